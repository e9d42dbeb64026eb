"""Errors and warnings of the inner chat, under the fields of the request that it was made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Final

from phloem.srt.http.responding import renamed
from phloem.srt.http.warning import ReplyWarning

_QUOTED: Final = re.compile("`([^`]+)`")


class Paths:
    """Fields of the inner request → fields of the outer one; what is not listed has the same name.
    The longest prefix that is listed counts."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = sorted(known.items(), key=lambda item: -len(item[0]))

    def outer(self, param: str) -> str:
        """The outer path of an inner one. An outer one stays as it is."""
        for inner, outer in self._known:
            rest = param.removeprefix(inner)
            if param.startswith(inner) and (not rest or rest[0] in ".[/"):
                return outer + rest
        return param

    def translated(self) -> AbstractContextManager[None]:
        """Errors that leave name the outer field."""
        return renamed(self.outer, self._message)

    def warning(self, inner: ReplyWarning) -> ReplyWarning:
        """A warning under the outer field."""
        return ReplyWarning(self.outer(inner.param), self._message(inner.message, inner.param))

    def _message(self, message: str, param: str | None) -> str:
        """A message about `param`, which may quote other fields, too."""
        if param is None:
            return message
        message = message.replace(param, self.outer(param))
        return _QUOTED.sub(lambda match: f"`{self.outer(match[1])}`", message)

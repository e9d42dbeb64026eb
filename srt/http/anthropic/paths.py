"""Where a field of the inner chat stands in the body that the client sent."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from phloem.srt.http.responding import renamed

_MESSAGE = re.compile(r"messages\[(?P<index>\d+)\](?P<rest>.*)")
_QUOTED = re.compile(r"`(?P<path>[^`\s]+)`")
_BELOW = re.compile(r"[.\[]")
_TOOL = re.compile(r"(?P<tool>tools\[\d+\])\.function(?P<schema>\.parameters)?")


@dataclass(frozen=True)
class Paths:
    """`messages` are the places of the inner messages, in order; `fields` maps other inner paths to
    the client's, with all that is below them."""

    messages: Sequence[str]
    fields: Mapping[str, str] = field(default_factory=dict)

    def outer(self, param: str) -> str:
        """The client's path for an inner one. What has no other name stays as it is."""
        found = _MESSAGE.fullmatch(param)
        if found and int(found["index"]) < len(self.messages):
            rest = found["rest"] if found["rest"] in (".role", ".content") else ""
            return self.messages[int(found["index"])] + rest
        if found := _TOOL.match(param):
            schema = ".input_schema" if found["schema"] else ""
            return found["tool"] + schema + param[found.end() :]
        for inner, outer in self.fields.items():
            if param == inner or param.startswith((f"{inner}.", f"{inner}[")):
                return outer + param[len(inner) :]
        return param

    def reported(self) -> AbstractContextManager[None]:
        """Report what is wrong with the inner chat in the client's own terms."""
        return renamed(self.outer, self._in_text)

    def _in_text(self, message: str, param: str | None) -> str:
        """The message with its paths as the client knows them: those between backticks, and the
        `param` itself where it cannot be taken for a word."""
        quoted = _QUOTED.sub(lambda found: f"`{self.outer(found['path'])}`", message)
        if quoted != message or param is None or not _BELOW.search(param):
            return quoted
        return message.replace(param, self.outer(param))

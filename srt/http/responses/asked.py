"""A request to this API, ready to run: whole, streamed or in the background."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phloem.srt.http.responses.answer import ResponseAnswer
from phloem.srt.http.responses.items import Item
from phloem.srt.http.responses.translate import PreparedResponse


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One request: the items of its own input, and what is run for it."""

    sent: Sequence[Item]
    prepared: PreparedResponse

    def answer(self) -> ResponseAnswer:
        one = self.prepared
        return ResponseAnswer(one.blank, one.parser, one.warnings, one.paths)

"""One answer of a chat as it grows: its text, its reasoning and its tool calls, out of chunks.

Every chat protocol writes its replies and its events from this.
"""

from __future__ import annotations

from phloem.srt.generation import Chunk, ConstraintOutcome, Finish, Logprob
from phloem.srt.http.tool_parser import AnswerParser, Piece, Reasoning, ToolStart


class Choice:
    """`index` is its place among the `n` of a request. What was said so far is in `content`,
    `reasoning` and `calls`; `last` is the newest chunk, with the counts."""

    def __init__(self, index: int, parser: AnswerParser) -> None:
        self.index = index
        self.logprobs: list[Logprob] | None = None
        self.finish: Finish | None = None
        self.constraint: ConstraintOutcome | None = None
        self.last: Chunk | None = None
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[ToolStart, list[str]]] = []

    def add(self, chunk: Chunk) -> list[Piece]:
        """Take the chunk in; the pieces that are certain with it."""
        self.last = chunk
        pieces = self._parser.feed(chunk.text)
        if chunk.finish is not None:
            pieces += self._parser.finish()
            self.finish = chunk.finish
            self.constraint = chunk.constraint
        for piece in pieces:
            if isinstance(piece, str):
                self._content.append(piece)
            elif isinstance(piece, Reasoning):
                self._reasoning.append(piece.text)
            elif isinstance(piece, ToolStart):
                self._calls.append((piece, []))
            else:
                self._calls[piece.index][1].append(piece.text)
        if chunk.logprobs is not None:
            self.logprobs = self.logprobs or []
            self.logprobs += chunk.logprobs
        return pieces

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[tuple[ToolStart, str]]:
        """Each call with the JSON text of its arguments."""
        return [(start, "".join(arguments)) for start, arguments in self._calls]

    @property
    def called(self) -> bool:
        return bool(self._calls)

    @property
    def chose_to_call(self) -> bool:
        """Whether it called, and not because the client named the function."""
        return self.called and not self._parser.named

    def ended(self) -> Finish:
        """How it ended. Only for an answer that has: `fanout` checks that all do."""
        assert self.finish is not None
        return self.finish

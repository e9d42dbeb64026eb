"""Counts the tokens of a model's reasoning."""

from __future__ import annotations

from phloem.srt.generation import Thoughts


class ThoughtCounter:
    """`count` is how many of the tokens so far are reasoning, with its marks.

    Tokens that may still turn out to be the mark that begins it do not count until they do.
    """

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self.count = 0
        self._pending = 0
        self._tail = ""
        self._open = thoughts.opened
        self._over = False

    def add(self, piece: str) -> None:
        """One more token, which adds `piece` to the text."""
        if self._over:
            return
        self._tail += piece
        if not self._open:
            self._pending += 1
            self._begin()
            return
        self.count += 1
        self._end()

    def _begin(self) -> None:
        begin, text = self._thoughts.begin, self._tail.lstrip()
        if text.startswith(begin):
            self._open = True
            self.count = self._pending
            self._tail = text.removeprefix(begin)
            self._end()
        elif not begin.startswith(text):
            self._over = True

    def _end(self) -> None:
        end = self._thoughts.end
        if end in self._tail:
            self._over = True
        self._tail = self._tail[-len(end) :]

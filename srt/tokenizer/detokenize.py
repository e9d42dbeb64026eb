"""Token ids → text as it grows, and stop strings in it.

Both are linear in what they are fed: nothing is decoded or searched twice.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from phloem.constrained.overlap import Overlap
from phloem.srt.tokenizer.stop_patterns import PatternAutomaton
from phloem.srt.tokenizer.tokenizer import Tokenizer

_new_decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDetokenizer:
    """Turns the tokens of one sequence into pieces of text that join to the whole decode.

    A character is never split: bytes that may still become one are held back, and bytes that
    cannot become U+FFFD. With `skip_special` control tokens are left out, else they show their
    markup. `at_start` says that the tokens begin a text, rather than go on after a prompt: only
    then is SentencePiece's leading space dropped, as `Tokenizer.decode` does.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special: bool = True, at_start: bool = False
    ) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._hidden = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = _new_decoder("replace")
        self._strip = at_start and tokenizer.strip_leading_space

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; maybe empty."""
        data = b"".join([self._bytes_of(i) for i in ids if i not in self._hidden])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What was held back: U+FFFD for a character that was never completed."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Finds the first of some strings, or of what `patterns` match, in text that comes in pieces.

    What is complete first wins (the longest, if several end together), so the result does not
    depend on how the text was cut. Text that may be the beginning of a stop string, or of a match,
    is held back; what was given out never has a part of the one that is found. `matched` is the
    stop string or the pattern found, and nothing more comes out after it; `include_stop` says that
    its text comes out itself. Empty strings match nothing.
    """

    def __init__(
        self, stops: Sequence[str], *, patterns: Sequence[str] = (), include_stop: bool = False
    ) -> None:
        self._automata: list[_Automaton | PatternAutomaton] = [
            *(_Automaton(stop) for stop in stops if stop),
            *map(PatternAutomaton, patterns),
        ]
        self._include = include_stop
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """The text that is safe to give out now."""
        if self.matched is not None:
            return ""
        if not self._automata:
            return text
        buffer = self._held + text
        end = len(self._held)
        for character in text:
            end += 1
            complete = [(n, a.stop) for a in self._automata if (n := a.advance(character))]
            if complete:
                length, self.matched = max(complete, key=lambda one: one[0])
                self._held = ""
                return buffer[: end if self._include else end - length]
        safe = len(buffer) - max(automaton.length for automaton in self._automata)
        self._held = buffer[safe:]
        return buffer[:safe]

    def finish(self) -> str:
        """The text held back, now that no more comes."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Looks for one string. `length` is how much of `stop` the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._overlap = Overlap(stop)

    def advance(self, character: str) -> int:
        """Take one more character; the length of `stop` when it is complete, else 0."""
        self.length = length = self._overlap.after(self.length, character)
        return length if length == len(self.stop) else 0

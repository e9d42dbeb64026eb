"""Regular expressions that end an answer, found in text that comes in pieces.

The text is read once, character by character, by an automaton that looks for a match from every
place on at the same time (as Thompson, "Regular Expression Search Algorithm", 1968): what a
pattern costs follows its size, and never what a text makes of it. A match is complete with the
first character that completes any: `[0-9]+` ends a text at its first digit. An anchor `$` behind a
pattern says nothing, since a text ends, so far, with each of its characters.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from phloem.constrained.base import ConstraintError, LimitExceeded
from phloem.constrained.nfa import Nfa
from phloem.constrained.pattern import Alt, Anchor, At, Look, Node, Repeat, Seq, min_length
from phloem.constrained.pattern_parser import Dialect, parse
from phloem.srt.errors import InvalidRequest

MAX_PATTERNS: Final = 32
MAX_PATTERN_BYTES: Final = 256
MAX_STATES: Final = 1_000
"""States of all patterns of a request together: each character may have to be tried in each."""


def check_patterns(patterns: Sequence[str], param: str) -> tuple[str, ...]:
    """`patterns`, if they can end an answer. Raises `InvalidRequest` that names the one at fault
    under `param`."""
    if len(patterns) > MAX_PATTERNS:
        raise _invalid(f"At most {MAX_PATTERNS} patterns, not {len(patterns)}.", param)
    states = 0
    for index, pattern in enumerate(patterns):
        at = param if len(patterns) == 1 else f"{param}[{index}]"
        if len(pattern.encode(errors="replace")) > MAX_PATTERN_BYTES:
            raise _invalid(f"A pattern has at most {MAX_PATTERN_BYTES} bytes.", at)
        try:
            states += len(_program(pattern).moves)
        except ConstraintError as error:
            raise _invalid(str(error), at) from None
        if states > MAX_STATES:
            raise _invalid(f"The patterns need more than {MAX_STATES} automaton states.", param)
    return tuple(patterns)


class PatternAutomaton:
    """Looks for one pattern. `length` is how much of the text so far may belong to a match."""

    def __init__(self, pattern: str) -> None:
        self.stop = pattern
        self.length = 0
        self._program = _program(pattern)
        self._threads: dict[int, int] = {}  # state → length of what led there from its start

    def advance(self, character: str) -> int:
        """Take one more character; the length of the match that it completes, or 0."""
        program = self._program
        kind = program.kind(character)
        threads = dict(self._threads)
        for state in program.start:
            threads.setdefault(state, 0)
        reached: dict[int, int] = {}
        for state, length in threads.items():
            for mask, targets in program.moves[state]:
                if mask & kind:
                    for target in targets:
                        reached[target] = max(reached.get(target, 0), length + 1)
        self._threads = reached
        self.length = max(reached.values(), default=0)
        return reached.get(program.end, 0)


class _Program:
    """A pattern's automaton without empty moves: `moves[s]` are (characters, states behind
    them)."""

    def __init__(self, node: Node) -> None:
        nfa = Nfa(node)
        if len(nfa.edges) > MAX_STATES:
            raise LimitExceeded(f"a pattern needs more than {MAX_STATES} automaton states")
        closures = [nfa.closure([state]) for state in range(len(nfa.edges))]
        self.start = closures[nfa.start]
        self.end = nfa.end
        self.moves = [[(mask, closures[to]) for mask, to in row] for row in nfa.edges]
        ranges = sorted(
            (low, high, 1 << bit)
            for bit in range(nfa.alphabet.full.bit_length())
            for low, high in nfa.alphabet.chars(1 << bit)
        )
        self._lows = [low for low, _, _ in ranges]
        self._ranges = ranges

    def kind(self, character: str) -> int:
        """The class of a character, as a bit; 0 if no set holds it."""
        code = ord(character)
        index = bisect.bisect_right(self._lows, code) - 1
        _, high, bit = self._ranges[index]
        return bit if index >= 0 and code <= high else 0


@lru_cache(maxsize=256)
def _program(pattern: str) -> _Program:
    """Raises `ConstraintError` for what is no pattern, or none that can end an answer."""
    node = _without_end(parse(pattern, Dialect.PYTHON))
    if _has_conditions(node):
        raise ConstraintError("anchors, word boundaries and look-around cannot end an answer")
    if min_length(node) == 0:
        raise ConstraintError("the pattern matches the empty text")
    return _Program(node)


def _without_end(node: Node) -> Node:
    """The pattern less an anchor of the end in its last place."""
    match node:
        case Alt(items):
            return Alt(tuple(map(_without_end, items)))
        case Seq((*first, At(Anchor.END | Anchor.LAST))):
            return Seq(tuple(first))
    return node


def _has_conditions(node: Node) -> bool:
    match node:
        case At() | Look():
            return True
        case Seq(items) | Alt(items):
            return any(map(_has_conditions, items))
        case Repeat(item):
            return _has_conditions(item)
        case _:
            return False


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")

"""Thompson's construction: patterns as automata with empty moves, conditions included."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from phloem.constrained import charset
from phloem.constrained.alphabet import Alphabet
from phloem.constrained.base import LimitExceeded, UnsupportedKeyword
from phloem.constrained.charset import CharSet
from phloem.constrained.pattern import (
    Alt,
    Anchor,
    At,
    Automaton,
    Chars,
    Look,
    Node,
    Repeat,
    Seq,
    literal,
)

MAX_NFA_STATES = 40_000


@dataclasses.dataclass(frozen=True, slots=True)
class Condition:
    """What an empty move asks for. `ahead`: a match from `start` to `end` begins (or, if
    `negative`, does not begin) here; else one that began anywhere ends here. `behind` numbers
    conditions that look behind, inner ones first. Both None: the text begins here."""

    start: int = 0
    end: int = 0
    negative: bool = False
    behind: int | None = None
    begin: bool = False


class Nfa:
    """States with edges on characters, empty moves, and empty moves under a condition."""

    def __init__(self, node: Node) -> None:
        self.alphabet = Alphabet({charset.ANY, *_sets(node)})
        self.empty: list[list[int]] = []
        self.edges: list[list[tuple[int, int]]] = []
        self.conditions: dict[int, list[tuple[Condition, int]]] = {}
        self.behinds: list[Condition] = []
        self._behind_depth = 0
        self.start = self.state()
        self.end = self.add(node, self.start)
        self.universal = frozenset(s for s in range(len(self.edges)) if self._accepts_all(s))
        """States from which every text is accepted."""

    def state(self) -> int:
        """A new state.

        Raises:
            LimitExceeded: there are too many.
        """
        if len(self.empty) > MAX_NFA_STATES:
            raise LimitExceeded(f"a pattern needs more than {MAX_NFA_STATES} automaton states")
        self.empty.append([])
        self.edges.append([])
        return len(self.empty) - 1

    def add(self, node: Node, start: int) -> int:
        """Build `node` from state `start`; its end state."""
        match node:
            case Chars(chars):
                end = self.state()
                self.edges[start].append((self.alphabet.mask(chars), end))
                return end
            case Seq(items):
                for item in items:
                    start = self.add(item, start)
                return start
            case Alt(items):
                ends = [self.add(item, self._fork(start)) for item in items]
                join = self.state()
                for end in ends:
                    self.empty[end].append(join)
                return join
            case Repeat(item, low, high):
                return self._repeat(item, low, high, start)
            case Automaton():
                return self._automaton(node, start)
            case At(anchor):
                return self._anchor(anchor, start)
            case Look():
                return self._look(node, start)

    def _fork(self, start: int) -> int:
        state = self.state()
        self.empty[start].append(state)
        return state

    def _repeat(self, item: Node, low: int, high: int | None, start: int) -> int:
        for _ in range(low):
            start = self.add(item, start)
        if high is None:
            loop = self._fork(start)
            self.empty[self.add(item, loop)].append(loop)
            return self._fork(loop)
        join = self.state()
        self.empty[start].append(join)
        for _ in range(high - low):
            start = self.add(item, self._fork(start))
            self.empty[start].append(join)
        return join

    def _automaton(self, machine: Automaton, start: int) -> int:
        states = [self.state() for _ in machine.edges]
        self.empty[start].append(states[0])
        end = self.state()
        for state, row in zip(states, machine.edges, strict=True):
            self.edges[state] = [(self.alphabet.mask(c), states[to]) for c, to in row]
        for state in machine.accepting:
            self.empty[states[state]].append(end)
        return end

    # ----------------------------------------------------------------- conditions

    def _anchor(self, anchor: Anchor, start: int) -> int:
        match anchor:
            case Anchor.BEGIN:
                return self._when(Condition(begin=True), start)
            case Anchor.END:
                return self._look(Look(Chars(charset.ANY), ahead=True, negative=True), start)
            case Anchor.LAST:
                end = Look(Chars(charset.ANY), ahead=True, negative=True)
                last = Seq((Repeat(literal("\n"), 0, 1), end))
                return self._look(Look(last, ahead=True, negative=False), start)

    def _when(self, condition: Condition, start: int) -> int:
        target = self.state()
        self.conditions.setdefault(start, []).append((condition, target))
        return target

    def _look(self, look: Look, start: int) -> int:
        if look.ahead and self._behind_depth:
            raise UnsupportedKeyword(
                "regular expression: look-ahead, $ or \\b inside look-behind is not supported",
                code="unsupported_regex",
            )
        self._behind_depth += not look.ahead
        first = self.state()
        last = self.add(look.item, first)
        if self.edges[last] or self.empty[last] or last in self.conditions:
            end = self.state()
            self.empty[last].append(end)
            last = end
        self._behind_depth -= not look.ahead
        if look.ahead:
            return self._when(Condition(first, last, look.negative), start)
        condition = Condition(first, last, look.negative, behind=len(self.behinds))
        self.behinds.append(condition)
        return self._when(condition, start)

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        """States reached by empty moves, where there are no conditions."""
        found = set(states)
        pending = list(found)
        while pending:
            for state in self.empty[pending.pop()]:
                if state not in found:
                    found.add(state)
                    pending.append(state)
        return frozenset(found)

    def _accepts_all(self, state: int) -> bool:
        """Whether a loop over any character at `state` leads to the end at every turn."""
        loops = [to for mask, to in self.edges[state] if mask == self.alphabet.full]
        if not any(state in self.closure([to]) for to in loops):
            return False
        return self.end in self.closure([state])


def _sets(node: Node) -> Iterator[CharSet]:
    match node:
        case Chars(chars):
            yield chars
        case Seq(items) | Alt(items):
            for item in items:
                yield from _sets(item)
        case Repeat(item) | Look(item):
            yield from _sets(item)
        case Automaton(edges):
            yield from (chars for row in edges for chars, _ in row)
        case At(Anchor.LAST):
            yield charset.of("\n")
        case At():
            return

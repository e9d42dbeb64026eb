"""Finite automata over characters: what patterns become when they are combined.

Used where a grammar has no operator: strings that match two patterns, or a pattern and a length,
or that are none of some names. Automata are deterministic, partial (a missing transition rejects)
and trimmed (every state can still accept), so an empty language has no state but a dead start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from phloem.constrained import charset
from phloem.constrained.base import LimitExceeded
from phloem.constrained.charset import CharSet
from phloem.constrained.pattern import Alt, Chars, Node, Repeat, Seq

State = TypeVar("State", bound=Hashable)

MAX_STATES = 4_000
MAX_NFA_STATES = 40_000


@dataclasses.dataclass(frozen=True, slots=True)
class Automaton:
    """`edges[s]` are disjoint character sets with their targets; state 0 is the start."""

    edges: tuple[tuple[tuple[CharSet, int], ...], ...]
    accepting: frozenset[int]

    @property
    def is_empty(self) -> bool:
        """No string is accepted."""
        return not self.accepting

    def step(self, state: int, character: str) -> int | None:
        """The next state, or None when `character` is not accepted."""
        for chars, target in self.edges[state]:
            if charset.contains(chars, character):
                return target
        return None

    def accepts(self, text: str) -> bool:
        """Whether the whole of `text` is in the language."""
        state = 0
        for character in text:
            target = self.step(state, character)
            if target is None:
                return False
            state = target
        return state in self.accepting


def _limit(count: int, limit: int = MAX_STATES) -> None:
    if count > limit:
        raise LimitExceeded(f"a pattern needs more than {limit} automaton states")


# --------------------------------------------------------------------------- construction


class _Nfa:
    """Thompson's construction."""

    def __init__(self) -> None:
        self.empty: list[list[int]] = []
        self.edges: list[list[tuple[CharSet, int]]] = []

    def state(self) -> int:
        _limit(len(self.empty), MAX_NFA_STATES)
        self.empty.append([])
        self.edges.append([])
        return len(self.empty) - 1

    def add(self, node: Node, start: int) -> int:
        """Build `node` from state `start`; its end state."""
        match node:
            case Chars(chars):
                end = self.state()
                self.edges[start].append((chars, end))
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
            case _:
                raise AssertionError("anchors are gone once a pattern is closed")

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

    def closure(self, states: Iterable[int]) -> frozenset[int]:
        found = set(states)
        pending = list(found)
        while pending:
            for state in self.empty[pending.pop()]:
                if state not in found:
                    found.add(state)
                    pending.append(state)
        return frozenset(found)


def from_pattern(node: Node) -> Automaton:
    """The automaton of a closed pattern.

    Raises:
        LimitExceeded: it would have too many states.
    """
    nfa = _Nfa()
    start = nfa.state()
    end = nfa.add(node, start)

    def successors(states: frozenset[int]) -> list[tuple[CharSet, frozenset[int]]]:
        outgoing = [edge for state in states for edge in nfa.edges[state]]
        found: dict[frozenset[int], list[CharSet]] = {}
        for atom in charset.atoms(chars for chars, _ in outgoing):
            first = chr(atom[0][0])
            targets = [to for chars, to in outgoing if charset.contains(chars, first)]
            if targets:
                found.setdefault(nfa.closure(targets), []).append(atom)
        return [(charset.union(*atoms), target) for target, atoms in found.items()]

    return _build(nfa.closure([start]), successors, lambda states: end in states)


def _build(
    start: State,
    successors: Callable[[State], list[tuple[CharSet, State]]],
    accepts: Callable[[State], bool],
) -> Automaton:
    """Explore from `start`, then drop what cannot accept."""
    numbers: dict[State, int] = {start: 0}
    order: list[State] = [start]
    edges: list[list[tuple[CharSet, int]]] = []
    for state in order:
        row: list[tuple[CharSet, int]] = []
        for chars, target in successors(state):
            if target not in numbers:
                numbers[target] = len(order)
                order.append(target)
                _limit(len(order))
            row.append((chars, numbers[target]))
        edges.append(row)
    return _trim(edges, {i for i, state in enumerate(order) if accepts(state)})


def _trim(edges: list[list[tuple[CharSet, int]]], accepting: set[int]) -> Automaton:
    sources: list[list[int]] = [[] for _ in edges]
    for state, row in enumerate(edges):
        for _, target in row:
            sources[target].append(state)
    live = set(accepting)
    pending = list(accepting)
    while pending:
        for source in sources[pending.pop()]:
            if source not in live:
                live.add(source)
                pending.append(source)
    kept = [s for s in range(len(edges)) if s in live or s == 0]
    number = {state: i for i, state in enumerate(kept)}
    return Automaton(
        tuple(tuple((c, number[t]) for c, t in edges[s] if t in live) for s in kept),
        frozenset(number[s] for s in accepting),
    )


def words(texts: Iterable[str]) -> Automaton:
    """Exactly these strings, as a trie."""
    trie: list[dict[str, int]] = [{}]
    accepting: set[int] = set()
    for text in texts:
        state = 0
        for character in text:
            if character not in trie[state]:
                trie[state][character] = len(trie)
                trie.append({})
            state = trie[state][character]
        accepting.add(state)
    _limit(len(trie), MAX_NFA_STATES)
    rows = (tuple((charset.of(c), to) for c, to in row.items()) for row in trie)
    return Automaton(tuple(rows), frozenset(accepting))


# --------------------------------------------------------------------------- operations


def intersection(left: Automaton, right: Automaton) -> Automaton:
    """What both accept."""

    def successors(pair: tuple[int, int]) -> list[tuple[CharSet, tuple[int, int]]]:
        found = []
        for chars, target in left.edges[pair[0]]:
            for others, partner in right.edges[pair[1]]:
                both = charset.intersect(chars, others)
                if both:
                    found.append((both, (target, partner)))
        return found

    return _build((0, 0), successors, lambda p: p[0] in left.accepting and p[1] in right.accepting)


def difference(left: Automaton, right: Automaton) -> Automaton:
    """What `left` accepts and `right` does not."""

    def successors(
        pair: tuple[int, int | None],
    ) -> list[tuple[CharSet, tuple[int, int | None]]]:
        found: list[tuple[CharSet, tuple[int, int | None]]] = []
        for chars, target in left.edges[pair[0]]:
            rest = chars
            for others, partner in right.edges[pair[1]] if pair[1] is not None else ():
                both = charset.intersect(chars, others)
                if both:
                    found.append((both, (target, partner)))
                    rest = charset.subtract(rest, others)
            if rest:
                found.append((rest, (target, None)))
        return found

    start: tuple[int, int | None] = (0, 0)
    return _build(
        start, successors, lambda p: p[0] in left.accepting and p[1] not in right.accepting
    )


def disjoint(left: Automaton, right: Automaton) -> bool:
    """No string is in both."""
    return intersection(left, right).is_empty

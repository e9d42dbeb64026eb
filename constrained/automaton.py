"""Finite automata over characters: what patterns become when they are combined.

Used where a grammar has no operator: strings that match two patterns, or a pattern and a length,
or that are none of some names. Automata are deterministic, partial, trimmed and minimal.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from phloem.constrained import charset
from phloem.constrained.alphabet import Alphabet, split
from phloem.constrained.base import LimitExceeded
from phloem.constrained.graphs import reaching
from phloem.constrained.minimise import minimise
from phloem.constrained.nfa import MAX_NFA_STATES, Nfa
from phloem.constrained.pattern import Automaton, Node

__all__ = [
    "Automaton",
    "build",
    "difference",
    "disjoint",
    "from_pattern",
    "intersection",
    "of_length",
    "union",
    "words",
]

State = TypeVar("State", bound=Hashable)
Row = list[tuple[int, int]]

MAX_STATES = 10_000


def _limit(count: int, limit: int = MAX_STATES) -> None:
    if count > limit:
        raise LimitExceeded(f"a pattern needs more than {limit} automaton states")


# --------------------------------------------------------------------------- construction


def from_pattern(node: Node) -> Automaton:
    """The automaton of a closed pattern.

    Raises:
        LimitExceeded: it would have too many states.
    """
    if isinstance(node, Automaton):
        return node
    nfa = Nfa(node)
    assert not nfa.conditions, "conditions are gone once a pattern is closed"

    def closure(states: Iterable[int]) -> frozenset[int]:
        reached = nfa.closure(states)
        everything = reached & nfa.universal
        return nfa.closure([min(everything)]) if everything else reached

    def successors(states: frozenset[int]) -> list[tuple[int, frozenset[int]]]:
        outgoing: dict[int, set[int]] = {}
        for state in states:
            for mask, to in nfa.edges[state]:
                outgoing.setdefault(mask, set()).add(to)
        found: dict[frozenset[int], int] = {}
        for part in split(outgoing, nfa.alphabet.full):
            targets = {t for mask, to in outgoing.items() if mask & part for t in to}
            if targets:
                target = closure(targets)
                found[target] = found.get(target, 0) | part
        return [(mask, target) for target, mask in found.items()]

    start = closure([nfa.start])
    return build(start, successors, lambda states: nfa.end in states, nfa.alphabet)


def build(
    start: State,
    successors: Callable[[State], list[tuple[int, State]]],
    accepts: Callable[[State], bool],
    alphabet: Alphabet,
    limit: int = MAX_STATES,
) -> Automaton:
    """Explore from `start` over masks of `alphabet`, drop what cannot accept, merge equal states.

    Raises:
        LimitExceeded: there are more than `limit` states.
    """
    numbers: dict[State, int] = {start: 0}
    order: list[State] = [start]
    rows: list[Row] = []
    for state in order:
        row: dict[int, int] = {}
        for mask, target in successors(state):
            number = numbers.setdefault(target, len(order))
            if number == len(order):
                order.append(target)
                _limit(len(order), limit)
            row[number] = row.get(number, 0) | mask
        rows.append([(mask, number) for number, mask in row.items()])
    accepting = {i for i, state in enumerate(order) if accepts(state)}
    return _finish(*_trim(rows, accepting), alphabet)


def _trim(rows: list[Row], accepting: set[int]) -> tuple[list[Row], set[int]]:
    """Only the start and states that can accept."""
    live = reaching(((s, target) for s, row in enumerate(rows) for _, target in row), accepting)
    kept = [s for s in range(len(rows)) if s in live or s == 0]
    number = {state: i for i, state in enumerate(kept)}
    return (
        [[(m, number[t]) for m, t in rows[s] if t in live] for s in kept],
        {number[s] for s in accepting},
    )


def _finish(rows: list[Row], accepting: set[int], alphabet: Alphabet) -> Automaton:
    rows, accepting = minimise(rows, accepting)
    chars = alphabet.chars
    return Automaton(
        tuple(tuple((chars(mask), target) for mask, target in row) for row in rows),
        frozenset(accepting),
    )


def words(texts: Iterable[str]) -> Automaton:
    """Exactly these strings.

    Raises:
        LimitExceeded: they have too many characters.
    """
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
    alphabet = Alphabet({charset.of(c) for row in trie for c in row})
    rows = [[(alphabet.mask(charset.of(c)), to) for c, to in row.items()] for row in trie]
    return _finish(rows, accepting, alphabet)


# --------------------------------------------------------------------------- operations


def _shared(*machines: Automaton) -> tuple[Alphabet, list[list[Row]]]:
    """One alphabet for all, and their rows in masks of it."""
    alphabet = Alphabet({c for machine in machines for row in machine.edges for c, _ in row})
    rows = [[[(alphabet.mask(c), t) for c, t in row] for row in m.edges] for m in machines]
    return alphabet, rows


def intersection(left: Automaton, right: Automaton) -> Automaton:
    """What both accept."""
    alphabet, (ours, theirs) = _shared(left, right)

    def successors(pair: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
        return [
            (mask & other, (target, partner))
            for mask, target in ours[pair[0]]
            for other, partner in theirs[pair[1]]
            if mask & other
        ]

    def accepts(pair: tuple[int, int]) -> bool:
        return pair[0] in left.accepting and pair[1] in right.accepting

    return build((0, 0), successors, accepts, alphabet)


def difference(left: Automaton, right: Automaton) -> Automaton:
    """What `left` accepts and `right` does not."""
    alphabet, (ours, theirs) = _shared(left, right)

    def successors(pair: tuple[int, int | None]) -> list[tuple[int, tuple[int, int | None]]]:
        found: list[tuple[int, tuple[int, int | None]]] = []
        for mask, target in ours[pair[0]]:
            for other, partner in theirs[pair[1]] if pair[1] is not None else ():
                if mask & other:
                    found.append((mask & other, (target, partner)))
                    mask &= ~other
            if mask:
                found.append((mask, (target, None)))
        return found

    def accepts(pair: tuple[int, int | None]) -> bool:
        return pair[0] in left.accepting and pair[1] not in right.accepting

    start: tuple[int, int | None] = (0, 0)
    return build(start, successors, accepts, alphabet)


def union(left: Automaton, right: Automaton) -> Automaton:
    """What either accepts."""
    alphabet, (ours, theirs) = _shared(left, right)
    Pair = tuple[int | None, int | None]

    def successors(pair: Pair) -> list[tuple[int, Pair]]:
        one = ours[pair[0]] if pair[0] is not None else []
        other = theirs[pair[1]] if pair[1] is not None else []
        found: list[tuple[int, Pair]] = []
        for part in split([mask for mask, _ in (*one, *other)], alphabet.full):
            target = next((t for mask, t in one if mask & part), None)
            partner = next((t for mask, t in other if mask & part), None)
            if target is not None or partner is not None:
                found.append((part, (target, partner)))
        return found

    def accepts(pair: Pair) -> bool:
        return pair[0] in left.accepting or pair[1] in right.accepting

    start: Pair = (0, 0)
    return build(start, successors, accepts, alphabet)


def of_length(machine: Automaton, low: int, high: int | None) -> Automaton:
    """What `machine` accepts of `low` to `high` characters.

    Raises:
        LimitExceeded: counting needs too many states.
    """
    least, most = machine.lengths
    if least >= low and (high is None or (most is not None and most <= high)):
        return machine
    alphabet, (rows,) = _shared(machine)
    left = _distances(machine)
    last = low if high is None else high

    def successors(pair: tuple[int, int]) -> list[tuple[int, tuple[int, int]]]:
        count = min(pair[1] + 1, last) if high is None else pair[1] + 1
        return [
            (mask, (target, count))
            for mask, target in rows[pair[0]]
            if high is None or count + left[target] <= high
        ]

    def accepts(pair: tuple[int, int]) -> bool:
        return pair[0] in machine.accepting and pair[1] >= low

    return build((0, 0), successors, accepts, alphabet)


def _distances(machine: Automaton) -> list[int]:
    """How many characters each state is away from acceptance."""
    sources: list[list[int]] = [[] for _ in machine.edges]
    for state, row in enumerate(machine.edges):
        for _, target in row:
            sources[target].append(state)
    left = [0] * len(machine.edges)
    seen = set(machine.accepting)
    level = list(seen)
    while level:
        after = [s for state in level for s in sources[state] if s not in seen]
        for source in level:
            for s in sources[source]:
                if s not in seen:
                    left[s] = left[source] + 1
                    seen.add(s)
        level = list(dict.fromkeys(after))
    return left


def disjoint(left: Automaton, right: Automaton) -> bool:
    """No string is in both."""
    return intersection(left, right).is_empty

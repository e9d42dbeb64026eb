"""Regular expressions as trees of character sets: nodes, simplification, lengths.

`phloem.constrained.pattern_parser` makes the trees, `phloem.constrained.pattern_closing` resolves
their anchors and look-around; `phloem.constrained.grammar_text` writes closed ones as grammar rules
and `phloem.constrained.automaton` turns them into automata.
"""

from __future__ import annotations

import dataclasses
import enum
import functools

from phloem.constrained import charset
from phloem.constrained.charset import CharSet


class Anchor(enum.Enum):
    """BEGIN and END of the text; LAST is the end or before a line feed that ends the text, as
    `$` is in Python."""

    BEGIN = "^"
    END = "$"
    LAST = "$ or before a last line feed"


@dataclasses.dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    chars: CharSet


@dataclasses.dataclass(frozen=True, slots=True)
class Seq:
    """One after the other; no items is the empty string."""

    items: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Alt:
    """One of the items."""

    items: tuple[Node, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Repeat:
    """`low` to `high` times; `high` None is without bound."""

    item: Node
    low: int
    high: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class At:
    """A zero-width anchor; none is left once a pattern is closed."""

    anchor: Anchor


@dataclasses.dataclass(frozen=True, slots=True)
class Look:
    """A zero-width condition: `item` matches from here on (or, not `ahead`, up to here), or, if
    `negative`, it does not. None is left once a pattern is closed."""

    item: Node
    ahead: bool
    negative: bool


@dataclasses.dataclass(frozen=True)
class Automaton:
    """A language by a deterministic automaton: `edges[s]` are disjoint character sets with their
    targets; state 0 is the start. Partial (a missing transition rejects) and trimmed (every state
    but a dead start can still accept)."""

    edges: tuple[tuple[tuple[CharSet, int], ...], ...]
    accepting: frozenset[int]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.edges, self.accepting))

    def __hash__(self) -> int:
        return self._hash

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

    @functools.cached_property
    def lengths(self) -> tuple[int, int | None]:
        """The least and the greatest number of characters accepted (None: without bound)."""
        least = most = 0
        level, seen = {0}, 0
        for length in range(len(self.edges) + 1):
            if not level:
                return least, most
            if level & self.accepting:
                least = least if seen else length
                most, seen = length, 1
            level = {target for state in level for _, target in self.edges[state]}
        return least, None


Node = Chars | Seq | Alt | Repeat | At | Look | Automaton

NOTHING = Seq(())
ANY_TEXT = Repeat(Chars(charset.ANY), 0, None)


def literal(text: str) -> Node:
    """Exactly `text`."""
    return Seq(tuple(Chars(charset.of(c)) for c in text))


# --------------------------------------------------------------------------- simplification


def simplify(node: Node) -> Node:
    """The same language with nested sequences flattened and no loop over the empty string."""
    match node:
        case Seq(items):
            return _simplify_seq(items)
        case Alt(items):
            return _simplify_alt(items)
        case Repeat(item, low, high):
            return _simplify_repeat(simplify(item), low, high)
        case _:
            return node


def _simplify_seq(items: tuple[Node, ...]) -> Node:
    flat: list[Node] = []
    for item in map(simplify, items):
        parts = item.items if isinstance(item, Seq) else (item,)
        for part in parts:
            if part == ANY_TEXT and flat and flat[-1] == ANY_TEXT:
                continue
            flat.append(part)
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def _simplify_alt(items: tuple[Node, ...]) -> Node:
    flat: list[Node] = []
    for item in map(simplify, items):
        parts = item.items if isinstance(item, Alt) else (item,)
        flat.extend(p for p in parts if p not in flat)
    if ANY_TEXT in flat:
        return ANY_TEXT
    chars = [p for p in flat if isinstance(p, Chars)]
    if len(chars) > 1:
        merged = Chars(charset.union(*(c.chars for c in chars)))
        flat = [merged, *(p for p in flat if not isinstance(p, Chars))]
    return flat[0] if len(flat) == 1 else Alt(tuple(flat))


def _simplify_repeat(item: Node, low: int, high: int | None) -> Node:
    if high == 0 or item == NOTHING:
        return NOTHING
    if (low, high) == (1, 1):
        return item
    if not nullable(item):
        return Repeat(item, low, high)
    bodies = _turns(item)
    if not bodies:
        return NOTHING
    body = bodies[0] if len(bodies) == 1 else _simplify_alt(tuple(bodies))
    if high is None:
        return Repeat(body, 0, None)
    if isinstance(item, Repeat) and item.low == 0:
        return Repeat(item.item, 0, None if item.high is None else item.high * high)
    return Repeat(item, 0, high)


def _turns(node: Node) -> list[Node]:
    """Non-empty pieces such that looping over them equals looping over `node`, which may be
    empty."""
    if not nullable(node):
        return [node]
    match node:
        case Seq(items) | Alt(items):
            return [turn for item in items for turn in _turns(item)]
        case Repeat(item):
            return _turns(item)
        case _:
            return []


def nullable(node: Node) -> bool:
    """Whether the empty string matches."""
    return min_length(node) == 0


def min_length(node: Node) -> int:
    """Fewest characters of a match."""
    match node:
        case Chars():
            return 1
        case Seq(items):
            return sum(min_length(i) for i in items)
        case Alt(items):
            return min(min_length(i) for i in items)
        case Repeat(item, low, _):
            return low * min_length(item)
        case Automaton():
            return node.lengths[0]
        case At() | Look():
            return 0


def max_length(node: Node) -> int | None:
    """Most characters of a match; None when there is no bound."""
    match node:
        case Chars():
            return 1
        case Seq(items):
            lengths = [max_length(i) for i in items]
            return None if None in lengths else sum(n for n in lengths if n is not None)
        case Alt(items):
            lengths = [max_length(i) for i in items]
            return None if None in lengths else max(n for n in lengths if n is not None)
        case Repeat(item, _, high):
            inner = max_length(item)
            if inner == 0:
                return 0
            return None if high is None or inner is None else high * inner
        case Automaton():
            return node.lengths[1]
        case At() | Look():
            return 0


def counts(node: Node) -> int:
    """The greatest count of a repeat."""
    match node:
        case Seq(items) | Alt(items):
            return max((counts(i) for i in items), default=0)
        case Repeat(item, low, high):
            return max(low, high or 0, counts(item))
        case _:
            return 0

"""Regular expressions as trees of character sets: anchors, simplification, lengths.

`phloem.constrained.pattern_parser` makes the trees; `phloem.constrained.grammar_text` writes them
as grammar rules and `phloem.constrained.automaton` turns them into automata.
"""

from __future__ import annotations

import dataclasses
import enum

from phloem.constrained import charset
from phloem.constrained.base import UnsupportedKeyword
from phloem.constrained.charset import CharSet


class Anchor(enum.Enum):
    BEGIN = "^"
    END = "$"


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


Node = Chars | Seq | Alt | Repeat | At

NOTHING = Seq(())
ANY_TEXT = Repeat(Chars(charset.ANY), 0, None)


def literal(text: str) -> Node:
    """Exactly `text`."""
    return Seq(tuple(Chars(charset.of(c)) for c in text))


# --------------------------------------------------------------------------- anchors


def close_full(node: Node) -> Node:
    """The language of `re.fullmatch`: anchors at the edges go, others are refused."""
    return simplify(_refuse_anchors(_strip(_strip(node, Anchor.BEGIN), Anchor.END)))


def close_search(node: Node) -> Node:
    """The language of `re.search` as whole strings: free text on each side without an anchor."""
    return simplify(_refuse_anchors(_open(_open(node, Anchor.BEGIN), Anchor.END)))


def _has_anchor(node: Node) -> bool:
    match node:
        case At():
            return True
        case Seq(items) | Alt(items):
            return any(_has_anchor(i) for i in items)
        case Repeat(item):
            return _has_anchor(item)
        case _:
            return False


def _refuse_anchors(node: Node) -> Node:
    if _has_anchor(node):
        raise UnsupportedKeyword(
            "regular expression: ^ or $ inside the pattern is not supported",
            code="unsupported_regex",
        )
    return node


def _edge(items: tuple[Node, ...], anchor: Anchor) -> tuple[Node, tuple[Node, ...]]:
    return (items[0], items[1:]) if anchor is Anchor.BEGIN else (items[-1], items[:-1])


def _join(edge: Node, rest: tuple[Node, ...], anchor: Anchor) -> Node:
    return Seq((edge, *rest) if anchor is Anchor.BEGIN else (*rest, edge))


def _strip(node: Node, anchor: Anchor) -> Node:
    """Drop this anchor where it stands at its own edge, so that it says nothing."""
    match node:
        case At(found) if found is anchor:
            return NOTHING
        case Alt(items):
            return Alt(tuple(_strip(i, anchor) for i in items))
        case Seq(items) if items:
            edge, rest = _edge(items, anchor)
            if edge == At(anchor):
                return _strip(Seq(rest), anchor)
            return _join(_strip(edge, anchor), rest, anchor)
        case _:
            return node


def _open(node: Node, anchor: Anchor) -> Node:
    """Put free text at this edge of each alternative, unless the anchor holds it there."""
    match node:
        case At(found) if found is anchor:
            return NOTHING
        case Alt(items):
            return Alt(tuple(_open(i, anchor) for i in items))
        case Seq(items) if items:
            edge, rest = _edge(items, anchor)
            if edge == At(anchor):
                return _strip(Seq(rest), anchor)
            if isinstance(edge, Alt | Seq) and _has_anchor(edge):
                return _join(_open(edge, anchor), rest, anchor)
            if isinstance(edge, Repeat) and not _has_anchor(edge):
                # Free text beside a loop takes all its turns but the ones it must make.
                edge = Repeat(edge.item, edge.low, edge.low)
                if edge.low == 0:
                    return _open(Seq(rest), anchor)
            return _join(ANY_TEXT, _join_items(edge, rest, anchor), anchor)
        case Repeat(item, low, _) if not _has_anchor(item):
            return _join(ANY_TEXT, (Repeat(item, low, low),) if low else (), anchor)
        case _:
            return _join(ANY_TEXT, (node,) if node != NOTHING else (), anchor)


def _join_items(edge: Node, rest: tuple[Node, ...], anchor: Anchor) -> tuple[Node, ...]:
    return (edge, *rest) if anchor is Anchor.BEGIN else (*rest, edge)


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
        case At():
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
        case At():
            return 0

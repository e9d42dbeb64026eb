"""Closing patterns: anchors at the edges say nothing or open an edge; what is zero-width elsewhere
(inner anchors, look-around, word boundaries) is resolved by an automaton.
"""

from __future__ import annotations

from phloem.constrained import charset
from phloem.constrained.lookaround import resolve
from phloem.constrained.pattern import (
    ANY_TEXT,
    NOTHING,
    Alt,
    Anchor,
    At,
    Chars,
    Look,
    Node,
    Repeat,
    Seq,
    simplify,
)


def close_full(node: Node) -> Node:
    """The language of `re.fullmatch`.

    Raises:
        LimitExceeded: look-around or inner anchors need too many states.
        UnsupportedKeyword: look-ahead inside look-behind.
    """
    stripped = _strip(_strip(node, Anchor.BEGIN), Anchor.END)
    return simplify(stripped) if not _has_condition(stripped) else resolve(node)


def close_search(node: Node) -> Node:
    """The language of `re.search` as whole strings: free text on each side without an anchor.

    Raises:
        As `close_full`.
    """
    opened = _open(_open(node, Anchor.BEGIN), Anchor.END)
    if not _has_condition(opened):
        return simplify(opened)
    return resolve(Seq((ANY_TEXT, node, ANY_TEXT)))


def _has_condition(node: Node) -> bool:
    """Whether something in `node` is no plain part of a string; a class without characters is
    like a condition that never holds."""
    match node:
        case At() | Look() | Chars(charset.EMPTY):
            return True
        case Seq(items) | Alt(items):
            return any(_has_condition(i) for i in items)
        case Repeat(item):
            return _has_condition(item)
        case _:
            return False


def _edge(items: tuple[Node, ...], anchor: Anchor) -> tuple[Node, tuple[Node, ...]]:
    return (items[0], items[1:]) if anchor is Anchor.BEGIN else (items[-1], items[:-1])


def _join(edge: Node, rest: tuple[Node, ...], anchor: Anchor) -> Node:
    return Seq((edge, *rest) if anchor is Anchor.BEGIN else (*rest, edge))


def _stands(node: Node, anchor: Anchor) -> bool:
    """Whether `node` is this anchor, at its own edge of the text."""
    return node == At(anchor) or (anchor is Anchor.END and node == At(Anchor.LAST))


def _strip(node: Node, anchor: Anchor) -> Node:
    """Drop this anchor where it stands at its own edge, so that it says nothing."""
    match node:
        case At() if _stands(node, anchor):
            return NOTHING
        case Alt(items):
            return Alt(tuple(_strip(i, anchor) for i in items))
        case Seq(items) if items:
            edge, rest = _edge(items, anchor)
            if _stands(edge, anchor):
                return _strip(Seq(rest), anchor)
            return _join(_strip(edge, anchor), rest, anchor)
        case _:
            return node


def _open(node: Node, anchor: Anchor) -> Node:
    """Put free text at this edge of each alternative, unless the anchor holds it there."""
    match node:
        case At() if _stands(node, anchor):
            return NOTHING
        case Alt(items):
            return Alt(tuple(_open(i, anchor) for i in items))
        case Seq(items) if items:
            edge, rest = _edge(items, anchor)
            if _stands(edge, anchor):
                return _strip(Seq(rest), anchor)
            if isinstance(edge, Alt | Seq) and _has_condition(edge):
                return _join(_open(edge, anchor), rest, anchor)
            if isinstance(edge, Repeat) and not _has_condition(edge):
                # Free text beside a loop takes all its turns but the ones it must make.
                edge = Repeat(edge.item, edge.low, edge.low)
                if edge.low == 0:
                    return _open(Seq(rest), anchor)
            return _join(ANY_TEXT, _join_items(edge, rest, anchor), anchor)
        case Repeat(item, low, _) if not _has_condition(item):
            return _join(ANY_TEXT, (Repeat(item, low, low),) if low else (), anchor)
        case _:
            return _join(ANY_TEXT, (node,) if node != NOTHING else (), anchor)


def _join_items(edge: Node, rest: tuple[Node, ...], anchor: Anchor) -> tuple[Node, ...]:
    return (edge, *rest) if anchor is Anchor.BEGIN else (*rest, edge)

"""Questions about shapes: what a member must satisfy, which strings are meant, is anything left."""

from __future__ import annotations

import functools
from collections.abc import Callable

from phloem.constrained import automaton, charset
from phloem.constrained.automaton import Automaton
from phloem.constrained.base import LimitExceeded
from phloem.constrained.numerals import integer_bounds
from phloem.constrained.pattern import ANY_TEXT, Chars, Repeat
from phloem.constrained.pattern import Node as Pattern
from phloem.constrained.shapes import Array, Conj, Number, Object, Shape, Text, conj, meet

MAX_DEPTH = 4
MAX_COUNTED = 2_000


@functools.lru_cache(maxsize=4096)
def pattern_automaton(pattern: Pattern) -> Automaton:
    """The automaton of a closed pattern."""
    return automaton.from_pattern(pattern)


@functools.lru_cache(maxsize=1024)
def text_automaton(text: Text) -> Automaton:
    """All strings of a shape.

    Raises:
        LimitExceeded: lengths or patterns need too many states.
    """
    found: Automaton | None = None
    if text.low or text.high is not None or not text.patterns:
        if max(text.low, text.high or 0) > MAX_COUNTED:
            raise LimitExceeded(f"a length beside a pattern is above {MAX_COUNTED}")
        found = automaton.from_pattern(Repeat(Chars(charset.ANY), text.low, text.high))
    for pattern in text.patterns:
        machine = pattern_automaton(pattern)
        found = machine if found is None else automaton.intersection(found, machine)
    assert found is not None
    if text.excluded:
        found = automaton.difference(found, automaton.words(sorted(text.excluded)))
    return found


def member(shape: Object, name: str) -> Conj:
    """What the member `name` must satisfy."""
    nodes: list[Conj] = []
    for layer in shape.layers:
        declared = dict(layer.properties)
        found = [declared[name]] if name in declared else []
        found += [
            c for p, c in layer.patterns if p == ANY_TEXT or pattern_automaton(p).accepts(name)
        ]
        nodes += found or [layer.rest]
    return conj(n for c in nodes for n in c)


class ShapeRelations:
    """`shapes_of` gives the shapes of a conjunction, or None when they are not known yet."""

    def __init__(self, shapes_of: Callable[[Conj], tuple[Shape, ...] | None]) -> None:
        self._shapes_of = shapes_of

    def disjoint(self, left: Shape, right: Shape) -> bool:
        """True when surely no value is in both."""
        both = meet(left, right)
        return both is None or self.empty(both)

    def empty(self, shape: Shape, depth: int = MAX_DEPTH) -> bool:
        """True when surely nothing has this shape."""
        match shape:
            case Number():
                low, high = integer_bounds(shape)
                whole = shape.integer and low is not None and high is not None and low > high
                return shape.empty() or whole
            case Text():
                return _no_text(shape)
            case Array():
                if shape.high is not None and shape.low > shape.high:
                    return True
                wanted = range(min(shape.low, shape.prefix_length() + 1))
                return any(self._never(shape.at(i), depth) for i in wanted)
            case Object():
                if shape.high is not None and shape.high < max(shape.low, len(shape.required)):
                    return True
                return any(self._never(member(shape, name), depth) for name in shape.required)
            case _:
                return False

    def _never(self, nodes: Conj, depth: int) -> bool:
        if not nodes or depth == 0:
            return False
        shapes = self._shapes_of(nodes)
        return shapes is not None and all(self.empty(s, depth - 1) for s in shapes)


def _no_text(text: Text) -> bool:
    if text.high is not None and text.low > text.high:
        return True
    if not text.patterns and not text.excluded:
        return False
    try:
        return text_automaton(text).is_empty
    except LimitExceeded:
        return False

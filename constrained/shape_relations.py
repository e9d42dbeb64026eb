"""Questions about shapes: what a member must satisfy, which strings are meant, is anything left."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from phloem.constrained import automaton, charset
from phloem.constrained.automaton import Automaton
from phloem.constrained.base import LimitExceeded
from phloem.constrained.numerals import integer_bounds
from phloem.constrained.pattern import Chars, Repeat
from phloem.constrained.pattern import Node as Pattern
from phloem.constrained.shapes import (
    NEVER,
    Array,
    Clause,
    Conj,
    Has,
    HasSome,
    Lacks,
    Members,
    Number,
    Object,
    Shape,
    Text,
    conj,
    meet,
)

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
    for pattern in text.without:
        found = automaton.difference(found, pattern_automaton(pattern))
    if text.excluded:
        found = automaton.difference(found, automaton.words(sorted(text.excluded)))
    return found


def member(shape: Object, name: str) -> Conj:
    """What the member `name` must satisfy. Where engines may differ on whether a pattern matches
    the name, it must do so either way."""
    nodes: list[Conj] = []
    for layer in shape.layers:
        declared = dict(layer.properties)
        found = [declared[name]] if name in declared else []
        doubtful = False
        for keys, value in layer.patterns:
            if not pattern_automaton(keys.unmatched).accepts(name):
                found.append(value)
                doubtful |= not pattern_automaton(keys.matched).accepts(name)
        nodes += found or [layer.rest]
        nodes += [layer.rest] if doubtful and name not in declared else []
    return conj(n for c in nodes for n in c)


def accepts_key(keys: Text, name: str) -> bool:
    """Whether a name is one of the strings of a shape without lengths."""
    return (
        name not in keys.excluded
        and all(pattern_automaton(p).accepts(name) for p in keys.patterns)
        and not any(pattern_automaton(p).accepts(name) for p in keys.without)
    )


class ShapeRelations:
    """`shapes_of` gives the shapes of a conjunction, or None when they are not known yet."""

    def __init__(self, shapes_of: Callable[[Conj], tuple[Shape, ...] | None]) -> None:
        self._shapes_of = shapes_of

    def disjoint(self, left: Shape, right: Shape) -> bool:
        """True when surely no value is in both."""
        if isinstance(left, Text) and isinstance(right, Text):
            left, right = left.widened(), right.widened()
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
                low = shape.low if shape.repeats is None else max(shape.low, 2)
                if shape.high is not None and low > shape.high:
                    return True
                if shape.unique is not None and shape.repeats is not None:
                    return True
                wanted = range(min(shape.low, shape.prefix_length() + 1))
                return any(self._never(shape.at(i), depth) for i in wanted) or self._too_few(
                    shape, depth
                )
            case Object():
                if shape.high is not None and shape.high < max(shape.low, len(shape.required)):
                    return True
                return any(
                    self._never(member(shape, name), depth) for name in shape.required
                ) or any(
                    all(self.impossible(shape, clause, depth) for clause in demand)
                    for demand in shape.demands
                )
            case _:
                return False

    def _too_few(self, shape: Array, depth: int) -> bool:
        """Whether some elements that have to be there have no place."""
        length = shape.prefix_length()
        for some in shape.some:
            if some.low == 0:
                continue
            places = range(some.start, max(length, some.start) + 1)
            if shape.high is not None:
                places = range(some.start, min(shape.high, places.stop))
            if all(self._never(conj((*shape.at(i), *some.nodes)), depth) for i in places):
                return True
        return False

    def settle(self, shape: Object) -> Object | None:
        """The same objects, with clauses that cannot hold left out, and what must hold said
        plainly; None when surely nothing has this shape."""
        settled = dataclasses.replace(shape, demands=())
        for demand in shape.demands:
            if any(self._holds(shape, clause) for clause in demand):
                continue
            left = tuple(c for c in demand if not self.impossible(shape, c, MAX_DEPTH))
            match left:
                case ():
                    return None
                case (Lacks(name),):
                    settled = settled.meet(Object(layers=(Members(((name, (NEVER,)),)),)))
                case (Has(name, nodes),):
                    layers = (Members(((name, nodes),)),)
                    settled = settled.meet(Object(layers=layers, required=(name,)))
                case _:
                    settled = settled.meet(Object(demands=(left,)))
        return settled if settled == shape else self.settle(settled)

    def _holds(self, shape: Object, clause: Clause) -> bool:
        match clause:
            case Lacks(name):
                return self._never(member(shape, name), MAX_DEPTH)
            case Has(name, nodes):
                return name in shape.required and set(nodes) <= set(member(shape, name))
            case _:
                return False

    def impossible(self, shape: Object, clause: Clause, depth: int = MAX_DEPTH) -> bool:
        """Whether no object of a shape has what a clause asks for, surely."""
        match clause:
            case Lacks(name):
                return name in shape.required
            case Has(name, nodes):
                return self._never(conj((*member(shape, name), *nodes)), depth)
            case _:
                return self._no_member(shape, clause, depth)

    def _no_member(self, shape: Object, wanted: HasSome, depth: int) -> bool:
        """Whether a member that has to be there can have none of the names left to it. Known only
        where a layer that declares its names is closed beyond them."""
        closed = [
            layer for layer in shape.layers if not layer.patterns and self._never(layer.rest, depth)
        ]
        if shape.high == 0:
            return True
        if not closed:
            return False
        names = {name for name, _ in closed[0].properties}
        for layer in closed[1:]:
            names &= {name for name, _ in layer.properties}
        return all(
            not accepts_key(wanted.keys, name)
            or self._never(conj((*member(shape, name), *wanted.nodes)), depth)
            for name in names
        )

    def _never(self, nodes: Conj, depth: int) -> bool:
        if not nodes or depth == 0:
            return False
        shapes = self._shapes_of(nodes)
        return shapes is not None and all(self.empty(s, depth - 1) for s in shapes)


def _no_text(text: Text) -> bool:
    if text.high is not None and text.low > text.high:
        return True
    if not text.patterns and not text.excluded and not text.without:
        return False
    try:
        return text_automaton(text).is_empty
    except LimitExceeded:
        return False

"""What a JSON value may look like, as a union of shapes that can be intersected.

A conjunction (`Conj`) is a tuple of schema nodes that all have to hold. A shape refers to its
children by conjunctions only, so that recursive schemas stay finite, and the intersection of two
shapes is again a shape. Equality of shapes is equality of what they say, not of what they accept.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from fractions import Fraction
from typing import Any, TypeVar

from phloem.constrained.pattern import Node as Pattern
from phloem.constrained.schema_document import Node

Conj = tuple[Node, ...]
NEVER = Node("#never", negated=True, schema=True)
_GIVEN = "#given "

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """Exactly this JSON value (an `enum` member or a `const`)."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Null:
    """`null`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Boolean:
    """`true` or `false`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Number:
    """A number between bounds (None: unbounded), a multiple of each of `multiples` and of none of
    `indivisible` (of 1: it is no integer)."""

    integer: bool = False
    low: Fraction | None = None
    low_open: bool = False
    high: Fraction | None = None
    high_open: bool = False
    multiples: tuple[Fraction, ...] = ()
    indivisible: tuple[Fraction, ...] = ()

    def meet(self, other: Number) -> Number:
        low, low_open = _tighter(self.low, self.low_open, other.low, other.low_open, 1)
        high, high_open = _tighter(self.high, self.high_open, other.high, other.high_open, -1)
        multiples = unique(self.multiples + other.multiples)
        integer = self.integer or other.integer
        return Number(
            integer,
            low,
            low_open,
            high,
            high_open,
            multiples,
            unique(self.indivisible + other.indivisible),
        )

    def empty(self) -> bool:
        """Whether the bounds, or the multiples, exclude everything for certain."""
        divisors = (*self.multiples, Fraction(1)) if self.integer else self.multiples
        if any(not m % d for m in divisors for d in self.indivisible):
            return True
        if self.low is None or self.high is None:
            return False
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))


def _tighter(
    a: Fraction | None, a_open: bool, b: Fraction | None, b_open: bool, sign: int
) -> tuple[Fraction | None, bool]:
    if a is None or b is None:
        return (b, b_open) if a is None else (a, a_open)
    if a == b:
        return a, a_open or b_open
    return (a, a_open) if a * sign > b * sign else (b, b_open)


@dataclasses.dataclass(frozen=True, slots=True)
class Text:
    """A string of `low` to `high` characters that matches every pattern, none of those in
    `without`, and is not excluded. `loose` pairs patterns that lack some of the strings that are
    meant with patterns that hold all of them (None: none is known)."""

    low: int = 0
    high: int | None = None
    patterns: tuple[Pattern, ...] = ()
    excluded: frozenset[str] = frozenset()
    without: tuple[Pattern, ...] = ()
    loose: tuple[tuple[Pattern, Pattern | None], ...] = ()

    def meet(self, other: Text) -> Text:
        return Text(
            max(self.low, other.low),
            least(self.high, other.high),
            unique(self.patterns + other.patterns),
            self.excluded | other.excluded,
            unique(self.without + other.without),
            unique(self.loose + other.loose),
        )

    def widened(self) -> Text:
        """A shape that surely holds every string that is meant."""
        covers = dict(self.loose)
        wide = (covers.get(pattern, pattern) for pattern in self.patterns)
        return dataclasses.replace(self, patterns=tuple(p for p in wide if p is not None), loose=())


@dataclasses.dataclass(frozen=True, slots=True)
class Items:
    """One schema's say on an array's elements."""

    prefix: tuple[Conj, ...]
    rest: Conj

    def at(self, index: int) -> Conj:
        return self.prefix[index] if index < len(self.prefix) else self.rest


@dataclasses.dataclass(frozen=True, slots=True)
class Some:
    """`low` to `high` of the elements from index `start` on satisfy `nodes`."""

    nodes: Conj
    low: int = 1
    high: int | None = None
    start: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Array:
    """`low` to `high` elements; `unique` is the path of a `uniqueItems` that holds, `repeats` that
    of one that does not; `some` is what a number of elements satisfy beyond that."""

    layers: tuple[Items, ...] = ()
    low: int = 0
    high: int | None = None
    unique: str | None = None
    some: tuple[Some, ...] = ()
    path: str = dataclasses.field(default="", compare=False)
    repeats: str | None = None

    def meet(self, other: Array) -> Array:
        return Array(
            unique(self.layers + other.layers),
            max(self.low, other.low),
            least(self.high, other.high),
            self.unique or other.unique,
            unique(self.some + other.some),
            self.path or other.path,
            self.repeats or other.repeats,
        )

    def prefix_length(self) -> int:
        return max((len(layer.prefix) for layer in self.layers), default=0)

    def at(self, index: int) -> Conj:
        """What element `index` must satisfy."""
        return conj(n for layer in self.layers for n in layer.at(index))


@dataclasses.dataclass(frozen=True, slots=True)
class Keys:
    """The keys that surely match a pattern, and those that surely do not; engines may differ on
    others."""

    matched: Pattern
    unmatched: Pattern


@dataclasses.dataclass(frozen=True, slots=True)
class Members:
    """One schema's say on an object's members. `patterns` pairs key languages with schemas; they
    apply beside `properties`; `rest` is for keys that neither names."""

    properties: tuple[tuple[str, Conj], ...] = ()
    patterns: tuple[tuple[Keys, Conj], ...] = ()
    rest: Conj = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Lacks:
    """There is no member of this name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Has:
    """There is a member of this name, and its value satisfies `nodes`."""

    name: str
    nodes: Conj


@dataclasses.dataclass(frozen=True, slots=True)
class HasSome:
    """There is a member whose key is in `keys` and in `names`, and its value satisfies `nodes`."""

    keys: Text = Text()
    names: Conj = ()
    nodes: Conj = ()


Clause = Lacks | Has | HasSome


@dataclasses.dataclass(frozen=True, slots=True)
class Object:
    """Members by layers; `names` are languages that every key must be in (`propertyNames`); of
    each of `demands`, one clause at least holds."""

    layers: tuple[Members, ...] = ()
    required: tuple[str, ...] = ()
    low: int = 0
    high: int | None = None
    names: tuple[Conj, ...] = ()
    path: str = dataclasses.field(default="", compare=False)
    demands: tuple[tuple[Clause, ...], ...] = ()

    def meet(self, other: Object) -> Object:
        return Object(
            unique(self.layers + other.layers),
            unique(self.required + other.required),
            max(self.low, other.low),
            least(self.high, other.high),
            unique(self.names + other.names),
            self.path or other.path,
            unique(self.demands + other.demands),
        )

    def declared(self) -> tuple[str, ...]:
        """Names in the order of declaration, then those that are only asked for."""
        names = [name for layer in self.layers for name, _ in layer.properties]
        asked = [
            clause.name
            for demand in self.demands
            for clause in demand
            if not isinstance(clause, HasSome)
        ]
        return unique((*names, *self.required, *asked))


Shape = Value | Null | Boolean | Number | Text | Array | Object

UNIVERSE: tuple[Shape, ...] = (Null(), Boolean(), Number(), Text(), Array(), Object())


def meet(left: Shape, right: Shape) -> Shape | None:
    """The intersection of two shapes; None when it is empty for certain. A `Value` is kept as it
    is: the caller checks values against the schemas themselves."""
    if isinstance(left, Value):
        return left
    if isinstance(right, Value):
        return right
    match (left, right):
        case (Number() as one, Number() as other):
            met = one.meet(other)
            return None if met.empty() else met
        case (Text() as text, Text() as another):
            return _possible(text.meet(another))
        case (Array() as array, Array() as another_array):
            return _possible(array.meet(another_array))
        case (Object() as members, Object() as more):
            return _possible(members.meet(more))
        case _:
            return left if type(left) is type(right) else None


def _possible(shape: Text | Array | Object) -> Shape | None:
    return None if shape.high is not None and shape.low > shape.high else shape


def only(value: Any) -> Node:
    """A node that is nowhere in the document and accepts just this value."""
    text = json.dumps(value, ensure_ascii=False, sort_keys=True)
    return Node(_GIVEN + text, schema={"const": value})


def is_given(node: Node) -> bool:
    """Whether `only` made the node."""
    return node.pointer.startswith(_GIVEN)


def given(node: Node) -> Any:
    """The value of a node that `only` made."""
    assert isinstance(node.schema, dict)
    return node.schema["const"]


def conj(nodes: Iterable[Node]) -> Conj:
    """Nodes without duplicates, in order."""
    return unique(tuple(nodes))


def unique(items: tuple[T, ...]) -> tuple[T, ...]:
    return tuple(dict.fromkeys(items))


def least(a: int | None, b: int | None) -> int | None:
    """The smaller bound; None is no bound."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


def unique_values(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """Shapes without duplicates, in order; `1`, `1.0` and `true` are told apart by JSON's rules."""
    found: dict[object, Shape] = {}
    for shape in shapes:
        key = value_key(shape.value) if isinstance(shape, Value) else shape
        found.setdefault(key, shape)
    return tuple(found.values())


def value_key(value: Any) -> object:
    """Hashable, equal exactly when two JSON values are equal."""
    match value:
        case bool() | None | str():
            return (type(value).__name__, value)
        case int() | float():
            return ("number", Fraction(value))
        case list():
            return ("array", tuple(value_key(v) for v in value))
        case _:
            return ("object", frozenset((k, value_key(v)) for k, v in value.items()))

"""Complements: the shapes of what a schema refuses, for `not`, `if` and overlapping `oneOf`.

A schema holds when all of its keywords do, so its complement is the union of the complements of
the keywords; each of those is a value of the keyword's own type that breaks it. Keywords whose
complement is not a shape are refused by path.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any, Protocol

from phloem.constrained.base import UnsupportedKeyword
from phloem.constrained.schema_document import Node, SchemaDocument
from phloem.constrained.schema_keywords import ASSERTIONS, without
from phloem.constrained.shapes import (
    Array,
    Boolean,
    Members,
    Null,
    Number,
    Object,
    Shape,
    Text,
    Value,
    unique_values,
)

_BY_TYPE: dict[str, Shape] = {
    "null": Null(),
    "boolean": Boolean(),
    "number": Number(),
    "string": Text(),
    "array": Array(),
    "object": Object(),
}


class Expander(Protocol):
    """What complements need of `phloem.constrained.schema_shapes.Analysis`."""

    document: SchemaDocument

    def expand(self, node: Node) -> tuple[Shape, ...]: ...

    def intersect(self, unions: Iterable[Iterable[Shape]]) -> tuple[Shape, ...]: ...


def complement(analysis: Expander, node: Node, schema: dict[str, Any]) -> tuple[Shape, ...]:
    """What the schema at `node` refuses.

    Raises:
        UnsupportedKeyword: a keyword's complement is not a shape.
    """
    union: list[Shape] = []
    for key in schema:
        rule = _COMPLEMENTS.get(key)
        if rule is not None:
            union.extend(rule(analysis, node, schema[key]))
        elif key in ASSERTIONS and key not in ("then", "else", "minContains", "maxContains"):
            raise UnsupportedKeyword(
                f"{key} under not, if or an overlapping oneOf is not supported", path=node.at(key)
            )
    return unique_values(union)


def _not_type(analysis: Expander, node: Node, types: Any) -> Iterable[Shape]:
    named = {types} if isinstance(types, str) else set(types)
    if "integer" in named and "number" not in named:
        raise UnsupportedKeyword("not type integer is not supported", path=node.at("type"))
    return tuple(s for t, s in _BY_TYPE.items() if t not in named)


def _not_values(analysis: Expander, node: Node, values: list[Any]) -> Iterable[Shape]:
    strings = frozenset(v for v in values if isinstance(v, str))
    union: list[Shape] = [Text(excluded=strings), Array(), Object()]
    if any(isinstance(v, list | dict) for v in values):
        raise UnsupportedKeyword(
            "not with arrays or objects as values is not supported", path=node.pointer
        )
    union += [] if None in values else [Null()]
    booleans = [v for v in values if isinstance(v, bool)]
    union += [Boolean()] if not booleans else [Value(b) for b in (True, False) if b not in booleans]
    numbers = sorted({Fraction(repr(v)) for v in values if _is_number(v)})
    edges: list[Fraction | None] = [None, *numbers, None]
    union += [
        Number(low=a, low_open=a is not None, high=b, high_open=b is not None)
        for a, b in itertools.pairwise(edges)
    ]
    return union


def _not_const(analysis: Expander, node: Node, value: Any) -> Iterable[Shape]:
    return _not_values(analysis, node, [value])


def _not_required(analysis: Expander, node: Node, names: list[str]) -> Iterable[Shape]:
    return tuple(without(name) for name in names)


def _not_properties(analysis: Expander, node: Node, properties: dict[str, Any]) -> Iterable[Shape]:
    for name in properties:
        child = node.child("properties", name).complement()
        members = Members(properties=((name, (child,)),))
        yield Object(layers=(members,), required=(name,), path=node.pointer)


def _not_minimum(analysis: Expander, node: Node, bound: Any) -> Iterable[Shape]:
    return (Number(high=Fraction(repr(bound)), high_open=True),)


def _not_maximum(analysis: Expander, node: Node, bound: Any) -> Iterable[Shape]:
    return (Number(low=Fraction(repr(bound)), low_open=True),)


def _not_min_length(analysis: Expander, node: Node, bound: Any) -> Iterable[Shape]:
    return (Text(high=int(bound) - 1),) if bound > 0 else ()


def _not_max_length(analysis: Expander, node: Node, bound: Any) -> Iterable[Shape]:
    return (Text(low=int(bound) + 1),)


def _not_all_of(analysis: Expander, node: Node, branches: list[Any]) -> Iterable[Shape]:
    for i in range(len(branches)):
        yield from analysis.expand(node.child("allOf", i).complement())


def _not_any_of(analysis: Expander, node: Node, branches: list[Any]) -> Iterable[Shape]:
    count = range(len(branches))
    return analysis.intersect(analysis.expand(node.child("anyOf", i).complement()) for i in count)


def _not_not(analysis: Expander, node: Node, _: Any) -> Iterable[Shape]:
    return analysis.expand(node.child("not"))


def _not_ref(analysis: Expander, node: Node, ref: Any) -> Iterable[Shape]:
    return analysis.expand(analysis.document.resolve(str(ref), node).complement())


_COMPLEMENTS: dict[str, Callable[[Expander, Node, Any], Iterable[Shape]]] = {
    "type": _not_type,
    "enum": _not_values,
    "const": _not_const,
    "required": _not_required,
    "minimum": _not_minimum,
    "maximum": _not_maximum,
    "minLength": _not_min_length,
    "maxLength": _not_max_length,
    "properties": _not_properties,
    "allOf": _not_all_of,
    "anyOf": _not_any_of,
    "not": _not_not,
    "$ref": _not_ref,
}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

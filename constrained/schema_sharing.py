"""Equal subschemas are one: a representative for each spelling, and unions without what they say
twice. Overlapping `oneOf` branches repeat each other, and their products would explode."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from phloem.constrained.schema_document import SchemaDocument
from phloem.constrained.schema_node import MANY, MAPS, ONE, Node
from phloem.constrained.shapes import (
    Array,
    Clause,
    Conj,
    Has,
    HasSome,
    Items,
    Members,
    Object,
    Shape,
    is_given,
)

_ANNOTATIONS = {
    "title",
    "description",
    "default",
    "examples",
    "$comment",
    "deprecated",
    "readOnly",
    "writeOnly",
}

MAX_COMPARED = 2_000


class Sharing:
    """Finds the representative of a node: the first node met that is written alike."""

    def __init__(self, document: SchemaDocument) -> None:
        self._references = document.references
        self._nodes: dict[str, Node] = {}
        self._known: dict[Node, Node] = {}

    def representative(self, node: Node) -> Node:
        """A node that accepts exactly what `node` does, the same one for equal schemas."""
        if isinstance(node.schema, bool) or is_given(node):
            return node
        positive = node.complement() if node.negated else node
        found = self._known.get(positive)
        if found is None:
            key = spelling(node)
            if 'Ref"' in key or '$ref"' in key:  # which means another place below another base
                key = f"{self._references.base(node.pointer)} {key}"
            found = self._nodes.setdefault(key, positive)
            self._known[positive] = found
        return found.complement() if node.negated else found


def spelling(node: Node) -> str:
    """Equal for schemas that say the same in the same words, annotations apart."""
    return json.dumps(_plain(node.schema))


def _plain(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in MAPS and isinstance(value, dict):
            found[key] = {k: _plain(v) for k, v in value.items()}
        elif key in MANY and isinstance(value, list):
            found[key] = [_plain(v) for v in value]
        elif key in ONE:
            found[key] = _plain(value)
        elif key not in _ANNOTATIONS:
            found[key] = value
    return found


# --------------------------------------------------------------------------- absorption

Canonical = Callable[[Conj], Conj]


def absorb(shapes: Iterable[Shape], canonical: Canonical) -> tuple[Shape, ...]:
    """The union without shapes that say all that another one says, and more. Only arrays and
    objects are compared."""
    union = tuple(shapes)
    clauses = [_clauses(shape, canonical) for shape in union]
    order = sorted(range(len(union)), key=lambda i: len(clauses[i] or ()))
    kept: list[int] = []
    for i in order if len(union) <= MAX_COMPARED else ():
        mine = clauses[i]
        if mine is None or not any(
            theirs is not None and theirs <= mine and type(union[j]) is type(union[i])
            for j, theirs in ((j, clauses[j]) for j in kept)
        ):
            kept.append(i)
    return tuple(union[i] for i in sorted(kept)) if kept else union


def _clauses(shape: Shape, canonical: Canonical) -> frozenset[object] | None:
    """What a shape says, as independent clauses; None where it is not taken apart."""
    found: set[object] = set()
    match shape:
        case Object():
            for layer in shape.layers:
                found |= _member_clauses(layer, canonical)
            found |= {("required", name) for name in shape.required}
            found |= {("names", canonical(nodes)) for nodes in shape.names}
            found |= {
                ("demand", frozenset(canonical_clause(c, canonical) for c in demand))
                for demand in shape.demands
            }
        case Array():
            for items in shape.layers:
                found |= _element_clauses(items, canonical)
            found |= {("some", canonical(s.nodes), s.low, s.high, s.start) for s in shape.some}
            found |= {("unique",)} if shape.unique else set()
            found |= {("repeats",)} if shape.repeats else set()
        case _:
            return None
    if shape.low:
        found |= (
            {("low", n) for n in range(1, shape.low + 1)}
            if shape.low < 64
            else {("low", shape.low)}
        )
    if shape.high is not None:
        found.add(("high", shape.high))
    return frozenset(found)


def canonical_clause(clause: Clause, canonical: Canonical) -> Clause:
    """The clause with equal subschemas made one."""
    match clause:
        case Has(name, nodes):
            return Has(name, canonical(nodes))
        case HasSome(keys, names, nodes):
            return HasSome(keys, canonical(names), canonical(nodes))
        case _:
            return clause


def _member_clauses(layer: Members, canonical: Canonical) -> set[object]:
    if layer.rest or layer.patterns:
        return {
            (
                "layer",
                tuple((name, canonical(nodes)) for name, nodes in layer.properties),
                tuple((pattern, canonical(nodes)) for pattern, nodes in layer.patterns),
                canonical(layer.rest),
            )
        }
    return {("member", name, node) for name, nodes in layer.properties for node in canonical(nodes)}


def _element_clauses(items: Items, canonical: Canonical) -> set[object]:
    prefix = tuple(canonical(nodes) for nodes in items.prefix)
    if items.rest:
        return {("items", prefix, canonical(items.rest))}
    return {("element", i, node) for i, nodes in enumerate(prefix) for node in nodes}

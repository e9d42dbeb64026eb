"""Complements: the shapes of what a schema refuses, for `not`, `if` and overlapping `oneOf`.

A schema holds when all of its keywords do, so its complement is the union of the complements of
the keywords; each of those is a value of the keyword's own type that breaks it: of an array, that
some element does, of an object, that some member does. What combines schemas is turned inside
out. Keywords whose complement is not a shape are refused by path: `unevaluated*` beside
applicators, and formats of which only a part is known.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, Protocol

from phloem.constrained.base import UnsupportedKeyword
from phloem.constrained.schema_document import Node
from phloem.constrained.schema_formats import cover, is_checked, unmatched
from phloem.constrained.schema_keywords import (
    APPLICATORS,
    ASSERTIONS,
    contained,
    count,
    fraction,
    key_pattern,
)
from phloem.constrained.shapes import (
    Array,
    Boolean,
    Clause,
    Conj,
    Has,
    HasSome,
    Items,
    Lacks,
    Null,
    Number,
    Object,
    Shape,
    Some,
    Text,
    Value,
    only,
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
_SEEN_WITH_ANOTHER = {"then", "else", "minContains", "maxContains"}
MAX_PAIRS = 500


class Expander(Protocol):
    """What complements need of `phloem.constrained.schema_shapes.Analysis`."""

    def targets(self, node: Node, schema: dict[str, Any]) -> Iterator[Node]: ...

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
            union.extend(rule(analysis, node, schema))
        elif key in ASSERTIONS and key not in _SEEN_WITH_ANOTHER:
            raise UnsupportedKeyword(
                f"{key} under not, if or an overlapping oneOf is not supported", path=node.at(key)
            )
    return unique_values(_gathered(union))


def _gathered(union: Iterable[Shape]) -> Iterable[Shape]:
    """The same union with one object shape for all that ask for a single thing each: products of
    unions stay small that way."""
    clauses: list[Clause] = []
    for shape in union:
        asked = _only_demand(shape) if isinstance(shape, Object) else None
        if asked is None:
            yield shape
        else:
            clauses.extend(asked)
    if clauses:
        yield Object(demands=(tuple(dict.fromkeys(clauses)),))


def _only_demand(shape: Object) -> tuple[Clause, ...] | None:
    return shape.demands[0] if shape == Object(demands=shape.demands[:1]) != Object() else None


def _refused(node: Node, *keys: str | int) -> Conj | None:
    """What breaks a subschema; None when nothing does."""
    child = node.child(*keys)
    if child.schema is True:
        return None
    return () if child.schema is False else (child.complement(),)


# --------------------------------------------------------------------------- any type


def _not_type(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    types = schema["type"]
    named = {types} if isinstance(types, str) else set(types)
    for name, shape in _BY_TYPE.items():
        if name == "number" and name not in named and "integer" in named:
            yield Number(indivisible=(Fraction(1),))
        elif name not in named:
            yield shape


def _not_enum(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    return _not_values(analysis, schema["enum"])


def _not_const(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    return _not_values(analysis, [schema["const"]])


def _not_values(analysis: Expander, values: list[Any]) -> Iterable[Shape]:
    strings = frozenset(v for v in values if isinstance(v, str))
    yield Text(excluded=strings)
    yield from analysis.intersect(
        [(Array(),), *(_other_arrays(v) for v in values if isinstance(v, list))]
    )
    yield from analysis.intersect(
        [(Object(),), *(_other_objects(v) for v in values if isinstance(v, dict))]
    )
    if None not in values:
        yield Null()
    booleans = [v for v in values if isinstance(v, bool)]
    yield from [Value(b) for b in (True, False) if b not in booleans] if booleans else [Boolean()]
    numbers = sorted({Fraction(repr(v)) for v in values if _is_number(v)})
    edges: list[Fraction | None] = [None, *numbers, None]
    for a, b in itertools.pairwise(edges):
        yield Number(low=a, low_open=a is not None, high=b, high_open=b is not None)


def _other_arrays(value: list[Any]) -> tuple[Shape, ...]:
    """Arrays that are longer or shorter, or of which an element is another."""
    size = len(value)
    found: list[Shape] = [Array(low=size + 1)]
    if value:
        found.append(Array(high=size - 1))
    for i, element in enumerate(value):
        prefix: tuple[Conj, ...] = ((),) * i + ((only(element).complement(),),)
        found.append(Array((Items(prefix, ()),), size, size))
    return tuple(found)


def _other_objects(value: dict[str, Any]) -> tuple[Shape, ...]:
    """Objects that lack a member, have another one, or have another value in one."""
    clauses: list[Clause] = [Lacks(name) for name in value]
    clauses += [Has(name, (only(member).complement(),)) for name, member in value.items()]
    return (_asking(*clauses, HasSome(Text(excluded=frozenset(value)))),)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _not_refs(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    for target in analysis.targets(node, schema):
        yield from analysis.expand(target.complement())


# --------------------------------------------------------------------------- numbers, strings


def _not_minimum(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    # Draft 4 has a boolean exclusiveMinimum beside minimum.
    closed = schema.get("exclusiveMinimum") is True
    yield Number(high=fraction(node, schema, "minimum"), high_open=not closed)


def _not_maximum(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    closed = schema.get("exclusiveMaximum") is True
    yield Number(low=fraction(node, schema, "maximum"), low_open=not closed)


def _not_above(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    bound = fraction(node, schema, "exclusiveMinimum")
    return () if bound is None else (Number(high=bound),)


def _not_below(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    bound = fraction(node, schema, "exclusiveMaximum")
    return () if bound is None else (Number(low=bound),)


def _not_multiple(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    yield Number(indivisible=(fraction(node, schema, "multipleOf") or Fraction(1),))


def _not_min_length(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    bound = count(node, schema, "minLength")
    return (Text(high=bound - 1),) if bound else ()


def _not_max_length(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    yield Text(low=(count(node, schema, "maxLength") or 0) + 1)


def _not_pattern(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    yield Text(patterns=(unmatched(str(schema["pattern"]), node.at("pattern")),))


def _not_format(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    name = schema["format"]
    if not is_checked(name):
        return ()
    outside = cover(name)
    if outside is None:
        raise UnsupportedKeyword(
            "format under not, if or an overlapping oneOf is not supported", path=node.at("format")
        )
    return (Text(without=(outside,)),)


# --------------------------------------------------------------------------- arrays


def _not_items(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    items = schema["items"]
    if isinstance(items, list):
        return _places(node, "items", len(items))
    refused = _refused(node, "items")
    start = len(schema.get("prefixItems", ()))
    return _some_element(node, refused, start)


def _not_prefix(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    if isinstance(schema.get("items"), list):
        return ()
    return _places(node, "prefixItems", len(schema["prefixItems"]))


def _places(node: Node, key: str, count: int) -> Iterable[Shape]:
    for i in range(count):
        refused = _refused(node, key, i)
        if refused is not None:
            prefix: tuple[Conj, ...] = ((),) * i + (refused,)
            yield Array((Items(prefix, ()),), low=i + 1)


def _not_rest(key: str) -> Rule:
    def rule(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
        items = schema.get("items")
        if key == "additionalItems":
            start = len(items) if isinstance(items, list) else None
        elif isinstance(items, list):
            start = None if "additionalItems" in schema else len(items)
        else:
            start = None if "items" in schema else len(schema.get("prefixItems", ()))
        if start is None:
            return ()
        _check_unevaluated(node, schema, key)
        return _some_element(node, _refused(node, key), start)

    return rule


def _some_element(node: Node, refused: Conj | None, start: int) -> Iterable[Shape]:
    if refused is None:
        return ()
    if not refused:
        return (Array(low=start + 1),)
    return (Array(some=(Some(refused, start=start),), path=node.pointer),)


def _not_contains(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    child = node.child("contains")
    nodes: Conj = () if child.schema is True else (child,)
    low, high = contained(node, schema)
    path = node.at("contains")
    if low > 0:
        yield Array(some=(Some(nodes, 0, low - 1),), path=path)
    if high is not None:
        yield Array(some=(Some(nodes, high + 1),), path=path)


def _not_min_items(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    bound = count(node, schema, "minItems")
    return (Array(high=bound - 1),) if bound else ()


def _not_max_items(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    yield Array(low=(count(node, schema, "maxItems") or 0) + 1)


def _not_unique(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    if schema["uniqueItems"] is True:
        yield Array(low=2, repeats=node.at("uniqueItems"))


# --------------------------------------------------------------------------- objects


def _asking(*clauses: Clause, path: str = "") -> Object:
    """Objects of which one clause holds."""
    return Object(demands=(clauses,), path=path)


def _not_required(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    names = schema["required"]
    return tuple(_asking(Lacks(name)) for name in names) if isinstance(names, list) else ()


def _not_properties(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    for name in schema["properties"]:
        refused = _refused(node, "properties", name)
        if refused is not None:
            yield _asking(Has(name, refused), path=node.pointer)


def _not_patterns(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    for text in schema["patternProperties"]:
        refused = _refused(node, "patternProperties", text)
        if refused is not None:
            keys = Text(patterns=(key_pattern(node, text).matched,))
            yield _asking(HasSome(keys, nodes=refused), path=node.pointer)


def _not_others(key: str) -> Rule:
    def rule(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
        refused = _refused(node, key)
        if refused is None or (key != "additionalProperties" and "additionalProperties" in schema):
            return ()
        _check_unevaluated(node, schema, key)
        patterns = tuple(
            key_pattern(node, text).unmatched for text in schema.get("patternProperties", ())
        )
        keys = Text(excluded=frozenset(schema.get("properties", ())), patterns=patterns)
        return (_asking(HasSome(keys, nodes=refused), path=node.pointer),)

    return rule


def _check_unevaluated(node: Node, schema: dict[str, Any], key: str) -> None:
    if key.startswith("unevaluated") and any(a in schema for a in APPLICATORS):
        raise UnsupportedKeyword(
            f"{key} under not, if or an overlapping oneOf is not supported", path=node.at(key)
        )


def _not_names(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    refused = _refused(node, "propertyNames")
    if refused is not None:
        yield _asking(HasSome(names=refused), path=node.pointer)


def _not_min_properties(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    bound = count(node, schema, "minProperties")
    return (Object(high=bound - 1),) if bound else ()


def _not_max_properties(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    yield Object(low=(count(node, schema, "maxProperties") or 0) + 1, path=node.pointer)


def _not_dependent(key: str) -> Rule:
    def rule(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
        for name, wanted in schema[key].items():
            present = Object(required=(name,))
            if isinstance(wanted, list):
                clauses = [Lacks(other) for other in wanted]
                lacking: Iterable[Shape] = (_asking(*clauses),) if clauses else ()
            else:
                lacking = analysis.expand(node.child(key, name).complement())
            yield from analysis.intersect([(present,), lacking])

    return rule


# --------------------------------------------------------------------------- combinations


def _not_all_of(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    for i in range(len(schema["allOf"])):
        yield from analysis.expand(node.child("allOf", i).complement())


def _not_any_of(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    count = range(len(schema["anyOf"]))
    return analysis.intersect(analysis.expand(node.child("anyOf", i).complement()) for i in count)


def _not_one_of(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    """None of the branches, or two of them."""
    branches = [node.child("oneOf", i) for i in range(len(schema["oneOf"]))]
    pairs = list(itertools.combinations(branches, 2))
    if len(pairs) > MAX_PAIRS:
        raise UnsupportedKeyword(
            "oneOf with that many branches under not, if or an overlapping oneOf is not supported",
            path=node.at("oneOf"),
        )
    yield from analysis.intersect(analysis.expand(b.complement()) for b in branches)
    for one, other in pairs:
        yield from analysis.intersect([analysis.expand(one), analysis.expand(other)])


def _not_not(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    return analysis.expand(node.child("not"))


def _not_if(analysis: Expander, node: Node, schema: dict[str, Any]) -> Iterable[Shape]:
    condition = node.child("if")
    for key, case in (("then", condition), ("else", condition.complement())):
        if key in schema:
            refused = analysis.expand(node.child(key).complement())
            yield from analysis.intersect([analysis.expand(case), refused])


Rule = Callable[[Expander, Node, dict[str, Any]], Iterable[Shape]]

_COMPLEMENTS: dict[str, Rule] = {
    "type": _not_type,
    "enum": _not_enum,
    "const": _not_const,
    "$ref": _not_refs,
    "$dynamicRef": _not_refs,
    "$recursiveRef": _not_refs,
    "minimum": _not_minimum,
    "maximum": _not_maximum,
    "exclusiveMinimum": _not_above,
    "exclusiveMaximum": _not_below,
    "multipleOf": _not_multiple,
    "minLength": _not_min_length,
    "maxLength": _not_max_length,
    "pattern": _not_pattern,
    "format": _not_format,
    "items": _not_items,
    "prefixItems": _not_prefix,
    "additionalItems": _not_rest("additionalItems"),
    "unevaluatedItems": _not_rest("unevaluatedItems"),
    "contains": _not_contains,
    "minItems": _not_min_items,
    "maxItems": _not_max_items,
    "uniqueItems": _not_unique,
    "required": _not_required,
    "properties": _not_properties,
    "patternProperties": _not_patterns,
    "additionalProperties": _not_others("additionalProperties"),
    "unevaluatedProperties": _not_others("unevaluatedProperties"),
    "propertyNames": _not_names,
    "minProperties": _not_min_properties,
    "maxProperties": _not_max_properties,
    "dependentRequired": _not_dependent("dependentRequired"),
    "dependentSchemas": _not_dependent("dependentSchemas"),
    "dependencies": _not_dependent("dependencies"),
    "allOf": _not_all_of,
    "anyOf": _not_any_of,
    "oneOf": _not_one_of,
    "not": _not_not,
    "if": _not_if,
}

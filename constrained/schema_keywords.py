"""The keywords of one type: from a schema object to the shape of its numbers, strings, arrays
or objects. Raises `ConstraintError` with the keyword's path."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from phloem.constrained import formats
from phloem.constrained.base import ConstraintError, MalformedConstraint
from phloem.constrained.pattern import Node as Pattern
from phloem.constrained.pattern_closing import close_search
from phloem.constrained.pattern_parser import Dialect, parse
from phloem.constrained.schema_document import Node, finite
from phloem.constrained.schema_formats import cover, unmatched
from phloem.constrained.shapes import (
    NEVER,
    Array,
    Boolean,
    Conj,
    Items,
    Keys,
    Members,
    Null,
    Number,
    Object,
    Shape,
    Some,
    Text,
    meet,
    unique,
)

ASSERTIONS = [
    "type",
    "enum",
    "const",
    "multipleOf",
    "maximum",
    "exclusiveMaximum",
    "minimum",
    "exclusiveMinimum",
    "maxLength",
    "minLength",
    "pattern",
    "maxItems",
    "minItems",
    "uniqueItems",
    "maxContains",
    "minContains",
    "maxProperties",
    "minProperties",
    "required",
    "dependentRequired",
    "format",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "dependentSchemas",
    "prefixItems",
    "items",
    "contains",
    "properties",
    "patternProperties",
    "additionalProperties",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
    "additionalItems",
    "dependencies",
]
"""Keywords that restrict something."""

ALL_TYPES = ("null", "boolean", "number", "string", "array", "object")


def typed_shapes(node: Node, schema: dict[str, Any]) -> tuple[Shape, ...]:
    """One shape for each type the schema allows, with that type's keywords."""
    named = schema.get("type", ALL_TYPES)
    types = (named,) if isinstance(named, str) else tuple(named)
    if "number" in types:
        types = tuple(t for t in types if t != "integer")
    shapes = [_shape(node, schema, t) for t in dict.fromkeys(types)]
    return tuple(s for s in shapes if s is not None)


def _shape(node: Node, schema: dict[str, Any], kind: str) -> Shape | None:
    match kind:
        case "null":
            return Null()
        case "boolean":
            return Boolean()
        case "number" | "integer":
            number = _number(node, schema, integer=kind == "integer")
            return None if number.empty() else number
        case "string":
            text = _text(node, schema)
            return meet(text, text) if "format" not in schema else _loose(text, schema)
        case "array":
            array = _array(node, schema)
            return meet(array, array)
        case _:
            members = _object(node, schema)
            return meet(members, members)


def _loose(text: Text, schema: dict[str, Any]) -> Shape | None:
    """The text, with a cover of its format, of whose strings the pattern may lack some."""
    covers: tuple[tuple[Pattern, Pattern | None], ...] = ()
    if schema["format"] in formats.FORMATS:
        covers = ((formats.pattern_of(schema["format"], text.high), cover(schema["format"])),)
    return meet(text, dataclasses.replace(text, loose=covers))


def count(node: Node, schema: dict[str, Any], key: str) -> int | None:
    """The value of a keyword that counts; None when it is not there."""
    value = schema.get(key)
    if value is None:
        return None
    if not finite(value):
        raise MalformedConstraint(f"{key} is too large", path=node.at(key))
    return int(value)


def fraction(node: Node, schema: dict[str, Any], key: str) -> Fraction | None:
    """The value of a keyword that bounds or divides numbers, as the decimal that was written; None
    when it is not there, or a boolean."""
    value = schema.get(key)
    if value is None or isinstance(value, bool):
        return None
    if not finite(value):
        raise MalformedConstraint(f"{key} is too large", path=node.at(key))
    return Fraction(repr(value))


def _number(node: Node, schema: dict[str, Any], *, integer: bool) -> Number:
    number = Number(integer=integer)
    low = fraction(node, schema, "minimum")
    high = fraction(node, schema, "maximum")
    if low is not None:
        # Draft 4 has a boolean exclusiveMinimum beside minimum.
        number = number.meet(Number(low=low, low_open=schema.get("exclusiveMinimum") is True))
    if high is not None:
        number = number.meet(Number(high=high, high_open=schema.get("exclusiveMaximum") is True))
    low = fraction(node, schema, "exclusiveMinimum")
    high = fraction(node, schema, "exclusiveMaximum")
    if low is not None:
        number = number.meet(Number(low=low, low_open=True))
    if high is not None:
        number = number.meet(Number(high=high, high_open=True))
    multiple = fraction(node, schema, "multipleOf")
    if multiple is not None:
        number = number.meet(Number(multiples=(multiple,)))
    named = schema.get("format")
    if integer and named in formats.INTEGER_FORMATS:
        least_value, most = formats.INTEGER_FORMATS[named]
        number = number.meet(Number(low=Fraction(least_value), high=Fraction(most)))
    return number


def _text(node: Node, schema: dict[str, Any]) -> Text:
    patterns: list[Pattern] = []
    low, high = count(node, schema, "minLength") or 0, count(node, schema, "maxLength")
    if "pattern" in schema:
        patterns.append(search_pattern(str(schema["pattern"]), node.at("pattern")))
    named = schema.get("format")
    if named in formats.FORMATS:
        patterns.append(formats.pattern_of(named, high))
    return Text(low, high, unique(tuple(patterns)))


def search_pattern(text: str, path: str) -> Pattern:
    """A `pattern` as the language of whole strings in which it is found."""
    try:
        return close_search(parse(text, Dialect.ECMA))
    except ConstraintError as error:
        raise type(error)(error.message, path=path, code=error.reason) from error


def subschema(node: Node, *keys: str | int) -> Conj:
    """The conjunction of one subschema."""
    child = node.child(*keys)
    return () if child.schema is True else (child,)


def _array(node: Node, schema: dict[str, Any]) -> Array:
    low = count(node, schema, "minItems") or 0
    high = count(node, schema, "maxItems")
    items = schema.get("items", True)
    if isinstance(items, list):  # draft 7 and older
        prefix = tuple(subschema(node, "items", i) for i in range(len(items)))
        rest = _rest(node, schema, ("additionalItems", "unevaluatedItems"))
    else:
        prefix = tuple(
            subschema(node, "prefixItems", i) for i in range(len(schema.get("prefixItems", ())))
        )
        rest = (
            subschema(node, "items")
            if "items" in schema
            else _rest(node, schema, ("unevaluatedItems",))
        )
    some: tuple[Some, ...] = ()
    if "contains" in schema:
        wanted, most = contained(node, schema)
        if wanted or most is not None:
            some = (Some(subschema(node, "contains"), wanted, most),)
    path = node.at("uniqueItems") if schema.get("uniqueItems") is True else None
    layers = (Items(prefix, rest),) if prefix or rest else ()
    return Array(layers, low, high, path, some, node.at("contains") if some else node.pointer)


def contained(node: Node, schema: dict[str, Any]) -> tuple[int, int | None]:
    """How many elements `contains` asks for: at least, at most."""
    wanted = count(node, schema, "minContains")
    return 1 if wanted is None else wanted, count(node, schema, "maxContains")


APPLICATORS = (
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "dependentSchemas",
    "dependencies",
    "contains",
)
"""Keywords with schemas about the same value."""


def _rest(node: Node, schema: dict[str, Any], keys: tuple[str, ...]) -> Conj:
    """What the first of `keys` that is there says of all other elements or members; what
    `unevaluated*` says beside applicators is seen to elsewhere."""
    for key in keys:
        if key in schema:
            beside = key.startswith("unevaluated") and any(a in schema for a in APPLICATORS)
            return () if beside else subschema(node, key)
    return ()


def _object(node: Node, schema: dict[str, Any]) -> Object:
    properties = tuple(
        (name, subschema(node, "properties", name)) for name in schema.get("properties", ())
    )
    patterns = tuple(
        (key_pattern(node, text), subschema(node, "patternProperties", text))
        for text in schema.get("patternProperties", ())
    )
    rest = _rest(node, schema, ("additionalProperties", "unevaluatedProperties"))
    names = (subschema(node, "propertyNames"),) if "propertyNames" in schema else ()
    required = schema.get("required", ())
    members = Members(properties, patterns, rest)
    return Object(
        layers=(members,) if properties or patterns or rest else (),
        required=unique(tuple(required)) if isinstance(required, list) else (),
        low=count(node, schema, "minProperties") or 0,
        high=count(node, schema, "maxProperties"),
        names=names,
        path=node.pointer,
    )


def key_pattern(node: Node, text: str) -> Keys:
    """The keys that one of `patternProperties` is about."""
    path = node.at("patternProperties", text)
    return Keys(search_pattern(text, path), unmatched(text, path))


def without(name: str) -> Object:
    """Objects that lack this member."""
    return Object(layers=(Members(properties=((name, (NEVER,)),)),))

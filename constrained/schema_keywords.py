"""The keywords of one type: from a schema object to the shape of its numbers, strings, arrays
or objects. Raises `ConstraintError` with the keyword's path."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from phloem.constrained import formats
from phloem.constrained.base import ConstraintError, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.pattern import Node as Pattern
from phloem.constrained.pattern import close_search
from phloem.constrained.pattern_parser import Dialect, parse
from phloem.constrained.schema_document import Node, finite
from phloem.constrained.shapes import (
    NEVER,
    Array,
    Boolean,
    Conj,
    Items,
    Members,
    Null,
    Number,
    Object,
    Shape,
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
            return meet(text, text)
        case "array":
            array = _array(node, schema)
            return meet(array, array)
        case _:
            members = _object(node, schema)
            return meet(members, members)


def _count(node: Node, schema: dict[str, Any], key: str) -> int | None:
    value = schema.get(key)
    if value is None:
        return None
    if not finite(value):
        raise MalformedConstraint(f"{key} is too large", path=node.at(key))
    return int(value)


def _fraction(node: Node, schema: dict[str, Any], key: str) -> Fraction | None:
    """A bound, as the decimal that was written."""
    value = schema.get(key)
    if value is None or isinstance(value, bool):
        return None
    if not finite(value):
        raise MalformedConstraint(f"{key} is too large", path=node.at(key))
    return Fraction(repr(value))


def _number(node: Node, schema: dict[str, Any], *, integer: bool) -> Number:
    number = Number(integer=integer)
    low = _fraction(node, schema, "minimum")
    high = _fraction(node, schema, "maximum")
    if low is not None:
        # Draft 4 has a boolean exclusiveMinimum beside minimum.
        number = number.meet(Number(low=low, low_open=schema.get("exclusiveMinimum") is True))
    if high is not None:
        number = number.meet(Number(high=high, high_open=schema.get("exclusiveMaximum") is True))
    low = _fraction(node, schema, "exclusiveMinimum")
    high = _fraction(node, schema, "exclusiveMaximum")
    if low is not None:
        number = number.meet(Number(low=low, low_open=True))
    if high is not None:
        number = number.meet(Number(high=high, high_open=True))
    multiple = _fraction(node, schema, "multipleOf")
    if multiple is not None:
        number = number.meet(Number(multiples=(multiple,)))
    named = schema.get("format")
    if integer and named in formats.INTEGER_FORMATS:
        least_value, most = formats.INTEGER_FORMATS[named]
        number = number.meet(Number(low=Fraction(least_value), high=Fraction(most)))
    elif named is not None and "type" in schema:
        known = formats.FORMATS | formats.ANNOTATION_FORMATS | set(formats.INTEGER_FORMATS)
        if named not in known:
            raise UnsupportedKeyword("unknown format", path=node.at("format"))
    return number


def _text(node: Node, schema: dict[str, Any]) -> Text:
    patterns: list[Pattern] = []
    if "pattern" in schema:
        patterns.append(search_pattern(str(schema["pattern"]), node.at("pattern")))
    named = schema.get("format")
    if named in formats.FORMATS:
        patterns.append(formats.pattern_of(named))
    elif named is not None and named not in formats.ANNOTATION_FORMATS:
        raise UnsupportedKeyword(
            f"format is not one of {', '.join(sorted(formats.FORMATS))}", path=node.at("format")
        )
    low = _count(node, schema, "minLength") or 0
    return Text(low, _count(node, schema, "maxLength"), unique(tuple(patterns)))


def search_pattern(text: str, path: str) -> Pattern:
    """A `pattern` as the language of whole strings in which it is found."""
    try:
        return close_search(parse(text, Dialect.ECMA))
    except ConstraintError as error:
        raise type(error)(error.message, path=path, code=error.reason) from error


def _conj(node: Node, *keys: str | int) -> Conj:
    child = node.child(*keys)
    return () if child.schema is True else (child,)


def _array(node: Node, schema: dict[str, Any]) -> Array:
    low = _count(node, schema, "minItems") or 0
    high = _count(node, schema, "maxItems")
    items = schema.get("items", True)
    if isinstance(items, list):  # draft 7 and older
        prefix = tuple(_conj(node, "items", i) for i in range(len(items)))
        rest = _rest(node, schema, ("additionalItems", "unevaluatedItems"))
    else:
        prefix = tuple(
            _conj(node, "prefixItems", i) for i in range(len(schema.get("prefixItems", ())))
        )
        rest = (
            _conj(node, "items")
            if "items" in schema
            else _rest(node, schema, ("unevaluatedItems",))
        )
    if "contains" in schema:
        least_found = schema.get("minContains", 1)
        if least_found > 0 or "maxContains" in schema:
            raise UnsupportedKeyword("contains is not supported", path=node.at("contains"))
    path = node.at("uniqueItems") if schema.get("uniqueItems") is True else None
    layers = (Items(prefix, rest),) if prefix or rest else ()
    return Array(layers, low, high, path)


_APPLICATORS = ("$ref", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas", "contains")


def _rest(node: Node, schema: dict[str, Any], keys: tuple[str, ...]) -> Conj:
    """What the first of `keys` that is there says of all other elements or members."""
    for key in keys:
        if key not in schema:
            continue
        if key.startswith("unevaluated") and schema[key] is not True:
            beside = next((a for a in _APPLICATORS if a in schema), None)
            if beside is not None:
                raise UnsupportedKeyword(
                    f"{key} beside {beside} is not supported", path=node.at(key)
                )
        return _conj(node, key)
    return ()


def _object(node: Node, schema: dict[str, Any]) -> Object:
    properties = tuple(
        (name, _conj(node, "properties", name)) for name in schema.get("properties", ())
    )
    patterns = tuple(
        (
            search_pattern(text, node.at("patternProperties", text)),
            _conj(node, "patternProperties", text),
        )
        for text in schema.get("patternProperties", ())
    )
    rest = _rest(node, schema, ("additionalProperties", "unevaluatedProperties"))
    names = (_conj(node, "propertyNames"),) if "propertyNames" in schema else ()
    required = schema.get("required", ())
    members = Members(properties, patterns, rest)
    return Object(
        layers=(members,) if properties or patterns or rest else (),
        required=unique(tuple(required)) if isinstance(required, list) else (),
        low=_count(node, schema, "minProperties") or 0,
        high=_count(node, schema, "maxProperties"),
        names=names,
        path=node.pointer,
    )


def without(name: str) -> Object:
    """Objects that lack this member."""
    return Object(layers=(Members(properties=((name, (NEVER,)),)),))

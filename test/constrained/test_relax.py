"""Taking keywords out of schemas: never narrower, and told as it is."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.constrained.base import UnsupportedKeyword
from phloem.constrained.relax import RelaxedSchema
from phloem.constrained.schema import lower_schema
from phloem.constrained.spec import Whitespace
from phloem.constrained.validate import Violation, validator_of

_names = st.sampled_from(["a", "b", "ab"])
_values: st.SearchStrategy[Any] = st.sampled_from(
    [None, True, 0, 1, 2.5, 7, "", "a", "ab", [], [1], [1, 1], ["a", 2], {}]
)
_VALUES: list[Any] = [
    *[None, False, 0, 1, 2, 2.5, 7, -1, "", "a", "ab", "abc"],
    *[[], [1], [1, 1], [1, "a"], ["a", 2], [[], {}], [2, 7, 1]],
    *[{}, {"a": 1}, {"a": "a"}, {"b": 2}, {"a": 1, "b": "ab"}, {"ab": None, "a": 7}],
    *[{"a": {"a": 1}}, {"a": [1, 1]}, {"c": {}}, {"b": {"b": "a", "a": 0}}],
]


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    schemas = st.lists(inner, min_size=1, max_size=3)
    properties = st.dictionaries(_names, inner, min_size=1, max_size=2)
    parts: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(["object", "array", "string", "integer", ["object", "string"]]),
        "minimum": st.integers(0, 3),
        "minLength": st.integers(0, 2),
        "pattern": st.sampled_from(["a", "^a", "b$"]),
        "uniqueItems": st.just(True),
        "minItems": st.integers(0, 2),
        "required": st.lists(_names, max_size=2, unique=True),
        "enum": st.lists(_values, min_size=1, max_size=3),
        "properties": properties,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": inner,
        "dependentSchemas": properties,
        "dependentRequired": st.just({"a": ["b"]}),
        "items": inner,
        "prefixItems": schemas,
        "contains": inner,
        "minContains": st.integers(0, 2),
        "maxContains": st.integers(0, 2),
        "allOf": schemas,
        "anyOf": schemas,
        "oneOf": schemas,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "unevaluatedProperties": st.just(False),
        "unevaluatedItems": st.just(False),
        "$ref": st.sampled_from(["#/$defs/x", "#/$defs/y", "#"]),
    }
    return st.lists(st.sampled_from(sorted(parts)), max_size=4, unique=True).flatmap(
        lambda keys: st.fixed_dictionaries({key: parts[key] for key in keys})
    )


_schemas = st.recursive(st.booleans() | _objects(st.booleans()), _objects, max_leaves=6)


def keywords(value: Any, pointer: str = "") -> list[str]:
    """Every place in the JSON of a schema: more than there are keywords."""
    found = [pointer]
    parts = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in parts:
        step = str(key).replace("~", "~0").replace("/", "~1")
        found += (
            keywords(below, f"{pointer}/{step}")
            if isinstance(below, dict | list)
            else [f"{pointer}/{step}"]
        )
    return found


def validity(schema: Any) -> list[bool]:
    validator = jsonschema_rs.validator_for(schema)
    return [bool(validator.is_valid(value)) for value in _VALUES]


@settings(deadline=None, max_examples=200)
@given(schema=_objects(_schemas), x=_schemas, y=_schemas, data=st.data())
def test_it_is_never_narrower(schema: Any, x: Any, y: Any, data: st.DataObject) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "$defs": {"x": x, "y": y},
    }
    relaxed = RelaxedSchema(json.dumps(schema))
    for _ in range(3):
        before = json.loads(relaxed.text)
        pointer = data.draw(st.sampled_from(keywords(before)))
        try:
            accepted = validity(before)
            if relaxed.drop(pointer):
                assert json.loads(relaxed.text) != before
                after = validity(json.loads(relaxed.text))
            else:
                assert json.loads(relaxed.text) == before
                after = accepted
        except (ValueError, jsonschema_rs.ReferencingError):
            return  # it refers to itself without end, or to what was taken out
        wrong = [v for v, old, new in zip(_VALUES, accepted, after, strict=True) if old and not new]
        assert not wrong, (pointer, before, relaxed.text)


@settings(deadline=None, max_examples=100)
@given(schema=_objects(_schemas), x=_schemas, y=_schemas, data=st.data())
def test_every_keyword_is_told_once(schema: Any, x: Any, y: Any, data: st.DataObject) -> None:
    schema = {**schema, "$defs": {"x": x, "y": y}}
    relaxed = RelaxedSchema(json.dumps(schema))
    every = relaxed.enforced()
    assert not relaxed.validated()
    assert not relaxed.unsupported()
    for _ in range(3):
        relaxed.drop(data.draw(st.sampled_from(keywords(json.loads(relaxed.text)))))
    enforced, rest = relaxed.enforced(), relaxed.validated() + relaxed.unsupported()
    assert not set(enforced) & set(rest)
    for pointer in every:
        told = [p for p in rest if pointer == p or pointer.startswith(p + "/")]
        assert pointer in enforced or told


def relax(schema: Any) -> RelaxedSchema:
    """What a server does: take out what the compiler refuses, until it refuses nothing."""
    relaxed = RelaxedSchema(json.dumps(schema))
    for _ in range(30):
        try:
            lower_schema(relaxed.text, Whitespace.COMPACT)
        except UnsupportedKeyword as error:
            if not relaxed.drop(error.path):
                break
        else:
            return relaxed
    raise AssertionError(relaxed.text)


_TWICE = {"type": "string", "pattern": r"^(.)\1$"}


@pytest.mark.parametrize(
    ("schema", "enforced", "validated", "unsupported"),
    [
        (_TWICE, ["/type"], ["/pattern"], []),
        (
            {"type": "object", "properties": {"a": _TWICE, "b": {"type": "null"}}},
            ["/properties", "/properties/a/type", "/properties/b/type", "/type"],
            ["/properties/a/pattern"],
            [],
        ),
        (
            {"patternProperties": {r"^(.)\1": {"type": "null"}}, "additionalProperties": False},
            [],
            ["/additionalProperties", "/patternProperties"],
            [],
        ),
        (
            {"type": "array", "items": {"oneOf": [_TWICE, {"minLength": 2}]}},
            ["/items", "/items/oneOf/0/type", "/items/oneOf/1/minLength", "/type"],
            ["/items/oneOf", "/items/oneOf/0/pattern"],
            [],
        ),
        (
            {"type": "string", "not": {"$ref": "#/$defs/s"}, "$defs": {"s": _TWICE}},
            ["/$defs/s/pattern", "/$defs/s/type", "/type"],
            ["/not"],
            [],
        ),
        ({"type": "string", "min_length": 3}, ["/type"], [], ["/min_length"]),
        (
            {"type": "object", "properties": {"a": {"$ref": "https://example.com/s"}}},
            ["/properties", "/type"],
            [],
            ["/properties/a/$ref"],
        ),
        (
            {"properties": {"a": {"uniqueItems": True}, "b": {"maxLength": 2}}},
            ["/properties", "/properties/b/maxLength"],
            ["/properties/a/uniqueItems"],
            [],
        ),
    ],
)
def test_what_is_told(
    schema: Any, enforced: list[str], validated: list[str], unsupported: list[str]
) -> None:
    relaxed = relax(schema)
    assert relaxed.enforced() == enforced
    assert relaxed.validated() == validated
    assert relaxed.unsupported() == unsupported


def test_the_rest_is_validated() -> None:
    relaxed = relax({"type": "object", "properties": {"a": _TWICE}, "min_length": 1})
    validator = validator_of(relaxed.checked_schema())
    validator.check({"a": "xx"})
    with pytest.raises(Violation, match="pattern does not hold at /a"):
        validator.check({"a": "ab"})


@pytest.mark.parametrize("pointer", ["", "/nothing", "/properties/b", "/$schema", "/$defs/t/$id"])
def test_what_cannot_be_taken_out_stays(pointer: str) -> None:
    text = json.dumps(
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "$defs": {"t": {"$id": "https://example.com/t"}},
        }
    )
    relaxed = RelaxedSchema(text)
    if pointer:
        assert not relaxed.drop(pointer)
        assert relaxed.text == text
    else:
        assert relaxed.drop("")
        assert "type" not in json.loads(relaxed.text)

"""Schemas are enforced in full or refused by path. The probes: schemas with texts to take and to
refuse; an independent validator must agree with every verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.constrained.base import (
    Backend,
    ConstraintError,
    LimitExceeded,
    MalformedConstraint,
    UnsupportedKeyword,
)
from phloem.constrained.formats import FORMATS, pattern_of
from phloem.constrained.lowering import lower
from phloem.constrained.shape_relations import pattern_automaton
from phloem.constrained.spec import Constraint, JsonObject, JsonSchema, Whitespace

Judge = Callable[[Constraint], Callable[[str], bool]]

PROBES: list[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "data" / "schema_probes.json").read_text()
)


def constraint(schema: Any, whitespace: Whitespace = Whitespace.BOUNDED) -> JsonSchema:
    return JsonSchema(schema=json.dumps(schema, ensure_ascii=False), whitespace=whitespace)


@pytest.mark.parametrize("probe", PROBES, ids=[p["name"] for p in PROBES])
def test_probe(probe: dict[str, Any], judge: Judge) -> None:
    accepts = judge(constraint(probe["schema"]))
    for text in probe["accept"]:
        assert accepts(text), text
    for text in probe["reject"]:
        assert not accepts(text), text


@pytest.mark.parametrize("probe", PROBES, ids=[p["name"] for p in PROBES])
def test_probes_are_right(probe: dict[str, Any]) -> None:
    validator = jsonschema_rs.validator_for(probe["schema"], validate_formats=True)
    for text in probe["accept"]:
        assert validator.is_valid(json.loads(text)), text
    for text in probe["reject"]:
        try:
            value = json.loads(text)
        except ValueError:
            continue
        lone = any(0xD800 <= ord(c) <= 0xDFFF for c in str(value))
        unsaid = probe["name"] == "int32"  # a format that JSON Schema only annotates with
        assert lone or unsaid or not validator.is_valid(value), text


@pytest.mark.parametrize(
    ("schema", "error", "path"),
    [
        ({"type": "array", "uniqueItems": True}, UnsupportedKeyword, "/uniqueItems"),
        (
            {"properties": {"a/b": {"items": {"type": "string"}, "uniqueItems": True}}},
            UnsupportedKeyword,
            "/properties/a~1b/uniqueItems",
        ),
        ({"$dynamicRef": "#x"}, MalformedConstraint, "/$dynamicRef"),
        ({"$ref": "https://example.com/s"}, UnsupportedKeyword, "/$ref"),
        ({"$ref": "#/$defs/missing"}, MalformedConstraint, "/$ref"),
        ({"$ref": "#"}, MalformedConstraint, ""),
        ({"items": {"$ref": "#/$defs/a"}, "$defs": {"a": {"$ref": "#/$defs/b"},
          "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}}, MalformedConstraint, "/$defs/b"),
        ({"type": "string", "pattern": "(a)\\1"}, UnsupportedKeyword, "/pattern"),
        ({"type": "string", "pattern": "(a"}, MalformedConstraint, "/pattern"),
        ({"items": {"enum": []}}, MalformedConstraint, "/items/enum"),
        ({"type": "strange"}, MalformedConstraint, "/type"),
        ({"minlength": 3}, UnsupportedKeyword, "/minlength"),
        ({"type": "object", "minProperties": 2}, UnsupportedKeyword, "/minProperties"),
        (
            {"not": {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}},
            UnsupportedKeyword,
            "/not/unevaluatedProperties",
        ),
        ({"not": {"format": "uri-template"}}, UnsupportedKeyword, "/not/format"),
        ({"not": {"uniqueItems": True}}, UnsupportedKeyword, "/not/uniqueItems"),
        ({"type": "number", "multipleOf": 123456789}, LimitExceeded, ""),
        ({"$schema": "https://example.com/mine"}, UnsupportedKeyword, "/$schema"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, MalformedConstraint, ""),
        ({"type": "object", "additionalProperties": False, "required": ["a"]},
         MalformedConstraint, ""),
        ({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
         MalformedConstraint, ""),
        (False, MalformedConstraint, ""),
        ({"type": "string", "minLength": 5000, "pattern": "a"}, LimitExceeded, ""),
        ({"enum": list(range(1001))}, LimitExceeded, ""),
        ({"properties": {f"p{i}": {} for i in range(5001)}}, LimitExceeded, ""),
        ({"anyOf": [{"const": 1}] * 257}, LimitExceeded, "/anyOf"),
        ({"enum": ["x" * 120_001]}, LimitExceeded, ""),
        ({"description": "x" * 300_000}, LimitExceeded, ""),
    ],
)  # fmt: skip
def test_refusal_names_the_path(schema: Any, error: type[ConstraintError], path: str) -> None:
    with pytest.raises(error) as caught:
        lower(constraint(schema))
    assert caught.value.path == path


@pytest.mark.parametrize(
    "text", ['{"a": 1, "a": 2}', '{"minimum": NaN}', "{", "[1]", '{"const": 1e999}', '"\\ud800"']
)
def test_not_a_schema(text: str) -> None:
    with pytest.raises(MalformedConstraint):
        lower(JsonSchema(schema=text))


def test_nesting_is_refused_before_anything_recurses() -> None:
    deep = '{"type":"array","items":' * 3000 + "{}" + "}" * 3000
    with pytest.raises(LimitExceeded, match="nests"):
        lower(JsonSchema(schema=deep))
    schema: Any = {}
    for _ in range(40):
        schema = {"items": schema}
    with pytest.raises(LimitExceeded, match="32 levels"):
        lower(constraint(schema))


def test_compact_has_no_whitespace(judge: Judge) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array"}}, "required": ["a"]}
    accepts = judge(constraint(schema, Whitespace.COMPACT))
    assert accepts('{"a":[1,{"b":null}]}')
    for text in ('{"a": []}', '{ "a":[]}', '{"a":[1, 2]}', ' {"a":[]}', '{"a":[]}\n'):
        assert not accepts(text)


def test_bounded_whitespace(judge: Judge) -> None:
    value = {"a": [1, {"b": []}], "c": {}}
    accepts = judge(constraint({"type": "object", "required": ["a"]}))
    for indent in (None, 1, 2, 4):
        assert accepts(json.dumps(value, indent=indent))
    assert accepts('{ "a" : [ ] }')
    assert not accepts('{"a":\n\n1}')
    assert not accepts('{"a":' + "\n" + " " * 64 + "1}")
    assert not accepts('{"a":  1}')


def test_json_object(judge: Judge) -> None:
    accepts = judge(JsonObject())
    assert accepts('{"a": [1, -2.5e3, {"b": null}], "c": "\\u00e9\\n"}')
    for text in ("[]", "1", '{"a":}', '{"a":1,}', "{a:1}", '{"a":01}', '{"a":"\n"}'):
        assert not accepts(text)


def test_huge_bounds_are_cheap(backend: Backend) -> None:
    for schema in (
        {"type": "string", "minLength": 1, "maxLength": 2_000_000_000},
        {"type": "array", "items": {"type": "integer"}, "minItems": 10**6, "maxItems": 2 * 10**6},
    ):
        assert backend.compile(constraint(schema)).memory_bytes < 64 << 20


FORMAT_EXAMPLES = {
    "date": ["2024-02-29", "1999-12-31"],
    "date-time": ["2024-02-29T12:30:00Z", "2024-01-01T00:00:00.123+05:30"],
    "duration": ["P1DT2H", "P3W", "PT5S", "P1Y2M3DT4H5M6S"],
    "email": ["a.b@example.com"],
    "hostname": ["example.com", "a-b.c", "localhost"],
    "ipv4": ["192.168.0.1", "0.0.0.0", "255.255.255.255"],
    "ipv6": ["::1", "::", "2001:db8::ff00:42:8329", "1:2:3:4:5:6:7:8"],
    "json-pointer": ["", "/a/b~1c", "/"],
    "relative-json-pointer": ["0", "1/a", "2#"],
    "time": ["12:30:00Z", "23:59:59+01:00"],
    "idn-email": ["a.b@example.com"],
    "idn-hostname": ["example.com", "b\u00fccher.example"],
    "iri": ["https://example.com/\u00fc"],
    "iri-reference": ["/\u00fc", "#frag", ""],
    "regex": ["a+b?", "^x$"],
    "uri": ["https://example.com/a?b=c#d", "mailto:a@b.c", "urn:x:y"],
    "uri-template": ["https://example.com/{id}{?q*}", "plain"],
    "uri-reference": ["/a/b", "#frag", "", "a/b?c"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}


def test_each_format_has_examples() -> None:
    assert set(FORMAT_EXAMPLES) == FORMATS
    for name, texts in FORMAT_EXAMPLES.items():
        for text in texts:
            assert pattern_automaton(pattern_of(name)).accepts(text), (name, text)


@pytest.mark.parametrize("name", sorted(FORMATS))
@settings(max_examples=60)
@given(data=st.data())
def test_what_a_format_accepts_is_valid(name: str, data: st.DataObject) -> None:
    machine = pattern_automaton(pattern_of(name))
    state, text = 0, ""
    # A random walk through the automaton, biased to end soon.
    for _ in range(60):
        if state in machine.accepting and data.draw(st.integers(0, 3)) == 0:
            break
        if not machine.edges[state]:
            break
        chars, state = data.draw(st.sampled_from(machine.edges[state]))
        low, high = data.draw(st.sampled_from(chars))
        text += chr(data.draw(st.integers(low, min(high, low + 300))))
    if state not in machine.accepting:
        return
    validator = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    assert validator.is_valid(text), text


VALUES = st.recursive(
    st.sampled_from([None, True, False, 0, 1, -3, 2.5, "", "a", "ab", "b1", 'q"']),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["a", "b", "ab", "z"]), inner, max_size=3),
    ),
    max_leaves=6,
)


@st.composite
def schemas(draw: st.DrawFn, depth: int = 3) -> Any:
    """Small schemas that mix most keywords."""
    inner = schemas(depth=depth - 1) if depth else st.sampled_from([True, {"type": "integer"}])
    names = st.sampled_from(["a", "b", "ab"])
    small = st.integers(0, 3)
    keywords: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from(
            ["null", "boolean", "integer", "number", "string", "array", "object"]
        ).flatmap(lambda t: st.sampled_from([t, [t, "string"], [t, "object"]]).map(_distinct)),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": VALUES,
        "minimum": small,
        "exclusiveMaximum": small,
        "multipleOf": st.sampled_from([1, 0.5, 2]),
        "minLength": small,
        "maxLength": small,
        "pattern": st.sampled_from(["^a", "b$", "[0-9]", "^a?b*$"]),
        "items": inner,
        "prefixItems": st.lists(inner, min_size=1, max_size=2),
        "minItems": small,
        "maxItems": small,
        "properties": st.dictionaries(names, inner, max_size=3),
        "required": st.lists(names, unique=True, max_size=2),
        "additionalProperties": inner,
        "patternProperties": st.dictionaries(st.sampled_from(["^a", "b"]), inner, max_size=2),
        "propertyNames": st.sampled_from([{"pattern": "^a"}, {"enum": ["a", "b"]}, True]),
        "minProperties": small,
        "maxProperties": small,
        "allOf": st.lists(inner, min_size=1, max_size=2),
        "anyOf": st.lists(inner, min_size=1, max_size=2),
        "oneOf": st.lists(inner, min_size=1, max_size=2),
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentRequired": st.dictionaries(names, st.lists(names, max_size=1), max_size=1),
        "$ref": st.sampled_from(["#", "#/$defs/d"]),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(keywords)), max_size=3, unique=True))
    return {key: draw(keywords[key]) for key in chosen}


def _distinct(types: Any) -> Any:
    return sorted(set(types)) if isinstance(types, list) else types


@settings(max_examples=300)
@given(schema=schemas(), shared=schemas(depth=1), values=st.lists(VALUES, min_size=8, max_size=12))
def test_no_random_schema_lets_an_invalid_value_through(
    judge: Judge, schema: dict[str, Any], shared: dict[str, Any], values: list[Any]
) -> None:
    document = {**schema, "$defs": {"d": shared}}
    try:
        accepts = judge(constraint(document))
    except ConstraintError:
        return
    validator = jsonschema_rs.validator_for(document)
    for value in values:
        if accepts(json.dumps(value)):
            assert validator.is_valid(value), value

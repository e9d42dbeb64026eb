"""Schemas that say the same have one text, and others do not."""

from __future__ import annotations

import json
from typing import Any

import pytest

from phloem.constrained.schema_canonical import canonical_text
from phloem.constrained.spec import JsonSchema, constraint_key


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"type": "object", "title": "x"}', '{ "title":"x","type" :"object" }'),
        (
            '{"properties": {"a": {"minimum": 1, "type": "integer"}}, "required": ["a"]}',
            '{"required":["a"],"properties":{"a":{"type":"integer","minimum":1}}}',
        ),
        (
            '{"anyOf": [{"type": "null", "title": "n"}, {"$ref": "#/$defs/b"}], '
            '"$defs": {"b": {"type": "string", "maxLength": 2}, "a": true}}',
            '{"$defs": {"a": true, "b": {"maxLength": 2, "type": "string"}}, '
            '"anyOf": [{"title": "n", "type": "null"}, {"$ref": "#/$defs/b"}]}',
        ),
    ],
)
def test_one_text(one: str, other: str) -> None:
    assert canonical_text(json.loads(one)) == canonical_text(json.loads(other))
    keys = {constraint_key(JsonSchema(schema=canonical_text(json.loads(t)))) for t in (one, other)}
    assert len(keys) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"properties": {"a": {}, "b": {}}}', '{"properties": {"b": {}, "a": {}}}'),
        ('{"const": {"a": 1, "b": 2}}', '{"const": {"b": 2, "a": 1}}'),
        ('{"enum": [1, 2]}', '{"enum": [2, 1]}'),
        ('{"properties": {"type": {}}}', '{"type": {"properties": {}}}'),
        ('{"items": [{"const": 1}, {}]}', '{"items": [{}, {"const": 1}]}'),
    ],
)
def test_other_texts(one: str, other: str) -> None:
    assert canonical_text(json.loads(one)) != canonical_text(json.loads(other))


@pytest.mark.parametrize("schema", [True, False, {}, {"properties": {"items": {"enum": [{}]}}}])
def test_nothing_is_lost(schema: Any) -> None:
    assert json.loads(canonical_text(schema)) == schema

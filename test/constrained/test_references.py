"""References: within the document by pointer, anchor or `$id`, with base URIs as the drafts say.
And what of a schema restricts nothing."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained.base import MalformedConstraint, UnsupportedKeyword
from phloem.constrained.schema_document import SchemaDocument

DRAFT_4 = "http://json-schema.org/draft-04/schema#"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
INTEGER = {"type": "integer"}


def document(schema: Any) -> SchemaDocument:
    return SchemaDocument(json.dumps(schema))


CASES: list[tuple[dict[str, Any], str]] = [
    ({"$ref": "#/$defs/a%25b~1c~0", "$defs": {"a%b/c~": INTEGER}}, "/$defs/a%b~1c~0"),
    ({"$ref": "#x", "$defs": {"a": {"$anchor": "x", **INTEGER}}}, "/$defs/a"),
    ({"$ref": "#x", "$defs": {"a": {"$dynamicAnchor": "x", **INTEGER}}}, "/$defs/a"),
    ({"$ref": "b.json", "$defs": {"a": {"$id": "b.json", **INTEGER}}}, "/$defs/a"),
    (
        {
            "$id": "http://example.com/root.json",
            "$ref": "http://example.com/dir/b.json#/$defs/c",
            "$defs": {"a": {"$id": "dir/b.json", "$defs": {"c": INTEGER}}},
        },
        "/$defs/a/$defs/c",
    ),
    (
        {
            "$id": "http://example.com/a.json",
            "$ref": "http://example.com/b/d.json",
            "$defs": {"x": {"$id": "/b/c.json", "not": {"$defs": {"y": {"$id": "d.json"}}}}},
        },
        "/$defs/x/not/$defs/y",
    ),
    ({"$ref": "urn:a:b#x", "$defs": {"u": {"$id": "urn:a:b", "$anchor": "x"}}}, "/$defs/u"),
    ({"$schema": DRAFT_4, "definitions": {"a": {"id": "#x"}}, "$ref": "#x"}, "/definitions/a"),
    (
        {
            "$schema": DRAFT_7,
            "definitions": {"a": {"$id": "item.json"}},
            "allOf": [{"$ref": "item.json"}],
            "$ref": "item.json#",
        },
        "/definitions/a",
    ),
]


@pytest.mark.parametrize(("schema", "pointer"), CASES)
def test_where_a_reference_leads(schema: dict[str, Any], pointer: str) -> None:
    found = document(schema)
    assert found.resolve(schema["$ref"], found.root).pointer == pointer


def test_a_document_may_refer_to_itself_by_its_own_name() -> None:
    name = "http://example.com/s.json#"
    child = {"enum": ["a", {"b": "a"}], "items": {"$ref": name}}
    found = document({"$schema": DRAFT_4, "id": name, "properties": {"b": child}})
    assert found.resolve(name, found.root.child("properties", "b", "items")).pointer == ""
    assert found.admits(found.root.child("properties", "b"), {"b": "a"})


def test_inner_references_start_from_the_inner_resource() -> None:
    schema = {
        "$id": "http://example.com/root.json",
        "$defs": {
            "a": {"$id": "inner.json", "$defs": {"b": INTEGER}, "$ref": "#/$defs/b"},
            "b": {"type": "string"},
        },
    }
    found = document(schema)
    inner = found.root.child("$defs", "a")
    assert found.resolve("#/$defs/b", inner).pointer == "/$defs/a/$defs/b"
    assert found.resolve("root.json#/$defs/b", inner).pointer == "/$defs/b"
    assert found.admits(inner, 3)
    assert not found.admits(inner, "x")


@given(st.sampled_from([1, "a", [1], ["a"], {"x": 1}, {"x": "a"}, None]))
def test_values_are_judged_inside_resources(value: Any) -> None:
    schema = {
        "$id": "https://example.com/tree.json",
        "type": ["object", "array", "integer"],
        "properties": {"x": {"$ref": "leaf.json"}},
        "items": {"$ref": "https://example.com/tree.json"},
        "$defs": {"leaf": {"$id": "leaf.json", "type": "integer"}},
    }
    found = document(schema)
    assert found.admits(found.root, value) == jsonschema_rs.is_valid(schema, value)


@pytest.mark.parametrize(
    ("ref", "error"),
    [
        ("http://example.com/other.json", UnsupportedKeyword),
        (DRAFT_7, UnsupportedKeyword),
        ("other.json#/a", UnsupportedKeyword),
        ("#nowhere", MalformedConstraint),
        ("#/$defs/nothing", MalformedConstraint),
        ("#/type", MalformedConstraint),
    ],
)
def test_what_leads_nowhere(ref: str, error: type[Exception]) -> None:
    found = document({"type": "object", "properties": {"a": {"$ref": ref}}})
    with pytest.raises(error) as caught:
        found.resolve(ref, found.root.child("properties", "a"))
    assert getattr(caught.value, "path", "") == "/properties/a/$ref"


def test_dynamic_references_with_one_target() -> None:
    schema: dict[str, Any] = {
        "$dynamicAnchor": "node",
        "properties": {"next": {"$dynamicRef": "#node"}, "plain": {"$dynamicRef": "#/$defs/a"}},
        "$defs": {"a": INTEGER},
    }
    found = document(schema)
    node = found.root.child("properties", "next")
    assert found.resolve_dynamic("#node", node).pointer == ""
    assert found.resolve_dynamic("#/$defs/a", node).pointer == "/$defs/a"
    schema["$defs"]["b"] = {"$id": "b.json", "$dynamicAnchor": "node"}
    found = document(schema)  # the root's own is outermost
    assert found.resolve_dynamic("#node", found.root.child("properties", "next")).pointer == ""
    assert found.resolve_dynamic("b.json#node", found.root).pointer == ""
    del schema["$dynamicAnchor"]
    schema["$defs"]["c"] = {"$id": "c.json", "$dynamicAnchor": "node"}
    found = document(schema)
    with pytest.raises(UnsupportedKeyword, match="several"):
        found.resolve_dynamic("b.json#node", found.root)


def test_annotations_are_listed_with_their_paths() -> None:
    schema = {
        "properties": {
            "colour": {"type": "string", "format": "color"},
            "size": {"type": "number", "format": "int32"},
            "count": {"type": "integer", "format": "int32"},
            "mail": {"type": "string", "format": "email"},
            "blob": {"type": "string", "contentEncoding": "base64"},
            "format": {"const": "color"},
        }
    }
    listed = dict(document(schema).annotations)
    assert set(listed) == {
        "/properties/colour/format",
        "/properties/size/format",
        "/properties/blob/contentEncoding",
    }
    assert "color" in listed["/properties/colour/format"]

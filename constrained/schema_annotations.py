"""Keywords that look like assertions and are none: what a schema's author should be told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from phloem.constrained.formats import FORMATS, INTEGER_FORMATS
from phloem.constrained.schema_node import Node

_CONTENT = ("contentEncoding", "contentMediaType", "contentSchema")


def annotations_of(node: Node, schema: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Path and reason of each keyword of `schema`, an object at `node`, that restricts nothing."""
    named = schema.get("format")
    if isinstance(named, str) and named not in FORMATS:
        if named not in INTEGER_FORMATS:
            yield node.at("format"), f"format {named[:80]!r} is not one that JSON Schema defines"
        elif schema.get("type") != "integer":
            yield node.at("format"), f"format {named!r} says something of type integer only"
    for key in _CONTENT:
        if key in schema:
            yield node.at(key), f"{key} describes a string and does not restrict it"

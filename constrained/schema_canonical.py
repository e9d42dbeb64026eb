"""One text for schemas that say the same: whitespace and the order of keywords do not matter.

The order of `properties` does, since it is the order of the output's keys; so does everything
inside values (`enum`, `const`, …), which are written as they are.
"""

from __future__ import annotations

import json
from typing import Any

_SCHEMA = {
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
}
_SCHEMAS = {"allOf", "anyOf", "oneOf", "prefixItems"}
_ORDERED = {"properties"}
_MAPS = {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties"}


def canonical_text(schema: Any) -> str:
    """The JSON text that stands for `schema` (a value as `json.loads` gives it)."""
    return json.dumps(_canonical(schema), ensure_ascii=False, separators=(",", ":"))


def _canonical(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {key: _keyword(key, schema[key]) for key in sorted(schema)}


def _keyword(key: str, value: Any) -> Any:
    if key in _SCHEMA or (key == "items" and not isinstance(value, list)):
        return _canonical(value)
    if (key in _SCHEMAS or key == "items") and isinstance(value, list):
        return [_canonical(part) for part in value]
    if key in _ORDERED and isinstance(value, dict):
        return {name: _canonical(part) for name, part in value.items()}
    if key in _MAPS and isinstance(value, dict):
        return {name: _canonical(value[name]) for name in sorted(value)}
    return value

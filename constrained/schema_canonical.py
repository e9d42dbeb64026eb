"""One text for schemas that say the same: whitespace and the order of keywords do not matter.

The order of `properties` does, since it is the order of the output's keys; so does everything
inside values (`enum`, `const`, …), which are written as they are.
"""

from __future__ import annotations

import json
from typing import Any

from phloem.constrained.schema_node import MANY, MAPS, ONE


def canonical_text(schema: Any) -> str:
    """The JSON text that stands for `schema` (a value as `json.loads` gives it)."""
    return json.dumps(_canonical(schema), ensure_ascii=False, separators=(",", ":"))


def _canonical(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    return {key: _keyword(key, schema[key]) for key in sorted(schema)}


def _keyword(key: str, value: Any) -> Any:
    if key in MANY and isinstance(value, list):
        return [_canonical(part) for part in value]
    if key in ONE or key == "contentSchema":
        return _canonical(value)
    if key in MAPS and isinstance(value, dict):
        names = value if key == "properties" else sorted(value)
        return {name: _canonical(value[name]) for name in names}
    return value

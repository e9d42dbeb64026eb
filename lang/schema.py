"""What a user may give as `json_schema=` → the schema's JSON text."""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec

SchemaLike = Mapping[str, object] | str | type


def schema_text(schema: SchemaLike) -> str:
    """The JSON text of a schema given as a dict, as JSON text, or as a class.

    A class may be a pydantic model, a dataclass, a TypedDict, a NamedTuple or a msgspec Struct; its
    fields keep their order. Raises `ValueError` for text that is no JSON object, `TypeError` for
    what describes no schema. Keywords are the server's to judge: it refuses what it cannot enforce.
    """
    if isinstance(schema, str):
        return _checked(schema)
    if isinstance(schema, Mapping):
        return _dump(schema)
    if not isinstance(schema, type):
        raise TypeError(
            "json_schema must be a dict, JSON text, or a class (pydantic model, dataclass, "
            f"TypedDict, msgspec Struct), not {type(schema).__name__}"
        )
    pydantic_schema = getattr(schema, "model_json_schema", None)
    if callable(pydantic_schema):
        return _dump(pydantic_schema())
    try:
        return _dump(msgspec.json.schema(schema))
    except TypeError as exc:
        raise TypeError(f"json_schema: no schema can be made from {schema!r}: {exc}") from exc


def _checked(text: str) -> str:
    try:
        parsed = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"json_schema is not JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise ValueError(f"json_schema must be a JSON object, not {type(parsed).__name__}")
    return text


def _dump(schema: object) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise TypeError(f"json_schema does not fit into JSON: {exc}") from exc

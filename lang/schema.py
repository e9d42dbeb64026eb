"""What a user may give as a schema → the schema's JSON text, and how an answer becomes a value."""

from __future__ import annotations

import json
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar, cast

import msgspec

from phloem.constrained.spec import JsonSchema, Whitespace

T = TypeVar("T")

SchemaLike = Mapping[str, object] | str | type
"""A JSON schema as a dict or as text, or a type that has one."""


@dataclass(frozen=True, slots=True)
class Decode:
    """JSON text → a value of `form`: a class or a form of `typing`; None for plain data.

    Raises what the library that the type comes from raises: `msgspec.ValidationError`,
    `pydantic.ValidationError`.
    """

    form: Any = None

    def __call__(self, text: str) -> Any:
        return json.loads(text) if self.form is None else _type_of(self.form).decode(text)


class _Type(NamedTuple):
    """What a library makes of a type: its schema, and values of JSON text."""

    schema: Any
    decode: Callable[[str], Any]


def schema_text(schema: Any, option: str = "json_schema") -> str:
    """The JSON text of a schema given as a dict, as JSON text, or as a type.

    A type is a pydantic model, dataclass, TypedDict, NamedTuple or msgspec Struct, whose fields
    keep their order, or anything like `int`, `list[str]`, `Literal["a", "b"]` and `X | None`.
    Raises `ValueError` for text that is no JSON object, `TypeError` for what describes no schema.
    Keywords are the server's to judge: it refuses what it cannot enforce.
    """
    if isinstance(schema, str):
        return _checked(schema, option)
    if isinstance(schema, Mapping):
        return _dump(schema, option)
    if not is_type(schema):
        raise TypeError(
            f"{option} must be a dict, JSON text, or a type (pydantic model, dataclass, "
            f"TypedDict, msgspec Struct, list[int], …), not {type(schema).__name__}"
        )
    try:
        return _dump(_type_of(schema).schema, option)
    except _NoSchema:
        raise TypeError(f"{option}: no schema can be made from {schema!r}") from None


def json_constraint(schema: Any, option: str) -> JsonSchema:
    """The constraint to JSON of `schema`, in one line. Raises as `schema_text` does."""
    return JsonSchema(schema=schema_text(schema, option), whitespace=Whitespace.COMPACT)


def decoder(schema: Any) -> Callable[[str], Any]:
    """What makes the value of an answer that satisfies `schema`."""
    return Decode(schema if is_type(schema) else None)


def as_form(value: Any, form: type[T], name: str) -> T:
    """`value` as a `form`: texts and plain data are read as one, anything else must be one. Raises
    `TypeError` when it is not, and what `Decode` raises."""
    kind = typing.get_origin(form) or form
    checkable = isinstance(kind, type) and not typing.is_typeddict(kind)
    if isinstance(value, kind) if checkable else not isinstance(value, str):
        return cast("T", value)
    if isinstance(value, dict | list):
        return cast("T", Decode(form)(json.dumps(value)))
    if not isinstance(value, str):
        raise TypeError(f"{name!r} is a {type(value).__name__}, not a {form}")
    if form in (int, float):
        return form(value)  # type: ignore[call-arg]
    if form is bool and value in ("True", "False"):
        return cast("T", value == "True")
    return cast("T", Decode(form)(value))


def is_type(schema: object) -> bool:
    """Whether it is a class or a form of `typing`."""
    return isinstance(schema, type | types.UnionType) or typing.get_origin(schema) is not None


class _NoSchema(Exception):
    """Of a type that is none of data."""


def _type_of(form: Any) -> _Type:
    try:
        return _cached(form)
    except TypeError:  # some forms cannot be hashed
        return _examine(form)


def _examine(form: Any) -> _Type:
    if callable(pydantic_schema := getattr(form, "model_json_schema", None)):
        return _Type(pydantic_schema(), form.model_validate_json)
    try:
        schema = msgspec.json.schema(form)
    except TypeError:  # a type that msgspec does not know, such as one with pydantic models in it
        return _by_pydantic(form)
    return _Type(schema, msgspec.json.Decoder(form).decode)


_cached = lru_cache(maxsize=256)(_examine)


def _by_pydantic(form: Any) -> _Type:
    pydantic = sys.modules.get("pydantic")  # whoever has models has imported it
    if pydantic is None:
        raise _NoSchema
    try:
        adapter = pydantic.TypeAdapter(form)
        schema = adapter.json_schema()
    except (pydantic.errors.PydanticUserError, NameError):
        raise _NoSchema from None
    if not schema:  # it takes everything
        raise _NoSchema
    return _Type(schema, adapter.validate_json)


def _checked(text: str, option: str) -> str:
    try:
        parsed = json.loads(text)
    except ValueError as exc:
        raise ValueError(f"{option} is not JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise ValueError(f"{option} must be a JSON object, not {type(parsed).__name__}")
    return text


def _dump(schema: object, option: str) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as exc:
        raise TypeError(f"{option} does not fit into JSON: {exc}") from exc

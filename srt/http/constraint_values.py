"""Reading the values that constraints are made of: schemas, patterns, grammars, choices."""

from __future__ import annotations

from typing import Final, TypeVar

import msgspec
from msgspec import Raw

from phloem.constrained.schema_canonical import canonical_text
from phloem.constrained.spec import Choice
from phloem.srt.errors import InvalidConstraint, InvalidRequest
from phloem.srt.http.body import given, strict_loads, validation_error

ANY_JSON: Final = "$$ANY$$"
_S = TypeVar("_S")


def convert(raw: Raw, type_: type[_S], param: str) -> _S:
    """`raw` as a `type_`. Raises `InvalidRequest` with the path below `param`."""
    try:
        return msgspec.json.decode(raw, type=type_)
    except msgspec.ValidationError as error:
        raise validation_error(error, param) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(
            f"{param} is not JSON: {error}", param=param, code="invalid_value"
        ) from None


def schema_text(raw: Raw, param: str) -> str:
    """A schema's canonical JSON text, given as JSON or as a string that holds JSON."""
    text = unquoted(raw, param).decode()
    if text == ANY_JSON:
        return "{}"
    try:
        msgspec.json.decode(text)  # refuses lone surrogates, which the standard library keeps
        schema = strict_loads(text.encode())
        canonical = canonical_text(schema)
    except (ValueError, msgspec.DecodeError, RecursionError) as error:
        raise InvalidConstraint(
            f"{param} is not JSON: {error}", param=param, code="invalid_schema"
        ) from None
    if not isinstance(schema, dict | bool):
        raise InvalidConstraint(
            f"{param} must be an object or a boolean, as JSON Schema has it.",
            param=param,
            code="invalid_schema",
        )
    return canonical


def unquoted(raw: Raw, param: str) -> bytes:
    """JSON text: of the value itself, or inside it when it is a string."""
    if not given(raw):
        raise InvalidRequest(f"{param} is missing.", param=param, code="missing_schema")
    return string(raw, param).encode() if bytes(raw).startswith(b'"') else bytes(raw)


def string(raw: Raw, param: str) -> str:
    return convert(raw, str, param)


def nonempty(text: str | None, param: str) -> str:
    if not text:
        raise InvalidConstraint(f"{param} is empty.", param=param, code="empty_constraint")
    return text


def read_choices(choices: list[str], param: str) -> Choice:
    if not choices or not all(choices):
        raise InvalidConstraint(
            f"{param} wants at least one string, and no empty one.",
            param=param,
            code="empty_constraint",
        )
    return Choice(choices=tuple(dict.fromkeys(choices)))


def want_true(value: bool, param: str) -> None:
    if not value:
        raise InvalidRequest(
            f"{param} false asks for nothing; leave it out.", param=param, code="invalid_value"
        )

"""`gen_int`, `gen_float`, `gen_bool`, `gen_string`: one JSON scalar within limits.

Each is declared three times: of one answer the value is a text, of several a list of texts, and of
a number of answers that is not written out, nobody knows before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Unpack, overload

from phloem.lang import ir
from phloem.lang.options import (
    SCALAR_ORDER,
    AnswerOptions,
    Several,
    check_name,
    named,
    sampling_from,
)
from phloem.lang.schema import json_constraint

_RANGE: Final = {"minimum": "minimum", "maximum": "maximum"}
_LIMITS: Final[Mapping[str, Mapping[str, str]]] = {
    "integer": _RANGE,
    "number": _RANGE,
    "boolean": {},
    "string": {"min_length": "minLength", "max_length": "maxLength", "pattern": "pattern"},
}
"""By the type of the value, our options and the keywords of JSON Schema that they are."""


@overload
def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: Literal[1] | None = None,
    *positional: Any,
    min_tokens: int | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[str]: ...
@overload
def gen_int(
    name: str | None = None,
    *positional: Any,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Several,
    minimum: int | None = None,
    maximum: int | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[list[str]]: ...
@overload
def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    *positional: Any,
    min_tokens: int | None = None,
    minimum: int | None = None,
    maximum: int | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[Any]: ...
def gen_int(name: str | None = None, *positional: Any, **options: Any) -> ir.Gen[Any]:
    """A whole number from `minimum` to `maximum`. The value is its text: `int(s["name"])`.

    Positional arguments of this function and the next three are those of SGLang's `gen_int`. With
    `n` above 1 the value is a list, as that of `gen`.
    """
    return _scalar("gen_int", "integer", name, positional, options)


@overload
def gen_float(
    name: str | None = None,
    max_tokens: int | None = None,
    n: Literal[1] | None = None,
    *positional: Any,
    min_tokens: int | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[str]: ...
@overload
def gen_float(
    name: str | None = None,
    *positional: Any,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Several,
    minimum: float | None = None,
    maximum: float | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[list[str]]: ...
@overload
def gen_float(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    *positional: Any,
    min_tokens: int | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[Any]: ...
def gen_float(name: str | None = None, *positional: Any, **options: Any) -> ir.Gen[Any]:
    """A number from `minimum` to `maximum`. The value is its text: `float(s["name"])`."""
    return _scalar("gen_float", "number", name, positional, options)


@overload
def gen_bool(
    name: str | None = None,
    max_tokens: int | None = None,
    n: Literal[1] | None = None,
    *positional: Any,
    min_tokens: int | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[str]: ...
@overload
def gen_bool(
    name: str | None = None,
    *positional: Any,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Several,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[list[str]]: ...
@overload
def gen_bool(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    *positional: Any,
    min_tokens: int | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[Any]: ...
def gen_bool(name: str | None = None, *positional: Any, **options: Any) -> ir.Gen[Any]:
    """`true` or `false`. The value is that text: `json.loads(s["name"])`."""
    return _scalar("gen_bool", "boolean", name, positional, options)


@overload
def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: Literal[1] | None = None,
    *positional: Any,
    min_tokens: int | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    pattern: str | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[str]: ...
@overload
def gen_string(
    name: str | None = None,
    *positional: Any,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: Several,
    min_length: int | None = None,
    max_length: int | None = None,
    pattern: str | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[list[str]]: ...
@overload
def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    *positional: Any,
    min_tokens: int | None = None,
    min_length: int | None = None,
    max_length: int | None = None,
    pattern: str | None = None,
    **options: Unpack[AnswerOptions],
) -> ir.Gen[Any]: ...
def gen_string(name: str | None = None, *positional: Any, **options: Any) -> ir.Gen[Any]:
    """A JSON string, quotes and escapes included: `json.loads(s["name"])`. `pattern` is searched
    for in its content, as in JSON Schema; lengths are in characters."""
    return _scalar("gen_string", "string", name, positional, options)


def _scalar(
    function: str,
    kind: str,
    name: str | None,
    positional: Sequence[Any],
    options: Mapping[str, Any],
) -> ir.Gen[Any]:
    """Raises `TypeError` for a limit that values of this kind do not have."""
    check_name(name)
    given = named(function, SCALAR_ORDER, positional, options)
    limits = _LIMITS[kind]
    schema = {keyword: given.pop(own) for own, keyword in limits.items() if own in given}
    sampling = sampling_from(given)
    return ir.Gen(name, sampling, json_constraint({"type": kind, **schema}, "json_schema"))

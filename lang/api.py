"""The verbs of a program: `gen`, `select`, and the roles."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Unpack

from phloem.constrained.spec import Constraint, JsonSchema, Regex, Whitespace
from phloem.lang import ir
from phloem.lang.choices import ChoicesMethod
from phloem.lang.sampling import SamplingOverrides, sampling_of
from phloem.lang.schema import SchemaLike, schema_text

_DEFAULT_METHOD = ChoicesMethod.TOKEN_LENGTH_NORMALIZED


def gen(
    name: str | None = None,
    *,
    regex: str | None = None,
    json_schema: SchemaLike | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | str | None = None,
    return_logprob: bool = False,
    **sampling: Unpack[SamplingOverrides],
) -> ir.Gen | ir.Select:
    """Let the model go on from here, and bind what it says to `name`.

    At most one of: `regex`, which the whole answer matches; `json_schema` (a dict, JSON text, or a
    pydantic model, dataclass, TypedDict or msgspec Struct), which it satisfies; `choices`, which
    makes this a `select`. Sampling options given here win over those of the run. `return_logprob`
    is short for `logprobs=0`. With `n` above 1 the value is a list, and nothing enters the text:
    append the answer you choose.

    Raises `ValueError` or `TypeError` at once for what can be seen to be wrong; what only the
    server can judge becomes the variable's error.
    """
    _check_name(name)
    if sum(option is not None for option in (regex, json_schema, choices)) > 1:
        raise ValueError("regex, json_schema and choices exclude each other")
    if choices is not None:
        if sampling:
            raise TypeError(
                f"choices are scored, not sampled: {', '.join(sampling)} would have no effect"
            )
        return select(name, choices, method=choices_method or _DEFAULT_METHOD)
    if choices_method is not None:
        raise TypeError("choices_method needs choices")
    if return_logprob:
        sampling.setdefault("logprobs", 0)
    return ir.Gen(name, sampling_of(sampling), _constraint(regex, json_schema))


def gen_int(
    name: str | None = None,
    *,
    minimum: int | None = None,
    maximum: int | None = None,
    **sampling: Unpack[SamplingOverrides],
) -> ir.Gen:
    """A whole number from `minimum` to `maximum`. The value is its text: `int(s["name"])`."""
    return _scalar(name, "integer", {"minimum": minimum, "maximum": maximum}, sampling)


def gen_float(
    name: str | None = None,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    **sampling: Unpack[SamplingOverrides],
) -> ir.Gen:
    """A number from `minimum` to `maximum`. The value is its text: `float(s["name"])`."""
    return _scalar(name, "number", {"minimum": minimum, "maximum": maximum}, sampling)


def gen_bool(name: str | None = None, **sampling: Unpack[SamplingOverrides]) -> ir.Gen:
    """`true` or `false`. The value is that text: `json.loads(s["name"])`."""
    return _scalar(name, "boolean", {}, sampling)


def gen_string(
    name: str | None = None,
    *,
    min_length: int | None = None,
    max_length: int | None = None,
    pattern: str | None = None,
    **sampling: Unpack[SamplingOverrides],
) -> ir.Gen:
    """A JSON string, quotes and escapes included: `json.loads(s["name"])`. `pattern` is searched
    for in its content, as in JSON Schema; lengths are in characters."""
    limits = {"minLength": min_length, "maxLength": max_length, "pattern": pattern}
    return _scalar(name, "string", limits, sampling)


def select(
    name: str | None = None,
    choices: Sequence[str] = (),
    *,
    method: ChoicesMethod | str = _DEFAULT_METHOD,
) -> ir.Select:
    """Let the model judge `choices` as continuations of the text so far; append the one it
    prefers and bind it to `name`. `method` is one of `phloem.lang.choices.ChoicesMethod`."""
    _check_name(name)
    if isinstance(choices, str):
        raise TypeError("choices must be a list of texts, not one text")
    chosen = tuple(choices)
    if not all(isinstance(choice, str) for choice in chosen):
        raise TypeError("choices must be texts")
    if not chosen or "" in chosen or len(set(chosen)) != len(chosen):
        raise ValueError(f"choices must be different, non-empty texts, at least one: {chosen!r}")
    return ir.Select(name, chosen, ChoicesMethod(method))


def system(content: str | ir.Node) -> ir.Role:
    """A system message."""
    return ir.Role("system", ir.as_node(content))


def user(content: str | ir.Node) -> ir.Role:
    """A user message."""
    return ir.Role("user", ir.as_node(content))


def assistant(content: str | ir.Node) -> ir.Role:
    """An assistant message; the place for `gen` and `select`."""
    return ir.Role("assistant", ir.as_node(content))


def _scalar(
    name: str | None, type_: str, limits: Mapping[str, object], sampling: SamplingOverrides
) -> ir.Gen:
    _check_name(name)
    schema = {"type": type_, **{key: value for key, value in limits.items() if value is not None}}
    return ir.Gen(name, sampling_of(sampling), _constraint(None, schema))


def _check_name(name: str | None) -> None:
    if name is not None and (not isinstance(name, str) or not name):
        raise TypeError(f"a variable's name must be a non-empty text, not {name!r}")


def _constraint(regex: str | None, json_schema: SchemaLike | None) -> Constraint | None:
    if json_schema is not None:
        return JsonSchema(schema=schema_text(json_schema), whitespace=Whitespace.COMPACT)
    if regex is None:
        return None
    try:
        re.compile(regex)
    except re.error as exc:
        raise ValueError(f"regex {regex!r}: {exc}") from exc
    return Regex(pattern=regex)

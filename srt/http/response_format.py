"""`response_format` in all its spellings → the constraint it asks for.

A key that the named type does not have is refused, known or not: it would be a second constraint,
or one that is misspelt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Raw

from phloem.constrained.spec import Ebnf, JsonLines, JsonObject, JsonSchema, Regex
from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import ABSENT, given
from phloem.srt.http.constraint_values import (
    convert,
    nonempty,
    read_choices,
    schema_text,
    string,
)
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.structural_tags import read_structural_tag

_Lines = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class NamedSchema(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `json_schema`. Without `strict`, or with null, it is true."""

    schema: Raw = ABSENT
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class _Format(msgspec.Struct, kw_only=True):
    """All fields that any type has; `_FORMATS` says which are whose."""

    type: str
    json_schema: Raw = ABSENT
    schema: Raw = ABSENT
    strict: bool | None = None
    value: Raw = ABSENT
    regex: str | None = None
    pattern: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    choices: list[str] | None = None
    choice: list[str] | None = None
    min_lines: _Lines | None = None
    max_lines: _Lines | None = None


def response_format(raw: Raw) -> Iterator[FoundConstraint]:
    """The constraint of the field `response_format`, if it has one. Raises `InvalidRequest`."""
    if not given(raw):
        return
    form = convert(raw, _Format, "response_format")
    if form.type not in _FORMATS:
        raise InvalidRequest(
            f"response_format.type is {form.type!r}; known are {', '.join(_FORMATS)}.",
            param="response_format.type",
            code="invalid_value",
        )
    reader, known = _FORMATS[form.type]
    for key, value in convert(raw, dict[str, Raw], "response_format").items():
        if key != "type" and key not in known and given(value):
            raise InvalidRequest(
                f"response_format of type {form.type} has no `{key}`.",
                param=f"response_format.{key}",
                code="unknown_constraint",
            )
    if reader is not None:
        yield reader(form, raw)


def _json_object(form: _Format, raw: Raw) -> FoundConstraint:
    if given(form.schema) or given(form.value):
        return _json_schema(form, raw)
    return FoundConstraint("response_format", JsonObject())


def _json_schema(form: _Format, raw: Raw) -> FoundConstraint:
    param, schema, strict = _schema(form)
    return FoundConstraint(param, JsonSchema(schema=schema), strict)


def _json_lines(form: _Format, raw: Raw) -> FoundConstraint:
    low = 1 if form.min_lines is None else form.min_lines
    if form.max_lines is not None and form.max_lines < low:
        raise InvalidRequest(
            f"max_lines ({form.max_lines}) is less than min_lines ({low}).",
            param="response_format.max_lines",
            code="invalid_value",
        )
    param, schema, strict = _schema(form)
    lines = JsonLines(schema=schema, min_lines=low, max_lines=form.max_lines)
    return FoundConstraint(param, lines, strict)


def _schema(form: _Format) -> tuple[str, str, bool]:
    """Where the schema is, its text, and whether it is strict.

    OpenAI nests it; llama-server's own README and TensorRT-LLM put it beside the type, TGI calls
    it `value`.
    """
    places = {"response_format.schema": form.schema, "response_format.value": form.value}
    strict = form.strict
    if given(form.json_schema):
        at = "response_format.json_schema"
        named = convert(form.json_schema, NamedSchema, at)
        places[f"{at}.schema"] = named.schema
        strict = named.strict if strict is None else strict
    found = [(param, schema) for param, schema in places.items() if given(schema)]
    if len(found) != 1:
        raise InvalidRequest(
            f"response_format of type {form.type} wants exactly one schema.",
            param="response_format.json_schema",
            code="missing_schema" if not found else "several_constraints",
        )
    param, raw = found[0]
    return param, schema_text(raw, param), strict is not False


def _regex(form: _Format, raw: Raw) -> FoundConstraint:
    value = string(form.value, "response_format.value") if given(form.value) else None
    param, pattern = _only("regex", regex=form.regex, pattern=form.pattern, value=value)
    return FoundConstraint(param, Regex(pattern=nonempty(pattern, param)))


def _grammar(form: _Format, raw: Raw) -> FoundConstraint:
    param, grammar = _only(form.type, ebnf=form.ebnf, grammar=form.grammar)
    return FoundConstraint(param, Ebnf(grammar=nonempty(grammar, param)))


def _choice(form: _Format, raw: Raw) -> FoundConstraint:
    name = "choices" if form.choice is None else "choice"
    if form.choice is not None and form.choices is not None:
        raise _several("response_format.choices")
    param = f"response_format.{name}"
    return FoundConstraint(param, read_choices(form.choices or form.choice or [], param))


def _structural_tag(form: _Format, raw: Raw) -> FoundConstraint:
    return FoundConstraint("response_format", read_structural_tag(bytes(raw), "response_format"))


def _only(default: str, **values: str | None) -> tuple[str, str | None]:
    """The one value that was given, and its field."""
    found = [(name, value) for name, value in values.items() if value is not None]
    if len(found) > 1:
        raise _several(f"response_format.{found[1][0]}")
    name, value = found[0] if found else (default, None)
    return f"response_format.{name}", value


def _several(param: str) -> InvalidRequest:
    return InvalidRequest(
        "response_format has two constraints in it.", param=param, code="several_constraints"
    )


_Reader = Callable[[_Format, Raw], FoundConstraint]
_SCHEMA_KEYS: Final = frozenset({"json_schema", "schema", "value", "strict", "name", "description"})
_FORMATS: Final[dict[str, tuple[_Reader | None, frozenset[str]]]] = {
    "text": (None, frozenset()),
    "json_object": (_json_object, frozenset({"schema", "value", "strict"})),
    "json_schema": (_json_schema, _SCHEMA_KEYS),
    "json": (_json_schema, _SCHEMA_KEYS),
    "json_lines": (_json_lines, _SCHEMA_KEYS | {"min_lines", "max_lines"}),
    "regex": (_regex, frozenset({"regex", "pattern", "value"})),
    "ebnf": (_grammar, frozenset({"ebnf", "grammar"})),
    "grammar": (_grammar, frozenset({"ebnf", "grammar"})),
    "choice": (_choice, frozenset({"choice", "choices"})),
    "structural_tag": (
        _structural_tag,
        frozenset({"format", "structures", "triggers", "at_least_one", "stop_after_first"}),
    ),
}

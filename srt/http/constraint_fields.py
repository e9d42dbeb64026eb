"""Every spelling of a constraint → one `Constraint`, or a 400 that names the field.

OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`, SGLang's `regex`,
`ebnf`, `json_schema` and `structural_tag`, TGI's and llama-server's `grammar`, Ollama's `format`.
An empty string in one of SGLang's fields means unset, as there; anywhere else it is an error.
Schemas keep the user's own text, so the order of its properties survives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Raw

from phloem.constrained.spec import (
    Constraint,
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    Whitespace,
)
from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import given, unsupported
from phloem.srt.http.constraint_values import (
    convert,
    nonempty,
    read_choices,
    schema_text,
    string,
    unquoted,
    want_true,
)
from phloem.srt.http.protocol import ConstraintFields, StructuredOutputs
from phloem.srt.http.structural_tags import read_structural_tag


@dataclass(frozen=True)
class FoundConstraint:
    """A constraint, and the request field it came from: errors below are reported under it."""

    param: str
    constraint: Constraint


def read_constraint(fields: ConstraintFields) -> FoundConstraint | None:
    """The one constraint of a request. Raises `InvalidRequest` for a malformed or a second one."""
    if fields.guided_whitespace_pattern is not None:
        raise unsupported("guided_whitespace_pattern", "whitespace is fixed")
    return only_one(
        [
            *_response_format(fields.response_format),
            *_structured_outputs(fields.structured_outputs),
            *_guided(fields),
            *raw_constraints(
                json_schema=fields.json_schema,
                regex=fields.regex,
                ebnf=fields.ebnf,
                structural_tag=fields.structural_tag,
            ),
            *_grammar(fields.grammar),
            *_ollama_format(fields.format),
        ]
    )


def only_one(found: list[FoundConstraint]) -> FoundConstraint | None:
    """Refuse two constraints at once: neither could be called the wrong one."""
    if len(found) > 1:
        names = " and ".join(f"`{one.param}`" for one in found)
        raise InvalidRequest(
            f"Only one constraint may be given, not {names}.",
            param=found[1].param,
            code="several_constraints",
        )
    return found[0] if found else None


def raw_constraints(
    *, json_schema: Raw, regex: str | None, ebnf: str | None, structural_tag: Raw, prefix: str = ""
) -> Iterator[FoundConstraint]:
    """SGLang's fields, at the top level or in `sampling_params`; empty strings are unset."""
    if given(json_schema) and bytes(json_schema) != b'""':
        param = prefix + "json_schema"
        yield FoundConstraint(param, JsonSchema(schema=schema_text(json_schema, param)))
    if regex:
        yield FoundConstraint(prefix + "regex", Regex(pattern=regex))
    if ebnf:
        yield FoundConstraint(prefix + "ebnf", Ebnf(grammar=ebnf))
    if given(structural_tag) and bytes(structural_tag) != b'""':
        param = prefix + "structural_tag"
        yield FoundConstraint(param, read_structural_tag(unquoted(structural_tag, param), param))


# ----------------------------------------------------------------------- response_format


class _Format(msgspec.Struct, kw_only=True):
    """All fields that any type of `response_format` has."""

    type: str
    json_schema: Raw = Raw()
    schema: Raw = Raw()
    value: Raw = Raw()
    regex: str | None = None
    pattern: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    choices: list[str] | None = None


class _NamedSchema(msgspec.Struct, kw_only=True):
    schema: Raw = Raw()


def _response_format(raw: Raw) -> Iterator[FoundConstraint]:
    if not given(raw):
        return
    form = convert(raw, _Format, "response_format")
    if form.type == "text":
        return
    reader = _FORMATS.get(form.type)
    if reader is None:
        raise InvalidRequest(
            f"response_format.type is {form.type!r}; known are text, {', '.join(_FORMATS)}.",
            param="response_format.type",
            code="invalid_value",
        )
    yield reader(form, raw)


def _format_json_object(form: _Format, raw: Raw) -> FoundConstraint:
    if given(form.schema):
        param = "response_format.schema"
        return FoundConstraint(param, JsonSchema(schema=schema_text(form.schema, param)))
    return FoundConstraint("response_format", JsonObject())


def _format_json_schema(form: _Format, raw: Raw) -> FoundConstraint:
    """OpenAI nests the schema; llama-server's own README and TGI put it beside the type."""
    places = {"response_format.schema": form.schema, "response_format.value": form.value}
    if given(form.json_schema):
        param = "response_format.json_schema"
        named = convert(form.json_schema, _NamedSchema, param)
        places[f"{param}.schema"] = named.schema
    found = [(param, schema) for param, schema in places.items() if given(schema)]
    if len(found) != 1:
        raise InvalidRequest(
            "response_format of type json_schema wants exactly one schema.",
            param="response_format.json_schema",
            code="missing_schema" if not found else "several_constraints",
        )
    param, schema = found[0]
    return FoundConstraint(param, JsonSchema(schema=schema_text(schema, param)))


def _format_json(form: _Format, raw: Raw) -> FoundConstraint:
    """TensorRT-LLM says `schema`, TGI says `value`."""
    return _format_json_schema(form, raw)


def _format_regex(form: _Format, raw: Raw) -> FoundConstraint:
    value = string(form.value, "response_format.value") if given(form.value) else None
    param = "response_format.regex"
    return FoundConstraint(
        param, Regex(pattern=nonempty(form.regex or form.pattern or value, param))
    )


def _format_grammar(form: _Format, raw: Raw) -> FoundConstraint:
    param = f"response_format.{form.type}"
    return FoundConstraint(param, Ebnf(grammar=nonempty(form.ebnf or form.grammar, param)))


def _format_choice(form: _Format, raw: Raw) -> FoundConstraint:
    return FoundConstraint(
        "response_format.choices", read_choices(form.choices or [], "response_format.choices")
    )


def _format_structural_tag(form: _Format, raw: Raw) -> FoundConstraint:
    return FoundConstraint("response_format", read_structural_tag(bytes(raw), "response_format"))


_FORMATS: dict[str, Callable[[_Format, Raw], FoundConstraint]] = {
    "json_object": _format_json_object,
    "json_schema": _format_json_schema,
    "json": _format_json,
    "regex": _format_regex,
    "ebnf": _format_grammar,
    "grammar": _format_grammar,
    "choice": _format_choice,
    "structural_tag": _format_structural_tag,
}


# ------------------------------------------------------------------ vLLM, TGI, llama-server, Ollama


def _structured_outputs(spec: StructuredOutputs | None) -> Iterator[FoundConstraint]:
    if spec is None:
        return
    at = "structured_outputs"
    if spec.whitespace_pattern is not None:
        raise unsupported(f"{at}.whitespace_pattern", "whitespace is fixed")
    if spec.disable_additional_properties:
        raise unsupported(f"{at}.disable_additional_properties", "say it in the schema")
    whitespace = Whitespace.COMPACT if spec.disable_any_whitespace else Whitespace.BOUNDED
    found: list[FoundConstraint] = []
    if given(spec.json):
        schema = schema_text(spec.json, f"{at}.json")
        found.append(
            FoundConstraint(f"{at}.json", JsonSchema(schema=schema, whitespace=whitespace))
        )
    if spec.json_object is not None:
        want_true(spec.json_object, f"{at}.json_object")
        found.append(FoundConstraint(f"{at}.json_object", JsonObject(whitespace=whitespace)))
    if spec.regex is not None:
        param = f"{at}.regex"
        found.append(FoundConstraint(param, Regex(pattern=nonempty(spec.regex, param))))
    if spec.choice is not None:
        found.append(FoundConstraint(f"{at}.choice", read_choices(spec.choice, f"{at}.choice")))
    if spec.grammar is not None:
        param = f"{at}.grammar"
        found.append(FoundConstraint(param, Ebnf(grammar=nonempty(spec.grammar, param))))
    if given(spec.structural_tag):
        param = f"{at}.structural_tag"
        tag = read_structural_tag(unquoted(spec.structural_tag, param), param)
        found.append(FoundConstraint(param, tag))
    if not found:
        raise InvalidRequest(f"{at} has no constraint in it.", param=at, code="missing_constraint")
    yield from found


def _guided(fields: ConstraintFields) -> Iterator[FoundConstraint]:
    if given(fields.guided_json):
        schema = schema_text(fields.guided_json, "guided_json")
        yield FoundConstraint("guided_json", JsonSchema(schema=schema))
    if fields.guided_json_object is not None:
        want_true(fields.guided_json_object, "guided_json_object")
        yield FoundConstraint("guided_json_object", JsonObject())
    if fields.guided_regex is not None:
        pattern = nonempty(fields.guided_regex, "guided_regex")
        yield FoundConstraint("guided_regex", Regex(pattern=pattern))
    if fields.guided_choice is not None:
        yield FoundConstraint("guided_choice", read_choices(fields.guided_choice, "guided_choice"))
    if fields.guided_grammar is not None:
        grammar = nonempty(fields.guided_grammar, "guided_grammar")
        yield FoundConstraint("guided_grammar", Ebnf(grammar=grammar))


class _TgiGrammar(msgspec.Struct, kw_only=True):
    type: str
    value: Raw = Raw()


def _grammar(raw: Raw) -> Iterator[FoundConstraint]:
    """A string is llama-server's GBNF, an object is TGI's `{type, value}`."""
    if not given(raw):
        return
    if bytes(raw).startswith(b'"'):
        grammar = nonempty(string(raw, "grammar"), "grammar")
        yield FoundConstraint("grammar", Ebnf(grammar=grammar))
        return
    spec = convert(raw, _TgiGrammar, "grammar")
    if spec.type == "regex":
        pattern = nonempty(string(spec.value, "grammar.value"), "grammar.value")
        yield FoundConstraint("grammar.value", Regex(pattern=pattern))
        return
    if spec.type not in ("json", "json_schema"):
        raise InvalidRequest(
            f"grammar.type is {spec.type!r}; known are json, json_schema and regex.",
            param="grammar.type",
            code="invalid_value",
        )
    value, param = spec.value, "grammar.value"
    if spec.type == "json_schema":
        named = convert(spec.value, _NamedSchema, param)
        value, param = named.schema, f"{param}.schema"
    yield FoundConstraint(param, JsonSchema(schema=schema_text(value, param)))


def _ollama_format(raw: Raw) -> Iterator[FoundConstraint]:
    if not given(raw) or bytes(raw) == b'""':
        return
    if bytes(raw) == b'"json"':
        yield FoundConstraint("format", JsonObject())
        return
    yield FoundConstraint("format", JsonSchema(schema=schema_text(raw, "format")))

"""Every spelling of a constraint → one `Constraint`, or a 400 that names the field.

OpenAI's `response_format`, vLLM's `structured_outputs` and older `guided_*`, SGLang's `regex`,
`ebnf`, `json_schema` and `structural_tag`, TGI's and llama-server's `grammar`, Ollama's `format`.
An empty string in one of SGLang's fields means unset, as there; anywhere else it is an error.
Schemas keep the user's own text, so the order of its properties survives.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from msgspec import Raw

from phloem.constrained.spec import (
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    Whitespace,
)
from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import ABSENT, given, unsupported
from phloem.srt.http.constraint_values import (
    convert,
    nonempty,
    read_choices,
    schema_text,
    string,
    unquoted,
    want_true,
)
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.protocol import ConstraintFields, StructuredOutputs
from phloem.srt.http.response_format import NamedSchema, response_format
from phloem.srt.http.structural_tags import read_structural_tag


def read_constraint(fields: ConstraintFields) -> FoundConstraint | None:
    """The one constraint of a request. Raises `InvalidRequest` for a malformed or a second one."""
    if fields.guided_whitespace_pattern is not None:
        raise unsupported("guided_whitespace_pattern", "whitespace is fixed")
    return only_one(
        [
            *response_format(fields.response_format),
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


class _TgiGrammar(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: str
    value: Raw = ABSENT


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
    value, param, strict = spec.value, "grammar.value", None
    if spec.type == "json_schema":
        named = convert(spec.value, NamedSchema, param)
        value, param, strict = named.schema, f"{param}.schema", named.strict
    yield FoundConstraint(param, JsonSchema(schema=schema_text(value, param)), strict is not False)


def _ollama_format(raw: Raw) -> Iterator[FoundConstraint]:
    if not given(raw) or bytes(raw) == b'""':
        return
    if bytes(raw) == b'"json"':
        yield FoundConstraint("format", JsonObject())
        return
    yield FoundConstraint("format", JsonSchema(schema=schema_text(raw, "format")))

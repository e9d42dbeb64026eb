"""Does a finished text satisfy its constraint? Answered without the grammar engine.

Schemas go to jsonschema-rs with a retriever that refuses, after a strict parse (no duplicate keys,
no NaN). Regular expressions go to Phloem's own automaton, which is linear where `re` may not be.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any, Final

import jsonschema_rs

from phloem.constrained.base import ConstraintError, MalformedConstraint
from phloem.constrained.regex import parse_regex
from phloem.constrained.schema_document import SchemaDocument, join, parse_json
from phloem.constrained.shape_relations import pattern_automaton
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Continued,
    Deferred,
    Ebnf,
    JsonDocuments,
    JsonLines,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)

MAX_VALIDATORS: Final = 256

_decoder = json.JSONDecoder()


class Violation(ValueError):
    """The text does not satisfy the constraint; the message says where, without echoing values."""


def validate(constraint: Constraint, text: str, parse: Callable[[str], Any] | None = None) -> None:
    """Check a finished text. `parse` reads JSON (None: strictly).

    Raises:
        Violation: it does not satisfy the constraint. And what `parse` raises.
        NotImplementedError: `Ebnf` and `StructuralTag` have no independent validator.
        MalformedConstraint: the constraint itself is broken.
    """
    parse = parse or _parse
    match constraint:
        case JsonSchema(schema=schema):
            validator_of(schema).check(parse(text))
        case JsonObject():
            _want(isinstance(parse(text), dict), "the text is JSON but not an object")
        case JsonLines():
            _check_lines(constraint, text, parse)
        case JsonDocuments():
            _check_documents(constraint, text, parse)
        case Regex(pattern=pattern):
            _want(
                pattern_automaton(parse_regex(pattern)).accepts(text),
                "the text does not match the regular expression",
            )
        case Choice(choices=choices):
            _want(text in choices, "the text is none of the choices")
        case Continued(constraint=inner, prefix=prefix):
            validate(inner, prefix + text, parse)
        case Deferred(constraint=Ebnf() | StructuralTag()) | Ebnf() | StructuralTag():
            raise NotImplementedError(
                f"{type(constraint).__name__} has no validator but the engine that enforces it"
            )
        case Deferred():
            _check_deferred(constraint, text, parse)


def _want(condition: bool, message: str) -> None:
    if not condition:
        raise Violation(message)


def _check_lines(lines: JsonLines, text: str, parse: Callable[[str], Any]) -> None:
    documents = text.split("\n")
    if len(documents) < lines.min_lines:
        raise Violation(f"there are {len(documents)} lines; at least {lines.min_lines} are wanted")
    if lines.max_lines is not None and len(documents) > lines.max_lines:
        raise Violation(f"there are {len(documents)} lines; at most {lines.max_lines} are wanted")
    validator = validator_of(lines.schema)
    for document in documents:
        validator.check(parse(document))


def _check_documents(documents: JsonDocuments, text: str, parse: Callable[[str], Any]) -> None:
    if not (text.startswith(documents.begin) and text.endswith(documents.end)):
        raise Violation("the text lacks what is to stand before or behind the documents")
    text = text.removeprefix(documents.begin).removesuffix(documents.end)
    validator = validator_of(documents.schema)
    at = count = 0
    while count == 0 or (at < len(text) and text.startswith(documents.separator, at)):
        at += len(documents.separator) if count else 0
        try:
            end = _decoder.raw_decode(text, at)[1]
        except (ValueError, RecursionError):
            raise Violation(f"document {count} is not JSON") from None
        validator.check(parse(text[at:end]))
        at, count = end, count + 1
    if at != len(text) or count > documents.max_documents:
        raise Violation(f"behind document {count - 1} there is something else")


def _check_deferred(constraint: Deferred, text: str, parse: Callable[[str], Any]) -> None:
    inner = constraint.constraint
    if inner is None:
        return
    if not text.startswith(constraint.begin):
        validate(inner, text, parse)
        return
    text = constraint.seen + text.removeprefix(constraint.begin)
    _, marker, rest = text.partition(constraint.end)
    _want(bool(marker), "the free text does not end")
    validate(inner, rest.lstrip("\n"), parse)


class SchemaValidator:
    """Puts values to a schema, in the dialect that the grammar was made for."""

    def __init__(self, document: SchemaDocument) -> None:
        self.annotations = tuple(pointer for pointer, _ in document.annotations)
        """Pointers of keywords that look like assertions and, as JSON Schema has it, are none."""
        try:
            self._validator = jsonschema_rs.validator_for(
                document.root.schema, retriever=_refuse, validate_formats=True
            )
        except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
            raise MalformedConstraint("invalid schema") from error

    def check(self, value: Any) -> None:
        """Raises `Violation` with the keyword and the place in the value."""
        if self._validator.is_valid(value):
            return
        fault = next(self._validator.iter_errors(value))
        keyword = str(fault.schema_path[-1]) if fault.schema_path else "schema"
        where = join("", *fault.instance_path) or "the root"
        raise Violation(f"{keyword} does not hold at {where}")


@functools.lru_cache(maxsize=MAX_VALIDATORS)
def validator_of(schema: str) -> SchemaValidator:
    """The validator of a schema's JSON text; the last ones are kept.

    Raises:
        ConstraintError: no validator can be made of it.
    """
    return SchemaValidator(SchemaDocument(schema))


def _refuse(uri: str) -> Any:
    raise ValueError("references out of the schema are not followed")


def _parse(text: str) -> Any:
    try:
        return parse_json(text)
    except ConstraintError as error:
        raise Violation(f"the text is not strict JSON: {error.message}") from error

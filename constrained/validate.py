"""Does a finished text satisfy its constraint? Answered without the grammar engine.

Schemas go to jsonschema-rs with a retriever that refuses, after a strict parse (no duplicate keys,
no NaN). Regular expressions go to Phloem's own automaton, which is linear where `re` may not be.
"""

from __future__ import annotations

from typing import Any

import jsonschema_rs

from phloem.constrained.base import ConstraintError, MalformedConstraint
from phloem.constrained.regex import parse_regex
from phloem.constrained.schema_document import join, parse_json
from phloem.constrained.shape_relations import pattern_automaton
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
)


class Violation(ValueError):
    """The text does not satisfy the constraint; the message says where, without echoing values."""


def validate(constraint: Constraint, text: str) -> None:
    """Check a finished text.

    Raises:
        Violation: it does not satisfy the constraint.
        NotImplementedError: `Ebnf` and `StructuralTag` have no independent validator.
        MalformedConstraint: the constraint itself is broken.
    """
    match constraint:
        case JsonSchema(schema=schema):
            _check_schema(parse_json(schema), _parse(text))
        case JsonObject():
            if not isinstance(_parse(text), dict):
                raise Violation("the text is JSON but not an object")
        case Regex(pattern=pattern):
            if not pattern_automaton(parse_regex(pattern)).accepts(text):
                raise Violation("the text does not match the regular expression")
        case Choice(choices=choices):
            if text not in choices:
                raise Violation("the text is none of the choices")
        case Ebnf() | StructuralTag():
            raise NotImplementedError(
                f"{type(constraint).__name__} has no validator but the engine that enforces it"
            )


def _parse(text: str) -> Any:
    try:
        return parse_json(text)
    except ConstraintError as error:
        raise Violation(f"the text is not strict JSON: {error.message}") from error


def _refuse(uri: str) -> Any:
    raise ValueError("references out of the schema are not followed")


def _check_schema(schema: Any, value: Any) -> None:
    try:
        validator = jsonschema_rs.validator_for(schema, retriever=_refuse, validate_formats=True)
    except (ValueError, jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError) as error:
        raise MalformedConstraint("invalid schema") from error
    fault = next(validator.iter_errors(value), None)
    if fault is not None:
        keyword = str(fault.schema_path[-1]) if fault.schema_path else "schema"
        where = join("", *fault.instance_path) or "the root"
        raise Violation(f"{keyword} does not hold at {where}")

"""The validator is strict and never follows a reference out of the schema."""

from __future__ import annotations

import json

import pytest

from phloem.constrained.base import MalformedConstraint
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Continued,
    Ebnf,
    JsonLines,
    JsonObject,
    JsonSchema,
    Regex,
)
from phloem.constrained.validate import Violation, validate

SCHEMA = JsonSchema(
    schema=json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "integer", "minimum": 3}},
            "required": ["a"],
        }
    )
)
LINES = JsonLines(schema=SCHEMA.schema, min_lines=2, max_lines=3)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (SCHEMA, '{"a": 3}'),
        (JsonObject(), '{"x": [1, null]}'),
        (Regex(pattern="^(yes|no)$"), "yes"),
        (Choice(choices=("a", "b")), "b"),
        (LINES, '{"a": 3}\n{"a": 4}'),
        (LINES, '{"a": 3}\n{"a": 4}\n{"a": 5}'),
        (Continued(constraint=SCHEMA, prefix='{"a"'), ": 3}"),
        (JsonSchema(schema='{"items": [{"type": "null"}]}'), "[null, 1]"),  # as draft 7 has it
    ],
)
def test_valid(constraint: Constraint, text: str) -> None:
    validate(constraint, text)


@pytest.mark.parametrize(
    ("constraint", "text", "said"),
    [
        (SCHEMA, '{"a": 2}', "minimum does not hold at /a"),
        (LINES, '{"a": 3}', "at least 2"),
        (LINES, "\n".join(['{"a": 3}'] * 4), "at most 3"),
        (LINES, '{"a": 3}\n{"a": 2}', "minimum does not hold at /a"),
        (LINES, '{"a": 3}\n{"a": 3}\n', "not strict JSON"),
        (Continued(constraint=SCHEMA, prefix='{"a": '), "2}", "minimum"),
        (JsonSchema(schema='{"items": [{"type": "null"}]}'), "[1]", "type does not hold at /0"),
        (SCHEMA, "{}", "required does not hold at the root"),
        (SCHEMA, '{"a": 3, "a": 4}', "duplicate key"),
        (SCHEMA, '{"a": 3', "not strict JSON"),
        (SCHEMA, '{"a": NaN}', "not strict JSON"),
        (SCHEMA, "[" * 200 + "]" * 200, "nests"),
        (JsonObject(), "[]", "not an object"),
        (Regex(pattern="yes|no"), "yes\n", "regular expression"),
        (Regex(pattern="(a+)+b"), "a" * 64, "regular expression"),
        (Choice(choices=("a", "b")), "ab", "none of the choices"),
    ],
)
def test_violations(constraint: Constraint, text: str, said: str) -> None:
    with pytest.raises(Violation, match=said):
        validate(constraint, text)


def test_remote_references_are_not_fetched() -> None:
    with pytest.raises(MalformedConstraint):
        validate(JsonSchema(schema='{"$ref": "http://127.0.0.1:9/s.json"}'), "1")


def test_grammars_have_no_second_opinion() -> None:
    with pytest.raises(NotImplementedError):
        validate(Ebnf(grammar='root ::= "a"'), "a")

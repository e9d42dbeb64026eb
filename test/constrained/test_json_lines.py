"""JSON lines: as many documents as asked for, a line each."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from phloem.constrained.base import ConstraintError, LimitExceeded, UnsupportedKeyword
from phloem.constrained.lowering import lower
from phloem.constrained.spec import Constraint, JsonLines
from phloem.constrained.validate import Violation, validate

Judge = Callable[[Constraint], Callable[[str], bool]]

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(("low", "high"), [(1, None), (1, 1), (2, 2), (2, 4), (1, 3), (3, None)])
def test_the_number_of_lines(judge: Judge, low: int, high: int | None) -> None:
    lines = JsonLines(schema=SCHEMA, min_lines=low, max_lines=high)
    accepts = judge(lines)
    for count in range(6):
        text = "\n".join(json.dumps({"a": i}, separators=(",", ":")) for i in range(count))
        wanted = low <= count <= (count if high is None else high)
        assert accepts(text) is wanted, count
        if wanted:
            validate(lines, text)
        else:
            with pytest.raises(Violation):
                validate(lines, text)


@pytest.mark.parametrize(
    "text", ['{"a":1}\n', '\n{"a":1}', '{"a":1} {"a":2}', '{"a":1}\n\n{"a":2}', '{\n"a":1}', "1\n2"]
)
def test_lines_hold_one_document_each(judge: Judge, text: str) -> None:
    assert not judge(JsonLines(schema=SCHEMA))(text)


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (JsonLines(schema=SCHEMA, min_lines=0), ConstraintError),
        (JsonLines(schema=SCHEMA, min_lines=3, max_lines=2), ConstraintError),
        (JsonLines(schema=SCHEMA, max_lines=10**6), LimitExceeded),
        (JsonLines(schema='{"uniqueItems": true}'), UnsupportedKeyword),
    ],
)
def test_refusals(lines: JsonLines, error: type[ConstraintError]) -> None:
    with pytest.raises(error):
        lower(lines)

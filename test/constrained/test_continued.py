"""A constraint that begins before the output: what may follow a prefix."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from phloem.constrained.base import Backend, MalformedConstraint
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Continued,
    Deferred,
    JsonSchema,
    Regex,
    StructuralTag,
)

Judge = Callable[[Constraint], Callable[[str], bool]]

SCHEMA = JsonSchema(
    schema=json.dumps(
        {
            "type": "object",
            "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["name", "n"],
            "additionalProperties": False,
        }
    )
)
TAG = StructuralTag(
    format='{"type": "tag", "begin": "<a>", "content": {"type": "any_text"}, "end": "</a>"}'
)


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (SCHEMA, '{"name": "Ångström 😀", "n": -12}'),
        (Regex(pattern="[0-9]{4}-[0-9]{2}"), "2024-05"),
        (Choice(choices=("yes", "yesterday", "no")), "yesterday"),
        (TAG, "<a>b</a>"),
    ],
)
def test_every_split_goes_on(judge: Judge, constraint: Constraint, text: str) -> None:
    assert not isinstance(constraint, Continued | Deferred)
    for at in range(1, len(text)):
        accepts = judge(Continued(constraint=constraint, prefix=text[:at]))
        assert accepts(text[at:]), text[:at]
        assert not accepts(text[at:] + "\x01")


@pytest.mark.parametrize("prefix", ["[", '{"name": 1', '{"name": "a", "n": 1}}'])
def test_a_prefix_that_cannot_be_is_refused(backend: Backend, prefix: str) -> None:
    with pytest.raises(MalformedConstraint, match="prefix") as caught:
        backend.compile(Continued(constraint=SCHEMA, prefix=prefix))
    assert caught.value.reason == "prefix_rejected"


def test_rollback_stops_at_the_prefix(backend: Backend) -> None:
    matcher = backend.compile(Continued(constraint=SCHEMA, prefix='{"name": "')).matcher()
    start, row = np.zeros(9, np.int32), np.zeros(9, np.int32)
    matcher.fill(start)
    for byte in b'x", "n"':
        matcher.accept(byte)
    with pytest.raises(ValueError, match="roll back"):
        matcher.rollback(8)
    matcher.rollback(7)
    matcher.fill(row)
    assert (row == start).all()

"""Structural tags: pieces are as exact as constraints of their own."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from phloem.constrained.base import (
    ConstraintError,
    LimitExceeded,
    MalformedConstraint,
    UnsupportedKeyword,
)
from phloem.constrained.spec import Constraint, StructuralTag
from phloem.constrained.structural_tags import lower_tags

Judge = Callable[[Constraint], Callable[[str], bool]]

# The engine by itself would not enforce that `b` is required, since nothing declares it.
SCHEMA = {"type": "object", "required": ["b"], "additionalProperties": {"type": "integer"}}
TAG = {
    "type": "tag",
    "begin": "<call>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</call>",
}


def tags(format_: Any) -> StructuralTag:
    return StructuralTag(format=json.dumps(format_))


def test_a_tag_holds_a_schema(judge: Judge) -> None:
    accepts = judge(tags(TAG))
    assert accepts('<call>{"b": 1}</call>')
    assert not accepts("<call>{}</call>")
    assert not accepts('<call>{"b": 1}')


@pytest.mark.parametrize(
    "spelling",
    [
        {"type": "triggered_tags", "triggers": ["<call"], "tags": [TAG]},
        {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": ["<call"], "tags": [TAG]},
        },
        {
            "type": "structural_tag",
            "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
            "triggers": ["<call"],
        },
    ],
)
def test_free_text_around_tags(judge: Judge, spelling: Any) -> None:
    accepts = judge(tags(spelling))
    assert accepts("words and <b> more")
    assert accepts('say <call>{"b": 1}</call> again')
    assert not accepts("say <call>{}</call>")


def test_other_pieces(judge: Judge) -> None:
    accepts = judge(
        tags(
            {
                "type": "sequence",
                "elements": [
                    {"type": "const_string", "value": "x="},
                    {"type": "regex", "pattern": "^[0-9]{2}$"},
                    {"type": "grammar", "grammar": 'root ::= ";" | "!"'},
                ],
            }
        )
    )
    assert accepts("x=12;")
    assert not accepts("x=1;")


TRIGGERED = {"type": "triggered_tags", "triggers": ["<call"], "tags": [TAG]}


@pytest.mark.parametrize(
    ("option", "inside", "outside"),
    [
        (
            "at_least_one",  # at once, that is
            ['<call>{"b": 1}</call>', '<call>{"b": 1}</call> b <call>{"b": 2}</call>'],
            ["", "words", 'a <call>{"b": 1}</call>'],
        ),
        (
            "stop_after_first",
            ["words", 'a <call>{"b": 1}</call>'],
            ['<call>{"b": 1}</call> more', '<call>{"b": 1}</call><call>{"b": 1}</call>'],
        ),
    ],
)
def test_how_many_tags(judge: Judge, option: str, inside: list[str], outside: list[str]) -> None:
    accepts = judge(tags({**TRIGGERED, option: True}))
    assert all(accepts(text) for text in inside)
    assert not any(accepts(text) for text in outside)


def test_tags_inside_tags(judge: Judge) -> None:
    outer = {"type": "tag", "begin": "<out>", "content": TRIGGERED, "end": "</out>"}
    accepts = judge(tags({"type": "sequence", "elements": [outer]}))
    assert accepts('<out>so <call>{"b": 1}</call></out>')
    assert not accepts("<out><call>{}</call></out>")
    assert not accepts('<out><call>{"b": 1}</call>')


@pytest.mark.parametrize(
    ("text", "error", "path"),
    [
        ("[]", MalformedConstraint, ""),
        ("{", MalformedConstraint, ""),
        ('{"type": "structural_tag"}', MalformedConstraint, "/format"),
        ('{"type": "token", "token": 3}', UnsupportedKeyword, "/type"),
        ('{"structures": [{}], "triggers": []}', MalformedConstraint, ""),
        (
            json.dumps(
                {
                    "type": "sequence",
                    "elements": [
                        {"type": "json_schema", "json_schema": {"items": {"enum": []}}},
                    ],
                }
            ),
            MalformedConstraint,
            "/elements/0/items/enum",
        ),
        ("{" * 200, LimitExceeded, ""),
    ],
)
def test_refusal(text: str, error: type[ConstraintError], path: str) -> None:
    with pytest.raises(error) as caught:
        lower_tags(text)
    assert caught.value.path == path

"""Layouts of JSON texts: each takes what `json.dumps` writes in it, and whitespace always ends."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from phloem.constrained.base import Backend, MatcherRejected
from phloem.constrained.spec import Constraint, JsonObject, JsonSchema, Whitespace

Judge = Callable[[Constraint], Callable[[str], bool]]

VALUES: list[Any] = [
    {"a": [1, {"b": [], "c": {}}, "x, y: z"], "d": {"e": {"f": None}}},
    {"a": [], "more": {}},
    {"a": [[[[[[[[[[[["deep", 1]]]]]]]]]]]]},
]
CLOSED = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": [1, {"k": [2, 3]}, []]}, "maxItems": 3},
        "b": {"type": "object", "properties": {"c": {"const": {}}}, "additionalProperties": False},
    },
    "required": ["a"],
    "additionalProperties": False,
}
WRITTEN: dict[str, Callable[[Any], str]] = {
    "compact": lambda v: json.dumps(v, separators=(",", ":")),
    "default": json.dumps,
    "two": lambda v: json.dumps(v, indent=2),
    "four": lambda v: json.dumps(v, indent=4),
    "three": lambda v: json.dumps(v, indent=3),
    "tabs": lambda v: json.dumps(v, indent="\t"),
    "margin": lambda v: json.dumps(v, indent=0),
    "padded": lambda v: json.dumps(v, separators=(" , ", " : ")),
    "windows": lambda v: json.dumps(v, indent=2).replace("\n", "\r\n"),
    "blank lines": lambda v: json.dumps(v, indent=2).replace("\n", "\n\n"),
    "wide": lambda v: json.dumps(v, separators=(",    ", ":    ")),
}
ONE_RUN = {"compact", "default", "two", "four", "three", "tabs", "margin", "padded"}
TAKEN: dict[Whitespace, set[str]] = {
    Whitespace.COMPACT: {"compact"},
    Whitespace.BOUNDED: ONE_RUN,
    Whitespace.SPACED: {"default"},
    Whitespace.INDENTED: {"two", "four", "margin"},
    Whitespace.ANY: set(WRITTEN),
}


@pytest.mark.parametrize("layout", Whitespace)
@pytest.mark.parametrize("style", WRITTEN)
def test_what_a_layout_takes(layout: Whitespace, style: str, judge: Judge) -> None:
    anything = judge(JsonObject(whitespace=layout))
    for value in VALUES:
        text = WRITTEN[style](value)
        narrow = layout is not Whitespace.BOUNDED or "\n" + " " * 32 not in text
        assert anything(text) == (style in TAKEN[layout] and narrow)
    closed = judge(JsonSchema(schema=json.dumps(CLOSED), whitespace=layout))
    for value in ({"a": [1, {"k": [2, 3]}], "b": {"c": {}}}, {"a": [[], 1, 1], "b": {}}):
        assert closed(WRITTEN[style](value)) == (style in TAKEN[layout])


@pytest.mark.parametrize("layout", Whitespace)
def test_every_layout_takes_a_flat_empty_value(layout: Whitespace, judge: Judge) -> None:
    assert judge(JsonObject(whitespace=layout))("{}")


@pytest.mark.parametrize("layout", [Whitespace.BOUNDED, Whitespace.INDENTED, Whitespace.ANY])
def test_deep_indentation_is_taken(layout: Whitespace, judge: Judge) -> None:
    accepts = judge(JsonObject(whitespace=layout))
    columns = 31 if layout is Whitespace.BOUNDED else 63
    for depth, indent in ((columns // 2, 2), (columns // 4, 4)):
        value: Any = 1
        for _ in range(depth):
            value = {"a": value}
        assert accepts(json.dumps(value, indent=indent))
    assert accepts('{"a": 1,\n' + " " * (columns - 1) + '"b": 2}')
    assert not accepts('{"a": 1,\n' + " " * (columns + 1) + '"b": 2}')


@pytest.mark.parametrize("layout", Whitespace)
def test_whitespace_cannot_run_away(layout: Whitespace, backend: Backend) -> None:
    """From any place in a text, whatever whitespace is chosen, it ends soon."""
    compiled = backend.compile(JsonObject(whitespace=layout))
    styles = [s for s in WRITTEN if s in TAKEN[layout]]
    rng = random.Random(str(layout))
    for style in styles:
        text = WRITTEN[style](VALUES[0]).encode()
        matcher = compiled.matcher()
        for place, byte in enumerate(text):
            in_string = text[:place].count(b'"') % 2 == 1
            for likely in (b" ", b"\n", b"\t", b" \n", b" \t\r\n"):
                taken = 0
                while not in_string and taken < 400 and takes(matcher, rng.choice(likely)):
                    taken += 1
                assert taken <= 150
                matcher.rollback(taken)
            matcher.accept(byte)


def takes(matcher: Any, token: int) -> bool:
    try:
        matcher.accept(token)
    except MatcherRejected:
        return False
    return True

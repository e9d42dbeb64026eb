"""Patterns that end an answer: against `re`, whatever way the text is cut."""

from __future__ import annotations

import random
import re

import pytest

from phloem.srt.errors import InvalidRequest
from phloem.srt.tokenizer.detokenize import StopStrings
from phloem.srt.tokenizer.stop_patterns import MAX_PATTERN_BYTES, MAX_PATTERNS, check_patterns

PATTERNS = [
    r"[.1]\s*$",
    "bc$|é$",
    "ab+c",
    "(a|bb)(c|a)",
    "[ab]{2,3}c",
    "a.*b",
    r"\n\s*[0-9]+\.",
    "[^a]b",
    "é|ü{2}",
    "a|aab",
]


def first_match(patterns: list[str], text: str) -> tuple[int, int] | None:
    """(start, end) of the longest match that is complete first."""
    for end in range(1, len(text) + 1):
        starts = [
            start for p in patterns for start in range(end) if re.fullmatch(p, text[start:end])
        ]
        if starts:
            return min(starts), end
    return None


@pytest.mark.parametrize("seed", range(200))
def test_they_stop_where_re_finds_the_first_match(seed: int) -> None:
    rng = random.Random(seed)
    patterns = rng.sample(PATTERNS, rng.randint(1, 3))
    text = "".join(rng.choices("abc1. \néüx", k=rng.randint(0, 40)))
    include = rng.random() < 0.5
    stops = StopStrings([], patterns=patterns, include_stop=include)
    out, at = "", 0
    while at < len(text):
        size = rng.randint(1, 4)
        out += stops.feed(text[at : at + size])
        at += size
        assert text.startswith(out)
    out += stops.finish()
    found = first_match(patterns, text)
    if found is None:
        assert (out, stops.matched) == (text, None)
    else:
        assert out == text[: found[1] if include else found[0]]
        assert stops.matched in patterns


def test_what_may_belong_to_a_match_is_held_back() -> None:
    stops = StopStrings(["END"], patterns=[r"[0-9]+\."])
    assert stops.feed("a 1") == "a "
    assert stops.feed("2") == ""
    assert stops.feed("x E") == "12x "
    assert stops.feed("N7") == "EN"
    assert stops.feed(".!") == ""
    assert (stops.matched, stops.finish()) == (r"[0-9]+\.", "")


def test_a_string_and_a_pattern_that_end_together() -> None:
    stops = StopStrings(["b"], patterns=["a+b"])
    assert stops.feed("xaab") == "x"
    assert stops.matched == "a+b"


@pytest.mark.parametrize(
    ("patterns", "param"),
    [
        (["("], "stop_regex"),
        (["a", "["], "stop_regex[1]"),
        (["a*"], "stop_regex"),
        (["^a"], "stop_regex"),
        (["a$b"], "stop_regex"),
        (["(a$)+"], "stop_regex"),
        ([r"\ba"], "stop_regex"),
        (["(?=a)a"], "stop_regex"),
        ([r"(a)\1"], "stop_regex"),
        (["a" * (MAX_PATTERN_BYTES + 1)], "stop_regex"),
        (["(a?){9000}b"], "stop_regex"),
        (["(a{20}){20}"] * 3, "stop_regex"),
        (["a"] * (MAX_PATTERNS + 1), "stop_regex"),
    ],
)
def test_what_cannot_end_an_answer_is_refused(patterns: list[str], param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_patterns(patterns, "stop_regex")
    assert refused.value.param == param
    assert refused.value.message


def test_what_can_is_given_back() -> None:
    assert check_patterns(["a+", "b"], "stop_regex") == ("a+", "b")

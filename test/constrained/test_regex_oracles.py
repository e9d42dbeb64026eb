"""Regular expressions read by three: ours, interegular and `re`. They agree on which strings a
pattern matches as a whole."""

from __future__ import annotations

import random
import re

import interegular
import pytest

from phloem.constrained.base import ConstraintError
from phloem.constrained.regex import parse_regex
from phloem.constrained.shape_relations import pattern_automaton

PATTERNS = [
    "abc",
    "a*b+c?",
    "(ab|cd)*e",
    "[a-c]{2,4}",
    "[^ab]+",
    r"\d{1,3}(\.\d{1,3}){3}",
    r"[A-Z]{2}\d{2}",
    "(a|b)*a(a|b)",
    r"\w+@\w+\.(com|org)",
    "a{3}",
    "(x(y(z)?)?)?",
    r"-?(0|[1-9]\d*)",
    "a|b|",
    r"\s*a\s*",
    "[ab]|[bc]d",
    r"\(a\)\[b\]",
    "é+ß",
    "(?:ab){1,2}?c",
    ".a.",
    r"[\d\-x]*",
]
HARD_TO_HIT = {r"\d{1,3}(\.\d{1,3}){3}", r"[A-Z]{2}\d{2}", r"\w+@\w+\.(com|org)", r"\(a\)\[b\]"}
ALPHABET = "abcdexyz019.-@ éß()[]AZ_\n"


def near(pattern: str, rng: random.Random) -> str:
    """A string that may well match: letters of the pattern itself, in some order."""
    letters = [c for c in pattern if c in ALPHABET] or ["a"]
    return "".join(rng.choice(letters) for _ in range(rng.randrange(9)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_three_readings_agree(pattern: str) -> None:
    ours = pattern_automaton(parse_regex(pattern))
    theirs = interegular.parse_pattern(pattern).to_fsm()
    rng = random.Random(pattern)
    matched = 0
    for _ in range(400):
        text = near(pattern, rng)
        if rng.random() < 0.3:
            text = "".join(rng.choice(ALPHABET) for _ in range(rng.randrange(6)))
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        matched += expected
        assert ours.accepts(text) == expected, repr(text)
        assert theirs.accepts(text) == expected, repr(text)
    if pattern not in HARD_TO_HIT:
        assert matched, "no string matched: the test says nothing"


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{2,1}", "[b-a]", "*a", r"\p{L}", r"(a)\1", "(?=a)b", "(?<=a)b", r"\bword", "a++"],
)
def test_what_is_refused_is_not_silently_something_else(pattern: str) -> None:
    with pytest.raises(ConstraintError):
        parse_regex(pattern)

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

PATTERNS = {  # and a string that each matches
    "abc": "abc",
    "a*b+c?": "aabb",
    "(ab|cd)*e": "abcde",
    "[a-c]{2,4}": "abc",
    "[^ab]+": "cd",
    r"\d{1,3}(\.\d{1,3}){3}": "10.0.0.255",
    r"[A-Z]{2}\d{2}": "AZ01",
    "(a|b)*a(a|b)": "bbab",
    r"\w+@\w+\.(com|org)": "a_1@b.org",
    "a{3}": "aaa",
    "(x(y(z)?)?)?": "xyz",
    r"-?(0|[1-9]\d*)": "-10",
    "a|b|": "",
    r"\s*a\s*": " a\n",
    "[ab]|[bc]d": "bd",
    r"\(a\)\[b\]": "(a)[b]",
    "é+ß": "ééß",
    "(?:ab){1,2}?c": "ababc",
    ".a.": "éa]",
    r"[\d\-x]*": "1-x",
}
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
    assert re.fullmatch(pattern, PATTERNS[pattern])
    texts = [PATTERNS[pattern], *(near(pattern, rng) for _ in range(300))]
    texts += ["".join(rng.choices(ALPHABET, k=rng.randrange(6))) for _ in range(100)]
    for text in texts:
        expected = re.fullmatch(pattern, text, re.ASCII) is not None
        assert ours.accepts(text) == expected, repr(text)
        assert theirs.accepts(text) == expected, repr(text)


@pytest.mark.parametrize(
    "pattern",
    ["(", "a{2,1}", "[b-a]", "*a", r"\p{L}", r"(a)\1", "(?i)a", "(?>a)b", "(?P<n>a)(?P=n)", "a++"],
)
def test_what_is_refused_is_not_silently_something_else(pattern: str) -> None:
    with pytest.raises(ConstraintError):
        parse_regex(pattern)

"""Covers hold every string that a validator accepts, so what fails them surely is invalid."""

from __future__ import annotations

import random
import re

import jsonschema_rs
import pytest

from phloem.constrained.automaton import Automaton
from phloem.constrained.formats import FORMATS, pattern_of
from phloem.constrained.schema_formats import cover, is_checked, unmatched
from phloem.constrained.shape_relations import pattern_automaton

COVERED = sorted(name for name in FORMATS if cover(name) is not None)
LETTERS = '0123456789abcdefABCDEFTZzPtYMDWHS-+:./@#~%_,[]() x\u00e9\n*?{}|^\\<>"`$\x85'


def sample(machine: Automaton, source: random.Random) -> str:
    """A text that the automaton takes, or the beginning of one."""
    state, text = 0, ""
    for _ in range(60):
        if (state in machine.accepting and source.random() < 0.2) or not machine.edges[state]:
            break
        chars, state = source.choice(machine.edges[state])
        low, high = source.choice(chars)
        text += chr(source.randint(low, min(high, low + 200)))
    return text


def changed(text: str, source: random.Random) -> str:
    """The text with up to two characters added, removed or replaced."""
    for _ in range(source.randint(0, 2)):
        at = source.randrange(len(text) + 1)
        kind = source.randrange(3)
        text = text[:at] + source.choice(LETTERS) * (kind > 0) + text[at + (kind < 2) :]
    return text


SHAPES = {
    "date": r"\d{4}-\d\d-\d\d",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?(z|[+-]\d\d:\d\d)",
    "date-time": r"\d{4}-\d\d-\d\d[t ]\d\d:\d\d:\d\d(\.\d+)?(z|[+-]\d\d:\d\d)",
}


def looks(name: str, text: str) -> bool:
    """Older validators take any character for a digit of a date."""
    return re.fullmatch(SHAPES.get(name, ".*"), text, re.I | re.S | re.A) is not None


@pytest.mark.parametrize("name", COVERED)
def test_a_cover_holds_all_that_is_valid(name: str) -> None:
    source = random.Random(7)
    pattern = cover(name)
    assert pattern is not None
    machine, inside = pattern_automaton(pattern), pattern_automaton(pattern_of(name))
    validator = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    valid = 0
    for _ in range(2_000):
        text = changed(sample(inside, source), source)
        if validator.is_valid(text) and looks(name, text):
            valid += 1
            assert machine.accepts(text), text
    assert valid > 200


def test_unknown_formats_say_nothing() -> None:
    assert not is_checked("phone")
    assert is_checked("uri-template")


def test_what_a_pattern_refuses() -> None:
    machine = pattern_automaton(unmatched("^a|b$", ""))
    for text in ("", "ba", "xab\n", "ca"):
        assert machine.accepts(text)
    for text in ("a", "xb", "ab", "b"):
        assert not machine.accepts(text)
    spaces = pattern_automaton(unmatched(r"\s", ""))
    assert spaces.accepts("ab")
    assert not spaces.accepts(" ")
    assert not spaces.accepts("\x85")  # engines differ on it

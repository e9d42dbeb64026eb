"""Numerals are exactly those within the bounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained import automaton
from phloem.constrained.base import LimitExceeded, UnsupportedKeyword
from phloem.constrained.numerals import numeral
from phloem.constrained.shapes import Number

DECIMALS = st.decimals(-1100, 1100, places=2).map(lambda d: Fraction(str(d)))
BOUNDS = st.one_of(st.none(), st.integers(-1100, 1100).map(Fraction), DECIMALS)


def accepts(number: Number, text: str) -> bool:
    pattern = numeral(number)
    return pattern is not None and automaton.from_pattern(pattern).accepts(text)


def within(number: Number, value: Fraction) -> bool:
    above = (
        number.low is None or value > number.low or (value == number.low and not number.low_open)
    )
    below = (
        number.high is None
        or value < number.high
        or (value == number.high and not number.high_open)
    )
    return above and below


@given(BOUNDS, st.booleans(), BOUNDS, st.booleans(), DECIMALS)
def test_decimals(
    low: Fraction | None, low_open: bool, high: Fraction | None, high_open: bool, value: Fraction
) -> None:
    number = Number(False, low, low_open, high, high_open)
    candidates = [value, *(b for b in (low, high) if b is not None)]
    for each in candidates:
        text = f"{float(each):.2f}"
        if text == "-0.00":
            continue
        assert accepts(number, text) == (not number.empty() and within(number, each)), text
        assert accepts(number, text + "0") == accepts(number, text)


@given(BOUNDS, st.booleans(), BOUNDS, st.booleans(), st.integers(-1200, 1200))
def test_integers(
    low: Fraction | None, low_open: bool, high: Fraction | None, high_open: bool, value: int
) -> None:
    number = Number(True, low, low_open, high, high_open)
    assert accepts(number, str(value)) == (not number.empty() and within(number, Fraction(value)))
    assert not accepts(number, f"{value}.5")


@pytest.mark.parametrize(
    ("number", "inside", "outside"),
    [
        (Number(), ["0", "-1.5", "1e-07", "-0"], ["01", ".5", "1.", "+1"]),
        (Number(True), ["0", "-12"], ["1.0", "00", "1e3"]),
        (Number(low=Fraction(1)), ["1", "1000000.0"], ["0.99", "1e6", "-1"]),
        (Number(True, multiples=(Fraction(5),)), ["0", "15", "-10"], ["7", "1"]),
        (Number(True, multiples=(Fraction(20),)), ["0", "40", "-120"], ["10", "30"]),
        (Number(multiples=(Fraction(1, 100),)), ["1.25", "3"], ["1.255"]),
        (
            Number(True, Fraction(0), False, Fraction(100), False, (Fraction(7),)),
            ["0", "14", "98"],
            ["15", "105"],
        ),
    ],
)
def test_meaning(number: Number, inside: list[str], outside: list[str]) -> None:
    assert all(accepts(number, text) for text in inside)
    assert not any(accepts(number, text) for text in outside)


def test_nothing_left() -> None:
    assert numeral(Number(True, Fraction(1, 4), False, Fraction(3, 4), False)) is None
    assert numeral(Number(False, Fraction(1), True, Fraction(1), False)) is None


def test_refusals() -> None:
    with pytest.raises(UnsupportedKeyword, match="multipleOf 7"):
        numeral(Number(True, multiples=(Fraction(7),)))
    with pytest.raises(LimitExceeded, match="digits"):
        numeral(Number(low=Fraction(10**50)))

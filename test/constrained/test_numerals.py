"""Numerals are exactly those within the bounds."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from phloem.constrained import automaton
from phloem.constrained.base import LimitExceeded
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
        (Number(True, multiples=(Fraction(86400),)), ["0", "-86400", "172800"], ["86401", "8640"]),
        (Number(multiples=(Fraction(1, 10**8),)), ["1.00000001", "3.0"], ["0.000000001"]),
        (Number(indivisible=(Fraction(1),)), ["0.5", "-1.10"], ["1", "1.0", "0", "-0.00"]),
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


STEPS = st.one_of(
    st.integers(1, 60).map(Fraction),
    st.sampled_from(["0.01", "0.5", "1.5", "0.25", "0.0075", "2.4", "100", "7000"]).map(Fraction),
)


@given(
    st.booleans(),
    BOUNDS,
    BOUNDS,
    st.lists(STEPS, max_size=2),
    st.lists(STEPS, max_size=2),
    st.data(),
)
def test_multiples(
    integer: bool,
    low: Fraction | None,
    high: Fraction | None,
    multiples: list[Fraction],
    indivisible: list[Fraction],
    data: st.DataObject,
) -> None:
    number = Number(
        integer, low, False, high, False, tuple(multiples), indivisible=tuple(indivisible)
    )
    step = data.draw(st.sampled_from([*multiples, Fraction(1, 10)]))
    value = step * data.draw(st.integers(-300, 300))
    expected = (
        within(number, value)
        and (not integer or value.denominator == 1)
        and not any(value % m for m in multiples)
        and all(value % d for d in indivisible)
    )
    text = (
        f"{value.numerator // value.denominator}" if value.denominator == 1 else str(float(value))
    )
    try:
        numeral(number)
    except LimitExceeded:
        reject()  # multiples of too many things at once
    assert accepts(number, text) == expected, text
    if not integer and (multiples or indivisible):
        padded = text + ("0" if "." in text else ".00")
        assert accepts(number, padded) == expected, padded
        assert not accepts(number, text + "e1")


@pytest.mark.parametrize("multiples", [(), (Fraction(7),)])
def test_integers_that_end_in_a_zero_fraction(multiples: tuple[Fraction, ...]) -> None:
    pattern = numeral(Number(True, Fraction(0), multiples=multiples), zeros=True)
    assert pattern is not None
    machine = automaton.from_pattern(pattern)
    assert all(machine.accepts(text) for text in ("0", "7", "14.0", "0.0"))
    assert not any(machine.accepts(text) for text in ("7.", "7.1", "7.00", "-7.0"))


def test_nothing_left() -> None:
    assert numeral(Number(True, Fraction(1, 4), False, Fraction(3, 4), False)) is None
    assert numeral(Number(False, Fraction(1), True, Fraction(1), False)) is None


def test_refusals() -> None:
    with pytest.raises(LimitExceeded, match="remainders"):
        numeral(Number(True, multiples=(Fraction(123456789),)))
    with pytest.raises(LimitExceeded, match="digits"):
        numeral(Number(low=Fraction(10**50)))

"""Numerals within bounds, as patterns.

Bounded numbers are written in plain decimal notation, without exponent; every value has such a
spelling. Unbounded ones may have an exponent of one or two digits, multiples of something have
none. Integers have no fraction.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from fractions import Fraction

from phloem.constrained import charset
from phloem.constrained.automaton import difference, from_pattern, intersection, words
from phloem.constrained.base import LimitExceeded
from phloem.constrained.multiples import multiples_of
from phloem.constrained.pattern import (
    NOTHING,
    Alt,
    Automaton,
    Chars,
    Node,
    Repeat,
    Seq,
    literal,
    simplify,
)
from phloem.constrained.pattern_parser import Dialect, parse
from phloem.constrained.shapes import Number

MAX_LISTED_MULTIPLES = 1_000
MAX_DECIMAL_DIGITS = 40

_DIGIT = Chars(charset.DIGIT)
_DIGITS = Repeat(_DIGIT, 0, None)
_MINUS = literal("-")
_INTEGER = parse("-?(0|[1-9][0-9]*)", Dialect.ECMA)
_DECIMAL = parse(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", Dialect.ECMA)
_NUMBER = parse(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,2})?", Dialect.ECMA)


@functools.lru_cache(maxsize=1024)
def numeral(number: Number, *, zeros: bool = False) -> Node | None:
    """The pattern of all numerals in `number`; None when there is none. With `zeros` integers may
    end in `.0`, which drafts after 4 take for integers.

    Raises:
        LimitExceeded: a bound has too many digits, or a multiple too many remainders.
    """
    if number.empty():
        return None
    divided = number.multiples or number.indivisible
    found = _divided(number) if divided else _undivided(number)
    if found is None or not (zeros and number.integer):
        return found
    padded = Seq((found, Repeat(literal(".0"), 0, 1)))
    return from_pattern(padded) if isinstance(found, Automaton) else simplify(padded)


def _undivided(number: Number, *, exponents: bool = True) -> Node | None:
    if not number.integer:
        number = _apart_in_binary(number)
    if number.low is not None or number.high is not None:
        options = _bounded_integers(number) if number.integer else _bounded_decimals(number)
        return _closed(options)
    if number.integer:
        return _INTEGER
    return _NUMBER if exponents else _DECIMAL


def _apart_in_binary(number: Number) -> Number:
    """Open bounds as closed ones at the next double: a decimal that is closer to the bound is read
    as the bound itself. Zero stays: decimals that are read as zero have more than 300 digits."""
    if number.low_open and number.low:
        after = _neighbour(number.low, math.inf)
        number = dataclasses.replace(number, low=after, low_open=False)
    if number.high_open and number.high:
        before = _neighbour(number.high, -math.inf)
        number = dataclasses.replace(number, high=before, high_open=False)
    return number


def _neighbour(bound: Fraction, towards: float) -> Fraction:
    return Fraction(repr(math.nextafter(float(bound), towards)))


def _closed(options: list[Node]) -> Node | None:
    return simplify(Alt(tuple(options))) if options else None


# --------------------------------------------------------------------------- integers


def integer_bounds(number: Number) -> tuple[int | None, int | None]:
    """The least and the greatest integer within the bounds."""
    low = high = None
    if number.low is not None:
        low = math.ceil(number.low)
        low += number.low_open and low == number.low
    if number.high is not None:
        high = math.floor(number.high)
        high -= number.high_open and high == number.high
    return low, high


def _bounded_integers(number: Number) -> list[Node]:
    low, high = integer_bounds(number)
    return _integers(low, high)


def _integers(low: int | None, high: int | None) -> list[Node]:
    """Integers of both signs from `low` to `high`; zero has no sign."""
    _check_digits(low or 0, high or 0)
    options: list[Node] = []
    if high is None or high >= 0:
        options += _naturals(max(low or 0, 0), high)
    if low is None or low < 0:
        greatest = None if low is None else -low
        least = 1 if high is None or high >= 0 else -high
        options += [Seq((_MINUS, n)) for n in _naturals(least, greatest)]
    return options


def _check_digits(*values: int) -> None:
    if any(abs(v) >= 10**MAX_DECIMAL_DIGITS for v in values):
        raise LimitExceeded(f"a numeric bound has more than {MAX_DECIMAL_DIGITS} digits")


def _naturals(low: int, high: int | None) -> list[Node]:
    """Numerals without leading zeros from `low` ≥ 0 to `high`."""
    options: list[Node] = []
    if low == 0 and (high is None or high >= 0):
        options.append(literal("0"))
        low = 1
    length = len(str(low))
    while high is None or low <= high:
        last = 10**length - 1
        if high is None:
            longer = Seq((_digit_range("1", "9"), Repeat(_DIGIT, length, None)))
            return [*options, _same_length(str(low), str(last)), longer]
        options.append(_same_length(str(low), str(min(last, high))))
        low = last + 1
        length += 1
    return options


def _digit_range(low: str, high: str) -> Node:
    return Chars(((ord(low), ord(high)),))


def _same_length(low: str, high: str) -> Node:
    """Digit strings of one length between two of that length, both included."""
    if low == "":
        return NOTHING
    rest = len(low) - 1
    if low == "0" * len(low) and high == "9" * len(high):
        return Repeat(_DIGIT, len(low), len(low))
    if low[0] == high[0]:
        return Seq((literal(low[0]), _same_length(low[1:], high[1:])))
    options: list[Node] = []
    first, last = int(low[0]), int(high[0])
    if low[1:] != "0" * rest:
        options.append(Seq((literal(low[0]), _same_length(low[1:], "9" * rest))))
        first += 1
    if high[1:] != "9" * rest:
        options.append(Seq((literal(high[0]), _same_length("0" * rest, high[1:]))))
        last -= 1
    if first <= last:
        options.append(Seq((_digit_range(str(first), str(last)), Repeat(_DIGIT, rest, rest))))
    return Alt(tuple(options))


# --------------------------------------------------------------------------- decimals


def _bounded_decimals(number: Number) -> list[Node]:
    options: list[Node] = []
    low, high = number.low, number.high
    if high is None or high > 0 or (high == 0 and not number.high_open):
        floor, floor_open = (
            (low, number.low_open) if low is not None and low >= 0 else (None, False)
        )
        options += _positive(floor or Fraction(0), floor_open, high, number.high_open)
    if low is None or low < 0:
        ceiling, ceiling_open = (
            (high, number.high_open) if high is not None and high < 0 else (Fraction(0), True)
        )
        magnitude = None if low is None else -low
        negative = _positive(-ceiling, ceiling_open, magnitude, number.low_open)
        options += [Seq((_MINUS, n)) for n in negative]
    return options


def _positive(low: Fraction, low_open: bool, high: Fraction | None, high_open: bool) -> list[Node]:
    """Decimals from `low` ≥ 0 to `high`."""
    whole, fraction = _split(low)
    top, top_fraction = _split(high) if high is not None else (None, "")
    if top is not None and whole == top:
        return _with_whole(whole, _between(fraction, low_open, top_fraction, high_open))
    options = _with_whole(whole, _between(fraction, low_open, None, False))
    if top is None or whole + 1 <= top - 1:
        free = Repeat(Seq((literal("."), Repeat(_DIGIT, 1, None))), 0, 1)
        wholes = _naturals(whole + 1, None if top is None else top - 1)
        options += [Seq((n, free)) for n in wholes]
    if top is not None:
        options += _with_whole(top, _between("", False, top_fraction, high_open))
    return options


def _split(value: Fraction) -> tuple[int, str]:
    """Whole part and decimals without trailing zeros."""
    whole, rest = divmod(value, 1)
    _check_digits(whole)
    digits = ""
    while rest:
        if len(digits) == MAX_DECIMAL_DIGITS:
            raise LimitExceeded(f"a numeric bound has more than {MAX_DECIMAL_DIGITS} decimals")
        digit, rest = divmod(rest * 10, 1)
        digits += str(int(digit))
    return int(whole), digits


def _with_whole(whole: int, decimals: list[Node]) -> list[Node]:
    return [Seq((literal(str(whole)), d)) for d in decimals]


def _between(low: str, low_open: bool, high: str | None, high_open: bool) -> list[Node]:
    """What may follow a whole part: nothing, or a point and decimals within the bounds."""
    options: list[Node] = []
    if low == "" and not low_open and not (high == "" and high_open):
        options.append(NOTHING)
    decimals = _decimals(low, low_open, high, high_open, first=True)
    options += [Seq((literal("."), d)) for d in decimals]
    return options


def _decimals(
    low: str | None, low_open: bool, high: str | None, high_open: bool, *, first: bool = False
) -> list[Node]:
    """Digit strings between bounds, compared as decimals; None: that side is free already.

    `first` asks for at least one digit. An exhausted low bound is met by any rest (by a rest
    that is not zero when open), an exhausted high bound by zeros only (by nothing when open).
    """
    if low == "" and not low_open:
        low = None
    if high == "" and high_open:
        return []
    if low is None and high is None:
        return [Repeat(_DIGIT, 1, None) if first else _DIGITS]
    if high == "":
        return [] if low is not None else [Repeat(literal("0"), int(first), None)]
    options: list[Node] = []
    if low is None and not first:
        options.append(NOTHING)
    if high is None and low == "":
        nonzero = Seq((Repeat(literal("0"), 0, None), _digit_range("1", "9"), _DIGITS))
        return [nonzero]
    least = int(low[0]) if low else 0
    most = int(high[0]) if high else 9
    below = low[1:] if low else ("" if low is not None else None)
    above = high[1:] if high else None
    if low is not None and least == most and high is not None:
        rest = _decimals(below, low_open, above, high_open)
        return options + [Seq((literal(str(least)), r)) for r in rest]
    if low is not None:
        rest = _decimals(below, low_open, None, False)
        options += [Seq((literal(str(least)), r)) for r in rest]
        least += 1
    if high is not None:
        rest = _decimals(None, False, above, high_open)
        options += [Seq((literal(str(most)), r)) for r in rest]
        most -= 1
    if least <= most:
        options.append(Seq((_digit_range(str(least), str(most)), _DIGITS)))
    return options


# --------------------------------------------------------------------------- multiples


def _divided(number: Number) -> Node | None:
    """Multiples of all of `multiples` and of none of `indivisible`."""
    divisor = Fraction(1) if number.integer else None
    for each in number.multiples:
        divisor = each if divisor is None else _common(divisor, each)
    values = _listed(number, divisor) if number.integer else None
    if values is not None:
        return words(map(str, values)) if values else None
    whole = divisor is not None and number.integer
    plain = dataclasses.replace(number, integer=whole, multiples=(), indivisible=())
    bounded = _undivided(plain, exponents=False)
    if bounded is None:
        return None
    machine = from_pattern(bounded)
    if divisor is not None and not (whole and divisor == 1):
        machine = intersection(machine, multiples_of(divisor))
    for each in number.indivisible:
        machine = difference(machine, multiples_of(each))
    return None if machine.is_empty else machine


def _common(a: Fraction, b: Fraction) -> Fraction:
    """The least common multiple."""
    return Fraction(math.lcm(a.numerator, b.numerator), math.gcd(a.denominator, b.denominator))


def _listed(number: Number, divisor: Fraction | None) -> list[int] | None:
    """The integers meant, if they are few."""
    low, high = integer_bounds(number)
    if low is None or high is None or divisor is None:
        return None
    step = int(divisor)
    first, last = -(-low // step), high // step
    if last - first >= MAX_LISTED_MULTIPLES:
        return None
    values = (k * step for k in range(first, last + 1))
    return [v for v in values if all(v % d for d in number.indivisible)]

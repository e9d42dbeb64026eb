"""Numerals of the multiples of a number, as automata that carry a remainder.

A multiple of n/10^d is a decimal whose digits, the first d after the point included, are a
multiple of n, and that has only zeros after those.
"""

from __future__ import annotations

import functools
from fractions import Fraction

from phloem.constrained import charset
from phloem.constrained.alphabet import Alphabet
from phloem.constrained.automaton import build, difference, from_pattern, words
from phloem.constrained.base import LimitExceeded
from phloem.constrained.pattern import Alt, Automaton, Seq, literal

MAX_REMAINDERS = 8_000
MAX_DECIMALS = 40

_DIGITS = [charset.of(str(d)) for d in range(10)]
_SIGN, _POINT = charset.of("-"), charset.of(".")


@functools.lru_cache(maxsize=256)
def multiples_of(divisor: Fraction) -> Automaton:
    """Plain decimals (no exponent) that are multiples of `divisor` > 0.

    Raises:
        LimitExceeded: there are too many remainders.
    """
    decimals, zeros = 0, 0
    while divisor.denominator != 1:
        divisor, decimals = divisor * 10, decimals + 1
        if decimals > MAX_DECIMALS:
            raise LimitExceeded(f"multipleOf has more than {MAX_DECIMALS} decimals")
    modulus = divisor.numerator
    while not decimals and modulus % 10 == 0 and zeros < MAX_DECIMALS:
        modulus, zeros = modulus // 10, zeros + 1
    if modulus * (decimals + 1) > MAX_REMAINDERS:
        raise LimitExceeded(
            f"multipleOf leaves more than {MAX_REMAINDERS} remainders to be told apart"
        )
    if not zeros:
        return _remainders(modulus, decimals)
    nothing = words(["0", "-0"])
    fraction = from_pattern(Alt((Seq(()), Seq((literal("."), _zeros())))))
    nonzero = difference(_remainders(modulus, None), nothing)
    whole = Alt((nothing, Seq((nonzero, literal("0" * zeros)))))
    return from_pattern(Seq((whole, fraction)))


def _zeros() -> Automaton:
    zero = _DIGITS[0]
    return Automaton((((zero, 1),), ((zero, 1),)), frozenset({1}))


# A state is (remainder, number of digits after the point): none before the point. Before the first
# digit stand two states of their own, and one follows a leading zero.
_Place = tuple[str, int, int]


def _remainders(modulus: int, decimals: int | None) -> Automaton:
    """Multiples of `modulus` / 10^`decimals`; without a fraction at all if that is None."""
    alphabet = Alphabet([*_DIGITS, _SIGN, _POINT])
    digits = [alphabet.mask(d) for d in _DIGITS]
    sign, point = alphabet.mask(_SIGN), alphabet.mask(_POINT)

    def successors(place: _Place) -> list[tuple[int, _Place]]:
        part, rest, count = place
        match part:
            case "start" | "signed":
                found = [(digits[d], ("whole", d % modulus, 0)) for d in range(1, 10)]
                found.append((digits[0], ("zero", 0, 0)))
                return found + ([(sign, ("signed", 0, 0))] if part == "start" else [])
            case "whole" | "zero":
                found = [] if decimals is None else [(point, ("point", rest, 0))]
                if part == "whole":
                    found += [
                        (digits[d], ("whole", (10 * rest + d) % modulus, 0)) for d in range(10)
                    ]
                return found
            case _ if decimals is not None and count < decimals:
                return [
                    (digits[d], ("digits", (10 * rest + d) % modulus, count + 1)) for d in range(10)
                ]
            case _:
                return [(digits[0], ("digits", rest, count))] if rest == 0 else []

    def accepts(place: _Place) -> bool:
        part, rest, count = place
        missing = (decimals or 0) - count
        return part in ("whole", "zero", "digits") and rest * 10**missing % modulus == 0

    start: _Place = ("start", 0, 0)
    return build(start, successors, accepts, alphabet, 3 * MAX_REMAINDERS)

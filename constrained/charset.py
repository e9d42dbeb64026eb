"""Sets of Unicode characters as sorted, disjoint code-point ranges.

Surrogates are in no set: they are not characters and UTF-8 cannot carry them.
"""

from __future__ import annotations

import bisect
import functools
import sys
import unicodedata
from collections.abc import Iterable

Range = tuple[int, int]
CharSet = tuple[Range, ...]

EMPTY: CharSet = ()
ANY: CharSet = ((0, 0xD7FF), (0xE000, 0x10FFFF))


def char_set(ranges: Iterable[Range]) -> CharSet:
    """Sort, merge and drop surrogates."""
    merged: list[Range] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return intersect(tuple(merged), ANY)


def of(characters: str) -> CharSet:
    """The set of these characters."""
    return char_set((ord(c), ord(c)) for c in characters)


def union(*sets: CharSet) -> CharSet:
    return char_set(r for s in sets for r in s)


def intersect(left: CharSet, right: CharSet) -> CharSet:
    out: list[Range] = []
    i = j = 0
    while i < len(left) and j < len(right):
        low, high = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        if low <= high:
            out.append((low, high))
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return tuple(out)


def negate(chars: CharSet) -> CharSet:
    """All characters that are not in `chars`."""
    out: list[Range] = []
    start = 0
    for low, high in chars:
        if low > start:
            out.append((start, low - 1))
        start = high + 1
    out.append((start, 0x10FFFF))
    return intersect(tuple(r for r in out if r[0] <= r[1]), ANY)


def subtract(left: CharSet, right: CharSet) -> CharSet:
    return intersect(left, negate(right))


def contains(chars: CharSet, character: str) -> bool:
    code = ord(character)
    at = bisect.bisect_right(chars, (code, 0x110000)) - 1
    return at >= 0 and code <= chars[at][1]


DIGIT = of("0123456789")
WORD = char_set([(48, 57), (65, 90), (95, 95), (97, 122)])
ASCII_SPACE = of(" \t\n\r\f\v")
SPACE = union(
    ASCII_SPACE,
    char_set([(0x1C, 0x1F), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]),
    char_set([(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]),
    of("\ufeff"),
)
ECMA_SPACE = union(
    ASCII_SPACE,
    char_set([(0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]),
    of("\u202f\u205f\u3000\ufeff"),
)
NON_ASCII: CharSet = char_set([(0x80, 0x10FFFF)])


@functools.cache
def unicode_digits() -> CharSet:
    """Every decimal digit of every script (general category Nd)."""
    points = (i for i in range(sys.maxunicode + 1) if unicodedata.category(chr(i)) == "Nd")
    return char_set((i, i) for i in points)

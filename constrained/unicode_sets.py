"""Unicode properties by their ECMA-262 names (`\\p{L}`, `\\p{Uppercase_Letter}`, `\\p{ASCII}`).

Categories come from Python's Unicode tables. Scripts and binary properties other than a few are
not in them.
"""

from __future__ import annotations

import functools
import sys
import unicodedata

from phloem.constrained import charset
from phloem.constrained.charset import CharSet

_LONG_NAMES = {
    "Cased_Letter": "LC",
    "Close_Punctuation": "Pe",
    "Combining_Mark": "M",
    "Connector_Punctuation": "Pc",
    "Control": "Cc",
    "Currency_Symbol": "Sc",
    "Dash_Punctuation": "Pd",
    "Decimal_Number": "Nd",
    "Enclosing_Mark": "Me",
    "Final_Punctuation": "Pf",
    "Format": "Cf",
    "Initial_Punctuation": "Pi",
    "Letter": "L",
    "Letter_Number": "Nl",
    "Line_Separator": "Zl",
    "Lowercase_Letter": "Ll",
    "Mark": "M",
    "Math_Symbol": "Sm",
    "Modifier_Letter": "Lm",
    "Modifier_Symbol": "Sk",
    "Nonspacing_Mark": "Mn",
    "Number": "N",
    "Open_Punctuation": "Ps",
    "Other": "C",
    "Other_Letter": "Lo",
    "Other_Number": "No",
    "Other_Punctuation": "Po",
    "Other_Symbol": "So",
    "Paragraph_Separator": "Zp",
    "Private_Use": "Co",
    "Punctuation": "P",
    "Separator": "Z",
    "Space_Separator": "Zs",
    "Spacing_Mark": "Mc",
    "Surrogate": "Cs",
    "Symbol": "S",
    "Titlecase_Letter": "Lt",
    "Unassigned": "Cn",
    "Uppercase_Letter": "Lu",
    "cntrl": "Cc",
    "digit": "Nd",
    "punct": "P",
}
_BINARY = {
    "Any": charset.ANY,
    "ASCII": charset.char_set([(0, 0x7F)]),
    "ASCII_Hex_Digit": charset.of("0123456789ABCDEFabcdef"),
    "AHex": charset.of("0123456789ABCDEFabcdef"),
}


def named(name: str) -> CharSet | None:
    """The characters of a property, as written between the braces of `\\p{…}`; None when it is not
    known."""
    key, equals, value = name.partition("=")
    if equals:
        return _category(value) if key in ("General_Category", "gc") else None
    if name == "Assigned":
        unassigned = _category("Cn")
        return None if unassigned is None else charset.negate(unassigned)
    return _BINARY.get(name) or _category(name)


def _category(name: str) -> CharSet | None:
    short = _LONG_NAMES.get(name, name)
    if short == "LC":
        return charset.union(*(_categories()[c] for c in ("Lu", "Ll", "Lt")))
    found = [chars for c, chars in _categories().items() if c == short or c[0] == short]
    return charset.union(*found) if found else None


@functools.cache
def _categories() -> dict[str, CharSet]:
    """Every general category; surrogates are in none."""
    points: dict[str, list[tuple[int, int]]] = {"Cs": []}
    start, current = 0, unicodedata.category("\0")
    for point in range(1, sys.maxunicode + 2):
        category = unicodedata.category(chr(point)) if point <= sys.maxunicode else ""
        if category != current:
            points.setdefault(current, []).append((start, point - 1))
            start, current = point, category
    return {name: charset.char_set(ranges) for name, ranges in points.items()}

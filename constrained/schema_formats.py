"""Strings that a `format` or a `pattern` surely refuses.

The patterns of `phloem.constrained.formats` lack some strings, so what they refuse need not be
invalid. Where a format has to fail (`not`, `if`, an overlapping `oneOf`), what fails its cover
surely does. Regular expressions leave out characters of which engines think differently, so those
are left out of what they refuse, too.
"""

from __future__ import annotations

import functools

from phloem.constrained import formats
from phloem.constrained.base import ConstraintError
from phloem.constrained.pattern import Node
from phloem.constrained.pattern_closing import close_full
from phloem.constrained.pattern_parser import Dialect, parse

_ANY = r"(?:[^\u{0}]|\u{0})*"  # engines differ in what `\s` is
_COVERS = {
    "date": r"[0-9]{4}-[0-9]{2}-[0-9]{2}",
    "time": r"[0-9]{2}:[0-9]{2}:[0-9]{2}[0-9.:Zz+-]*",
    "date-time": r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}[0-9.:Zz+-]*",
    "duration": r"P[0-9A-Z.,]*",
    "email": rf"{_ANY}@{_ANY}",
    "idn-email": rf"{_ANY}@{_ANY}",
    "hostname": r"[A-Za-z0-9.-]*",
    "ipv6": r"[0-9A-Fa-f:]*:[0-9A-Fa-f:.]*",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_ANY}",
    "iri": rf"[A-Za-z][A-Za-z0-9+.-]*:{_ANY}",
    "uri-reference": r"[A-Za-z0-9._~!$&'()*+,;=:@/?#\[\]%-]*",
    "iri-reference": r"[^\u{0}-\u{20}\"<>\\^`{|}]*",
    "regex": rf"(?:[^*+?]{_ANY})?",
    "relative-json-pointer": rf"[0-9]+(?:#|(?:/{_ANY})?)",
    "json-pointer": rf"(?:/{_ANY})?",
}
_EXACT = frozenset({"ipv4", "uuid"})
_UNCOVERED = frozenset({"idn-hostname", "uri-template"})


def is_checked(name: str) -> bool:
    """Whether a validator checks the format at all; others say nothing."""
    return name in formats.FORMATS or name in _COVERS or name in _UNCOVERED


@functools.cache
def cover(name: str) -> Node | None:
    """A pattern that holds every valid string of a format; None where none is known."""
    if name in _EXACT:
        return formats.pattern_of(name)
    text = _COVERS.get(name)
    return None if text is None else close_full(parse(text, Dialect.ECMA))


def unmatched(text: str, path: str) -> Node:
    """The strings in which a `pattern` is surely not found.

    Raises:
        ConstraintError: the pattern is refused.
    """
    try:
        return close_full(parse(f"(?!{_ANY}(?:{text})){_ANY}", Dialect.ECMA))
    except ConstraintError as error:
        raise type(error)(error.message, path=path, code=error.reason) from error

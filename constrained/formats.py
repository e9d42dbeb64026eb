"""String formats as patterns: each accepts only valid values, most of them all of them.

Where the whole grammar of a format is not regular or not worth its size, the pattern is a plain
subset: `email` has no quoted local parts, `uri` has a scheme and an authority or path of ASCII,
`hostname` has up to five labels, `ipv6` has no embedded IPv4. Sources: RFC 3339 (dates; no leap
seconds), RFC 1123, RFC 4291, RFC 3986, RFC 6901, RFC 9562.
"""

from __future__ import annotations

import functools

from phloem.constrained.pattern import Node, close_full
from phloem.constrained.pattern_parser import Dialect, parse

_LEAP_CENTURY = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP_CENTURY}|{_LEAP_CENTURY}00|0000)"
_DATE = (
    "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"
_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:[0-9]+W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})"
_LABEL = "[A-Za-z0-9]{1,20}(?:-[A-Za-z0-9]{1,20})?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,20}"
_EMAIL = rf"{_ATOM}(?:\.{_ATOM}){{0,2}}@{_HOSTNAME}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_UUID = "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}"
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_PCHAR = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})"
_NO_COLON = "(?:[A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:/{_PCHAR}*)*"
_TAIL = rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?"
_URI = (
    rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_HOSTNAME}(?::[0-9]{{1,5}})?{_PATH}"
    rf"|/?{_PCHAR}+{_PATH}){_TAIL}"
)


def _ipv6() -> str:
    group = "[0-9A-Fa-f]{1,4}"
    forms = [f"(?:{group}:){{7}}{group}"]
    for left in range(8):
        head = f"{group}(?::{group}){{{left - 1}}}" if left else ""
        right = 7 - left
        tail = f"(?:{group}(?::{group}){{0,{right - 1}}})?" if right else ""
        forms.append(f"{head}::{tail}")
    return "(?:" + "|".join(forms) + ")"


_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": _EMAIL,
    "hostname": _HOSTNAME,
    "ipv4": _IPV4,
    "ipv6": _ipv6(),
    "uuid": _UUID,
    "uri": _URI,
    "uri-reference": rf"(?:{_URI}|(?:{_NO_COLON}+{_PATH}|(?:/(?:{_PCHAR}+{_PATH})?)?){_TAIL})",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}

FORMATS = frozenset(_PATTERNS)
"""Formats of strings that are enforced."""

ANNOTATION_FORMATS = frozenset({"password", "binary", "byte", "float", "double"})
"""Formats that restrict nothing beyond the type."""

INTEGER_FORMATS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
"""Formats that bound integers (OpenAPI)."""


@functools.cache
def pattern_of(name: str) -> Node:
    """The closed pattern of a format in `FORMATS`."""
    return close_full(parse(_PATTERNS[name], Dialect.ECMA))

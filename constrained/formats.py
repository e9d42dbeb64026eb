"""String formats as patterns: each accepts only valid values, most of them all of them.

Where the whole grammar of a format is not regular, or not worth its size, the pattern is a subset
that holds the usual values:

    date, date-time      years 0001 to 9999; leap seconds at whole and half hours' offsets
    hostname             three labels of 63 characters and four of 14; no `xn--` labels
    email                local parts of up to four atoms and 40 characters, or quoted ones of 20;
                         domains of four labels of 24, or addresses
    idn-hostname         labels of up to 10 letters of alphabets written from left to right
    regex                what ECMA-262 and Python both read, groups nested three deep

Sources: RFC 3339 (dates), RFC 1123, RFC 5321 and 6531 (mail), RFC 4291, RFC 3986 and 3987,
RFC 6570, RFC 6901, RFC 9562, RFC 5890 (names).
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Callable

from phloem.constrained import charset
from phloem.constrained.automaton import from_pattern, of_length
from phloem.constrained.charset import CharSet
from phloem.constrained.grammar_text import char_class
from phloem.constrained.pattern import Node
from phloem.constrained.pattern_closing import close_full
from phloem.constrained.pattern_parser import Dialect, parse

MIN_RUNS, MAX_RUNS = 128, 16_000
"""Lengths of references between which their parts, and not all their characters, are counted."""

# --------------------------------------------------------------------------- dates

_LEAP_CENTURY = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP_CENTURY}|(?:{_LEAP_CENTURY})00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_FRACTION = r"(?:\.[0-9]+)?"


def _leap_seconds() -> str:
    """The last second of a UTC day, in local time."""
    options = [f"23:59:60{_FRACTION}[Zz]"]
    for minutes in range(0, 24 * 60, 30):
        hour, minute = divmod(minutes, 60)
        ahead, behind = (24 * 60 - 1 + minutes) % 1440, (24 * 60 - 1 - minutes) % 1440
        for sign, local in (("+", ahead), ("-", behind)):
            clock = f"{local // 60:02}:{local % 60:02}"
            options.append(rf"{clock}:60{_FRACTION}\{sign}{hour:02}:{minute:02}")
    return "|".join(options)


_TIME = rf"(?:{_CLOCK}:[0-5][0-9]{_FRACTION}(?:[Zz]|[+-]{_CLOCK})|{_leap_seconds()})"
_DURATION_TIME = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION_DATE = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:[0-9]+W|{_DURATION_DATE}(?:{_DURATION_TIME})?|{_DURATION_TIME})"

# --------------------------------------------------------------------------- addresses

_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"


def _ipv6() -> str:
    group = "[0-9A-Fa-f]{1,4}"
    forms = [f"(?:{group}:){{7}}{group}", f"(?:{group}:){{6}}{_IPV4}"]
    for left in range(8):
        head = f"{group}(?::{group}){{{left - 1}}}" if left else ""
        right = 7 - left
        tail = f"(?:{group}(?::{group}){{0,{right - 1}}})?" if right else ""
        forms.append(f"{head}::{tail}")
        if right >= 2:
            forms.append(f"{head}::(?:{group}:){{0,{right - 2}}}{_IPV4}")
    return "(?:" + "|".join(forms) + ")"


_IPV6 = _ipv6()

# --------------------------------------------------------------------------- names and mail


def _label(letters: str, longest: int) -> str:
    """A label of letters and inner hyphens, without hyphens in both the third and fourth place
    (those are for `xn--`)."""
    inner = letters[:-1] + "-]"
    if longest == 1:
        return letters
    if longest < 6:
        return f"{letters}(?:{inner}{{0,{min(longest - 2, 2)}}}{letters})?"
    long = f"{inner}(?:{inner}{letters}|{letters}-){inner}{{0,{longest - 5}}}"
    return f"{letters}(?:(?:{inner}{{0,2}}|{long}){letters})?"


_ALNUM = "[A-Za-z0-9]"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"


def _atoms(room: int, *, letters: str = _ATOM) -> str:
    """Up to four atoms with dots between, together of at most `room` characters."""
    options = []
    for count in range(1, 5):
        each = (room - count + 1) // count
        if each > 0:
            options.append(rf"{letters}{{1,{each}}}(?:\.{letters}{{1,{each}}}){{{count - 1}}}")
    return "|".join(options)


def _hosts(room: int) -> str:
    """Up to five labels, together of at most `room` characters."""
    options = []
    for count in range(1, 6):
        each = min((room - count + 1) // count, 63)
        if each > 0:
            label = _label(_ALNUM, each)
            options.append(rf"{label}(?:\.{label}){{{count - 1}}}")
    return "(?:" + "|".join(options) + ")"


_HOSTNAME = rf"{_label(_ALNUM, 63)}(?:\.{_label(_ALNUM, 63)}){{0,2}}"
_HOSTNAME += rf"(?:\.{_label(_ALNUM, 14)}){{0,4}}"
_LOCAL = _atoms(40)
_DOMAIN = rf"{_label(_ALNUM, 24)}(?:\.{_label(_ALNUM, 24)}){{0,3}}"
_LITERAL = rf"\[(?:{_IPV4}|IPv6:{_IPV6})\]"
# Without a bare <: behind a space validators take what is before it for a display name.
_QUOTED = r'"(?:[ !#-;=-\[\]-~]|\\[!-~]){0,20}"'
_EMAIL = f"(?:{_LOCAL}|{_QUOTED})@(?:{_DOMAIN}|{_LITERAL})"


def _short_email(longest: int) -> str:
    local = min(max(longest // 3, 1), 64)
    return f"(?:{_atoms(local)})@{_hosts(longest - local - 1)}"


def _idn_letters() -> CharSet:
    """Lower-case letters and ideographs that RFC 5892 takes in any place of a label."""
    alphabets = [(0xDF, 0x24F), (0x370, 0x52F), (0x3041, 0x3096), (0x30A1, 0x30FA)]
    alphabets += [(0x4E00, 0x9FEF), (0xAC00, 0xD7A3)]

    def lasting(char: str) -> bool:
        folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", char).casefold())
        return folded == char and unicodedata.category(char) in ("Ll", "Lo")

    points = (p for low, high in alphabets for p in range(low, high + 1) if lasting(chr(p)))
    return charset.char_set((p, p) for p in points)


def _idn_hostname() -> str:
    letters = char_class(charset.union(_idn_letters(), charset.of("abcdefghijklmnopqrstuvwxyz")))
    digits = letters[:-1] + "0-9]"
    hyphens = digits[:-1] + "-]"
    label = f"{digits}(?:{digits}{{0,2}}|{digits}{hyphens}{digits}{hyphens}{{0,5}}{digits})"
    return rf"{label}(?:[.\u3002]{label}){{0,3}}|{_label('[a-z0-9]', 63)}"


def _idn_email() -> str:
    local = _atoms(40, letters=_ATOM[:-2] + r"\u0080-\u{10ffff}-]")
    quoted = r'"(?:[ !#-;=-\[\]-~\u0080-\u{10ffff}]|\\[!-~]){0,31}"'
    return f"(?:{local}|{quoted})@(?:{_DOMAIN}|{_idn_hostname()}|{_LITERAL})"


# --------------------------------------------------------------------------- references

_UCS = r"\u00a0-\ud7ff\uf900-\ufdcf\ufdf0-\uffef"
_UCS += "".join(rf"\u{{{n:x}0000}}-\u{{{n:x}fffd}}" for n in range(1, 14))
_PRIVATE = r"\ue000-\uf8ff\u{f0000}-\u{ffffd}\u{100000}-\u{10fffd}"


def _uri(more: str = "", private: str = "", *, brackets: bool = True) -> tuple[str, str]:
    """A URI and a relative reference; `more` letters and, in queries, `private` ones (RFC 3987).
    Without `brackets` hosts are no IPv6 addresses."""
    escaped = "%[0-9A-Fa-f]{2}"
    name = f"[A-Za-z0-9._~!$&'()*+,;={more}-]"
    segment = f"(?:{name[:-2]}:@-]|{escaped})"
    no_colon = f"(?:{name[:-2]}@-]|{escaped})"
    query = f"(?:{name[:-2]}:@/?{private}-]|{escaped})*"
    fragment = f"(?:{name[:-2]}:@/?-]|{escaped})*"
    future = r"[Vv][0-9A-Fa-f]+\.[A-Za-z0-9._~!$&'()*+,;=:-]+"
    address = rf"\[(?:{_IPV6}|{future})\]|" if brackets else ""
    host = f"(?:{address}(?:{name}|{escaped})*)"
    user = f"(?:(?:{name[:-2]}:-]|{escaped})*@)?"
    rest = f"(?:/{segment}*)*"
    authority = f"//{user}{host}(?::[0-9]*)?{rest}"
    absolute = f"/(?:{segment}+{rest})?"
    tail = rf"(?:\?{query})?(?:#{fragment})?"
    uri = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}|{absolute}|{segment}+{rest})?{tail}"
    return uri, f"(?:{authority}|{absolute}|{no_colon}+{rest})?{tail}"


def _short_uri(longest: int, more: str = "", *, relative: bool = False) -> str:
    """References whose parts cannot pass `longest` characters together, which engines count by
    themselves. Escapes are few, and hosts are no addresses in brackets."""
    name = f"[A-Za-z0-9._~!$&'()*+,;={more}-]"
    run = f"{name[:-2]}:@/?-]"

    def rest(room: int) -> str:
        """Path and query in one run, some escapes, a fragment."""
        fragment, each = room // 5, room // 40
        first = room - fragment - 2 - 8 * (3 + each)
        escapes = f"(?:%[0-9A-Fa-f]{{2}}{run}{{0,{each}}}){{0,8}}"
        return f"(?:[/?]{run}{{0,{first}}}{escapes})?(?:#{run}{{0,{fragment}}})?"

    room = longest - 17
    hosts = "|".join(
        rf"//{name}{{1,{host}}}(?::[0-9]{{1,5}})?{rest(room - host)}"
        for host in (room // 5, room // 2)
    )
    uri = f"[A-Za-z][A-Za-z0-9+.-]{{0,7}}:(?:{hosts}|{name}{{1,{room // 3}}}{rest(room // 2)})"
    if not relative:
        return uri
    return f"(?:{uri}|(?:/?{name}{{1,{room // 3}}})?{rest(room // 2)}|/)?"


_URI, _RELATIVE = _uri()
_IRI, _IRI_RELATIVE = _uri(_UCS, _PRIVATE)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"


def _uri_template() -> str:
    char = "(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})"
    variable = rf"{char}+(?:\.{char}+)*(?:\*|:[1-9][0-9]{{0,3}})?"
    expression = rf"\{{[+#./;?&]?{variable}(?:,{variable})*\}}"
    plain = r"[!#$&-;=?@A-Z\[\]_a-z~\u00a0-\ud7ff\uf900-\u{10ffff}]"
    return f"(?:{plain}|%[0-9A-Fa-f]{{2}}|{expression})*"


def _regex() -> str:
    """Patterns that every engine reads alike: characters, escapes, classes, groups, quantifiers."""
    escape = r"\\(?:[dDwWsSnrtfv.*+?^$|()\[\]{}\\/-]|x[0-9A-Fa-f]{2}|u[0-9A-Fa-c][0-9A-Fa-f]{3})"
    escape = escape.replace("u[0-9A-Fa-c]", "u[0-9A-Ca-c]")
    member = r"(?:[A-Za-z0-9_ .,:;!?@#%=<>/'\"+*$(){}\u00a1-\ud7ff]" + rf"|{escape})"
    inside = rf"\[\^?(?:{member}|0-9|a-z|A-Z|a-f|A-F)+\]"
    plain = r"[A-Za-z0-9_ ,:;!@#%&=<>/'\"~`.\u00a1-\ud7ff-]"
    quantifier = r"(?:[*+?]\??|\{(?:[0-9]|[1-9][0-9])\}|\{(?:[0-9]|[1-9][0-9]),\})?"
    atom = f"(?:{plain}|{escape}|{inside}){quantifier}"
    for opening in (r"(?:\?(?::|=|!))?", r"(?:\?:)?", r"(?:\?:)?"):
        group = rf"\({opening}(?:{atom})*(?:\|(?:{atom})*)*\)"
        quantified = group + (quantifier if opening != r"(?:\?(?::|=|!))?" else "")
        atom = f"(?:{atom}|{quantified})"
    return rf"\^?(?:{atom})*(?:\|(?:{atom})*)*\$?"


_PATTERNS = {
    "date": lambda: _DATE,
    "time": lambda: _TIME,
    "date-time": lambda: f"{_DATE}[Tt]{_TIME}",
    "duration": lambda: _DURATION,
    "email": lambda: _EMAIL,
    "idn-email": _idn_email,
    "hostname": lambda: _HOSTNAME,
    "idn-hostname": _idn_hostname,
    "ipv4": lambda: _IPV4,
    "ipv6": lambda: _IPV6,
    "uuid": lambda: "[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}",
    "uri": lambda: _URI,
    "uri-reference": lambda: f"(?:{_URI}|{_RELATIVE})",
    "iri": lambda: _IRI,
    "iri-reference": lambda: f"(?:{_IRI}|{_IRI_RELATIVE})",
    "uri-template": _uri_template,
    "json-pointer": lambda: _POINTER,
    "relative-json-pointer": lambda: f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": _regex,
}

FORMATS = frozenset(_PATTERNS)
"""Formats of strings that are enforced. Any other name is an annotation."""

# Formats with a form for strings of bounded length, and the bounds between which it is used.
_SHORT: dict[str, tuple[Callable[[int], str], int, int]] = {
    "email": (_short_email, 0, 316),
    "idn-email": (_short_email, 0, 316),
    "hostname": (_hosts, 0, 250),
    "uri": (_short_uri, MIN_RUNS, MAX_RUNS),
    "iri": (functools.partial(_short_uri, more=_UCS), MIN_RUNS, MAX_RUNS),
    "uri-reference": (functools.partial(_short_uri, relative=True), MIN_RUNS, MAX_RUNS),
    "iri-reference": (
        functools.partial(_short_uri, more=_UCS, relative=True),
        MIN_RUNS,
        MAX_RUNS,
    ),
}

INTEGER_FORMATS = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
}
"""Formats that bound integers (OpenAPI)."""


@functools.lru_cache(maxsize=256)
def pattern_of(name: str, longest: int | None = None) -> Node:
    """The closed pattern of a format in `FORMATS`.

    Beside a maxLength of `longest`, mail addresses, hosts and references are of parts that cannot
    pass it, and not of any parts that happen not to: counting all at once takes too many states.
    """
    if longest is not None and name in _SHORT:
        form, least, most = _SHORT[name]
        if least <= longest <= most:
            pattern = _closed(form(longest))
            return pattern if least else from_pattern(pattern)
        if longest < least:
            more = (_UCS, _PRIVATE) if name.startswith("iri") else ("", "")
            uri, other = _uri(*more, brackets=False)
            whole = f"(?:{uri}|{other})" if name.endswith("reference") else uri
            return of_length(from_pattern(_closed(whole)), 0, longest)
    return from_pattern(_closed(_PATTERNS[name]()))


def _closed(text: str) -> Node:
    return close_full(parse(text, Dialect.ECMA, limited=False))

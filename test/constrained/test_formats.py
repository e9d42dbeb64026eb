"""Formats: what is accepted is valid by jsonschema-rs and, where it looks, by jsonschema; usual and
odd valid values are accepted; so are those of bounded length."""

from __future__ import annotations

import random

import jsonschema
import jsonschema_rs
import pytest

from phloem.constrained.automaton import Automaton, from_pattern
from phloem.constrained.formats import FORMATS, pattern_of

VALID = {
    "date": ["2024-02-29", "1999-12-31", "0001-01-01", "2000-02-29"],
    "date-time": ["2024-02-29T12:30:00Z", "1963-06-19t08:30:06.283185z", "1998-12-31T23:59:60Z"],
    "duration": ["P1DT2H", "P3W", "PT5S", "P1Y2M3DT4H5M6S"],
    "email": ["a.b@example.com", '"joe bloggs"@example.com', "a@[127.0.0.1]", "a@[IPv6:::1]"],
    "hostname": ["example.com", "localhost", "a--b.com", f"{'a' * 63}.com", "a.b.c.d.e.f.g"],
    "idn-email": ["a@example.com", "실례@실례.테스트", "δοκιμή@example.com"],
    "idn-hostname": ["example", "실례.테스트", "ö.de", "日本語", "a" * 63],
    "ipv4": ["192.168.0.1", "0.0.0.0", "255.255.255.255"],
    "ipv6": ["::1", "::", "2001:db8::ff00:42:8329", "1::d6:192.168.0.1", "::ffff:1.2.3.4"],
    "iri": ["http://é.com/é?é#é", "https://example.com", "mailto:a@b.c"],
    "iri-reference": ["é", "#é", "//é/b", "http://é.com"],
    "json-pointer": ["", "/a/b~1c", "/", "/é\n"],
    "regex": ["^[a-z]+$", r"\d{2,}(?:a|b)*", "([abc])+\\s+$", "a.b|c", r"(?=x)[^\]]"],
    "relative-json-pointer": ["0", "1/a", "2#"],
    "time": ["12:30:00Z", "23:59:59+01:00", "23:59:60Z", "15:59:60-08:00", "08:30:06.28z"],
    "uri": ["https://a:b@example.com:8080/a?b=c#d", "mailto:a@b.c", "urn:x:y", "http://[::1]/"],
    "uri-reference": ["/a/b", "#frag", "", "a/b?c", "//a.b/c", "./a:b"],
    "uri-template": ["http://example.com/{term:1}/{+x,y*}", "", "a%41b", "é😀{?q}"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}
INVALID = {
    "date": ["2023-02-29", "1900-02-29", "2024-13-01", "24-01-01"],
    "time": ["24:00:00Z", "12:00:60Z", "12:30:00", "22:59:60Z"],
    "email": ["a@b..c", ".a@b.c", "a@-b.c", f"{'a' * 65}@b.c", '"a <"@b.c'],
    "hostname": ["-a", "a-", "a_b", "ab--cd", f"{'a' * 64}.com", "a..b"],
    "ipv4": ["256.1.1.1", "01.2.3.4", "1.2.3"],
    "ipv6": ["1:2:3:4:5:6:7", "::1::", "1:2:3:4:5:6:7:8:9", "12345::"],
    "uri": ["http://a b", "/a", "http://a/%zz", "http://a/é"],
    "uri-template": ["{", "{}", "a}b", "{v:0}"],
    "regex": ["^(abc]", "[", "a**", "a{2,1}", "\\a"],
}


def walk(machine: Automaton, rng: random.Random) -> str | None:
    """A string of the automaton, or None when the walk went on too long."""
    state, text = 0, ""
    mean = rng.choice((4, 12, 60))
    for _ in range(4 * mean):
        if state in machine.accepting and rng.random() < 1.5 / mean:
            return text
        if not machine.edges[state]:
            break
        chars, state = rng.choice(machine.edges[state])
        low, high = rng.choice(chars)
        text += chr(rng.randint(low, high if rng.random() < 0.1 else min(high, low + 300)))
    return text if state in machine.accepting else None


def test_each_format_has_examples() -> None:
    assert set(VALID) == FORMATS


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_examples(name: str) -> None:
    machine = from_pattern(pattern_of(name))
    for text in VALID[name]:
        assert machine.accepts(text), text
    for text in INVALID.get(name, []):
        assert not machine.accepts(text), text


@pytest.mark.parametrize("longest", [None, 5, 40, 100, 300])
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_what_a_format_accepts_is_valid(name: str, longest: int | None) -> None:
    machine = from_pattern(pattern_of(name, longest))
    validator = jsonschema_rs.validator_for({"format": name}, validate_formats=True)
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    rng = random.Random(f"{name} {longest}")
    texts = [t for t in (walk(machine, rng) for _ in range(150)) if t is not None]
    assert texts
    for text in texts:
        assert validator.is_valid(text), text
        # It takes any zero in the number for a leading one.
        assert name == "relative-json-pointer" or checker.conforms(text, name), text


@pytest.mark.parametrize(
    ("name", "longest", "text"),
    [
        ("email", 100, "firstname.lastname@department.university.edu"),
        ("email", 254, "a" * 64 + "@" + "b" * 50 + ".com"),
        ("hostname", 100, "service-1.region-2.provider.example.com"),
        ("uri", 60, "https://user@example.com:8080/a/b.html?c=%20d#e"),
        ("uri", 255, "https://www.example.com/" + "a/" * 40 + "?q=%20x#y"),
        ("uri", 2048, "https://www.example.com/" + "a" * 900),
        ("uri-reference", 200, "../images/picture.png?size=large"),
    ],
)
def test_bounded_length(name: str, longest: int, text: str) -> None:
    machine = from_pattern(pattern_of(name, longest))
    assert machine.accepts(text)
    most = machine.lengths[1]
    assert most is None or most <= longest or longest < 10

"""Patterns mean what `re` says they mean, or are refused by name."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import jsonschema_rs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phloem.constrained import automaton
from phloem.constrained.automaton import Automaton
from phloem.constrained.base import (
    ConstraintError,
    LimitExceeded,
    MalformedConstraint,
    UnsupportedKeyword,
)
from phloem.constrained.pattern import (
    max_length,
    min_length,
    simplify,
)
from phloem.constrained.pattern_closing import close_full, close_search
from phloem.constrained.pattern_parser import Dialect, parse
from phloem.constrained.spec import Constraint, JsonSchema, Regex

Judge = Callable[[Constraint], Callable[[str], bool]]
ATOMS = ["a", "b", ".", "[ab]", "[^a]", r"\d", "[a-c]", r"\n", ""]


@st.composite
def patterns(draw: st.DrawFn, depth: int = 3) -> str:
    """Small regular expressions over a, b, digits and line feeds."""
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(ATOMS))
    inner = draw(patterns(depth=depth - 1))
    match draw(st.integers(0, 3)):
        case 0:
            return inner + draw(patterns(depth=depth - 1))
        case 1:
            return f"(?:{inner}|{draw(patterns(depth=depth - 1))})"
        case 2:
            return f"(?:{inner}){draw(st.sampled_from(['*', '+', '?', '{2}', '{1,3}', '{0,2}']))}"
        case _:
            return f"({inner})"


TEXTS = st.text(alphabet="abc1\n", max_size=6)


CONDITIONS = ["^", "$", r"\b", r"\B", "(?={})", "(?!{})", "(?<={})", "(?<!{})"]


@st.composite
def conditional_patterns(draw: st.DrawFn, depth: int = 3) -> str:
    """Patterns with anchors, word boundaries and look-around anywhere."""
    if depth == 0:
        return draw(st.sampled_from(ATOMS))
    match draw(st.integers(0, 4)):
        case 0:
            return draw(patterns(depth=depth))
        case 1:
            condition = draw(st.sampled_from(CONDITIONS))
            behind = condition.startswith("(?<")
            fixed = st.sampled_from(["a", "[ab]", "^", "ab|[^a]b", r"(?<!a)b", r".\n"])
            inner = fixed if behind else conditional_patterns(depth=depth - 1)
            return condition.format(draw(inner))
        case 2:
            sign = draw(st.sampled_from(["*", "+", "?", "{2}", "{1,2}"]))
            return f"(?:{draw(conditional_patterns(depth=depth - 1))}){sign}"
        case kind:
            left = draw(conditional_patterns(depth=depth - 1))
            right = draw(conditional_patterns(depth=depth - 1))
            return left + right if kind == 3 else f"(?:{left}|{right})"


def full(pattern: str) -> Automaton:
    return automaton.from_pattern(close_full(parse(pattern, Dialect.PYTHON)))


@given(patterns(), TEXTS)
def test_full_match_agrees_with_re(pattern: str, text: str) -> None:
    assert full(pattern).accepts(text) == bool(re.fullmatch(pattern, text))


@given(conditional_patterns(), st.lists(TEXTS, min_size=1))
def test_conditions_agree_with_re(pattern: str, texts: list[str]) -> None:
    if r"\B" in pattern:  # the empty string differs between versions of Python
        texts = [t for t in texts if t]
    machine = full(pattern)
    for text in texts:
        assert machine.accepts(text) == bool(re.fullmatch(pattern, text)), text


@given(conditional_patterns(), st.lists(TEXTS, min_size=1))
def test_searched_conditions_agree_with_re(pattern: str, texts: list[str]) -> None:
    machine = automaton.from_pattern(close_search(parse(pattern, Dialect.ECMA)))
    for text in texts:
        if r"\B" in pattern and not text:
            continue
        expected = re.search(pattern.replace("$", r"\Z"), text)
        assert machine.accepts(text) == bool(expected), text


@given(patterns(), TEXTS, st.sampled_from([("", ""), ("^", ""), ("", "$"), ("^", "$")]))
def test_search_agrees_with_re(pattern: str, text: str, anchors: tuple[str, str]) -> None:
    anchored = f"{anchors[0]}(?:{pattern}){anchors[1]}"
    machine = automaton.from_pattern(close_search(parse(anchored, Dialect.ECMA)))
    # In Python `$` also stands before a last line feed; JSON Schema's does not.
    expected = re.search(anchored.replace("$", r"\Z").replace(".", r"[^\n]"), text)
    assert machine.accepts(text) == bool(expected)


@given(patterns(), TEXTS)
def test_simplification_and_lengths_keep_the_language(pattern: str, text: str) -> None:
    node = parse(pattern, Dialect.PYTHON)
    plain, simple = automaton.from_pattern(node), automaton.from_pattern(simplify(node))
    assert plain.accepts(text) == simple.accepts(text)
    if plain.accepts(text):
        longest = max_length(node)
        assert min_length(node) <= len(text)
        assert longest is None or len(text) <= longest


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        ("^(yes|no)$", ["yes", "no"], ["", "yesno"]),
        ("^a|b$", ["a", "b"], ["ab"]),
        (r"\w+", ["aZ_9"], ["é", "a b"]),
        (r"[^\w]", ["-", " "], ["é", "a"]),
        (r"\D", ["x", "é"], ["1", "٣"]),
        (r"\S+", ["é中"], ["a b", "\u00a0"]),
        (r"[一-三]{2}[à-ü]", ["一三ü"], ["一ü", "一二ü"]),
        ("(👍🏽|👎🏽){2}", ["👍🏽👎🏽"], ["👍🏽"]),
        ("x{b}", ["x{b}"], ["xb"]),
        (r"[]a\-z]+", ["]a-"], ["b"]),
        (r"\x41\u00e9\U0001F600", ["Aé😀"], ["A"]),
        ("a{,2}", ["", "aa"], ["aaa"]),
    ],
)
def test_meaning(pattern: str, inside: list[str], outside: list[str]) -> None:
    machine = full(pattern)
    assert all(machine.accepts(text) for text in inside)
    assert not any(machine.accepts(text) for text in outside)


@pytest.mark.parametrize(
    ("pattern", "error", "named"),
    [
        (r"(a)\1", UnsupportedKeyword, "back-reference"),
        ("(?<=a*)b", MalformedConstraint, "fixed width"),
        ("(?<=a(?=b))b", UnsupportedKeyword, "inside look-behind"),
        ("(?i)a", UnsupportedKeyword, "inline flag"),
        ("a++", UnsupportedKeyword, "possessive"),
        ("[[:alpha:]]", UnsupportedKeyword, "POSIX"),
        ("[", MalformedConstraint, "unterminated character class"),
        ("(a", MalformedConstraint, "unterminated group"),
        ("a)", MalformedConstraint, "unbalanced"),
        ("*a", MalformedConstraint, "nothing to repeat"),
        ("a**", MalformedConstraint, "multiple repeat"),
        ("[b-a]", MalformedConstraint, "range"),
        ("a{3,2}", MalformedConstraint, "out of order"),
        ("a\\", MalformedConstraint, "backslash"),
        (r"\uD800", MalformedConstraint, "surrogate"),
        ("(" * 65 + "a" + ")" * 65, LimitExceeded, "64"),
        ("a" * 2049, LimitExceeded, "2048"),
        ("((a{100}){100}){100}", LimitExceeded, "10000"),
    ],
)
def test_refusals_name_the_construct(
    pattern: str, error: type[ConstraintError], named: str
) -> None:
    with pytest.raises(error, match=re.escape(named)):
        close_full(parse(pattern, Dialect.PYTHON))


def test_state_explosion_is_an_error_and_not_a_hang() -> None:
    with pytest.raises(LimitExceeded):
        full("(a|b)*a(a|b){16}")


@given(patterns(), patterns(), TEXTS)
def test_automaton_operations(left: str, right: str, text: str) -> None:
    one, other = full(left), full(right)
    both, only = automaton.intersection(one, other), automaton.difference(one, other)
    assert both.accepts(text) == (one.accepts(text) and other.accepts(text))
    assert only.accepts(text) == (one.accepts(text) and not other.accepts(text))
    assert automaton.disjoint(only, other)


@given(st.lists(TEXTS, min_size=1), TEXTS)
def test_words(words: list[str], text: str) -> None:
    assert automaton.words(words).accepts(text) == (text in words)


CLASSES = st.sampled_from(
    [r"\s", r"\S", r"\w", r"\W", r"\D", r"\p{L}", r"[\s\d]", r"[^\w]", '"', r"\\"]
)


@settings(max_examples=150)
@example(pattern=r"^(?!.)\sa", texts=["\u2028a"], lengths=(0, 3))
@given(
    pattern=st.builds(
        "{}{}{}".format,
        conditional_patterns(depth=2),
        CLASSES,
        conditional_patterns(depth=2),
    ),
    texts=st.lists(st.text(alphabet='abc1\n "\\éß\u00a0٣\u2028\x1c\x85', max_size=6), min_size=3),
    lengths=st.tuples(st.integers(0, 3), st.integers(3, 6)),
)
def test_no_schema_takes_what_a_validator_refuses(
    judge: Judge, pattern: str, texts: list[str], lengths: tuple[int, int]
) -> None:
    low, high = lengths
    schema = {"type": "string", "pattern": pattern, "minLength": low, "maxLength": high}
    try:
        validator = jsonschema_rs.validator_for(schema)
    except (ValueError, jsonschema_rs.ValidationError):
        return  # not an expression to jsonschema-rs
    try:
        accepts = judge(JsonSchema(schema=json.dumps(schema)))
    except MalformedConstraint:  # nothing matches
        assert not any(map(validator.is_valid, filter(str.isascii, texts)))
        return
    for text in texts:
        taken, valid = accepts(json.dumps(text, ensure_ascii=False)), validator.is_valid(text)
        assert valid or not taken, text
        if text.isascii() and not any(c in text for c in "\x1c\x85"):
            assert taken == valid, text


@settings(max_examples=100)
@given(pattern=conditional_patterns(), texts=st.lists(TEXTS, min_size=3))
def test_what_an_engine_takes_matches(judge: Judge, pattern: str, texts: list[str]) -> None:
    texts = [t for t in texts if t or r"\B" not in pattern]
    try:
        accepts = judge(Regex(pattern=pattern))
    except MalformedConstraint:  # nothing matches
        assert not any(re.fullmatch(pattern, text) for text in texts)
        return
    for text in texts:
        assert accepts(text) == bool(re.fullmatch(pattern, text)), text

"""What every grammar backend promises, against the plain oracle."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phloem.constrained.backends import BACKENDS, load_backend
from phloem.constrained.base import Backend, ConstraintError, Matcher, MatcherRejected
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.reference import ReferenceMatcher
from phloem.constrained.regex import parse_regex
from phloem.constrained.spec import Choice, JsonSchema, Regex, Whitespace
from phloem.constrained.vocab import Vocabulary

# Merged tokens, pieces of characters, an unused id past the table, two end tokens and a control
# token whose text would be legal were it not special.
TOKENS = [
    *[b"a", b"b", b"c", b"ab", b"abc", b"aa", b"1", b"12", b"-", b" ", b'"', b'{"', b'":'],
    *["é".encode(), "é".encode()[:1], "é".encode()[1:], "日本".encode(), "日本".encode()[:4]],
    *["日本".encode()[4:], b"}", b"x", b"", b"", b"", b"a"],
]
STOPS = (21, 22)
VOCABULARY = Vocabulary(TOKENS, frozenset({21, 22, 23, 24}), STOPS, size=40)
END = STOPS[0]

PATTERNS = [
    "abc",
    "a*b",
    "(ab|abc)+",
    "(a|aa|é)*c",
    "[a-c]{2,3}",
    "日本(é|b)?",
    r"-?\d+",
    "(yes|ab)x",
    "[^a]b",
    ".{2}",
    "a?",
]


@pytest.fixture(scope="module", params=sorted(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    return load_backend(request.param, VOCABULARY)


def mask_of(matcher: Matcher) -> set[int]:
    row = np.full(words(VOCABULARY.size), 0x5A5A5A5A, dtype=np.int32)
    matcher.fill(row)
    return set(allowed_tokens(row, words(VOCABULARY.size) * 32))


def oracle(pattern: str) -> ReferenceMatcher:
    return ReferenceMatcher(parse_regex(pattern), VOCABULARY)


@settings(deadline=None, max_examples=80)
@given(pattern=st.sampled_from(PATTERNS), data=st.data())
def test_masks_are_the_oracles(backend: Backend, pattern: str, data: st.DataObject) -> None:
    matcher = backend.compile(Regex(pattern=pattern)).matcher()
    reference = oracle(pattern)
    accepted = 0
    for _ in range(12):
        allowed = reference.allowed()
        assert mask_of(matcher) == allowed
        assert matcher.is_complete == reference.is_complete
        if accepted and data.draw(st.integers(0, 3)) == 0:
            count = data.draw(st.integers(1, accepted))
            matcher.rollback(count)
            reference.rollback(count)
            accepted -= count
            continue
        steps = sorted(allowed - set(STOPS))
        if not steps:
            break
        token = data.draw(st.sampled_from(steps))
        matcher.accept(token)
        reference.accept(token)
        accepted += 1


@st.composite
def patterns(draw: st.DrawFn, depth: int = 3) -> str:
    """A pattern over the vocabulary's characters; it may be ambiguous, nested and empty."""
    atom = st.sampled_from(["a", "b", "c", "é", "(日本)", "1", "[ab]", "[^a]", ".", "[a-cé]"])
    if depth == 0:
        return draw(atom)
    inner = patterns(depth - 1)
    match draw(st.sampled_from(["atom", "sequence", "choice", "loop"])):
        case "sequence":
            return draw(inner) + draw(inner)
        case "choice":
            return f"({draw(inner)}|{draw(inner)})"
        case "loop":
            return (
                f"({draw(inner)}){draw(st.sampled_from(['*', '+', '?', '{2}', '{1,3}', '{2,}']))}"
            )
        case _:
            return draw(atom)


@settings(deadline=None, max_examples=60)
@given(pattern=patterns(), data=st.data())
def test_masks_of_random_patterns(backend: Backend, pattern: str, data: st.DataObject) -> None:
    matcher = backend.compile(Regex(pattern=pattern)).matcher()
    reference = oracle(pattern)
    for _ in range(6):
        allowed = reference.allowed()
        # Empty where the vocabulary has no token for the rest of a character.
        assert mask_of(matcher) == allowed, pattern
        steps = sorted(allowed - set(STOPS))
        if not steps:
            break
        token = data.draw(st.sampled_from(steps))
        matcher.accept(token)
        reference.accept(token)


@settings(deadline=None, max_examples=60)
@given(
    texts=st.lists(
        st.lists(st.sampled_from(["a", "b", "日本", "é", "1"]), min_size=1, max_size=4).map(
            "".join
        ),
        min_size=1,
        max_size=6,
        unique=True,
    ),
    data=st.data(),
)
def test_forced_text_begins_every_continuation(
    backend: Backend, texts: list[str], data: st.DataObject
) -> None:
    matcher = backend.compile(Choice(choices=tuple(texts))).matcher()
    written = b""
    while True:
        left = [t.encode()[len(written) :] for t in texts if t.encode().startswith(written)]
        forced = matcher.forced_string().encode()
        assert all(rest.startswith(forced) for rest in left)
        if b"" not in left and _is_text(written):
            assert forced == _shared(left).decode(errors="ignore").encode()
        steps = sorted(mask_of(matcher) - set(STOPS))
        if not steps:
            break
        token = data.draw(st.sampled_from(steps))
        matcher.accept(token)
        written += TOKENS[token]
    assert written.decode() in texts


def _shared(texts: list[bytes]) -> bytes:
    """The longest beginning of all."""
    length = len(texts[0])
    while any(not t.startswith(texts[0][:length]) for t in texts):
        length -= 1
    return texts[0][:length]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("pattern", PATTERNS)
def test_illegal_tokens_are_rejected_and_change_nothing(backend: Backend, pattern: str) -> None:
    matcher = backend.compile(Regex(pattern=pattern)).matcher()
    allowed = mask_of(matcher)
    for token in range(VOCABULARY.size):
        if token not in allowed:
            with pytest.raises(MatcherRejected):
                matcher.accept(token)
            assert mask_of(matcher) == allowed


def test_end_tokens_only_when_complete(backend: Backend) -> None:
    matcher = backend.compile(Regex(pattern="ab?")).matcher()
    assert not mask_of(matcher) & set(STOPS)
    assert not matcher.is_complete
    matcher.accept(0)
    assert set(STOPS) < mask_of(matcher)
    matcher.accept(1)
    assert mask_of(matcher) == set(STOPS)
    assert matcher.is_complete
    assert not matcher.is_terminated
    matcher.accept(STOPS[1])
    assert matcher.is_terminated
    assert mask_of(matcher) == set()
    with pytest.raises(MatcherRejected):
        matcher.accept(0)
    matcher.rollback(2)
    assert not matcher.is_terminated
    assert set(STOPS) | {1} == mask_of(matcher)
    with pytest.raises(ValueError, match="roll back"):
        matcher.rollback(2)


def test_special_tokens_are_never_text(backend: Backend) -> None:
    compiled = backend.compile(Regex(pattern=r"[\s\S]*"))
    allowed = mask_of(compiled.matcher())
    assert not allowed & {23, 24}
    assert max(allowed) < len(TOKENS)
    assert compiled.memory_bytes > 0


def test_forced_text(backend: Backend) -> None:
    matcher = backend.compile(Choice(choices=("日本é", "日本b"))).matcher()
    assert matcher.forced_string() == "日本"
    matcher.accept(16)
    assert matcher.forced_string() == ""
    matcher.accept(13)
    assert matcher.forced_string() == ""
    matcher.accept(END)
    assert matcher.forced_string() == ""


def test_matchers_of_one_grammar_are_independent(backend: Backend) -> None:
    compiled = backend.compile(Regex(pattern="ab"))
    one, other = compiled.matcher(), compiled.matcher()
    one.accept(0)
    assert mask_of(one) == {1}
    assert mask_of(other) == {0, 3}


def test_schemas(backend: Backend) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 12]}}, "required": ["a"]}
    closed = JsonSchema(
        schema=json.dumps({**schema, "additionalProperties": False}), whitespace=Whitespace.COMPACT
    )
    matcher = backend.compile(closed).matcher()
    assert matcher.forced_string() == '{"a":1'
    for token in (11, 0, 12):
        assert token in mask_of(matcher)
        matcher.accept(token)
    assert mask_of(matcher) == {6, 7}
    matcher.accept(7)
    assert mask_of(matcher) == {19}


def test_refusals_are_constraint_errors(backend: Backend) -> None:
    for constraint in (Regex(pattern="(a"), Choice(choices=()), JsonSchema(schema="{")):
        with pytest.raises(ConstraintError):
            backend.compile(constraint)

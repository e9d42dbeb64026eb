"""Kept masks are the engine's own, bit for bit, wherever texts of a grammar lead."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained import mask_cache
from phloem.constrained.backends import load_backend
from phloem.constrained.base import CompiledGrammar, ConstraintError, Matcher, MatcherRejected
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.closing import ClosingGrammar, ClosingVocabulary
from phloem.constrained.grammar_text import LoweredGrammar
from phloem.constrained.lowering import lower
from phloem.constrained.mask_cache import CachingGrammar, MaskCache
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Continued,
    Ebnf,
    JsonDocuments,
    JsonLines,
    JsonObject,
    JsonSchema,
    Regex,
    Whitespace,
)
from phloem.constrained.vocab import Vocabulary

STOPS = (256, 258)
ENGINES = ("xgrammar", "llguidance")
PIECES = [
    *('{"', '":', '": ', '":"', '","', '"}', '"]', "]}", "}}", "[[", '"name":', "true", "12", "0."),
    *("aa", "ab", "abc", "  ", "\n  ", "é", "日", "日本", '\\"', "\\u", 'a","b"', "x" * 9, "2024-"),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Bytes, two end tokens, a control token, pieces of JSON, halves of characters."""
    tokens = [bytes([b]) for b in range(256)] + [b"", b"", b"</s>"]
    tokens += [p.encode() for p in PIECES] + ["日".encode()[:2], "é".encode()[1:] + b"a", b"ab"]
    return Vocabulary(
        tokens,
        special_ids=frozenset({256, 257, 258}),
        stop_ids=STOPS,
        size=len(tokens) + 40,
    )


@pytest.fixture(scope="module")
def pieces(vocabulary: Vocabulary) -> ClosingVocabulary:
    return ClosingVocabulary(vocabulary)


def of_schema(schema: Any, whitespace: Whitespace = Whitespace.BOUNDED) -> JsonSchema:
    return JsonSchema(schema=json.dumps(schema), whitespace=whitespace)


RECORD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 9},
        "born": {"type": "string", "format": "date"},
        "mail": {"type": "string", "format": "email"},
        "n": {"type": "number", "minimum": -3.5, "multipleOf": 0.5},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", 1]}, "uniqueItems": True},
    },
    "required": ["name", "n"],
}
TREE = {
    "$defs": {"t": {"type": "object", "properties": {"next": {"$ref": "#/$defs/t"}}}},
    "$ref": "#/$defs/t",
}
CONSTRAINTS: dict[str, Constraint] = {
    "choice": Choice(choices=("yes", "no", "maybe", "日本", "日暮")),
    "regex": Regex(pattern="(a|b)*a(a|b){6}|[^a]{3}é+[一-龥]"),
    "object": JsonObject(whitespace=Whitespace.COMPACT),
    **{f"record, {layout}": of_schema(RECORD, layout) for layout in Whitespace},
    "closed": of_schema({**RECORD, "additionalProperties": False}, Whitespace.COMPACT),
    "tree": of_schema(TREE),
    "branches": of_schema({"anyOf": [{"type": "string", "pattern": "^a+b"}, {"maximum": 99}]}),
    "lines": JsonLines(schema=json.dumps({"type": "boolean"}), max_lines=3),
    "documents": JsonDocuments(
        schema=json.dumps({"type": "integer"}), begin="<", separator="|", end=">", max_documents=2
    ),
    "continued": Continued(constraint=of_schema(RECORD, Whitespace.COMPACT), prefix='{"name":"a'),
    "left": Ebnf(grammar='root ::= root "+" t | t\nt ::= "(" root ")" | [0-9]+'),
    "negated": Ebnf(grammar='root ::= [^a\\x00-\\x1f]{2,4} "a" [\\uD7F0-\\uE010]'),
    "escapes": Ebnf(grammar='root ::= "\\u65e5\\x41\\n" ("日" | "é")* "q"?'),
}


def compiled(
    constraint: Constraint, engine: str, vocabulary: Vocabulary, pieces: ClosingVocabulary
) -> tuple[CompiledGrammar, CachingGrammar] | None:
    """An engine's grammar, and the same with its masks kept; None if the engine refuses it."""
    lowered = lower(constraint)
    backend = load_backend(engine, vocabulary)
    try:
        plain, again = backend.compile_grammar(lowered), backend.compile_grammar(lowered)
    except ConstraintError:
        return None
    closings = ClosingGrammar(lowered, pieces)
    assert closings.minimum is not None
    caching = CachingGrammar(again, closings, lowered.prefix.encode())
    caching.matcher()  # the first text is not followed
    return plain, caching


def filled(matcher: Matcher, vocabulary: Vocabulary) -> list[int]:
    row = np.full(words(vocabulary.size), 0x5A5A5A5A, np.int32)
    matcher.fill(row)
    return row.tolist()


def compare(
    plain: Matcher, caching: Matcher, vocabulary: Vocabulary, rng: random.Random, length: int
) -> int:
    """Walk both along one random text, with steps back; how many masks were compared."""
    accepted = 0
    for step in range(length):
        expected = filled(plain, vocabulary)
        assert filled(caching, vocabulary) == expected
        assert caching.is_complete == plain.is_complete
        assert caching.is_terminated == plain.is_terminated
        legal = allowed_tokens(np.array(expected, np.int32), vocabulary.size)
        if not legal:
            return step
        if rng.random() < 0.15:
            back = rng.randint(0, accepted)
            for matcher in (plain, caching):
                matcher.rollback(back)
            accepted -= back
            continue
        single = [token for token in legal if token < 256]
        token = rng.choice(single if single and rng.random() < 0.5 else legal)
        for matcher in (plain, caching):
            matcher.accept(token)
        accepted += 1
    return length


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_are_the_engines(
    name: str, engine: str, vocabulary: Vocabulary, pieces: ClosingVocabulary
) -> None:
    pair = compiled(CONSTRAINTS[name], engine, vocabulary, pieces)
    if pair is None:
        assert engine == "llguidance"
        return
    plain, caching = pair
    rng = random.Random(name)
    masks = sum(compare(plain.matcher(), caching.matcher(), vocabulary, rng, 40) for _ in range(40))
    assert masks > 40
    assert caching.memory_bytes > plain.memory_bytes


@pytest.mark.parametrize("engine", ENGINES)
def test_halves_of_surrogates_are_told_apart(
    engine: str, vocabulary: Vocabulary, pieces: ClosingVocabulary
) -> None:
    pair = compiled(CONSTRAINTS["negated"], engine, vocabulary, pieces)
    assert pair is not None
    plain, caching = pair
    for lead in (0xE1, 0xED, 0xE1, 0xED):
        one, other = plain.matcher(), caching.matcher()
        for matcher in (one, other):
            matcher.accept(lead)
        assert filled(other, vocabulary) == filled(one, vocabulary)


_LEAVES = st.sampled_from(
    [
        *({"type": "string"}, {"type": "integer"}, {"type": "boolean"}, {"enum": ["x", 1, None]}),
        *({"type": "string", "maxLength": 4}, {"type": "string", "pattern": "^[a-c]{2,5}$"}),
        *({"type": "number", "exclusiveMinimum": 0}, {"type": "string", "format": "time"}, {}),
    ]
)
_SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda properties, required, more: {
                "type": "object",
                "properties": properties,
                "required": sorted(properties)[:required],
                "additionalProperties": more,
            },
            st.dictionaries(st.sampled_from(["a", "b", "name"]), inner, max_size=3),
            st.integers(0, 2),
            st.booleans(),
        ),
        st.builds(lambda items: {"type": "array", "items": items, "maxItems": 3}, inner),
        st.builds(lambda one, other: {"anyOf": [one, other]}, inner, inner),
    ),
    max_leaves=5,
)


@given(
    schema=_SCHEMAS,
    whitespace=st.sampled_from(list(Whitespace)),
    engine=st.sampled_from(ENGINES),
    seed=st.integers(0, 1 << 30),
)
def test_masks_under_any_schema_are_the_engines(
    schema: Any,
    whitespace: Whitespace,
    engine: str,
    seed: int,
    vocabulary: Vocabulary,
    pieces: ClosingVocabulary,
) -> None:
    pair = compiled(of_schema(schema, whitespace), engine, vocabulary, pieces)
    if pair is None:
        assert engine == "llguidance"
        return
    rng = random.Random(seed)
    for _ in range(6):
        compare(pair[0].matcher(), pair[1].matcher(), vocabulary, rng, 25)


class CountingMatcher:
    """A matcher that counts its masks."""

    def __init__(self, inner: Matcher) -> None:
        self.inner = inner
        self.masks = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def fill(self, row: Any) -> None:
        self.masks += 1
        self.inner.fill(row)


class CountingGrammar:
    engine, memory_bytes = "counting", 100

    def __init__(self, inner: CompiledGrammar) -> None:
        self.inner = inner
        self.made: list[CountingMatcher] = []

    def matcher(self) -> Any:
        self.made.append(CountingMatcher(self.inner.matcher()))
        return self.made[-1]


def counting(
    vocabulary: Vocabulary, pieces: ClosingVocabulary, constraint: Constraint
) -> tuple[CountingGrammar, CachingGrammar]:
    lowered: LoweredGrammar = lower(constraint)
    counted = CountingGrammar(load_backend("xgrammar", vocabulary).compile_grammar(lowered))
    return counted, CachingGrammar(counted, ClosingGrammar(lowered, pieces))


def follow(grammar: CachingGrammar, text: bytes, vocabulary: Vocabulary) -> None:
    matcher = grammar.matcher()
    for byte in text:
        filled(matcher, vocabulary)
        matcher.accept(byte)


def test_the_engine_is_asked_where_no_text_was_before(
    vocabulary: Vocabulary, pieces: ClosingVocabulary
) -> None:
    counted, grammar = counting(vocabulary, pieces, Regex(pattern="[a-z]{3}[0-9]{2}"))
    for text in (b"abc12", b"abc12", b"xyz34", b"xyz3"):
        follow(grammar, text, vocabulary)
    # The first is not followed, the second fills the cache, all others are like it.
    assert [matcher.masks for matcher in counted.made] == [5, 5, 0, 0]


def test_a_refused_token_changes_nothing(vocabulary: Vocabulary, pieces: ClosingVocabulary) -> None:
    _, grammar = counting(vocabulary, pieces, Regex(pattern="[a-z]{3}[0-9]{2}"))
    follow(grammar, b"abc12", vocabulary)
    matcher = grammar.matcher()
    before = filled(matcher, vocabulary)
    for token in (ord("1"), STOPS[0], 257, vocabulary.size - 1):
        with pytest.raises(MatcherRejected):
            matcher.accept(token)
    assert filled(matcher, vocabulary) == before


def test_masks_take_no_more_than_their_bound(
    vocabulary: Vocabulary, pieces: ClosingVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    closings = ClosingGrammar(lower(JsonObject()), pieces)
    cache = MaskCache(closings)
    row = np.arange(words(vocabulary.size), dtype=np.int32)
    monkeypatch.setattr(mask_cache, "MAX_BYTES", 10 * row.nbytes)
    state = cache.start(b'{"')
    for byte in b"a few different states, many masks" * 3:
        assert state is not None
        row[0] += 1
        cache.keep(state, row)
        state = cache.after(state, byte)
        assert cache.memory_bytes <= 10 * row.nbytes + row.nbytes + mask_cache.ENTRY_BYTES
    assert len(cache) > 0


def test_equal_masks_are_kept_once(vocabulary: Vocabulary, pieces: ClosingVocabulary) -> None:
    cache = MaskCache(ClosingGrammar(lower(Regex(pattern="[a-z]{30}")), pieces))
    row = np.arange(words(vocabulary.size), dtype=np.int32)
    state = cache.start(b"")
    for byte in b"abcdefghij":
        assert state is not None
        cache.keep(state, row)
        state = cache.after(state, byte)
    assert (len(cache), cache.memory_bytes) == (10, row.nbytes + 10 * mask_cache.ENTRY_BYTES)


def test_what_is_dear_to_follow_is_left_to_the_engine(
    vocabulary: Vocabulary, pieces: ClosingVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, grammar = counting(vocabulary, pieces, of_schema(RECORD, Whitespace.COMPACT))
    monkeypatch.setattr(mask_cache, "MAX_WORK", 0)
    text = b'{"name":"abc","n":2.5,'
    for _ in range(3):
        follow(grammar, text, vocabulary)
    assert [matcher.masks for matcher in counted.made] == [len(text)] * 3


def test_masks_go_with_the_graph_of_their_states(
    vocabulary: Vocabulary, pieces: ClosingVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phloem.constrained.closing_states.MAX_STATES", 8)
    closings = ClosingGrammar(lower(of_schema(RECORD, Whitespace.COMPACT)), pieces)
    cache = MaskCache(closings)
    row = np.zeros(words(vocabulary.size), np.int32)
    state, sizes = cache.start(b""), []
    for byte in b'{"name":"abc","n":2.5,"tags":["a","bb"]}':
        assert state is not None
        before = closings.recogniser.generation
        state = cache.after(state, byte)
        assert state is not None
        cache.keep(state, row)
        sizes.append((closings.recogniser.generation > before, len(cache)))
    assert any(dropped for dropped, _ in sizes)
    assert all(size == 1 for dropped, size in sizes if dropped)

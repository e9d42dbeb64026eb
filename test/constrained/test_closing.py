"""Closing within a budget, over grammars of every kind and a sampler that takes any legal token.

The oracle for what a mask must keep is the cost after each token alone; the oracle for costs is the
engine: what is said to complete a text must, and with a vocabulary of bytes nothing shorter may.
"""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from phloem.constrained import closing as closing_module
from phloem.constrained import closing_costs, closing_states
from phloem.constrained.backends import load_backend
from phloem.constrained.base import Backend, ConstraintError
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.closing import Closing, ClosingGrammar, ClosingVocabulary
from phloem.constrained.closing_utf8 import byte_trie, merge, negate
from phloem.constrained.grammar_text import LoweredGrammar
from phloem.constrained.lowering import lower
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Ebnf,
    JsonObject,
    JsonSchema,
    Regex,
    Whitespace,
)
from phloem.constrained.vocab import Vocabulary

STOP, CONTROL = 256, 257
PIECES = [
    *('{"', '":', '":"', '","', '"}', '"]', "]}", "}}", "[[", "[{", '"name":', "name", "true"),
    *("null", "aa", "ab", "abc", "  ", "\n  ", "00", "12", "0.", "é", "日", "日本", '\\"', "\\u"),
    *(']]]]', "}]", 'a","', 'a","b"', "x" * 20, " " * 90, "[" * 12, "((", "+("),
]  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """Bytes, pieces of JSON, halves of characters, a piece that is there twice."""
    tokens = [bytes([b]) for b in range(256)] + [b"", b""]
    tokens += [p.encode() for p in PIECES] + ["日".encode()[:2], "é".encode()[1:] + b"a", b"ab"]
    return Vocabulary(
        tokens,
        special_ids=frozenset({STOP, CONTROL}),
        stop_ids=(STOP,),
        size=len(tokens) + 40,
    )


@pytest.fixture(scope="module")
def engine(vocabulary: Vocabulary) -> Backend:
    return load_backend("xgrammar", vocabulary)


@pytest.fixture(scope="module")
def pieces(vocabulary: Vocabulary) -> ClosingVocabulary:
    return ClosingVocabulary(vocabulary)


def of_schema(schema: Any, whitespace: Whitespace = Whitespace.BOUNDED) -> JsonSchema:
    return JsonSchema(schema=json.dumps(schema), whitespace=whitespace)


PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 2},
    },
    "required": ["name", "age", "tags"],
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "number"},
                "kids": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
            "required": ["value", "kids"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
CONSTRAINTS: dict[str, Constraint] = {
    "choice": Choice(choices=("yes", "no", "maybe", "日本")),
    "regex": Regex(pattern="a{3,}b|c{2}[0-9]{3}"),
    "counted": Regex(pattern="(ab{2,30}c?){2,5}x*"),
    "nondeterministic": Regex(pattern="(a|b)*a(a|b){6}"),
    "characters": Regex(pattern="[^a]{3}é+[一-龥]"),
    "object": JsonObject(),
    "person": of_schema(PERSON),
    "closed": of_schema({**PERSON, "additionalProperties": False}, Whitespace.COMPACT),
    "indented": of_schema({**PERSON, "additionalProperties": False}, Whitespace.INDENTED),
    "tree": of_schema(TREE),
    "lengths": of_schema(
        {
            "type": "array",
            "items": {"type": "string", "minLength": 3, "maxLength": 7},
            "minItems": 2,
        }
    ),
    "date": of_schema({"type": "string", "format": "date-time"}),
    "left": Ebnf(grammar='root ::= root "+" t | t\nt ::= "(" root ")" | [0-9]+'),
    "ambiguous": Ebnf(grammar='root ::= root root | "a" | "b" root "c"'),
    "middle": Ebnf(grammar='root ::= "a" root "a" | "a"'),
    "palindromes": Ebnf(grammar='root ::= "a" root "b" | "a" root "c" | ""'),
    "empty parts": Ebnf(
        grammar='root ::= a b c\na ::= "x"?\nb ::= a a "y"* | c\nc ::= "" | "z" c "w"'
    ),
    "escapes": Ebnf(
        grammar='root ::= ("a" | b{2,4}){3} "\\u65e5\\x41\\n" [^\\x00-\\x7f\\]]\n'
        'b ::= "q" # comment\n  ("w" | b)'
    ),
}


def sample(
    constraint: Constraint,
    engine: Backend,
    grammar: ClosingGrammar,
    budget: int,
    rng: random.Random,
) -> None:
    """Sample evenly among what masks leave until a stop token or the budget's end; the text must be
    complete then."""
    matcher = engine.compile(constraint).matcher()
    closing = grammar.closing()
    row = np.zeros(words(grammar.vocabulary.size), np.int32)
    for spent in range(budget):
        matcher.fill(row)
        closing.narrow(row, budget - spent)
        token = rng.choice(allowed_tokens(row, grammar.vocabulary.size))
        if token == STOP:
            break
        matcher.accept(token)
        closing.advance(token)
    assert matcher.is_complete


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_every_budget_is_kept(name: str, engine: Backend, pieces: ClosingVocabulary) -> None:
    rng = random.Random(name)
    grammar = ClosingGrammar(lower(CONSTRAINTS[name]), pieces)
    assert grammar.minimum is not None
    for budget in range(grammar.minimum, grammar.minimum + 41):
        sample(CONSTRAINTS[name], engine, grammar, budget, rng)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_masks_lose_exactly_what_cannot_be_completed(
    name: str, engine: Backend, pieces: ClosingVocabulary, vocabulary: Vocabulary
) -> None:
    """At any state and for any budget; so also that nothing is lost when nothing is looked at."""
    rng = random.Random(name)
    grammar = ClosingGrammar(lower(CONSTRAINTS[name]), pieces)
    compiled = engine.compile(CONSTRAINTS[name])
    for _ in range(3):
        matcher, closing = compiled.matcher(), grammar.closing()
        for _ in range(15):
            row = np.zeros(words(vocabulary.size), np.int32)
            matcher.fill(row)
            legal = set(allowed_tokens(row, vocabulary.size))
            cost = closing.cost()
            assert cost is not None
            assert (cost == 0) == matcher.is_complete == (STOP in legal)
            after = {t: cost_after(closing, t) for t in legal - {STOP}}
            remaining = cost + rng.choice((0, 1, 2, 3, 5, 9, 20, 60, 150))
            narrowed = row.copy()
            lost = closing.narrow(narrowed, remaining)
            wanted = {t for t in legal if t == STOP or after[t] <= remaining - 1}
            if wanted:
                assert set(allowed_tokens(narrowed, vocabulary.size)) == wanted
                assert lost == (wanted != legal)
            choices = sorted(legal - {STOP})
            if not choices:
                break
            token = rng.choice(choices)
            matcher.accept(token)
            closing.advance(token)


def cost_after(closing: Closing, token: int) -> int:
    closing.advance(token)
    cost = closing.cost()
    closing.rollback(1)
    assert cost is not None
    return cost


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_the_path_completes_and_costs_one_less_with_each_token(
    name: str, engine: Backend, pieces: ClosingVocabulary
) -> None:
    grammar = ClosingGrammar(lower(CONSTRAINTS[name]), pieces)
    matcher, closing = engine.compile(CONSTRAINTS[name]).matcher(), grammar.closing()
    path = closing.path()
    assert path is not None
    assert len(path) == grammar.minimum
    for left in range(len(path), 0, -1):
        assert closing.cost() == left
        assert not matcher.is_complete
        matcher.accept(path[-left])
        closing.advance(path[-left])
    assert closing.cost() == 0
    assert closing.path() == []
    assert matcher.is_complete


# --------------------------------------------------------------------------- random constraints

EXPRESSIONS = st.recursive(
    st.sampled_from(['"a"', '"ab"', '"b"', "[ab]", "[^a]", '""', '"é"', "r0", "r1", "r2"]),
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map(" ".join)
        | st.lists(inner, min_size=2, max_size=3).map(lambda o: "(" + " | ".join(o) + ")")
        | st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,3}", "{2,}"])).map(
            lambda p: f"({p[0]}){p[1]}"
        )
    ),
    max_leaves=6,
)
GRAMMARS = st.tuples(EXPRESSIONS, EXPRESSIONS, EXPRESSIONS, EXPRESSIONS).map(
    lambda bodies: "\n".join(
        f"{name} ::= {body}" for name, body in zip(("root", "r0", "r1", "r2"), bodies, strict=True)
    )
)
SCHEMAS: st.SearchStrategy[Any] = st.recursive(
    st.sampled_from(
        [
            {"type": "integer", "minimum": -3, "maximum": 120},
            {"type": "string", "maxLength": 4},
            {"type": "string", "pattern": "^[a-c]+-[0-9]{2}$"},
            {"enum": ["a", "ab", 1, None, "日本"]},
            {"type": "boolean"},
            {"type": "number"},
        ]
    ),
    lambda inner: (
        st.builds(
            lambda item, low: {"type": "array", "items": item, "minItems": low},
            inner,
            st.integers(0, 3),
        )
        | st.builds(
            lambda values, more: {
                "type": "object",
                "properties": {f"k{i}": v for i, v in enumerate(values)},
                "required": [f"k{i}" for i in range(0, len(values), 2)],
                "additionalProperties": more,
            },
            st.lists(inner, min_size=1, max_size=3),
            st.booleans(),
        )
    ),
    max_leaves=4,
)
RANDOM = (
    GRAMMARS.map(lambda g: Ebnf(grammar=g))
    | st.builds(of_schema, SCHEMAS, st.sampled_from(list(Whitespace)))
    | st.from_regex(r"(a|b[ab]\*|\[ab\]\{1,3\}|\(a\|bc\)\+|é|[ab]\?){1,6}", fullmatch=True).map(
        lambda p: Regex(pattern=p)
    )
)


@given(constraint=RANDOM, more=st.integers(0, 40), seed=st.integers(0, 1000))
def test_random_constraints_keep_their_budget(
    constraint: Constraint,
    more: int,
    seed: int,
    engine: Backend,
    pieces: ClosingVocabulary,
) -> None:
    try:
        grammar = ClosingGrammar(lower(constraint), pieces)
        compiled = engine.compile(constraint)
    except ConstraintError:
        assume(False)
        return
    assert grammar.minimum is not None
    matcher = compiled.matcher()
    path = grammar.closing().path()
    assert path is not None
    for token in path:
        matcher.accept(token)
    assert matcher.is_complete
    sample(constraint, engine, grammar, grammar.minimum + more, random.Random(seed))


@given(grammar=GRAMMARS, steps=st.lists(st.integers(0, 5), max_size=4))
def test_with_bytes_alone_the_cost_is_the_shortest_completion(
    grammar: str, steps: list[int], backend: Backend, byte_vocabulary: Vocabulary
) -> None:
    constraint = Ebnf(grammar=grammar)
    try:
        compiled = backend.compile(constraint)
        closing = ClosingGrammar(lower(constraint), ClosingVocabulary(byte_vocabulary)).closing()
    except ConstraintError:
        assume(False)
        return
    matcher = compiled.matcher()
    row = np.zeros(words(byte_vocabulary.size), np.int32)
    for step in steps:
        matcher.fill(row)
        # One byte stands for many where a class allows them.
        legal = [t for t in allowed_tokens(row, 256) if t < 128][:4]
        if not legal:
            break
        matcher.accept(legal[step % len(legal)])
        closing.advance(legal[step % len(legal)])
    cost = closing.cost()
    assert cost is not None
    assert shortest(matcher, row, min(cost, 4)) == (cost if cost <= 4 else None)


def shortest(matcher: Any, row: NDArray[np.int32], most: int) -> int | None:
    """The length of the shortest completion, if it is at most `most`, by trying all."""
    if matcher.is_complete:
        return 0
    if most == 0:
        return None
    matcher.fill(row)
    legal = allowed_tokens(row, 256)
    plain = [t for t in legal if t in "abé日😀".encode()]
    others = [t for t in legal if t not in plain]
    found: list[int] = []
    for token in plain + others[:1] + [t for t in others[1:] if t >= 0x80][:3]:
        matcher.accept(token)
        rest = shortest(matcher, row, most - 1)
        matcher.rollback(1)
        if rest is not None:
            found.append(rest + 1)
    return min(found, default=None)


# --------------------------------------------------------------------------- one text


def test_rollback_is_as_if_the_tokens_had_not_been(
    engine: Backend, pieces: ClosingVocabulary, vocabulary: Vocabulary
) -> None:
    rng = random.Random(4)
    grammar = ClosingGrammar(lower(CONSTRAINTS["tree"]), pieces)
    matcher, closing = engine.compile(CONSTRAINTS["tree"]).matcher(), grammar.closing()
    history: list[int] = []
    row = np.zeros(words(vocabulary.size), np.int32)
    for _ in range(200):
        if history and rng.random() < 0.3:
            count = rng.randint(1, min(len(history), 5))
            matcher.rollback(count)
            closing.rollback(count)
            del history[-count:]
        else:
            matcher.fill(row)
            token = rng.choice(
                [t for t in allowed_tokens(row, vocabulary.size) if t != STOP] or [0]
            )
            if token == 0:
                continue
            matcher.accept(token)
            closing.advance(token)
            history.append(token)
        if rng.random() < 0.5:  # else several tokens stay unread
            fresh = grammar.closing()
            for token in history:
                fresh.advance(token)
            assert closing.cost() == fresh.cost()
            assert closing.path() == fresh.path()
    with pytest.raises(ValueError, match="cannot roll back"):
        closing.rollback(len(history) + 1)


def test_a_prefix_counts_as_written(pieces: ClosingVocabulary) -> None:
    grammar = ClosingGrammar(lower(Regex(pattern="abcabc[0-9]{3}")), pieces)
    assert grammar.minimum == 4  # abc abc 00 0
    assert grammar.closing(b"abca").cost() == 4  # b c 00 0
    assert grammar.closing(b"abcabc00").cost() == 1
    assert grammar.closing(b"x").cost() is None


def test_forced_tokens_have_to_fit(pieces: ClosingVocabulary) -> None:
    closing = ClosingGrammar(lower(Regex(pattern="(abc){4}")), pieces).closing()
    assert closing.fits([], 4)
    assert closing.fits(list(b"a"), 6)  # then b c abc abc abc
    assert not closing.fits(list(b"a"), 5)
    assert not closing.fits(list(b"abc"), 5)
    assert closing.fits([PIECES.index("abc") + 258] * 2, 4)
    assert closing.cost() == 4
    assert closing.fits(list(b"a"), 3)  # it is too late already


def test_end_tokens_change_nothing(pieces: ClosingVocabulary) -> None:
    closing = ClosingGrammar(lower(Choice(choices=("ab",))), pieces).closing()
    closing.advance(PIECES.index("ab") + 258)
    assert closing.cost() == 0
    closing.advance(STOP)
    assert closing.cost() == 0


def test_a_budget_below_the_cost_narrows_nothing(pieces: ClosingVocabulary) -> None:
    closing = ClosingGrammar(lower(Regex(pattern="[ab]{8}(a|c{30})")), pieces).closing()
    cost = closing.cost()
    assert cost is not None
    row = np.full(words(pieces.size), -1, np.int32)
    assert not closing.narrow(row, cost - 1)
    assert (row == -1).all()
    for token in b"abababab":
        closing.advance(token)
    assert not closing.narrow(row, 30)
    assert closing.narrow(row, 1)
    assert allowed_tokens(row, pieces.size) == [ord("a"), STOP]


def test_a_mask_of_other_tokens_is_left_alone(pieces: ClosingVocabulary) -> None:
    """An engine that allows none of the tokens that lead to the end has the last word."""
    closing = ClosingGrammar(lower(Regex(pattern="a|c{30}")), pieces).closing()
    row = np.zeros(words(pieces.size), np.int32)
    row[0] = 2
    assert not closing.narrow(row, 9)
    assert row[0] == 2


# --------------------------------------------------------------------------- limits


def test_bytes_that_are_no_tokens_are_not_needed() -> None:
    vocabulary = ClosingVocabulary(
        Vocabulary([b"a", b"b", b"ab", b""], special_ids=frozenset({3}), stop_ids=(3,))
    )
    grammar = ClosingGrammar(LoweredGrammar('root ::= "a"+ ("c" | "b" | "é")\n', 0), vocabulary)
    assert grammar.closing().path() == [2]
    unspellable = ClosingGrammar(LoweredGrammar('root ::= "a" "é"\n', 0), vocabulary)
    assert unspellable.minimum is None
    row = np.full(1, -1, np.int32)
    assert not unspellable.closing().narrow(row, 1)
    assert unspellable.closing().cost() is None
    assert unspellable.closing().path() is None


@pytest.mark.parametrize(
    "text",
    ['root ::= "a" root', "root ::= missing", "root ::= (", 'other ::= "a"', "root ::= [z-a]"],
)
def test_what_cannot_be_read_has_no_minimum(text: str, pieces: ClosingVocabulary) -> None:
    assert ClosingGrammar(LoweredGrammar(text, 0), pieces).minimum is None


def test_deep_groups_do_not_recurse(pieces: ClosingVocabulary) -> None:
    text = "root ::= " + '("a" ' * 3000 + '"b"' + ")?" * 3000
    assert ClosingGrammar(LoweredGrammar(text, 0), pieces).minimum == 0


def test_long_completions_are_spelled_in_bytes_until_they_are_short(
    engine: Backend, pieces: ClosingVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing_costs, "MAX_EXACT_BYTES", 10)
    grammar = ClosingGrammar(lower(CONSTRAINTS["person"]), pieces)
    path = grammar.closing().path()
    assert path is not None
    assert grammar.minimum is not None
    assert len(path) <= grammar.minimum
    text = b"".join(pieces.tokens[t] for t in path)
    assert json.loads(text) == {"name": "", "age": 0, "tags": ["a", "a"]}
    assert len(path) > len(text) - 10
    rng = random.Random(6)
    for more in range(0, 40, 3):
        sample(CONSTRAINTS["person"], engine, grammar, grammar.minimum + more, rng)


def test_small_caches_change_nothing(
    engine: Backend, pieces: ClosingVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing_states, "MAX_STATES", 40)
    monkeypatch.setattr(closing_costs, "MAX_TABLE_ROWS", 5)
    monkeypatch.setattr(closing_costs, "MASK_CACHE_BYTES", 300)
    monkeypatch.setattr(closing_module, "MAX_PENDING", 2)
    rng = random.Random(7)
    grammar = ClosingGrammar(lower(CONSTRAINTS["tree"]), pieces)
    assert grammar.minimum is not None
    for more in range(0, 60, 3):
        sample(CONSTRAINTS["tree"], engine, grammar, grammar.minimum + more, rng)
        assert grammar.memory_bytes < 2_000_000


def test_too_ambiguous_a_text_is_not_followed(
    pieces: ClosingVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = ClosingGrammar(lower(CONSTRAINTS["middle"]), pieces)
    monkeypatch.setattr(closing_states, "MAX_ITEMS", 60)
    closing = grammar.closing()
    row = np.full(words(pieces.size), -1, np.int32)
    count = 0
    while closing.cost() is not None and count < 100:
        closing.advance(ord("a"))
        count += 1
    assert count > 2
    assert closing.cost() is None
    assert not closing.narrow(row, 5)
    closing.rollback(count)
    assert closing.cost() == 1


def test_work_for_one_text_is_limited(
    pieces: ClosingVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammar = ClosingGrammar(lower(CONSTRAINTS["person"]), pieces)
    monkeypatch.setattr(closing_module, "MAX_WORK", 100)
    monkeypatch.setattr(closing_module, "TOKEN_WORK", 0)
    spent = grammar.closing()
    for token in b'{"name":"x","age"  :':
        spent.advance(token)
    assert spent.cost() is None
    assert not spent.narrow(np.full(words(pieces.size), -1, np.int32), 9)
    spent.rollback(8)
    assert spent.cost() is not None
    assert grammar.closing().cost() == grammar.minimum


# --------------------------------------------------------------------------- characters


@given(st.lists(st.tuples(st.integers(0, 0x10FFFF), st.integers(0, 3000)), max_size=4))
def test_tries_hold_exactly_the_characters(spans: list[tuple[int, int]]) -> None:
    ranges = merge([(low, min(low + more, 0x10FFFF)) for low, more in spans])
    for found in (ranges, negate(ranges)):
        trie = byte_trie(found)
        edges = {c for low, high in ranges for c in (low - 1, low, high, high + 1)}
        for code in edges | {0, 0x7F, 0x80, 0x7FF, 0x800, 0xD800, 0xFFFF, 0x10000, 0x10FFFF}:
            if 0 <= code <= 0x10FFFF:
                inside = any(low <= code <= high for low, high in found)
                assert reads(trie, chr(code).encode("utf-8", "surrogatepass")) == inside


def reads(trie: tuple[tuple[tuple[int, int, int], ...], ...], data: bytes) -> bool:
    node = 0
    for byte in data:
        if node < 0:
            return False
        targets = [child for low, high, child in trie[node] if low <= byte <= high]
        if not targets:
            return False
        assert len(targets) == 1
        node = targets[0]
    return node < 0

"""What is forced is all that could have come, and is split as the tokenizer splits it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest

from phloem.constrained.backends import load_backend
from phloem.constrained.base import Backend, Matcher
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.jump import Jumper
from phloem.constrained.spec import Choice, Constraint, JsonSchema, Regex, Whitespace
from phloem.constrained.vocab import Vocabulary

PIECES = ['{"', '":', '","', "na", "name", "ame", "age", '":"', '"}', "ab", "abc", "xy", "é€"]
BYTES = [bytes([b]) for b in range(256)]
TOKENS = [*BYTES, *(piece.encode() for piece in PIECES), b""]
END = len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, frozenset({END}), (END,))


def encode(text: str) -> list[int]:
    """Longest match first: a tokenizer whose split depends on what follows."""
    data, split = text.encode(), []
    while data:
        longest = max((t for t in TOKENS if t and data.startswith(t)), key=len)
        split.append(TOKENS.index(longest))
        data = data[len(longest) :]
    return split


def spell(tokens: Sequence[int]) -> str:
    return b"".join(TOKENS[t] for t in tokens).decode()


@pytest.fixture(scope="module")
def engine() -> Backend:
    return load_backend("xgrammar", VOCABULARY)


@pytest.fixture(scope="module")
def jumper() -> Jumper:
    return Jumper(VOCABULARY, encode)


def legal(matcher: Matcher) -> list[int]:
    row = np.zeros(words(VOCABULARY.size), np.int32)
    matcher.fill(row)
    return allowed_tokens(row, VOCABULARY.size)


def object_of(*names: str) -> JsonSchema:
    schema = {
        "type": "object",
        "properties": {name: {"type": "string", "pattern": "^[x-z]+$"} for name in names},
        "required": list(names),
        "additionalProperties": False,
    }
    return JsonSchema(schema=json.dumps(schema), whitespace=Whitespace.COMPACT)


def test_a_forced_text_is_split_by_the_tokenizer(engine: Backend, jumper: Jumper) -> None:
    matcher = engine.compile(object_of("name", "age")).matcher()
    jump = jumper.canonical(matcher, [])
    assert [spell([t]) for t in jump.tokens] == ['{"', "name", '":"']
    assert not jump.ends
    history = [*jump.tokens, TOKENS.index(b"xy"), TOKENS.index(b'","')]
    for token in history[len(jump.tokens) :]:
        matcher.accept(token)
    jump = jumper.canonical(matcher, history)
    assert [spell([t]) for t in jump.tokens] == ["age", '":"']


def test_nothing_is_forced_that_a_longer_token_may_swallow(engine: Backend, jumper: Jumper) -> None:
    """After `ab` comes `c`, which the tokenizer would join to it, or `d`, which it would not."""
    matcher = engine.compile(Regex(pattern="xyab(c|d)")).matcher()
    assert spell(jumper.canonical(matcher, []).tokens) == "xy"
    assert TOKENS.index(b"abc") in legal(matcher)
    matcher = engine.compile(Regex(pattern="xyab(e|d)")).matcher()
    assert spell(jumper.canonical(matcher, []).tokens) == "xyab"


def test_a_token_is_not_joined_to_one_that_was_sent(engine: Backend, jumper: Jumper) -> None:
    """The model wrote `ab` by letters: what is forced behind it begins a token of its own."""
    matcher = engine.compile(Regex(pattern="abc(x|y)")).matcher()
    history = [TOKENS.index(b"a"), TOKENS.index(b"b")]
    for token in history:
        matcher.accept(token)
    assert spell(jumper.canonical(matcher, history).tokens) == "c"


def test_the_end_is_seen(engine: Backend, jumper: Jumper) -> None:
    matcher = engine.compile(Choice(choices=("name",))).matcher()
    assert jumper.canonical(matcher, []) == ([TOKENS.index(b"name")], True)
    assert jumper.canonical(matcher, [TOKENS.index(b"name")]) == ([], True)
    matcher = engine.compile(Choice(choices=("name",))).matcher()
    assert not jumper.exact(matcher).tokens  # "n", "na" and "name" are all legal
    matcher = engine.compile(Regex(pattern="q(q|r)w")).matcher()
    assert jumper.exact(matcher) == ([TOKENS.index(b"q")], False)
    matcher.accept(TOKENS.index(b"r"))
    assert jumper.exact(matcher) == ([TOKENS.index(b"w")], True)


def test_half_a_character_before_a_jump(engine: Backend, jumper: Jumper) -> None:
    matcher = engine.compile(Regex(pattern="éabx?")).matcher()
    history = [0xC3]
    matcher.accept(0xC3)
    jump = jumper.canonical(matcher, history)
    assert b"\xc3" + b"".join(TOKENS[t] for t in jump.tokens) in (
        "é".encode(),
        "éab".encode(),
        b"\xc3",
    )


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("seed", range(30))
def test_jumps_allow_what_the_masks_allow(
    engine: Backend, jumper: Jumper, seed: int, exact: bool
) -> None:
    """A random walk with jumps is a walk by the masks alone, and reaches the same kind of end."""
    rng = random.Random(seed)
    names = rng.sample(["name", "age", "ab", "xyz", "é€"], rng.randrange(1, 4))
    constraints: list[Constraint] = [object_of(*names), Choice(choices=tuple(names))]
    constraint = rng.choice([*constraints, Regex(pattern="ab+")])
    grammar = engine.compile(constraint)
    matcher, forced = grammar.matcher(), 0
    history: list[int] = []
    for _ in range(60):
        jump = jumper.exact(matcher) if exact else jumper.canonical(matcher, history)
        forced += len(jump.tokens)
        history += jump.tokens
        allowed = legal(matcher)
        assert jump.ends == (allowed == [END])
        if jump.ends:
            break
        token = rng.choice([t for t in allowed if t != END] or allowed)
        matcher.accept(token)
        history.append(token)
    alone = grammar.matcher()
    for token in history:
        assert token in legal(alone)
        alone.accept(token)
    assert legal(alone) == legal(matcher)
    assert exact or forced or isinstance(constraint, Regex | Choice)

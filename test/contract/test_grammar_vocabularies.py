"""Backends on the kinds and sizes of vocabularies there are, against the plain oracle."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import numpy as np
import pytest

from phloem.constrained.backends import load_backend
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.reference import ReferenceMatcher
from phloem.constrained.regex import parse_regex
from phloem.constrained.spec import Regex
from phloem.constrained.vocab import Vocabulary

Kind = Callable[[int, random.Random], Vocabulary]
BYTES = [bytes([b]) for b in range(256)]
PATTERN = r'"(é|日本|[a-z 😀]){0,40}"'
LETTERS = ['"', " ", "a", "b", "z", "A", "é", "日", "本", "😀", "\n"]


def pieces(rng: random.Random, count: int) -> list[bytes]:
    """Different tokens of several bytes, some of which begin or end inside a character."""
    found: dict[bytes, None] = {}
    while len(found) < count:
        text = "".join(rng.choices(LETTERS, k=rng.randrange(1, 9))).encode()
        start, end = rng.randrange(3), rng.randrange(3)
        piece = text[start : len(text) - end] if rng.random() < 0.3 else text
        if len(piece) > 1:
            found[piece] = None
    return list(found)


def byte_level(size: int, rng: random.Random) -> Vocabulary:
    """Every byte and merges of bytes; control tokens at the end; logits wider than the table."""
    tokens = [*BYTES, *pieces(rng, size - 258), b"", b""]
    return Vocabulary(tokens, frozenset({size - 2, size - 1}), (size - 1,), size=size + 70)


def sentencepiece(size: int, rng: random.Random) -> Vocabulary:
    """Control tokens first, then a byte fallback beside the same characters as pieces."""
    letters = [c.encode() for c in LETTERS]
    tokens = [b"", b"", b"", *BYTES, *letters, *pieces(rng, size - 259 - len(letters))]
    return Vocabulary(tokens, frozenset({0, 1, 2}), (2,))


def tiktoken(size: int, rng: random.Random) -> Vocabulary:
    """Ranks in random order, several end tokens, and control tokens whose names are text."""
    tokens = [*BYTES, *pieces(rng, size - 260)]
    rng.shuffle(tokens)
    names = [b"<|end|>", b"<|eot|>", b"a", b'"']
    stops = (size - 4, size - 3)
    return Vocabulary([*tokens, *names], frozenset(range(size - 4, size)), stops)


@functools.cache
def walk(kind: Kind, size: int, steps: int) -> tuple[Vocabulary, list[int], list[set[int]]]:
    """A vocabulary, the tokens of a text, and what the oracle allows before each."""
    rng = random.Random(size)
    vocabulary = kind(size, rng)
    reference = ReferenceMatcher(parse_regex(PATTERN), vocabulary)
    text: list[int] = []
    masks: list[set[int]] = []
    for _ in range(steps):
        masks.append(reference.allowed())
        # Tokens that do not close the string; a long one of a few.
        going_on = [t for t in masks[-1] if b'"' not in vocabulary.tokens[t][1:]]
        some = rng.sample(sorted(going_on), min(len(going_on), 20))
        text.append(max(some, key=lambda t: len(vocabulary.tokens[t])))
        reference.accept(text[-1])
    return vocabulary, text, masks


@pytest.mark.parametrize("engine", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(
    ("kind", "size", "steps"),
    [
        (byte_level, 50_000, 3),
        (sentencepiece, 32_000, 3),
        (tiktoken, 100_000, 2),
        (byte_level, 260_000, 2),
    ],
)
def test_masks(engine: str, kind: Kind, size: int, steps: int) -> None:
    vocabulary, text, masks = walk(kind, size, steps)
    matcher = load_backend(engine, vocabulary).compile(Regex(pattern=PATTERN)).matcher()
    row = np.zeros(words(vocabulary.size), dtype=np.int32)
    for token, allowed in zip(text, masks, strict=True):
        matcher.fill(row)
        assert set(allowed_tokens(row, len(row) * 32)) == allowed
        matcher.accept(token)

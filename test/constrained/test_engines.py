"""Engines enforce one language: they agree at every step, and with plain oracles; routing."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable

import numpy as np
import pytest

from phloem.constrained.backends import load_backend
from phloem.constrained.base import (
    Backend,
    MalformedConstraint,
    Matcher,
    MatcherExhausted,
    MatcherRejected,
    UnsupportedKeyword,
)
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.spec import (
    Choice,
    Constraint,
    Continued,
    Ebnf,
    JsonLines,
    JsonObject,
    JsonSchema,
    Regex,
    StructuralTag,
    Whitespace,
)
from phloem.constrained.vocab import Vocabulary

SCHEMAS = {
    "open": {"properties": {"a": {"type": "integer"}, "bc": {"enum": ["x", 1, None, "xy"]}}},
    "closed": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "n": {"type": "number"}},
        "required": ["name"],
        "additionalProperties": False,
    },
    "counted": {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 40}},
    "bounded": {"type": "string", "minLength": 1, "maxLength": 70},
    "recursive": {
        "$defs": {"t": {"properties": {"next": {"$ref": "#/$defs/t"}}, "type": "object"}},
        "$ref": "#/$defs/t",
    },
    "pattern": {"type": "string", "pattern": '^(a|["\\\\]b){1,9}c?$'},
    "unanchored": {"type": "string", "pattern": "ab|c", "minLength": 4},
    "date": {"type": "string", "format": "date"},
    "numbers": {"type": "array", "items": {"type": "number", "minimum": -3.5, "maximum": 120}},
    "excluded keys": {
        "properties": {"type": {"const": "q"}},
        "additionalProperties": {"type": "boolean"},
        "type": "object",
    },
    "any": {},
}
GRAMMARS = [
    'root ::= root "," [a] | [a]',
    'root ::= e\ne ::= t (("+" | "-") t)*\nt ::= [0-9]+ | "(" e ")" | "-" t',
    'root ::= "{" (pair ("," pair)*)? "}"\npair ::= "\\"" [a-z]* "\\"" ":" (root | [0-9]+)',
    'root ::= "a" root "b" | "ab" | "aé"',
    'root ::= "\\"" root "\\"" | [^"]',
]


def legal(matcher: Matcher, vocabulary: Vocabulary) -> set[int]:
    row = np.zeros(words(vocabulary.size), dtype=np.int32)
    matcher.fill(row)
    return set(allowed_tokens(row, vocabulary.size))


@pytest.fixture(scope="module")
def engines(byte_vocabulary: Vocabulary) -> list[Backend]:
    return [load_backend(name, byte_vocabulary) for name in ("xgrammar", "llguidance")]


def agree(
    engines: list[Backend], vocabulary: Vocabulary, constraint: Constraint, seed: int
) -> None:
    """Walk the same random text, ending it late, and compare masks all along."""
    one, other = (engine.compile(constraint).matcher() for engine in engines)
    rng = random.Random(seed)
    for step in range(150):
        allowed = legal(one, vocabulary)
        assert legal(other, vocabulary) == allowed, f"step {step}"
        assert allowed
        assert one.is_complete == other.is_complete
        if step % 10 == 7:
            one.rollback(3)
            other.rollback(3)
            continue
        texts = [t for t in allowed if t < 256]
        closing = [t for t in texts if chr(t) in '"}]'] if step > 60 else []
        if not texts:
            break
        token = rng.choice(closing or texts)
        one.accept(token)
        other.accept(token)


@pytest.mark.parametrize("whitespace", list(Whitespace))
@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas(
    engines: list[Backend], byte_vocabulary: Vocabulary, name: str, whitespace: Whitespace
) -> None:
    constraint = JsonSchema(schema=json.dumps(SCHEMAS[name]), whitespace=whitespace)
    for seed in range(3):
        agree(engines, byte_vocabulary, constraint, seed)


@pytest.mark.parametrize(
    "constraint",
    [
        JsonObject(),
        JsonLines(schema='{"type": "integer"}', max_lines=3),
        Regex(pattern=r"(?:é|[^a-f]){0,300}\d*"),
        Choice(choices=tuple(f"{i:x}é" for i in range(600))),
        Continued(constraint=Regex(pattern="(日本|b)*c"), prefix="日本b"),
        *(Ebnf(grammar=g) for g in GRAMMARS),
    ],
)
def test_other_constraints(
    engines: list[Backend], byte_vocabulary: Vocabulary, constraint: Constraint
) -> None:
    for seed in range(3):
        agree(engines, byte_vocabulary, constraint, seed)


def test_a_prefix_that_is_not_legal(engines: list[Backend]) -> None:
    for engine in engines:
        with pytest.raises(MalformedConstraint) as caught:
            engine.compile(Continued(constraint=Regex(pattern="ab*"), prefix="b"))
        assert caught.value.reason == "prefix_rejected"


AMBIGUOUS: dict[str, Callable[[str], bool]] = {
    'root ::= root root | "a" | ""': lambda t: set(t) <= {"a"},
    'root ::= (b*)*\nb ::= "x" | "xa"': lambda t: not t.startswith("a") and "aa" not in t,
    "root ::= a\na ::= b\nb ::= a | [x]": lambda t: t == "x",
    'root ::= "a"* ("a" | "ax")*': lambda t: not t.startswith("x") and "xx" not in t,
}


@pytest.mark.parametrize("grammar", AMBIGUOUS)
def test_ambiguous_grammars(byte_vocabulary: Vocabulary, grammar: str) -> None:
    compiled = load_backend("routed", byte_vocabulary).compile(Ebnf(grammar=grammar))
    for length in range(6):
        for letters in itertools.product("ax", repeat=length):
            text = "".join(letters)
            assert accepts(compiled.matcher(), text) == AMBIGUOUS[grammar](text), text


def accepts(matcher: Matcher, text: str) -> bool:
    try:
        for byte in text.encode():
            matcher.accept(byte)
    except MatcherRejected:
        return False
    return matcher.is_complete


def test_a_grammar_beyond_the_limits_ends_its_own_matcher(byte_vocabulary: Vocabulary) -> None:
    """Each token of this one costs more than the one before; no token is legal by mistake."""
    grammar = 'root ::= root root | "a" | ""'
    compiled = load_backend("llguidance", byte_vocabulary).compile(Ebnf(grammar=grammar))
    matcher = compiled.matcher()
    other = compiled.matcher()

    def write(tokens: int) -> None:
        for _ in range(tokens):
            assert legal(matcher, byte_vocabulary) == {ord("a"), 256}
            matcher.accept(ord("a"))

    write(100)
    with pytest.raises(MatcherExhausted, match="items"):
        write(500)
    assert legal(other, byte_vocabulary) == {ord("a"), 256}
    assert legal(compiled.matcher(), byte_vocabulary) == {ord("a"), 256}


def test_routes(byte_vocabulary: Vocabulary) -> None:
    routed = load_backend("routed", byte_vocabulary)

    def engine(constraint: Constraint) -> str:
        return routed.compile(constraint).engine

    assert engine(JsonSchema(schema=json.dumps(SCHEMAS["open"]))) == "xgrammar"
    assert engine(JsonSchema(schema=json.dumps(SCHEMAS["counted"]))) == "llguidance"
    assert engine(Regex(pattern="[A-Za-z0-9 ]{1,256}")) == "llguidance"
    assert engine(Regex(pattern="[a-z]+")) == "xgrammar"
    assert engine(Choice(choices=("yes", "no"))) == "xgrammar"
    assert engine(Ebnf(grammar=next(iter(AMBIGUOUS)))) == "llguidance"
    assert engine(Ebnf(grammar=GRAMMARS[0])) == "xgrammar"
    assert engine(StructuralTag(format='{"type": "any_text"}')) == "xgrammar"


def test_llguidance_refuses_structural_tags(byte_vocabulary: Vocabulary) -> None:
    with pytest.raises(UnsupportedKeyword):
        load_backend("llguidance", byte_vocabulary).compile(
            StructuralTag(format='{"type": "any_text"}')
        )

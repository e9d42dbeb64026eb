"""Free text before a constraint: markers, budgets, and room for what must follow."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from phloem.constrained.backends import load_backend
from phloem.constrained.base import MalformedConstraint, MatcherRejected
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.closing import ClosingVocabulary
from phloem.constrained.grammar import Grammar
from phloem.constrained.jump import Jumper
from phloem.constrained.lowering import lower
from phloem.constrained.spec import (
    Deferred,
    JsonDocuments,
    JsonSchema,
    Plain,
    Regex,
    StructuralTag,
)
from phloem.constrained.validate import Violation, validate
from phloem.constrained.vocab import Vocabulary
from phloem.srt.grammar.compiling import Compiling, trial

EXTRA = ["</think>", "</", "think>", ">\n", "\n\n", '{"a": ', "<think>", ">>", "nk>x"]
LINE_FEED = ord("\n")  # is token 0: an id like any other
TOKENS = [bytes([b ^ LINE_FEED]) for b in range(128)] + [t.encode() for t in EXTRA] + [b""]
END = len(TOKENS) - 1
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
)

OBJECT = JsonSchema(schema=SCHEMA)


def build(constraint: Deferred, *, without: tuple[str, ...] = ()) -> tuple[Grammar, list[bytes]]:
    """The grammar over a vocabulary that lacks some tokens."""
    tokens = [b"" if t.decode() in without else t for t in TOKENS]
    unused = frozenset(i for i, t in enumerate(tokens) if not t)
    vocabulary = Vocabulary(tokens, special_ids=unused, stop_ids=(END,))
    closings = ClosingVocabulary(vocabulary)
    backend = load_backend("routed", vocabulary)
    return Compiling(backend, closings, trial(backend, closings)).build(constraint), tokens


def deferred(constraint: Plain | None = OBJECT, **more: Any) -> Deferred:
    return Deferred(constraint=constraint, end="</think>", **more)


def legal(grammar: Grammar, *texts: str) -> set[str]:
    """What may follow the tokens of these texts, the end token as END."""
    matcher = grammar.matcher()
    for text in texts:
        matcher.accept(TOKENS.index(text.encode()))
    row = np.zeros(words(len(TOKENS)), np.int32)
    matcher.fill(row)
    ids = allowed_tokens(row, len(TOKENS))
    return {"END" if i == END else TOKENS[i].decode() for i in ids}


def test_text_is_free_until_the_marker_and_bound_behind_it() -> None:
    grammar, _ = build(deferred())
    free = legal(grammar, "x", "{")
    assert {"a", "}", "</think>", "<", "\n"} <= free
    assert "END" not in free
    assert legal(grammar, "x", "</think>") == {"\n", "\n\n", "{", '{"a": '}
    assert legal(grammar, "</think>", "\n") == {"\n", "{", '{"a": '}
    assert legal(grammar, "</think>", "\n\n") == {"{", '{"a": '}
    # The same, where the marker comes in pieces; none runs over its end.
    assert "think>" in legal(grammar, "</")
    assert not {">\n", ">>"} & legal(grammar, "</", "t", "h", "i", "n", "k")
    assert "nk>x" not in legal(grammar, "</", "t", "h", "i")
    assert legal(grammar, "<", "</", "think>") == {"\n", "\n\n", "{", '{"a": '}


def test_a_begin_marker_is_the_models_to_write() -> None:
    grammar, _ = build(deferred(begin="<think>"))
    assert legal(grammar) == {"<think>", "{", '{"a": '}
    assert "x" in legal(grammar, "<think>")
    grammar, _ = build(deferred(begin="<think>"), without=("<think>",))
    assert legal(grammar) == {"<", "{", '{"a": '}
    assert legal(grammar, "<") == {"t", "think>"}
    assert "x" in legal(grammar, "<", "think>")
    assert "<" not in legal(grammar, "{")
    assert grammar.matcher().forced_string() == ""


@pytest.mark.parametrize("whole", [True, False])
def test_a_budget_forces_the_marker(whole: bool) -> None:
    grammar, _ = build(deferred(budget=2), without=() if whole else ("</think>",))
    assert "b" in legal(grammar, "a")
    wanted = {"</think>"} if whole else {"<", "</"}
    assert legal(grammar, "a", "b") == wanted
    assert legal(grammar, "a", "<") == ({"</think>"} if whole else {"/"})
    matcher = grammar.matcher()
    matcher.accept(ord("a"))
    matcher.accept(ord("b"))
    with pytest.raises(MatcherRejected):
        matcher.accept(ord("c"))
    assert matcher.forced_string() == ("" if whole else "</think>")
    assert legal(build(deferred(budget=0))[0]) == {"</think>"}


def test_nothing_inside_is_free_text_again() -> None:
    grammar, _ = build(deferred(None, budget=1, begin="<think>"))
    assert {"x", "END", "<think>"} <= legal(grammar)
    assert {"x", "END"} <= legal(grammar, "x", "y", "z")
    assert {"x", "END"} <= legal(grammar, "<think>")
    assert legal(grammar, "<think>", "x") == {"</think>"}
    assert {"x", "END", "</think>"} <= legal(grammar, "<think>", "x", "</think>", "y")
    matcher = grammar.matcher()
    matcher.accept(ord("x"))
    assert matcher.is_complete
    matcher.accept(END)
    assert matcher.is_terminated
    matcher.rollback(2)
    assert not matcher.is_terminated


def test_free_text_that_is_there_already() -> None:
    grammar, _ = build(deferred(seen="so <"))
    assert legal(grammar, "/", "think>") == {"\n", "\n\n", "{", '{"a": '}
    with pytest.raises(MalformedConstraint):
        lower(deferred(seen="</think> "))


def test_a_tag_may_be_inside() -> None:
    tag = {"type": "tag", "begin": "<", "content": {"type": "regex", "pattern": "a"}, "end": ">"}
    grammar, _ = build(deferred(StructuralTag(format=json.dumps(tag))))
    assert legal(grammar, "</think>") == {"\n", "\n\n", "<"}
    assert grammar.minimum is None


@pytest.mark.parametrize("budget", [None, 0, 7])
@pytest.mark.parametrize("begin", ["", "<think>"])
def test_random_texts_are_whole_within_their_tokens(budget: int | None, begin: str) -> None:
    """Whatever is drawn, rolled back, or jumped over: the text ends in time and is valid."""
    rng = random.Random(1)
    constraint = deferred(budget=budget, begin=begin)
    for without in ((), ("</think>", "<think>")):
        grammar, tokens = build(constraint, without=without)
        vocabulary = Vocabulary(tokens, frozenset(), (END,))
        jumper = Jumper(vocabulary, lambda text: [ord(c) for c in text])
        assert grammar.minimum is not None
        for _ in range(30):
            left = grammar.minimum + rng.randrange(25)
            ids = draw(grammar, rng, left, jumper, thoughtful=rng.random() < 0.8)
            text = b"".join(tokens[i] for i in ids).decode()
            validate(constraint, text)
            if budget is not None and text.startswith(begin):
                thoughts = text.removeprefix(begin).partition("</think>")[0]
                assert len(thoughts) <= budget * max(map(len, tokens))


def draw(
    grammar: Grammar, rng: random.Random, left: int, jumper: Jumper, *, thoughtful: bool
) -> list[int]:
    matcher, closing = grammar.matcher(), grammar.closing()
    assert closing is not None
    row = np.zeros(words(len(TOKENS)), np.int32)
    ids: list[int] = []
    while True:
        matcher.fill(row)
        closing.narrow(row, left)
        allowed = allowed_tokens(row, len(TOKENS))
        assert allowed
        if END in allowed and (allowed == [END] or left == 0 or rng.random() < 0.5):
            return ids
        texts = [i for i in allowed if i != END]
        token = rng.choice(texts)
        if not thoughtful and TOKENS.index(b"</think>") in texts:
            token = TOKENS.index(b"</think>")
        matcher.accept(token)
        closing.advance(token)
        if rng.random() < 0.2:
            matcher.rollback(1)
            closing.rollback(1)
            continue
        ids.append(token)
        left -= 1
        assert left >= 0
        jump = jumper.canonical(matcher, ids)
        if not closing.fits(jump.tokens, left):
            matcher.rollback(len(jump.tokens))
            continue
        for forced in jump.tokens:
            closing.advance(forced)
        ids += jump.tokens
        left -= len(jump.tokens)


@pytest.mark.parametrize("text", ["", "{}", 'x{"a": true}', 'x</think>\n{"a": 1}'])
def test_what_is_no_text_of_it(text: str) -> None:
    with pytest.raises(Violation):
        validate(deferred(), text)


def test_documents_between_fixed_texts() -> None:
    constraint = JsonDocuments(
        schema=SCHEMA, begin="<c>", separator="</c><c>", end="</c>", max_documents=2
    )
    one, two = '<c>{"a": true}</c>', '<c>{"a": true}</c><c>{"a": false}</c>'
    for text in (one, two):
        validate(constraint, text)
    for text in ("", "<c></c>", one[:-1], one * 3, '<c>{"a": 1}</c>', f"{one} ", f"{one}x</c>"):
        with pytest.raises(Violation):
            validate(constraint, text)
    vocabulary = Vocabulary(TOKENS, frozenset({END}), (END,))
    matcher = load_backend("routed", vocabulary).compile(constraint).matcher()
    for i, character in enumerate(two):
        assert matcher.is_complete == (two[:i] == one)
        matcher.accept(TOKENS.index(character.encode()))
    assert matcher.is_complete
    with pytest.raises(MatcherRejected):
        matcher.accept(TOKENS.index(b"<"))


def test_a_regex_may_be_inside() -> None:
    grammar, _ = build(deferred(Regex(pattern="a{2}")))
    assert legal(grammar, "</think>", "a", "a") == {"END"}
    assert grammar.minimum == 3

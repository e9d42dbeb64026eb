"""Drafts: what is guessed, that it is legal, and that following it changes no token."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from phloem.constrained.backends import load_backend
from phloem.constrained.base import Matcher, MatcherExhausted
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.closing import ClosingGrammar, ClosingVocabulary
from phloem.constrained.drafts import (
    CONTEXT,
    LEAST_CHANCE,
    MAX_SCOPES,
    STRONGEST,
    Drafter,
)
from phloem.constrained.grammar import Grammar
from phloem.constrained.jump import Jumper
from phloem.constrained.lowering import lower
from phloem.constrained.service import Drafted, GrammarService
from phloem.constrained.spec import Constraint, JsonSchema, Regex, Whitespace
from phloem.constrained.vocab import Vocabulary

BYTES = [bytes([i]) for i in range(32, 127)]
LONGER = [b'{"', b'":', b'":"', b'","', b'"}', b"re", b"red", b"gre", b"een", b"name", b"tr", b"ue"]
TOKENS = [*BYTES, *LONGER, b""]
END = len(TOKENS) - 1
VOCABULARY = Vocabulary(TOKENS, frozenset({END}), (END,))
WORDS = words(VOCABULARY.size)
ROWS = 40

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "grey"]},
        "name": {"type": "string", "maxLength": 3},
        "good": {"type": "boolean"},
        "sizes": {"type": "array", "items": {"enum": [1, 10, 12]}, "maxItems": 3},
    },
    "required": ["colour", "name", "good", "sizes"],
    "additionalProperties": False,
}
CONSTRAINTS: list[Constraint] = [
    JsonSchema(schema=json.dumps(SCHEMA), whitespace=Whitespace.COMPACT),
    Regex(pattern=r"((red|green), )*(name|no name)\."),
]


@dataclasses.dataclass(frozen=True)
class Row:
    uid: int
    key: str
    at: int
    tokens: list[int]
    mask_row: int = 0
    left: int = 1000
    draft: Drafted | None = None
    draft_row: int = 1


@dataclasses.dataclass(frozen=True)
class JumpRow:
    uid: int
    key: str
    at: int
    tokens: list[int]
    left: int = 1000
    draft: int | None = 16
    namespace: str = ""


def longest_match(text: str) -> list[int]:
    """A tokenizer: at each place the longest token."""
    data, ids = text.encode(), []
    while data:
        token = max((t for t in TOKENS if t and data.startswith(t)), key=len)
        ids.append(TOKENS.index(token))
        data = data[len(token) :]
    return ids


def stopped() -> float:
    """A clock that stands still: a collection of all the tests' garbage is not a mask's doing."""
    return 0.0


def grammar_of(constraint: Constraint) -> Grammar:
    lowered = lower(constraint)
    closings = ClosingGrammar(lowered, ClosingVocabulary(VOCABULARY))
    return Grammar(load_backend("routed", VOCABULARY).compile(constraint), closings)


# --------------------------------------------------------------------------- what is guessed


def learnt(texts: Sequence[Sequence[int]], scope: str = "k") -> Drafter:
    drafter = Drafter()
    for text in texts:
        for at in range(len(text)):
            drafter.learn(scope, text, at)
    return drafter


def guessed(drafter: Drafter, text: Sequence[int], scope: str = "k") -> int | None:
    guess = drafter.guess(scope, text)
    return None if guess is None else guess.token


def test_what_followed_the_same_tokens_is_guessed() -> None:
    drafter = learnt([[1, 2, 3, 4, 5]])
    assert guessed(drafter, []) == 1
    assert guessed(drafter, [1]) == 2
    assert guessed(drafter, [9, 9, 2, 3, 4]) == 5
    assert guessed(drafter, [9, 3, 4]) is None  # all CONTEXT tokens have to agree
    assert guessed(drafter, [2, 3]) is None  # as in a text that begins so
    assert guessed(drafter, [1], scope="other") is None


def test_a_guess_that_is_often_right_outlives_as_many_wrong_ones() -> None:
    context = list(range(CONTEXT))
    drafter = learnt([[*context, 7]] * 10)
    for _ in range(STRONGEST - 1):
        drafter.learn("k", [*context, 8], CONTEXT)
        assert guessed(drafter, context) == 7
    drafter.learn("k", [*context, 8], CONTEXT)
    assert guessed(drafter, context) == 8


def test_the_chance_of_a_guess_is_what_it_was_before_under_the_constraint() -> None:
    """Every text is new under one, and the same under the other."""
    drafter = Drafter()
    for i in range(200):
        drafter.learn("new", [i % 3, i % 5, i % 2, i], 3)
        drafter.learn("same", [i % 3, i % 5, i % 2, 7], 3)
    context = [1, 1, 1]
    for scope, chances in (("new", (0.0, 0.1)), ("same", (0.9, 1.0))):
        guess = drafter.guess(scope, context)
        assert guess is not None and chances[0] <= guess.chance <= chances[1]
    drafter.learn("other", [4, 5], 1)
    first = drafter.guess("other", [4])
    assert first is not None and first.chance > LEAST_CHANCE


def test_the_oldest_contexts_are_forgotten() -> None:
    drafter = Drafter(limit=50)
    for i in range(1000):
        drafter.learn("k", [i, i, i, 5], 3)
        drafter.learn("k", [7, 7, 7, 6], 3)
    assert len(drafter) == 50
    assert guessed(drafter, [7, 7, 7]) == 6
    assert guessed(drafter, [999] * 3) == 5
    assert guessed(drafter, [900] * 3) is None
    for i in range(2 * MAX_SCOPES):
        for _ in range(2):
            drafter.learn(i, [1], 0)
    assert len(drafter._right) == MAX_SCOPES


# --------------------------------------------------------------------------- the service


class Generation:
    """One text, drawn as the worker would: a token of each mask, mostly the first, by a hash of
    seed and place. `far` says how far a draft may go; None for none."""

    def __init__(self, service: GrammarService, uid: int, seed: int, left: int) -> None:
        self.service, self.uid, self.seed, self.budget = service, uid, seed, left
        self.tokens: list[int] = []
        self.told = 0
        self.masks = np.zeros((ROWS, WORDS), np.int32)
        self.steps = self.guessed = self.accepted = 0

    def draw(self, mask: NDArray[np.int32]) -> int:
        legal = allowed_tokens(mask, VOCABULARY.size)
        rng = random.Random(f"{self.seed} {len(self.tokens)}")
        return legal[0] if rng.random() < 0.8 else rng.choice(legal)

    def news(self) -> tuple[int, list[int], int]:
        at, self.told = self.told, len(self.tokens)
        return at, self.tokens[at:], self.budget - len(self.tokens)

    def run(self, far: int | None, *, exact: bool) -> list[int]:
        while len(self.tokens) < self.budget:
            at, news, left = self.news()
            ask = JumpRow(self.uid, "k", at, news, left, far)
            jump = self.service.jump(ask, exact=exact)
            self.tokens += jump.tokens
            self.told = len(self.tokens)
            if jump.ends:
                return [*self.tokens, END]
            draft = self.service.draft(ask, len(jump.tokens), exact=exact)
            if draft is not None and len(self.tokens) + len(draft.tokens) >= self.budget:
                draft = None
            if self.step(draft):
                return self.tokens
        return self.tokens

    def step(self, draft: Drafted | None) -> bool:
        """Draw, along a draft if there is one; whether the text has ended."""
        self.steps += 1
        at, news, left = self.news()
        row = Row(self.uid, "k", at, news, left=left, draft=draft)
        outcome = self.service.step([row], self.masks.__getitem__)
        draws = [0] if draft is None else draft.draws
        assert not outcome.failed and sorted(outcome.filled) == list(range(len(draws)))
        for place, start in enumerate(draws):
            token = self.draw(self.masks[place])
            self.guessed += draft is not None and start < len(draft.tokens)
            if draft is None or start == len(draft.tokens) or token != draft.tokens[start]:
                self.tokens.append(token)
                return token == END
            self.accepted += 1
            last = place + 1 == len(draws)
            self.tokens += draft.tokens[start : None if last else draws[place + 1]]
            if last:
                self.tokens.append(END)
        return True


@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("far", [1, 4, 32])
def test_drafts_change_no_token(constraint: Constraint, exact: bool, far: int) -> None:
    grammar = grammar_of(constraint)
    jumper = Jumper(VOCABULARY, longest_match)
    plain = GrammarService({"k": grammar}.get, jumper, clock=stopped)
    drafting = GrammarService({"k": grammar}.get, jumper, clock=stopped)
    steps = [0, 0]
    accepted = 0
    for uid in range(60):
        left = 1000 if uid % 2 else 16 + uid  # near the end of a budget, masks are narrowed
        alone = Generation(plain, uid, uid % 9, left)
        along = Generation(drafting, uid, uid % 9, left)
        assert along.run(far, exact=exact) == alone.run(None, exact=exact)
        accepted += along.accepted
        steps[0] += alone.steps
        steps[1] += along.steps
    assert steps[1] + accepted >= steps[0]  # each guess that was right saved at most a step
    if far > 1:  # else too short for a guess with what it forces
        assert accepted > 5 and steps[1] < steps[0]


def test_a_draft_is_legal_and_leaves_the_matcher_where_it_is() -> None:
    service = GrammarService(
        {"k": grammar_of(CONSTRAINTS[1])}.get, Jumper(VOCABULARY, longest_match)
    )
    text = longest_match("green, red, name.")
    for uid in range(3):
        for at in range(len(text)):
            service.jump(JumpRow(uid, "k", at, text[at : at + 1]), exact=True)
    first = JumpRow(9, "k", 0, [])
    service.jump(first, exact=True)
    draft = service.draft(first, 0, exact=True)
    assert draft is not None and draft.tokens == text[: len(draft.tokens)]
    assert draft.draws[0] == 0
    shorter = service.draft(dataclasses.replace(first, draft=6), 0, exact=True)
    assert shorter is not None and shorter.tokens == text[: len(shorter.tokens)]
    assert len(shorter.tokens) <= 6 < len(draft.tokens)
    masks = np.zeros((ROWS, WORDS), np.int32)
    service.step([Row(9, "k", 0, [])], masks.__getitem__)
    fresh = grammar_of(CONSTRAINTS[1]).matcher()
    expected = np.zeros(WORDS, np.int32)
    fresh.fill(expected)
    assert masks[0].tolist() == expected.tolist()


def test_texts_of_other_namespaces_are_not_drawn_on() -> None:
    service = GrammarService({"k": grammar_of(CONSTRAINTS[1])}.get, Jumper(VOCABULARY, None))
    for at, token in enumerate(text := longest_match("red, no name.")):
        row = JumpRow(1, "k", at, [token], namespace="a", draft=0)  # 0: learnt from all the same
        service.jump(row, exact=True)
        assert service.draft(row, 0, exact=True) is None
    for namespace, found in (("a", True), ("b", False)):
        row = JumpRow(2, "k", 0, [], namespace=namespace)
        service.jump(row, exact=True)
        draft = service.draft(row, 0, exact=True)
        assert (draft is not None) == found
    row = JumpRow(3, "k", 0, text[:2], draft=None)  # of no use: nothing is learnt
    service.jump(row, exact=True)
    assert service.draft(row, 0, exact=True) is None


class Tiring:
    """A matcher that is exhausted once it has read `most` tokens."""

    def __init__(self, inner: Matcher, most: int) -> None:
        self.inner, self.most, self.read = inner, most, 0

    def accept(self, token: int) -> None:
        self.read += 1
        if self.read > self.most:
            raise MatcherExhausted("too dear")
        self.inner.accept(token)

    def rollback(self, count: int) -> None:
        self.read -= count
        self.inner.rollback(count)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


def test_a_matcher_that_fails_along_a_draft_has_its_own_mask_all_the_same() -> None:
    compiled = grammar_of(CONSTRAINTS[1])

    class Weak:
        engine = "weak"
        memory_bytes = 0

        def matcher(self) -> Matcher:
            return Tiring(compiled.matcher(), 4)  # type: ignore[return-value]

    service = GrammarService({"k": Grammar(Weak())}.get, Jumper(VOCABULARY, None))
    masks = np.zeros((ROWS, WORDS), np.int32)
    text = longest_match("red, red, name.")
    draft = Drafted(text[1:6], [0, 1, 2, 5])
    outcome = service.step([Row(1, "k", 0, text[:1], draft=draft)], masks.__getitem__)
    assert outcome.filled == [0, 1, 2] and list(outcome.failed) == [3]
    assert not outcome.faults
    outcome = service.step([Row(1, "k", 0, text[:2])], masks.__getitem__)  # made anew
    assert outcome.filled == [0] and not outcome.failed


def test_a_slow_matcher_gets_no_further_drafts_and_its_request_does_not_pay() -> None:
    now = 0.0

    class Slow(Tiring):
        def accept(self, token: int) -> None:
            nonlocal now
            now += 0.004
            self.inner.accept(token)

    compiled = grammar_of(CONSTRAINTS[1])

    class Laggard:
        engine = "laggard"
        memory_bytes = 0

        def matcher(self) -> Matcher:
            return Slow(compiled.matcher(), 0)  # type: ignore[return-value]

    service = GrammarService(
        {"k": Grammar(Laggard())}.get, Jumper(VOCABULARY, None), clock=lambda: now
    )
    masks = np.zeros((ROWS, WORDS), np.int32)
    text = longest_match("red, red, red, name.")
    for at in range(8):
        service.jump(JumpRow(1, "k", at, text[at : at + 1]), exact=True)
    row = JumpRow(2, "k", 0, [])
    service.jump(row, exact=True)
    draft = service.draft(row, 0, exact=True)
    assert draft is not None
    assert service.draft(row, 0, exact=True) is None
    service.step([Row(2, "k", 0, [], draft=draft)], masks.__getitem__)
    assert service._matchers[2].seconds == pytest.approx(0.0)

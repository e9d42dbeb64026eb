"""Matchers follow the history they are told, whatever happened before, and fail alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from phloem.constrained.backends import load_backend
from phloem.constrained.base import Backend, Matcher
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.closing import ClosingGrammar, ClosingVocabulary
from phloem.constrained.grammar import Grammar
from phloem.constrained.jump import NO_JUMP, Jump, Jumper
from phloem.constrained.lowering import lower
from phloem.constrained.service import Drafted, GrammarService
from phloem.constrained.spec import Regex
from phloem.constrained.vocab import Vocabulary

TOKENS = [b"a", b"b", b"ab", b"", b"c"]
VOCABULARY = Vocabulary(TOKENS, frozenset({3}), (3,))
END = 3
JUMPER = Jumper(VOCABULARY, None)


@dataclasses.dataclass(frozen=True)
class Row:
    uid: int
    key: str
    at: int
    tokens: list[int]
    mask_row: int
    left: int = 1000
    draft: Drafted | None = None
    draft_row: int = 2


@dataclasses.dataclass(frozen=True)
class JumpRow:
    uid: int
    key: str
    at: int
    tokens: list[int]
    left: int = 1000
    draft: int | None = 8
    namespace: str = ""


def stopped() -> float:
    """A clock that stands still: a collection of all the tests' garbage is not a mask's doing."""
    return 0.0


@pytest.fixture(scope="module")
def engine() -> Backend:
    return load_backend("xgrammar", VOCABULARY)


@pytest.fixture(scope="module")
def grammar(engine: Backend) -> Grammar:
    return Grammar(engine.compile(Regex(pattern="(ab)*c")))


Buffer = Callable[[int], NDArray[np.int32]]


@pytest.fixture
def buffer() -> NDArray[np.int32]:
    return np.zeros((4, words(VOCABULARY.size)), dtype=np.int32)


def allowed(buffer: NDArray[np.int32], row: int) -> list[int]:
    return allowed_tokens(buffer[row], VOCABULARY.size)


def test_a_request_from_start_to_end(grammar: Grammar, buffer: NDArray[np.int32]) -> None:
    service = GrammarService({"k": grammar}.get, JUMPER, clock=stopped)
    assert service.step([Row(1, "k", 0, [], 0)], buffer.__getitem__).filled == [0]
    assert allowed(buffer, 0) == [0, 2, 4]
    service.step([Row(1, "k", 0, [0], 0)], buffer.__getitem__)
    assert allowed(buffer, 0) == [1]
    service.step([Row(1, "k", 1, [1, 4], 0)], buffer.__getitem__)
    assert allowed(buffer, 0) == [END]
    outcome = service.step([Row(1, "k", 3, [END], 0)], buffer.__getitem__)
    assert "already ended" in outcome.failed[0]
    service.close([1])
    assert service.matchers == 0


def test_a_jump_moves_the_matcher_on(grammar: Grammar, buffer: NDArray[np.int32]) -> None:
    service = GrammarService({"k": grammar}.get, JUMPER, clock=stopped)
    assert service.jump(JumpRow(1, "k", 0, []), exact=True) == NO_JUMP
    assert service.jump(JumpRow(1, "k", 0, [0]), exact=True) == Jump([1], ends=False)
    service.step([Row(1, "k", 2, [], 0)], buffer.__getitem__)
    assert allowed(buffer, 0) == [0, 2, 4]
    assert service.jump(JumpRow(1, "k", 2, [4]), exact=True) == Jump([], ends=True)


def test_a_jump_of_a_matcher_that_is_not_there_or_fails(
    grammar: Grammar, buffer: NDArray[np.int32]
) -> None:
    service = GrammarService({"k": grammar}.get, JUMPER, clock=stopped)
    assert service.jump(JumpRow(1, "k", 5, [0]), exact=True) == NO_JUMP
    assert service.jump(JumpRow(2, "none such", 0, []), exact=True) == NO_JUMP
    assert service.jump(JumpRow(3, "k", 0, [1]), exact=True) == NO_JUMP
    outcome = service.step([Row(3, "k", 0, [1], 0)], buffer.__getitem__)
    assert "contradicts" in outcome.failed[0]


def test_a_row_ahead_of_its_matcher_is_asked_for_again(
    grammar: Grammar, buffer: NDArray[np.int32]
) -> None:
    service = GrammarService({"k": grammar}.get, JUMPER, clock=stopped)
    outcome = service.step([Row(7, "k", 2, [0], 1)], buffer.__getitem__)
    assert (outcome.replay, outcome.filled, outcome.failed) == ([7], [], {})
    outcome = service.step([Row(7, "k", 0, [0, 1, 0], 1)], buffer.__getitem__)
    assert outcome.filled == [1]
    assert allowed(buffer, 1) == [1]


def test_rejected_drafts_roll_back(grammar: Grammar, buffer: NDArray[np.int32]) -> None:
    service = GrammarService({"k": grammar}.get, JUMPER, clock=stopped)
    service.step([Row(1, "k", 0, [2, 2, 0], 0)], buffer.__getitem__)
    service.step([Row(1, "k", 1, [4], 0)], buffer.__getitem__)
    assert allowed(buffer, 0) == [END]


def test_a_failing_row_does_not_touch_its_neighbours(
    grammar: Grammar, buffer: NDArray[np.int32]
) -> None:
    class Broken:
        engine = "broken"
        memory_bytes = 0

        def matcher(self) -> Matcher:
            raise RuntimeError("out of order")

    service = GrammarService({"k": grammar, "broken": Grammar(Broken())}.get, JUMPER)
    rows = [
        Row(1, "k", 0, [], 0),
        Row(2, "k", 0, [1], 1),
        Row(3, "gone", 0, [], 2),
        Row(4, "broken", 0, [], 3),
        Row(5, "k", 0, [2], 0),
    ]
    outcome = service.step(rows, buffer.__getitem__)
    assert outcome.filled == [0, 0]
    assert allowed(buffer, 0) == [0, 2, 4]
    assert "contradicts" in outcome.failed[1]
    assert "not compiled" in outcome.failed[2]
    assert "out of order" in outcome.failed[3]
    assert service.matchers == 2


def test_no_legal_token_is_an_error(engine: Backend, buffer: NDArray[np.int32]) -> None:
    # No token of this vocabulary can write a z.
    service = GrammarService({"k": Grammar(engine.compile(Regex(pattern="az")))}.get, JUMPER)
    outcome = service.step([Row(1, "k", 0, [0], 0)], buffer.__getitem__)
    assert "no token" in outcome.failed[0]
    assert outcome.faults == {0: "no_token_for_constraint"}


@pytest.mark.parametrize(("seconds", "good"), [(0.6, 0), (0.24, 4)])
def test_a_constraint_that_costs_too_much_ends_alone(
    grammar: Grammar, buffer: NDArray[np.int32], seconds: float, good: int
) -> None:
    """One mask too dear, or all of them together."""
    ticks = itertools.count(0.0, seconds)  # between two looks at the clock
    service = GrammarService({"k": grammar}.get, JUMPER, clock=lambda: next(ticks))
    row = Row(1, "k", 0, [], 0)
    for _ in range(good):
        assert service.step([row], buffer.__getitem__).failed == {}
    outcome = service.step([row], buffer.__getitem__)
    assert "processor time" in outcome.failed[0]
    assert outcome.faults == {0: "constraint_too_slow"}
    assert service.matchers == 0


def test_each_matcher_at_work_is_announced(grammar: Grammar, buffer: NDArray[np.int32]) -> None:
    said: list[int | None] = []

    class Notes:
        def begin(self, uid: int) -> None:
            said.append(uid)

        def end(self) -> None:
            said.append(None)

    service = GrammarService({"k": grammar}.get, JUMPER, guard=Notes())
    service.step([Row(7, "k", 0, [], 0), Row(8, "k", 0, [1], 1)], buffer.__getitem__)
    service.jump(JumpRow(7, "k", 0, [0]), exact=True)
    # Anew when its grammar is there: that was not the matcher's work.
    assert [uid for uid, _ in itertools.groupby(said)] == [7, None, 8, None, 7, None]


def test_masks_and_jumps_keep_within_the_budget(engine: Backend, buffer: NDArray[np.int32]) -> None:
    constraint = Regex(pattern="(ab)*c")
    closings = ClosingGrammar(lower(constraint), ClosingVocabulary(VOCABULARY))
    grammar = Grammar(engine.compile(constraint), closings)
    assert grammar.minimum == 1
    service = GrammarService({"k": grammar}.get, JUMPER, clock=stopped)
    outcome = service.step([Row(1, "k", 0, [], 0, left=3)], buffer.__getitem__)
    assert (allowed(buffer, 0), outcome.closing) == ([0, 2, 4], [])
    outcome = service.step([Row(1, "k", 0, [], 0, left=2)], buffer.__getitem__)
    assert (allowed(buffer, 0), outcome.closing) == ([2, 4], [0])
    outcome = service.step([Row(1, "k", 0, [2], 0, left=1)], buffer.__getitem__)
    assert (allowed(buffer, 0), outcome.closing) == ([4], [0])
    assert service.jump(JumpRow(2, "k", 0, [0], left=2), exact=True) == Jump([1], ends=False)


class Histories(RuleBasedStateMachine):
    """Random appends, rollbacks, restarts: masks always equal those of a fresh matcher."""

    engine = load_backend("xgrammar", VOCABULARY)
    grammar = Grammar(engine.compile(Regex(pattern="(ab)*c")))

    def __init__(self) -> None:
        super().__init__()
        self.service = GrammarService({"k": self.grammar}.get, JUMPER, clock=stopped)
        self.history: list[int] = []
        self.known = 0
        self.buffer = np.zeros((1, words(VOCABULARY.size)), dtype=np.int32)

    @rule(token=st.sampled_from([0, 1, 2, 4]))
    def append(self, token: int) -> None:
        fresh = self.grammar.matcher()
        row = np.zeros(words(VOCABULARY.size), dtype=np.int32)
        for known in self.history:
            fresh.accept(known)
        fresh.fill(row)
        if token in allowed_tokens(row, VOCABULARY.size):
            self.history.append(token)

    @rule(count=st.integers(1, 3))
    def reject(self, count: int) -> None:
        del self.history[len(self.history) - min(count, len(self.history)) :]
        self.known = min(self.known, len(self.history))

    @rule()
    def restart(self) -> None:
        self.service = GrammarService({"k": self.grammar}.get, JUMPER, clock=stopped)

    @invariant()
    def masks_agree(self) -> None:
        row = Row(1, "k", self.known, self.history[self.known :], 0)
        outcome = self.service.step([row], self.buffer.__getitem__)
        if outcome.replay:
            again = Row(1, "k", 0, self.history, 0)
            outcome = self.service.step([again], self.buffer.__getitem__)
        assert outcome.filled == [0]
        self.known = len(self.history)
        fresh = self.grammar.matcher()
        for token in self.history:
            fresh.accept(token)
        expected = np.zeros(words(VOCABULARY.size), dtype=np.int32)
        fresh.fill(expected)
        assert self.buffer[0].tolist() == expected.tolist()


TestHistories = Histories.TestCase

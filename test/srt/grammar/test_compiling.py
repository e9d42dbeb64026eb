"""What the sandbox tries before a constraint is compiled where the streams are."""

from __future__ import annotations

import time

import numpy as np
import pytest
from numpy.typing import NDArray

from phloem.constrained.backends import load_backend
from phloem.constrained.base import Backend, CompiledGrammar, LimitExceeded
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.closing import ClosingVocabulary
from phloem.constrained.compiler import Hurried
from phloem.constrained.grammar_text import LoweredGrammar
from phloem.constrained.spec import Constraint, Continued, Ebnf, JsonSchema, Regex
from phloem.constrained.vocab import Vocabulary
from phloem.srt.grammar.compiling import TRIAL_SECONDS, Compiling, trial
from phloem.srt.grammar.sandbox import OverLimit

VOCABULARY = Vocabulary(
    [bytes([b]) for b in range(128)] + [b""], special_ids=frozenset({128}), stop_ids=(128,)
)
CLOSINGS = ClosingVocabulary(VOCABULARY)
BACKEND = load_backend("routed", VOCABULARY)
END = 128


class SlowAfter:
    """A matcher of any text; it takes its time for each mask after so many tokens."""

    is_complete = True
    is_terminated = False

    def __init__(self, tokens: int) -> None:
        self._left = tokens

    def accept(self, token: int) -> None:
        self._left -= 1

    def rollback(self, count: int) -> None:
        self._left += count

    def fill(self, row: NDArray[np.int32]) -> None:
        row[:] = -1
        began = time.thread_time()
        while self._left <= 0 and time.thread_time() - began <= TRIAL_SECONDS:
            continue

    def forced_string(self) -> str:
        return ""


class SlowGrammar:
    engine = "slow"
    memory_bytes = 0

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def matcher(self) -> SlowAfter:
        return SlowAfter(self._tokens)


class SlowBackend:
    """Its masks are slow after so many tokens."""

    name = "slow"

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self.built = 0

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        raise NotImplementedError

    def compile_grammar(self, grammar: LoweredGrammar) -> CompiledGrammar:
        self.built += 1
        return SlowGrammar(self._tokens)


def build(backend: Backend, constraint: Constraint) -> None:
    Compiling(BACKEND, CLOSINGS, trial(backend, CLOSINGS)).build(constraint)


@pytest.mark.parametrize(
    ("constraint", "tokens"),
    [
        (Regex(pattern="[a-z]*"), 0),
        (Regex(pattern="a{20}"), 15),  # along the shortest text
        (Regex(pattern="[a-z]*"), 15),  # along another one
        (Ebnf(grammar='root ::= "a" root | ""'), 3),
        (Continued(constraint=Regex(pattern="ab*"), prefix="a"), 0),
        (JsonSchema(schema='{"type": "string", "maxLength": 2000}'), 5),
    ],
)
def test_a_constraint_with_slow_masks_is_refused(constraint: Constraint, tokens: int) -> None:
    with pytest.raises(LimitExceeded) as caught:
        build(SlowBackend(tokens), constraint)
    assert caught.value.reason == "constraint_too_slow"


def test_a_small_schema_is_not_tried() -> None:
    backend = SlowBackend(0)
    build(backend, JsonSchema(schema='{"type": "object", "properties": {"a": {}}}'))
    assert backend.built == 0


def test_what_was_tried_is_what_runs() -> None:
    grammar = Compiling(BACKEND, CLOSINGS, trial(BACKEND, CLOSINGS)).build(Regex(pattern="ab?"))
    row = np.zeros(words(VOCABULARY.size), np.int32)
    matcher = grammar.matcher()
    matcher.accept(ord("a"))
    matcher.fill(row)
    assert allowed_tokens(row, VOCABULARY.size) == [ord("b"), END]
    assert grammar.minimum == 1


def over_limit(_request: bytes) -> bytes:
    raise OverLimit


def test_what_takes_long_is_given_up_and_then_done_patiently() -> None:
    lower = trial(BACKEND, CLOSINGS)
    compiling = Compiling(BACKEND, CLOSINGS, over_limit, lower)
    with pytest.raises(Hurried):
        compiling.build(Regex(pattern="ab"))
    assert compiling.build_patiently(Regex(pattern="ab")).minimum == 2
    assert compiling.rebuild(Regex(pattern="ab")).minimum == 2


def test_what_is_too_much_for_patience_is_refused() -> None:
    for compiling in (
        Compiling(BACKEND, CLOSINGS, over_limit),
        Compiling(BACKEND, CLOSINGS, over_limit, over_limit),
    ):
        with pytest.raises(LimitExceeded, match="too much time or memory"):
            compiling.build_patiently(Regex(pattern="ab"))
    with pytest.raises(LimitExceeded, match="too much time or memory"):
        Compiling(BACKEND, CLOSINGS, over_limit).build(Regex(pattern="ab"))

"""From a constraint to a grammar: what may blow up first, elsewhere, and then here.

The sandbox lowers the constraint, and unless the result is small and plain also compiles it and
walks through some texts of it, on trial and within limits of time and memory. What comes back is a
text that is safe to compile here, where matchers live: compiled grammars are too large to be sent
(see `docs/constraints.md`).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from phloem.constrained.base import (
    Backend,
    ConstraintError,
    LimitExceeded,
    MalformedConstraint,
    Matcher,
    UnsupportedKeyword,
)
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.closing import ClosingGrammar, ClosingVocabulary
from phloem.constrained.grammar import Grammar
from phloem.constrained.grammar_text import LoweredGrammar
from phloem.constrained.lowering import lower
from phloem.constrained.service import CALL_SECONDS
from phloem.constrained.spec import Constraint, Continued, Ebnf, Regex
from phloem.srt.grammar.sandbox import OverLimit

TRIAL_CHARS = 20_000
TRIAL_COUNTED = 1_000
"""A lowered grammar that is larger, or counts more, or does not come from a schema, is tried:
others take some tens of milliseconds to compile, and next to nothing for a mask."""
TRIAL_TOKENS = 64
"""Of its shortest text, and half as many of a random one."""

_KINDS: dict[str, type[ConstraintError]] = {
    kind.__name__: kind
    for kind in (ConstraintError, LimitExceeded, MalformedConstraint, UnsupportedKeyword)
}


class _Refused(msgspec.Struct, frozen=True, tag="refused"):
    kind: str
    message: str
    path: str
    reason: str


class _Lowered(msgspec.Struct, frozen=True, tag="lowered"):
    grammar: LoweredGrammar


_request = msgspec.msgpack.Decoder(Constraint)
_answer = msgspec.msgpack.Decoder(_Lowered | _Refused)


def trial(backend: Backend, vocabulary: ClosingVocabulary) -> Callable[[bytes], bytes]:
    """What the sandbox does with a packed constraint: its lowered form, or why it is refused."""

    def handle(request: bytes) -> bytes:
        try:
            constraint = _request.decode(request)
            lowered = lower(constraint)
            if _may_be_dear(constraint, lowered):
                _walk(_build(backend, lowered, vocabulary), vocabulary)
        except ConstraintError as error:
            kind = type(error).__name__ if type(error).__name__ in _KINDS else "ConstraintError"
            refused = _Refused(kind, error.message, error.path, error.reason)
            return msgspec.msgpack.encode(refused)
        return msgspec.msgpack.encode(_Lowered(lowered))

    return handle


def _may_be_dear(constraint: Constraint, lowered: LoweredGrammar) -> bool:
    if isinstance(constraint, Continued):
        constraint = constraint.constraint
    return (
        isinstance(constraint, Regex | Ebnf)
        or len(lowered.text) > TRIAL_CHARS
        or lowered.counted > TRIAL_COUNTED
    )


def _build(backend: Backend, lowered: LoweredGrammar, vocabulary: ClosingVocabulary) -> Grammar:
    return Grammar(
        backend.compile_grammar(lowered),
        None if lowered.is_tag else ClosingGrammar(lowered, vocabulary),
        lowered.prefix.encode(),
    )


def _walk(grammar: Grammar, vocabulary: ClosingVocabulary) -> None:
    """See what masks take, along the shortest text and a random one.

    Raises:
        LimitExceeded: one takes too long.
    """
    closing = grammar.closing()
    shortest = None if closing is None else closing.path()
    _follow(grammar.matcher(), vocabulary, (shortest or [])[:TRIAL_TOKENS])
    _follow(grammar.matcher(), vocabulary, [None] * (TRIAL_TOKENS // 2))


def _follow(matcher: Matcher, vocabulary: ClosingVocabulary, tokens: Sequence[int | None]) -> None:
    """Fill a mask before each token; None is some token that the mask has."""
    row = np.zeros(words(vocabulary.size), np.int32)
    rng = random.Random(0)
    for token in tokens:
        began = time.thread_time()
        matcher.fill(row)
        took = time.thread_time() - began
        if took > CALL_SECONDS:
            raise LimitExceeded(
                f"a mask of the constraint takes {took:.2g} s of processor time;"
                f" at most {CALL_SECONDS:g} s are allowed",
                code="constraint_too_slow",
            )
        legal = allowed_tokens(row & ~vocabulary.stops, vocabulary.size)
        if not legal:
            return
        matcher.accept(rng.choice(legal) if token is None else token)


class Compiling:
    """Compiles for one vocabulary. `lower` takes and gives what `trial` does, wherever that is
    done; it may raise `OverLimit`. Thread-safe."""

    def __init__(
        self, backend: Backend, vocabulary: ClosingVocabulary, lower: Callable[[bytes], bytes]
    ) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._lower = lower

    def build(self, constraint: Constraint) -> Grammar:
        """The compiled constraint.

        Raises:
            ConstraintError: it is refused, or costs too much to compile.
        """
        try:
            answer = _answer.decode(self._lower(msgspec.msgpack.encode(constraint)))
        except OverLimit as error:
            raise LimitExceeded(
                "compiling the constraint takes too much time or memory", code="compile_limit"
            ) from error
        if isinstance(answer, _Refused):
            raise _KINDS[answer.kind](answer.message, path=answer.path, code=answer.reason)
        return _build(self._backend, answer.grammar, self._vocabulary)

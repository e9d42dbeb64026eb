"""From a constraint to a grammar: what may blow up first, elsewhere, and then here.

The sandbox lowers the constraint, and unless the result is small and plain also compiles it and
walks through some texts of it, on trial and within limits of time and memory. What comes back is a
text that is safe to compile here, where matchers live: compiled grammars are too large to be sent
(see `docs/constraints.md`).
"""

from __future__ import annotations

import dataclasses
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
from phloem.constrained.compiler import Hurried
from phloem.constrained.deferred import DeferredClosings, DeferredGrammar, Markers
from phloem.constrained.grammar import Grammar
from phloem.constrained.grammar_text import Deferral, LoweredGrammar
from phloem.constrained.lowering import lower
from phloem.constrained.mask_cache import CachingGrammar
from phloem.constrained.service import CALL_SECONDS
from phloem.constrained.spec import Constraint, Continued, Deferred, Ebnf, Regex
from phloem.srt.grammar.sandbox import OverLimit

TRIAL_CHARS = 20_000
TRIAL_COUNTED = 20_000
"""A lowered grammar that is larger, or counts more, or does not come from a schema, is tried:
others take some tens of milliseconds to compile, and next to nothing for a mask."""
TRIAL_SECONDS = CALL_SECONDS / 2
"""Of processor time that a mask may take on trial, where nobody else is at work."""
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
                inner = dataclasses.replace(lowered, deferral=None)
                _walk(_build(backend, inner, vocabulary), vocabulary)
        except ConstraintError as error:
            kind = type(error).__name__ if type(error).__name__ in _KINDS else "ConstraintError"
            refused = _Refused(kind, error.message, error.path, error.reason)
            return msgspec.msgpack.encode(refused)
        return msgspec.msgpack.encode(_Lowered(lowered))

    return handle


def _may_be_dear(constraint: Constraint, lowered: LoweredGrammar) -> bool:
    inner = constraint.constraint if isinstance(constraint, Continued | Deferred) else constraint
    return (
        isinstance(inner, Regex | Ebnf)
        or len(lowered.text) > TRIAL_CHARS
        or lowered.counted > TRIAL_COUNTED
    )


def _build(backend: Backend, lowered: LoweredGrammar, vocabulary: ClosingVocabulary) -> Grammar:
    if lowered.deferral is not None:
        return _build_deferred(backend, lowered, lowered.deferral, vocabulary)
    compiled, prefix = backend.compile_grammar(lowered), lowered.prefix.encode()
    if lowered.is_tag:
        return Grammar(compiled, None, prefix)
    closings = ClosingGrammar(lowered, vocabulary)
    # The engine's limits are what bounds ambiguous ones, so it has to see all of their texts.
    if closings.minimum is not None and not lowered.ambiguous:
        compiled = CachingGrammar(compiled, closings, prefix)
    return Grammar(compiled, closings, prefix)


def _build_deferred(
    backend: Backend, lowered: LoweredGrammar, deferral: Deferral, vocabulary: ClosingVocabulary
) -> Grammar:
    markers = Markers(deferral, vocabulary, free=not lowered.text)
    if not lowered.text:
        return Grammar(DeferredGrammar(markers, None))
    inner = _build(backend, dataclasses.replace(lowered, deferral=None), vocabulary)
    closings = inner.closings
    return Grammar(
        DeferredGrammar(markers, inner.compiled),
        DeferredClosings(markers, closings) if isinstance(closings, ClosingGrammar) else None,
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
        if took > TRIAL_SECONDS:
            raise LimitExceeded(
                f"a mask of the constraint takes {took:.2g} s of processor time;"
                f" at most {TRIAL_SECONDS:g} s are allowed",
                code="constraint_too_slow",
            )
        legal = allowed_tokens(row & ~vocabulary.stops, vocabulary.size)
        if not legal:
            return
        matcher.accept(rng.choice(legal) if token is None else token)


class Compiling:
    """Compiles for one vocabulary. `lower` takes and gives what `trial` does, wherever that is
    done; it may raise `OverLimit`. So does `lower_patiently`, which has more time. Thread-safe."""

    def __init__(
        self,
        backend: Backend,
        vocabulary: ClosingVocabulary,
        lower: Callable[[bytes], bytes],
        lower_patiently: Callable[[bytes], bytes] | None = None,
    ) -> None:
        self._backend = backend
        self._vocabulary = vocabulary
        self._lower = lower
        self._lower_patiently = lower_patiently

    def build(self, constraint: Constraint) -> Grammar:
        """The compiled constraint.

        Raises:
            ConstraintError: it is refused, or costs too much to compile.
            Hurried: it costs more than others should wait for, so `build_patiently` it.
        """
        try:
            return self._build(self._lower, constraint)
        except OverLimit as error:
            if self._lower_patiently is None:
                raise _too_dear() from error
            raise Hurried from error

    def build_patiently(self, constraint: Constraint) -> Grammar:
        """The compiled constraint, which is dear.

        Raises:
            ConstraintError: it is refused, or costs too much to compile.
        """
        try:
            return self._build(self._lower_patiently or self._lower, constraint)
        except OverLimit as error:
            raise _too_dear() from error

    def rebuild(self, constraint: Constraint) -> Grammar:
        """Compile what was compiled before: untried, and without waiting for others."""
        return _build(self._backend, lower(constraint), self._vocabulary)

    def _build(self, lowering: Callable[[bytes], bytes], constraint: Constraint) -> Grammar:
        answer = _answer.decode(lowering(msgspec.msgpack.encode(constraint)))
        if isinstance(answer, _Refused):
            raise _KINDS[answer.kind](answer.message, path=answer.path, code=answer.reason)
        return _build(self._backend, answer.grammar, self._vocabulary)


def _too_dear() -> LimitExceeded:
    return LimitExceeded(
        "compiling the constraint takes too much time or memory", code="compile_limit"
    )

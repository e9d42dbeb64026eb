"""Masks that were made before, by where in its grammar a text is.

An engine makes each mask anew: a fifth of a millisecond to a half where few characters are left of
a counted string, or among the keys of an open object. Texts that may go on alike have the same
mask, and the recogniser that closing follows them with (`closing_states`) gives them the same
state. So a mask is kept for each state, and the engine is only asked where no text was before.

That is exact: a state is all the places of the grammar's text, with what is to follow each, where
the text may be, so what can follow is a function of the state, whichever engine runs the grammar.

The first text of a grammar is not followed, since the recogniser is the slower one where it is new;
nor is any text of a grammar that is dear to follow.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.base import CompiledGrammar, Matcher
from phloem.constrained.closing import ClosingGrammar
from phloem.constrained.closing_states import State, TooAmbiguous

MAX_BYTES = 4 << 20
"""Of masks that one grammar keeps; beyond that it forgets them all."""
ENTRY_BYTES = 150
"""Of a state's entry, beside the mask, which others may have too."""
MAX_WORK = 2_000
"""Items of states (see `closing_states`) that reading one token may need for the first time; a
thousand take about a millisecond."""


class MaskCache:
    """The masks of one grammar. One thread at a time."""

    def __init__(self, closings: ClosingGrammar) -> None:
        self._recogniser = closings.recogniser
        self._tokens = closings.vocabulary.tokens
        self._generation = self._recogniser.generation
        self._masks: dict[State, NDArray[np.int32]] = {}
        self._distinct: dict[bytes, NDArray[np.int32]] = {}
        self._mask_bytes = 0
        self.dear = False
        """Following a text took more than `MAX_WORK`: no other is followed."""

    def __len__(self) -> int:
        return len(self._masks)

    @property
    def memory_bytes(self) -> int:
        """Approximate size, as of now."""
        return self._mask_bytes + ENTRY_BYTES * len(self._masks)

    def start(self, prefix: bytes) -> State | None:
        """Where a text is that has nothing but the prefix; None when that cannot be followed."""
        return self._read(self._recogniser.start, prefix)

    def after(self, state: State | None, token: int) -> State | None:
        """Where a text is after one more token; None after one without text, which ends it."""
        if state is None:
            return None
        text = self._tokens[token]
        at = state
        for byte in text:
            known = at.steps.get(byte)
            if known is None:
                return self._read(state, text)
            at = known
        return at if text else None

    def _read(self, state: State, text: bytes) -> State | None:
        if self.dear:
            return None
        try:
            return self._recogniser.limited(MAX_WORK, lambda: self._recogniser.read(state, text))
        except TooAmbiguous:
            self.dear = True
            return None

    def get(self, state: State) -> NDArray[np.int32] | None:
        """The mask of texts that are there, if it was made before."""
        return self._masks.get(state)

    def keep(self, state: State, mask: NDArray[np.int32]) -> None:
        """This is the mask of texts that are there."""
        if self._recogniser.generation != self._generation or self.memory_bytes > MAX_BYTES:
            self._generation = self._recogniser.generation
            self._masks.clear()
            self._distinct.clear()
            self._mask_bytes = 0
        data = mask.tobytes()
        if data not in self._distinct:
            self._distinct[data] = np.frombuffer(data, np.int32)
            self._mask_bytes += len(data)
        self._masks[state] = self._distinct[data]


class CachingMatcher:
    """See `phloem.constrained.base.Matcher`."""

    def __init__(self, matcher: Matcher, cache: MaskCache, prefix: bytes) -> None:
        self._matcher = matcher
        self._cache = cache
        # After 0, 1, … tokens; None: it is not known where that is.
        self._states = [cache.start(prefix)]

    def accept(self, token: int) -> None:
        self._matcher.accept(token)
        self._states.append(self._cache.after(self._states[-1], token))

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)
        del self._states[len(self._states) - count :]

    def fill(self, row: NDArray[np.int32]) -> None:
        state = self._states[-1]
        known = None if state is None else self._cache.get(state)
        if known is not None:
            row[:] = known
            return
        self._matcher.fill(row)
        if state is not None:
            self._cache.keep(state, row)

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_complete

    @property
    def is_terminated(self) -> bool:
        return self._matcher.is_terminated

    def forced_string(self) -> str:
        return self._matcher.forced_string()


class CachingGrammar:
    """See `phloem.constrained.base.CompiledGrammar`. `closings` is of the same grammar and has a
    minimum; `prefix` is what the matchers of `compiled` begin with. Its matchers are for one thread
    at a time, all of them."""

    def __init__(
        self, compiled: CompiledGrammar, closings: ClosingGrammar, prefix: bytes = b""
    ) -> None:
        self._compiled = compiled
        self._prefix = prefix
        self._cache = MaskCache(closings)
        self._lock = threading.Lock()
        self._used = False

    @property
    def engine(self) -> str:
        return self._compiled.engine

    @property
    def memory_bytes(self) -> int:
        return self._compiled.memory_bytes + self._cache.memory_bytes

    def matcher(self) -> Matcher:
        matcher = self._compiled.matcher()
        with self._lock:
            first, self._used = not self._used, True
        if first or self._cache.dear:
            return matcher
        return CachingMatcher(matcher, self._cache, self._prefix)

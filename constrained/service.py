"""Matchers by request, masks by step: the grammar process without its sockets.

The scheduler's token history is the truth. Each row of a step says where its tokens begin; a
matcher that is ahead rolls back, one that is behind or unknown is reported for replay. A row that
fails gives a reason and touches no other row.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.base import CompiledGrammar, Matcher, MatcherRejected
from phloem.constrained.jump import NO_JUMP, Jump, Jumper

log = logging.getLogger(__name__)

SLOW_MASK_SECONDS = 1.0
MAX_SLOW_MASKS = 3


class History(Protocol):
    """How far one request has come (see `phloem.srt.messages.GrammarRow`)."""

    @property
    def uid(self) -> int: ...

    @property
    def key(self) -> str: ...

    @property
    def at(self) -> int: ...

    @property
    def tokens(self) -> Sequence[int]: ...


class Row(History, Protocol):
    """One request's part in a step."""

    @property
    def mask_row(self) -> int: ...


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """Mask rows that were filled, mask rows that failed and why, requests to be replayed."""

    filled: list[int]
    failed: dict[int, str]
    replay: list[int]


@dataclasses.dataclass(slots=True)
class _Progress:
    matcher: Matcher
    key: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    slow_masks: int = 0


class GrammarService:
    """`grammar_of` looks up a compiled grammar by key; None when it is not (or no longer) there.
    `jumper` finds what is forced."""

    def __init__(
        self,
        grammar_of: Callable[[str], CompiledGrammar | None],
        jumper: Jumper,
        *,
        slow_mask_seconds: float = SLOW_MASK_SECONDS,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._grammar_of = grammar_of
        self._jumper = jumper
        self._slow_mask_seconds = slow_mask_seconds
        self._clock = clock
        self._matchers: dict[int, _Progress] = {}

    def step(self, rows: Iterable[Row], mask_of: Callable[[int], NDArray[np.int32]]) -> StepOutcome:
        """Bring each row's matcher to its history and fill its mask; `mask_of(mask_row)` gives
        the words to write."""
        outcome = StepOutcome([], {}, [])
        for row in rows:
            try:
                ready = self._advance(row)
                if ready is None:
                    outcome.replay.append(row.uid)
                    continue
                reason = self._fill(self._matchers[row.uid], mask_of(row.mask_row))
            except MatcherRejected as error:
                reason = f"the history contradicts the constraint: {error}"
            except Exception as error:  # whatever one matcher does, the others go on
                reason = f"the constraint's matcher failed: {type(error).__name__}: {error}"
            if reason is None:
                outcome.filled.append(row.mask_row)
            else:
                self._matchers.pop(row.uid, None)
                outcome.failed[row.mask_row] = reason
        return outcome

    def jump(self, row: History, *, exact: bool) -> Jump:
        """Bring a matcher to its history and past the tokens that are forced from there. A matcher
        that cannot be brought there does not jump: the next step tells why."""
        try:
            if self._advance(row) is None:
                return NO_JUMP
            progress = self._matchers[row.uid]
            if exact:
                jump = self._jumper.exact(progress.matcher)
            else:
                jump = self._jumper.canonical(progress.matcher, progress.tokens)
        except Exception:  # whatever one matcher does, the others go on; its next mask fails
            log.exception("request %d: its matcher failed in a jump", row.uid)
            self._matchers.pop(row.uid, None)
            return NO_JUMP
        progress.tokens += jump.tokens
        return jump

    def _fill(self, progress: _Progress, mask: NDArray[np.int32]) -> str | None:
        """Fill the mask; why the request cannot go on, if it cannot.

        One slow mask is no fault: a lazily compiled grammar pays for each state on its first
        visit. An ambiguous grammar is slow again and again, and holds up every other row.
        """
        start = self._clock()
        progress.matcher.fill(mask)
        if self._clock() - start > self._slow_mask_seconds:
            progress.slow_masks += 1
            if progress.slow_masks >= MAX_SLOW_MASKS:
                return (
                    f"{MAX_SLOW_MASKS} of the constraint's masks took more than"
                    f" {self._slow_mask_seconds:g} s of processor time each"
                )
        if mask.any():
            return None
        if progress.matcher.is_terminated:
            return "the constrained text has already ended"
        return "no token of the vocabulary can continue the constrained text"

    def _advance(self, row: History) -> Matcher | None:
        """The row's matcher at its history; None when the row must come again from 0.

        Raises:
            MatcherRejected: the history is not legal.
            LookupError: there is no such grammar.
        """
        known = self._matchers.get(row.uid)
        if known is None or known.key != row.key:
            if row.at > 0:
                return None
            grammar = self._grammar_of(row.key)
            if grammar is None:
                raise LookupError("its grammar is not compiled")
            known = _Progress(grammar.matcher(), row.key)
            self._matchers[row.uid] = known
        length = len(known.tokens)
        if length < row.at:
            return None
        if length > row.at:
            known.matcher.rollback(length - row.at)
            del known.tokens[row.at :]
        for token in row.tokens:
            known.matcher.accept(token)
            known.tokens.append(token)
        return known.matcher

    def close(self, uids: Iterable[int]) -> None:
        """These requests are over."""
        for uid in uids:
            self._matchers.pop(uid, None)

    @property
    def matchers(self) -> int:
        """Requests that have a matcher."""
        return len(self._matchers)

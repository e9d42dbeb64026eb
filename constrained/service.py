"""Matchers by request, masks by step: the grammar process without its sockets.

The scheduler's token history is the truth. Each row of a step says where its tokens begin; a
matcher that is ahead rolls back, one that is behind or unknown is reported for replay. A row that
fails gives a reason and touches no other row.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.base import Matcher, MatcherExhausted, MatcherRejected
from phloem.constrained.closing import Closing
from phloem.constrained.deferred import DeferredClosing
from phloem.constrained.drafts import LEAST_CHANCE, Drafter
from phloem.constrained.grammar import Grammar
from phloem.constrained.jump import NO_JUMP, Jump, Jumper

log = logging.getLogger(__name__)

FREE_SECONDS = 1.0
TOKEN_SECONDS = 0.01
"""What a request's matcher may take of processor time in all: so much, and so much more for each
token of its output. A lazily compiled grammar pays for each state on its first visit; an ambiguous
one takes longer and longer, and holds up every other row."""
CALL_SECONDS = 0.5
"""What it may take at one time, besides reading tokens: every other row waits for it."""
DRAFT_SECONDS = 0.005
"""What a draft may take, or its masks: beyond that, its request gets no more of them."""


TOO_SLOW, NO_TOKEN = "constraint_too_slow", "no_token_for_constraint"
"""What a constraint is at fault for: it costs too much, or goes where the vocabulary cannot."""


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

    @property
    def left(self) -> int: ...


class Guess(Protocol):
    """A draft (see `phloem.srt.messages.Draft`)."""

    @property
    def tokens(self) -> Sequence[int]: ...

    @property
    def draws(self) -> Sequence[int]: ...


class Row(History, Protocol):
    """One request's part in a step."""

    @property
    def mask_row(self) -> int: ...

    @property
    def draft(self) -> Guess | None: ...

    @property
    def draft_row(self) -> int: ...


class JumpRow(History, Protocol):
    """What is asked of one request's next tokens."""

    @property
    def draft(self) -> int | None: ...

    @property
    def namespace(self) -> str: ...


class Drafted(NamedTuple):
    """Tokens that may follow, and after how many of them one is drawn."""

    tokens: list[int]
    draws: list[int]


class Guard(Protocol):
    """Told when one request's matcher goes to work and when it is back, in case it never is."""

    def begin(self, uid: int) -> None: ...

    def end(self) -> None: ...


class NoGuard:
    """Where nobody watches."""

    def begin(self, uid: int) -> None:
        """Nobody is told."""

    def end(self) -> None:
        """Nobody is told."""


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """Mask rows that were filled, mask rows that failed and why, requests to be replayed. Rows in
    `faults`, which are in `failed`, did by their constraint's own fault, which has that code. Rows
    in `closing`, which are in `filled`, lack tokens after which the text could not be completed in
    time."""

    filled: list[int] = dataclasses.field(default_factory=list)
    failed: dict[int, str] = dataclasses.field(default_factory=dict)
    replay: list[int] = dataclasses.field(default_factory=list)
    faults: dict[int, str] = dataclasses.field(default_factory=dict)
    closing: list[int] = dataclasses.field(default_factory=list)


class _TooDear(Exception):
    """A matcher took more than its share of processor time."""


@dataclasses.dataclass(slots=True)
class _Progress:
    matcher: Matcher
    closing: Closing | DeferredClosing | None
    key: str
    tokens: list[int] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    drafts: bool = True

    def accept(self, tokens: Sequence[int]) -> None:
        """Move on by tokens.

        Raises:
            MatcherRejected: the matcher refuses one; those before it were accepted.
        """
        for token in tokens:
            self.matcher.accept(token)
            self.follow([token])

    def follow(self, tokens: Sequence[int]) -> None:
        """The matcher was moved on by these tokens."""
        self.tokens += tokens
        if self.closing is not None:
            for token in tokens:
                self.closing.advance(token)

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""
        self.matcher.rollback(count)
        del self.tokens[len(self.tokens) - count :]
        if self.closing is not None:
            self.closing.rollback(count)


class GrammarService:
    """`grammar_of` looks up a compiled grammar by key; None when it is not (or no longer) there.
    `jumper` finds what is forced. `clock` is processor seconds of this thread. The matcher of
    request `stuck` once did not come back, so it is not asked again."""

    def __init__(
        self,
        grammar_of: Callable[[str], Grammar | None],
        jumper: Jumper,
        *,
        guard: Guard | None = None,
        stuck: int | None = None,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._grammar_of = grammar_of
        self._jumper = jumper
        self._guard = guard or NoGuard()
        self._stuck = stuck
        self._clock = clock
        self._began = 0.0
        self._matchers: dict[int, _Progress] = {}
        self._drafter = Drafter()

    def step(self, rows: Iterable[Row], mask_of: Callable[[int], NDArray[np.int32]]) -> StepOutcome:
        """Bring each row's matcher to its history and fill its mask; `mask_of(mask_row)` gives
        the words to write."""
        outcome = StepOutcome()
        for row in rows:
            try:
                with self._at_work(row):
                    reason = self._mask(row, mask_of, outcome)
            except (_TooDear, MatcherExhausted) as error:
                reason = f"the constraint costs too much: {error}"
                outcome.faults[row.mask_row] = TOO_SLOW
            except MatcherRejected as error:
                reason = f"the history contradicts the constraint: {error}"
            except Exception as error:  # whatever one matcher does, the others go on
                reason = f"the constraint's matcher failed: {type(error).__name__}: {error}"
            if reason is not None:
                self._matchers.pop(row.uid, None)
                outcome.failed[row.mask_row] = reason
                _fail_draws(row, 1, reason, outcome)
        return outcome

    def _mask(
        self, row: Row, mask_of: Callable[[int], NDArray[np.int32]], outcome: StepOutcome
    ) -> str | None:
        """Fill one mask, and those along the draft; why the request cannot go on, if it cannot."""
        progress = self._advance(row)
        if progress is None:
            outcome.replay.append(row.uid)
            return None
        mask = mask_of(row.mask_row)
        progress.matcher.fill(mask)
        if mask.any():
            outcome.filled.append(row.mask_row)
            if progress.closing is not None and progress.closing.narrow(mask, row.left):
                outcome.closing.append(row.mask_row)
            if row.draft is not None:
                self._mask_draws(progress, row, row.draft, mask_of, outcome)
            return None
        if progress.matcher.is_terminated:
            return "the constrained text has already ended"
        outcome.faults[row.mask_row] = NO_TOKEN
        return "no token of the vocabulary can continue the constrained text"

    def _mask_draws(
        self,
        progress: _Progress,
        row: Row,
        draft: Guess,
        mask_of: Callable[[int], NDArray[np.int32]],
        outcome: StepOutcome,
    ) -> None:
        """Fill the masks of a draft's draws behind the first, which its matcher is at, and come
        back. If one cannot be filled, the next step tells why."""
        filled, closing = 1, progress.closing
        try:
            with self._ahead(progress):
                for place, (start, end) in enumerate(pairwise(draft.draws), start=row.draft_row):
                    progress.accept(draft.tokens[start:end])
                    mask = mask_of(place)
                    progress.matcher.fill(mask)
                    if not mask.any():
                        break
                    if closing is not None and closing.narrow(mask, row.left - end):
                        outcome.closing.append(place)
                    outcome.filled.append(place)
                    filled += 1
        except Exception as error:  # the row has its mask, and the others go on
            self._drop(row, "masks of its draft", error)
        _fail_draws(row, filled, "no mask was made along the draft", outcome)

    def jump(self, row: JumpRow, *, exact: bool) -> Jump:
        """Bring a matcher to its history and past the tokens that are forced from there. A matcher
        that cannot be brought there does not jump: the next step tells why."""
        try:
            with self._at_work(row):
                progress = self._advance(row)
                if progress is None:
                    return NO_JUMP
                if row.draft is not None:
                    for at in range(row.at, len(progress.tokens)):
                        self._drafter.learn((row.namespace, row.key), progress.tokens, at)
                return self._jump(progress, row.left, exact)
        except _TooDear:
            return NO_JUMP  # the next mask says so
        except Exception as error:  # whatever one matcher does, the others go on
            self._drop(row, "jump", error)
            return NO_JUMP

    def _drop(self, row: History, what: str, error: Exception) -> None:
        """A matcher failed in what can be done without; a new one takes its place."""
        log.warning("request %d: no %s: %s: %s", row.uid, what, type(error).__name__, error)
        self._matchers.pop(row.uid, None)

    def _jump(self, progress: _Progress, left: int, exact: bool) -> Jump:
        """Past what is forced, if the text can then be completed within `left` tokens."""
        if exact:
            jump = self._jumper.exact(progress.matcher)
        else:
            jump = self._jumper.canonical(progress.matcher, progress.tokens)
        closing = progress.closing
        if closing is not None and not closing.fits(jump.tokens, left):
            # The tokenizer's split is longer than the shortest way to the end.
            progress.matcher.rollback(len(jump.tokens))
            return NO_JUMP
        progress.follow(jump.tokens)
        return jump

    def draft(self, row: JumpRow, forced: int, *, exact: bool) -> Drafted | None:
        """What may follow the `forced` tokens that `jump` has just given for this row; None when
        that cannot be guessed. The matcher stays where it is."""
        progress = self._matchers.get(row.uid)
        if progress is None or not progress.drafts or not row.draft:
            return None
        self._guard.begin(row.uid)
        try:
            with self._ahead(progress):
                return self._guesses(progress, row, row.draft, row.left - forced, exact)
        except Exception as error:  # whatever one matcher does, the others go on
            self._drop(row, "draft", error)
            return None
        finally:
            self._guard.end()

    def _guesses(
        self, progress: _Progress, row: JumpRow, most: int, left: int, exact: bool
    ) -> Drafted | None:
        """Move on by guesses, and by what each forces, while it is likely that all are right; at
        most `most` tokens."""
        tokens: list[int] = []
        draws, chance = [0], 1.0
        while True:
            guess = self._drafter.guess((row.namespace, row.key), progress.tokens)
            if guess is None or (chance := chance * guess.chance) < LEAST_CHANCE:
                break
            try:
                progress.accept([guess.token])
            except MatcherRejected:
                break
            jump = self._jump(progress, left - len(tokens) - 1, exact)
            if len(tokens) + 1 + len(jump.tokens) > most:
                break
            tokens += [guess.token, *jump.tokens]
            if jump.ends:
                break
            draws.append(len(tokens))
        return Drafted(tokens, draws) if tokens else None

    @contextmanager
    def _ahead(self, progress: _Progress) -> Iterator[None]:
        """Work on what may never come: the matcher goes back afterwards, and what it takes is not
        its request's to answer for. One that is slow does not do it again."""
        length, began = len(progress.tokens), self._clock()
        try:
            yield
        finally:
            progress.rollback(len(progress.tokens) - length)
            spent = self._clock() - began
            self._began += spent
            progress.drafts = progress.drafts and spent <= DRAFT_SECONDS

    @contextmanager
    def _at_work(self, row: History) -> Iterator[None]:
        """One matcher works; what it takes is its own to answer for.

        Raises:
            _TooDear: it has taken too much by now, or in another life.
        """
        if row.uid == self._stuck:
            raise _TooDear("the constraint's matcher did not come back")
        self._begin(row.uid)
        try:
            yield
        finally:
            self._guard.end()
        progress = self._matchers.get(row.uid)
        if progress is None:
            return
        spent = self._clock() - self._began
        progress.seconds += spent
        read = len(progress.tokens)
        for what, seconds, allowed in (
            (
                "one of the constraint's masks",
                spent,
                CALL_SECONDS + TOKEN_SECONDS * len(row.tokens),
            ),
            ("the constraint's masks", progress.seconds, FREE_SECONDS + TOKEN_SECONDS * read),
        ):
            if seconds > allowed:
                raise _TooDear(
                    f"{what} took {seconds:.2g} s of processor time;"
                    f" {allowed:.2g} s are allowed after {read} tokens"
                )

    def _begin(self, uid: int) -> None:
        self._guard.begin(uid)
        self._began = self._clock()

    def _advance(self, row: History) -> _Progress | None:
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
            self._begin(row.uid)  # if it was compiled again, that was not the matcher's doing
            known = _Progress(grammar.matcher(), grammar.closing(), row.key)
            self._matchers[row.uid] = known
        length = len(known.tokens)
        if length < row.at:
            return None
        if length > row.at:
            known.rollback(length - row.at)
        known.accept(row.tokens)
        return known

    def close(self, uids: Iterable[int]) -> None:
        """These requests are over."""
        for uid in uids:
            self._matchers.pop(uid, None)

    @property
    def matchers(self) -> int:
        """Requests that have a matcher."""
        return len(self._matchers)


def _fail_draws(row: Row, first: int, reason: str, outcome: StepOutcome) -> None:
    """The masks of the row's draws from `first` on are not there."""
    if row.draft is not None:
        for place in range(first, len(row.draft.draws)):
            outcome.failed[row.draft_row + place - 1] = reason

"""What the scheduler knows of the grammar process, and what it asks of it.

The process is a cache: compiled grammars by key, matchers by request. The token history is here, so
whatever it forgets, or loses by dying, is sent again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from phloem.constrained.spec import Constraint, constraint_key
from phloem.srt.messages import (
    GrammarClose,
    GrammarCompile,
    GrammarJump,
    GrammarJumpRow,
    GrammarRow,
    GrammarStep,
    JumpForward,
    ToGrammar,
)
from phloem.srt.scheduler.request import Request, Status

MAX_COMPILE_ATTEMPTS = 2
"""Grammar processes that may die over one constraint before it is refused."""

MAX_AHEAD = 256
"""Constraints of calls to come that wait to be compiled; beyond that, the oldest are forgotten."""


class Grammars:
    """Requests that wait for their grammar, and the orders in `outbox`, which the driver sends."""

    def __init__(self) -> None:
        self.outbox: list[ToGrammar] = []
        self._waiters: dict[str, list[Request]] = {}
        self._attempts: dict[str, int] = {}
        self._missing: set[str] = set()
        """Grammars of accepted requests that a new process does not have yet."""
        self._jumping: dict[int, Request] = {}
        """By uid, requests of which it is not known yet what is forced next."""
        self._held: set[int] = set()
        """Of these, the running ones."""
        self._ahead: OrderedDict[str, Constraint] = OrderedDict()
        """What no request waits for yet, to be compiled when none waits for anything."""
        self._compiling_ahead: str | None = None

    @property
    def waiting(self) -> int:
        """Requests that are not queued yet: their grammar is being compiled, or it is not known
        what it forces at the beginning."""
        opening = len(self._jumping) - len(self._held)
        return opening + sum(len(waiters) for waiters in self._waiters.values())

    def require(self, request: Request) -> None:
        """Have the request's grammar compiled; several requests may wait for one compile."""
        key, constraint = request.grammar_key, request.constraint
        assert key is not None
        assert constraint is not None
        waiters = self._waiters.setdefault(key, [])
        waiters.append(request)
        if len(waiters) == 1:
            self._ahead.pop(key, None)
            self._compile(key, constraint)

    def prepare(self, constraints: Iterable[Constraint]) -> None:
        """Have these compiled for requests to come, one by one while no request waits for another
        grammar; the process keeps what comes of it."""
        for constraint in constraints:
            key = constraint_key(constraint)
            if key not in self._waiters and key != self._compiling_ahead:
                self._ahead[key] = constraint
        while len(self._ahead) > MAX_AHEAD:
            self._ahead.popitem(last=False)
        self._compile_ahead()

    def _compile_ahead(self) -> None:
        if self._ahead and self._compiling_ahead is None and not self._waiters:
            self._compiling_ahead, constraint = self._ahead.popitem(last=False)
            self._compile(self._compiling_ahead, constraint)

    def _compile(self, key: str, constraint: Constraint) -> None:
        if key in self._waiters:
            self._attempts[key] = self._attempts.get(key, 0) + 1
        self.outbox.append(GrammarCompile(key, constraint))

    def is_missing(self, key: str) -> bool:
        """Whether accepted requests wait for a new process to have this grammar."""
        return key in self._missing

    def compiled(self, key: str) -> list[Request]:
        """The compile of `key` has ended, one way or the other: the requests that waited for it."""
        self._missing.discard(key)
        self._attempts.pop(key, None)
        waiters = self._waiters.pop(key, [])
        if key == self._compiling_ahead:
            self._compiling_ahead = None
        self._compile_ahead()
        return waiters

    def withdraw(self, request: Request) -> None:
        """The request ended before its grammar was ready."""
        waiters = self._waiters.get(request.grammar_key or "", [])
        if request in waiters:
            waiters.remove(request)

    @property
    def holding(self) -> bool:
        """Whether the next step waits to hear what is forced."""
        return bool(self._held)

    def order_jumps(self, requests: Iterable[Request], draft: int | None = None) -> list[Request]:
        """Ask what is forced after the tokens of these requests, at once or when a new process has
        their grammars, and for drafts of so many tokens (see `GrammarJumpRow`). The ones that were
        asked of: others do not jump."""
        rows: list[GrammarJumpRow] = []
        asked: list[Request] = []
        for request in requests:
            if request.grammar_key is None or request.jump is JumpForward.OFF:
                continue
            if request.grammar_key not in self._missing:
                rows.append(self._jump_row(request, draft=draft))
            asked.append(request)
            self._jumping[request.uid] = request
            if request.status is Status.RUNNING:
                self._held.add(request.uid)
        if rows:
            self.outbox.append(GrammarJump(rows))
        return asked

    def asked(self, uid: int) -> Request | None:
        """The request, if it is not known yet what is forced for it."""
        return self._jumping.get(uid)

    def jumped(self, uid: int) -> Request | None:
        """What is forced for `uid` is known now: its request, if it waits for that."""
        self._held.discard(uid)
        return self._jumping.pop(uid, None)

    def _news(self, request: Request, *, from_start: bool = False) -> tuple[int, list[int]]:
        """Output tokens that the process was not told of, or all, and where they begin."""
        at = 0 if from_start else request.grammar_tokens
        tokens = request.tokens[request.prompt_len + at :].tolist()
        request.grammar_tokens = at + len(tokens)
        return at, tokens

    def close(self, request: Request) -> None:
        """The request is over; its matcher may go."""
        self.jumped(request.uid)
        if request.grammar_key is not None:
            self.outbox.append(GrammarClose([request.uid]))

    def restarted(self, live: Iterable[Request]) -> list[Request]:
        """A new process knows nothing: everything that `live` requests need is compiled again.

        Returns the requests to give up: their grammar was being compiled when
        `MAX_COMPILE_ATTEMPTS` processes died.
        """
        given_up: list[Request] = []
        for waited_for, waiters in list(self._waiters.items()):
            if not waiters or self._attempts[waited_for] >= MAX_COMPILE_ATTEMPTS:
                given_up += self.compiled(waited_for)
        self._missing.clear()
        self._compiling_ahead = None  # it may be what the process died of
        wanted: dict[str, Constraint] = {}
        for request in live:
            request.grammar_tokens = 0
            key, constraint = request.grammar_key, request.constraint
            if key is None or constraint is None or request in given_up:
                continue
            wanted[key] = constraint
            if request.status is not Status.COMPILING or request.uid in self._jumping:
                self._missing.add(key)
        for wanted_key, constraint in wanted.items():
            self._compile(wanted_key, constraint)
        return given_up

    def order_jumps_again(self, key: str) -> None:
        """A new process has the grammar of `key`: it is asked what its predecessor owes."""
        rows = [self._jump_row(request, from_start=True) for request in self.owed(key)]
        if rows:
            self.outbox.append(GrammarJump(rows))

    def owed(self, key: str) -> list[Request]:
        """Requests under the grammar of `key` of which it is not known what is forced."""
        return [r for r in self._jumping.values() if r.grammar_key == key]

    def _jump_row(
        self, request: Request, *, from_start: bool = False, draft: int | None = None
    ) -> GrammarJumpRow:
        assert request.grammar_key is not None
        at, tokens = self._news(request, from_start=from_start)
        return GrammarJumpRow(
            request.uid,
            request.grammar_key,
            at,
            tokens,
            _left(request),
            request.jump,
            draft,
            request.namespace,
        )

    def order_masks(
        self, step_id: int, requests: Iterable[Request], *, from_start: bool = False
    ) -> None:
        """Masks for what these requests sample in step `step_id`: each one's output tokens since
        the last order, or all of them for a matcher that has to be rebuilt. A request whose
        grammar the process does not have yet is left out; its order follows when it has."""
        rows = []
        for request in requests:
            key = request.grammar_key
            if key is None or key in self._missing:
                continue
            at, tokens = self._news(request, from_start=from_start)
            rows.append(
                GrammarRow(
                    request.uid,
                    key,
                    at,
                    tokens,
                    _left(request),
                    request.row,
                    request.draft,
                    request.draft_row,
                )
            )
        if rows:
            self.outbox.append(GrammarStep(step_id, rows))


def _left(request: Request) -> int:
    return request.max_output - request.output_len

"""What a run tells a Phloem server of its calls: the program that they are of, which of them are
siblings, what is queued behind them. It changes when they are served, never what is answered
(docs/programs.md). All of it is what is known as a call is sent: nothing waits for a hint.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Final, Protocol, runtime_checkable

import msgspec

from phloem.constrained.spec import Constraint
from phloem.lang.variable import Variable

_MAX_AHEAD: Final = 16
"""Constraints that a server takes with one call."""

_MAX_AHEAD_BYTES: Final = 1 << 16
"""How large they are together; one that has no room is sent with its own call only."""


@dataclass(frozen=True, slots=True)
class Hint:
    """What is said of one call.

    `group` is the fork whose first calls, `width` of them, it is one of. `remaining` is how many
    calls of the program wait for others, None as long as more can come; a call of which that is 0
    ends the program, when those that are with the server have ended. `ahead` are constraints of
    calls that wait, each said once in a run.
    """

    program: str
    group: str = ""
    width: int = 0
    remaining: int | None = None
    ahead: tuple[Constraint, ...] = ()


@dataclass(eq=False, slots=True)
class QueuedCall:
    """A call that the program has asked for. `waits` are the variables of its prompt that had no
    value by then."""

    calls: ProgramCalls
    variable: Variable
    constraint: Constraint | None
    waits: list[Variable]
    group: str = ""
    width: int = 0

    @property
    def ready(self) -> bool:
        """Whether it can be sent: every variable in its prompt has a value."""
        while self.waits and self.waits[-1].done:
            self.waits.pop()
        return not self.waits


@dataclass(eq=False, slots=True)
class ProgramCalls:
    """The calls of one run. Calls are queued from any thread, and sent on the loop."""

    program: str = field(default_factory=lambda: f"run-{uuid.uuid4().hex}")
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _waiting: list[QueuedCall] = field(default_factory=list)
    _said: set[Constraint] = field(default_factory=set)
    _queued: int = 0
    _told: int = 0
    _last: Variable | None = None
    _closed: bool = False

    def queue(
        self,
        variable: Variable,
        events: Sequence[object],
        constraint: Constraint | None = None,
        sibling: tuple[str, int] = ("", 0),
    ) -> QueuedCall:
        """The program asks for a call that makes `variable` from a prompt of `events`; it is one of
        a group of that width."""
        waits = [event for event in events if isinstance(event, Variable) and not event.done]
        call = QueuedCall(self, variable, constraint, waits, *sibling)
        with self._lock:
            self._queued += 1
            self._waiting.append(call)
        return call

    def close(self) -> None:
        """The program's function has returned: no call is queued any more."""
        self._closed = True

    def sending(self, call: QueuedCall) -> Hint | None:
        """What to say of a call as it is sent; None for the only one of its program, which is one
        without being called so."""
        with self._lock:
            self._waiting = [one for one in self._waiting if one is not call and not one.ready]
            remaining = len(self._waiting) if self._closed else None
            if self._closed and self._queued == 1:
                return None
            self._told += 1
            self._last = call.variable if remaining == 0 else None
            ahead = self._ahead(call)
        return Hint(self.program, call.group, call.width, remaining, ahead)

    def must_end(self) -> bool:
        """Whether the server waits for more calls of the program, now that all have ended: it was
        told of several, and not by one that came through that none would follow."""
        if self._told < 2:
            return False
        return self._last is None or self._last.peek() is None

    def _ahead(self, call: QueuedCall) -> tuple[Constraint, ...]:
        if call.constraint is not None:
            self._said.add(call.constraint)
        found: list[Constraint] = []
        room = _MAX_AHEAD_BYTES
        for one in self._waiting:
            constraint = one.constraint
            if constraint is None or constraint in self._said:
                continue
            if len(found) == _MAX_AHEAD:
                break
            self._said.add(constraint)
            size = len(msgspec.json.encode(constraint))
            if size <= room:
                room -= size
                found.append(constraint)
        return tuple(found)


call_here: ContextVar[QueuedCall | None] = ContextVar("phloem_call", default=None)
"""The call that runs in this context; None outside of programs."""


def take_hint() -> Hint | None:
    """What to say of the call that is sent here and now; None where there is nothing to say."""
    call = call_here.get()
    return None if call is None else call.calls.sending(call)


@runtime_checkable
class EndsPrograms(Protocol):
    """A backend that its calls' hints reach."""

    async def end_program(self, program: str) -> None:
        """Says that no call of `program` follows. Raises whatever prevents it."""
        ...

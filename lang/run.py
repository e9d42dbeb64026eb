"""One run of a program: what its calls share, and the guarantee that each of them ends."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable
from contextvars import ContextVar, copy_context
from functools import partial
from typing import Final

from phloem.lang.backend.base import Backend
from phloem.lang.background import background
from phloem.lang.errors import Cancelled, GenerationError
from phloem.lang.hints import EndsPrograms, ProgramCalls, QueuedCall, call_here
from phloem.lang.recording.recorder import Recorder
from phloem.lang.sampling import DEFAULT_MAX_TOKENS, Sampling
from phloem.lang.variable import Outcome, Variable

Work = Callable[[], Awaitable[Outcome]]

_DEFAULTS: Final = Sampling(max_tokens=DEFAULT_MAX_TOKENS)

backend_here: ContextVar[Backend | None] = ContextVar("phloem_backend", default=None)
"""That of the program whose function runs in this context: the programs it runs are on it, too."""


class Run:
    """Backend, default sampling, seconds a call may take, and the calls in flight.

    Every variable given to `start` is resolved or failed exactly once, whatever happens: the call
    may raise, time out, be cancelled, or never have begun.
    """

    def __init__(
        self, backend: Backend, sampling: Sampling, timeout_s: float | None, *, stream: bool
    ) -> None:
        self.backend = backend
        self.sampling = sampling.over(_DEFAULTS)
        self.timeout_s = timeout_s
        self.stream = stream
        self.one_by_one = False  # whether the program waits for each call before it goes on
        self.recorder = Recorder(_label(backend))
        self.calls = ProgramCalls()
        self.ended: str | None = None  # why no state of this run can be appended to any more
        self._lock = threading.Lock()
        self._cancelled = False
        self._variables: list[Variable] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, variable: Variable, work: Work, call: QueuedCall | None = None) -> None:
        """Let `work` make `variable`, on the loop; returns at once. `call` is the call of a model
        that it makes, if it makes one."""
        with self._lock:
            self._variables.append(variable)
        try:
            background.call_soon(lambda: self._spawn(variable, work, call))
        except RuntimeError:  # the loop was closed just now: Python is exiting
            _give_up(variable)

    def wait(self) -> None:
        """Block until every variable has a value or an error."""
        for variable in reversed(self._snapshot()):  # most often the last one is: one wait for all
            variable.settle()

    def unhandled(self) -> GenerationError | None:
        """The first failure, in program order, that no reader has met."""
        for variable in self._snapshot():
            error = variable.error
            if error is not None and not error.handled:
                return error
        return None

    def cancel(self) -> None:
        """End all calls, now and later; their variables fail with `Cancelled`."""
        with self._lock:
            self._cancelled = True
        background.call_soon(self._cancel_tasks)

    def end(self, reason: str) -> None:
        """All calls have ended, or been cancelled, and no other follows: `reason` says why. The
        server is told so where it waits for more; nobody waits for that."""
        self.ended = reason
        backend = self.backend
        if self.calls.must_end() and isinstance(backend, EndsPrograms):
            with contextlib.suppress(RuntimeError):  # the loop was closed just now
                background.tell(partial(backend.end_program, self.calls.program))

    def _snapshot(self) -> list[Variable]:
        with self._lock:
            return list(self._variables)

    def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _spawn(self, variable: Variable, work: Work, call: QueuedCall | None) -> None:
        if self._cancelled:
            _give_up(variable)
            return
        context = copy_context()
        context.run(call_here.set, call)
        loop = asyncio.get_running_loop()
        task = loop.create_task(_settle(variable, work), context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # a task that is cancelled before its first step never enters _settle
        task.add_done_callback(lambda _: _give_up(variable))


async def _settle(variable: Variable, work: Work) -> None:
    try:
        outcome = await work()
    except GenerationError as error:  # of a variable that this one builds on
        variable.fail(error)
    except asyncio.CancelledError:
        _give_up(variable)
    except BaseException as exc:  # SystemExit too: it must not end the loop of all programs
        variable.fail(GenerationError(variable.name, exc))
    else:
        variable.resolve(outcome)


def _give_up(variable: Variable) -> None:
    if not variable.done:
        variable.fail(GenerationError(variable.name, Cancelled("the run was cancelled")))


def _label(backend: Backend) -> str:
    """How a trace calls the backend."""
    kind = type(backend)
    return kind.__name__ if kind.__repr__ is object.__repr__ else repr(backend)

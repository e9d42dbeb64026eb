"""A straight-line program is sent whole, and runs in the server: `Program.run_remote`.

Its function runs once, before anything is sent, on a state that writes down what it appends. Then
its calls are made as those of any run, but for the answers: those come in one stream, as the server
has them. So values, errors and the trace are what they are of any run.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

from phloem.lang.backend import wire
from phloem.lang.backend.base import Backend, BackendInfo, Call, Delta, Prompt
from phloem.lang.backend.dialects import DIALECTS
from phloem.lang.backend.http_transport import Body
from phloem.lang.backend.selecting import Selected
from phloem.lang.choices import ChoiceScore, ChoicesMethod
from phloem.lang.errors import (
    BackendError,
    BackendUnavailable,
    Cancelled,
    GenerationError,
    UsageError,
)
from phloem.lang.hints import call_here
from phloem.lang.recorded import Recorded, Recording
from phloem.lang.recording.spans import note_prompt
from phloem.lang.run import Run, backend_here
from phloem.lang.sampling import Sampling
from phloem.lang.state import Record, State
from phloem.lang.steps import Steps
from phloem.lang.unknown import Places, filled
from phloem.lang.variable import Outcome, Variable


@runtime_checkable
class RunsPrograms(Protocol):
    """A backend whose server runs whole programs."""

    def run_program(self, body: Body) -> AsyncGenerator[bytes, None]:
        """The data of the events of `POST /programs/run`. Raises `BackendError`."""
        ...


class Replies:
    """The backend of calls that `backend`'s server makes: each waits for its answer to be told."""

    def __init__(self, backend: RunsPrograms) -> None:
        self._backend = backend
        self._told: dict[Variable, asyncio.Future[wire.Told]] = {}  # of the loop
        self.refusal: UsageError | None = None
        self.failed: Variable | None = None  # by the call at whose failure the program ended

    def __repr__(self) -> str:
        return repr(self._backend)

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        told = await self._answer(_variable())
        for delta in wire.told_deltas(told):
            yield delta

    async def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
    ) -> Selected:
        selected = wire.told_choice(await self._answer(_variable()), choices)
        note_prompt(selected.usage.prompt_tokens, selected.usage.cached_tokens)
        return selected

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        selected = await self.select(prompt, choices, ChoicesMethod.TOKEN_LENGTH_NORMALIZED)
        return list(selected.scores)

    async def info(self) -> BackendInfo:
        raise UsageError("a program that runs in a server does not ask it about itself")

    async def aclose(self) -> None:
        """The connections are the backend's own."""

    async def receive(self, body: Body, calls: dict[str, Variable]) -> Outcome:
        """Send the program, and tell its `calls` (by their steps' paths) what comes."""
        error: Exception = BackendUnavailable("the stream broke off before its end")
        try:
            async with aclosing(self._backend.run_program(body)) as events:
                async for data in events:
                    event = wire.program_event(data)
                    if event is not None and event.path in calls:
                        self._answer(calls[event.path]).set_result(event)
        except Exception as exc:  # whatever it is, no call may wait for ever
            error = exc
            if isinstance(exc, BackendError) and exc.status in (404, 405) and exc.param is None:
                error = self.refusal = UsageError(
                    f"{self!r} has no /programs/run: run_remote needs a Phloem server, run does not"
                )
        self._fail(error, calls)
        return Outcome(None)

    def _fail(self, error: Exception, calls: dict[str, Variable]) -> None:
        """What has not been told has failed: the call at fault by `error`, the others since it did;
        all by `error` where it is of none of them."""
        param = getattr(error, "param", None) or ""
        path = max((one for one in calls if f"{param}.".startswith(f"{one}.")), key=len, default="")
        rest = error
        if path:
            self.failed = calls[path]
            error = _without(error, path)
            rest = Cancelled(f"variable {self.failed.name!r} failed, which ends the program")
            rest.__cause__ = error
        for one, variable in calls.items():
            answer = self._answer(variable)
            if not answer.done():
                answer.set_exception(error if one == path else rest)
                answer.exception()  # its call may never have come so far as to look at it

    def _answer(self, variable: Variable) -> asyncio.Future[wire.Told]:
        if variable not in self._told:
            self._told[variable] = asyncio.get_running_loop().create_future()
        return self._told[variable]


class Remote:
    """One run of a program in the server of `backend`. Raises `UsageError` where that has none."""

    def __init__(
        self,
        backend: Backend,
        sampling: Sampling,
        timeout_s: float | None,
        record: Record | None = None,
    ) -> None:
        if not isinstance(backend, RunsPrograms):
            raise UsageError(f"{backend!r} is no Phloem server: run_remote needs one, run does not")
        self._around = backend
        self._timeout_s = timeout_s
        self._replies = Replies(backend)
        self._record = record
        self.run = Run(self._replies, sampling, None, stream=False)
        self.state = State(self.run, record=record)

    def execute(self, fn: Callable[..., Any], bound: inspect.BoundArguments) -> None:
        """Write `fn` down, send it, and wait for its end. Raises what `fn` raises, and `UsageError`
        for what it does and no steps can say."""
        run, state = self.run, self.state
        state._arguments = MappingProxyType(bound.arguments)
        failure: BaseException | None = None
        try:
            returned = self._send(fn, bound)
            run.wait()
            if self._replies.refusal is not None:
                raise self._replies.refusal
            state._returned = filled(returned)
            failure = self._failure()
        except BaseException as exc:
            failure = exc
            run.cancel()
            raise
        finally:
            run.end("its program has ended")
            run.recorder.end(fn.__qualname__, failure)
            state._end(failure)

    def _failure(self) -> GenerationError | None:
        failed = self._replies.failed
        if failed is None or failed.error is None or failed.error.handled:
            return self.run.unhandled()
        return failed.error

    def _send(self, fn: Callable[..., Any], bound: inspect.BoundArguments) -> Any:
        code = getattr(inspect.unwrap(fn), "__code__", None)
        places = Places(code.co_filename if code else "")
        recorded = Recorded(Recording(places), self.run, record=self._record)
        recorded._variables = self.state._variables  # that readers of the stream look into
        returned = self._written(fn, recorded, bound, places)
        steps = Steps(places)
        body: Body = {"steps": steps.whole(recorded.log), "defaults": DIALECTS["phloem"].extra}
        if self._timeout_s is not None:
            body["timeout"] = self._timeout_s
        self.state._prompt = recorded._prompt
        if steps.calls:
            self.run.start(Variable(None), lambda: self._replies.receive(body, steps.calls))
        return returned

    def _written(
        self,
        fn: Callable[..., Any],
        recorded: Recorded,
        bound: inspect.BoundArguments,
        places: Places,
    ) -> Any:
        """What `fn` returns."""
        outer = backend_here.set(self._around)  # of programs that it runs
        try:
            returned = fn(recorded, *bound.args, **bound.kwargs)
        except UsageError:
            raise
        except Exception as exc:
            if not recorded._recording.read:
                raise
            places.refuse(f"{type(exc).__name__}: {exc}", places.of(exc.__traceback__))
        finally:
            backend_here.reset(outer)
        if places.refusal is not None:  # which the function has caught
            raise places.refusal
        return returned


def _variable() -> Variable:
    """The one that the call which runs here makes."""
    call = call_here.get()
    assert call is not None, "each call of a run has its own context"
    return call.variable


def _without(error: Exception, path: str) -> Exception:
    """`error` of a call, whose field is named as if it had been sent by itself."""
    if not isinstance(error, BackendError) or error.param is None:
        return error
    inner = error.param.removeprefix(path).removeprefix(".gen").removeprefix(".select")
    return type(error)(
        error.message, status=error.status, param=inner.lstrip(".") or None, code=error.code
    )

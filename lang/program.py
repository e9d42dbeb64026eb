"""`@phloem.function`: a plain function of a state becomes a program that can be run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, Unpack

from phloem.lang.backend.base import Backend
from phloem.lang.backend.choose import BackendLike, as_backend, default_backend, refuse_to_block
from phloem.lang.batch import iter_batch
from phloem.lang.feed import Feed
from phloem.lang.run import Run
from phloem.lang.sampling import SAMPLING_FIELDS, Sampling, SamplingOverrides, sampling_of
from phloem.lang.state import Record, State
from phloem.lang.stream import Stream

P = ParamSpec("P")
R = TypeVar("R")

Item = Mapping[str, Any] | tuple[Any, ...]  # the arguments of one program of a batch

_OPTIONS = frozenset({"backend", "timeout_s", "concurrency", "progress_bar", "raise_on_error"})


@dataclass(frozen=True, slots=True)
class _Settings:
    """What the runs of one call of `run`, `run_batch` or `stream` share."""

    backend: Backend
    sampling: Sampling
    timeout_s: float | None

    def new_run(self, *, stream: bool = False) -> Run:
        return Run(self.backend, self.sampling, self.timeout_s, stream=stream)


class Program(Generic[P, R]):
    """A program. Calling it with a state runs it inside another program, on that state.

    The runs take the function's own arguments, and besides them `backend` (a backend, a URL, an
    engine; the default one if left out), `timeout_s` for each call, and any sampling option as the
    default for the program's calls. A name that is both belongs to the function.
    """

    def __init__(self, fn: Callable[Concatenate[State, P], R]) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        parameters = list(inspect.signature(fn).parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(f"{fn.__name__} needs the state as its first parameter, as in def f(s)")
        if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
            raise TypeError(
                f"{fn.__name__}: a program is a plain def; its calls run at once anyway"
            )
        taken = sorted(_OPTIONS & {p.name for p in parameters[1:]})
        if taken:
            raise TypeError(f"{fn.__name__}: {', '.join(taken)} would hide an option of run()")
        self._signature = inspect.Signature(parameters[1:])

    def __call__(self, s: State, *args: P.args, **kwargs: P.kwargs) -> R:
        if not isinstance(s, State):
            raise TypeError(
                f"{self._fn.__name__}(s, …) runs inside another program; "
                f"to start one, use {self._fn.__name__}.run(…)"
            )
        return self._fn(s, *args, **kwargs)

    def __repr__(self) -> str:
        return f"<Program {self._fn.__module__}.{self._fn.__qualname__}>"

    def run(
        self,
        *args: Any,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> State:
        """Run to the end and return the state; every variable is final then.

        An exception of the program itself is raised here, its calls cancelled. A failed call that
        the program did not read is in `state.error` and is raised by `state["x"]`.
        """
        arguments, sampling = self._split(kwargs)
        bound = self._signature.bind(*args, **arguments)
        settings = _settings(backend, sampling, timeout_s)
        refuse_to_block(settings.backend)
        state = State(settings.new_run())
        execute(self._fn, state, bound)
        return state

    async def arun(
        self,
        *args: Any,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> State:
        """`run` for asyncio programs; cancelling the task cancels the calls."""
        arguments, sampling = self._split(kwargs)
        bound = self._signature.bind(*args, **arguments)
        run = _settings(backend, sampling, timeout_s).new_run()
        state = State(run)
        done = _in_thread(lambda: execute(self._fn, state, bound))
        try:
            await asyncio.wrap_future(done)
        except asyncio.CancelledError:
            run.cancel()
            raise
        return state

    def stream(
        self,
        *args: Any,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Stream:
        """Start the program and return at once; read its text from the result as it comes."""
        arguments, sampling = self._split(kwargs)
        bound = self._signature.bind(*args, **arguments)
        run = _settings(backend, sampling, timeout_s).new_run(stream=True)
        record: Record = Feed()
        state = State(run, record=record)
        done = _in_thread(lambda: execute(self._fn, state, bound))
        return Stream(state, run, record, done)

    def run_batch(
        self,
        items: Iterable[Item],
        *,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        concurrency: int = 64,
        progress_bar: bool | None = None,
        raise_on_error: bool = False,
        **sampling: Unpack[SamplingOverrides],
    ) -> list[State]:
        """Run one program an item, `concurrency` at a time; the states in the items' order.

        What goes wrong in one is its state's `error` and does not disturb the others, unless
        `raise_on_error`. `progress_bar` None shows one on stderr if that is a terminal.
        """
        states: list[State] = []
        for state in self.iter_batch(
            items,
            backend=backend,
            timeout_s=timeout_s,
            concurrency=concurrency,
            progress_bar=progress_bar,
            **sampling,
        ):
            if raise_on_error and state.error is not None:
                raise state.error
            states.append(state)
        return states

    def iter_batch(
        self,
        items: Iterable[Item],
        *,
        in_order: bool = True,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        concurrency: int = 64,
        progress_bar: bool | None = None,
        **sampling: Unpack[SamplingOverrides],
    ) -> Iterator[State]:
        """`run_batch` as an iterator, in the items' order or as they complete.

        Items are taken as they are needed, so they may be endless and memory stays bounded;
        `state.arguments` tells which item a state is of. Leaving the loop cancels the rest.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        settings = _settings(backend, sampling_of(sampling), timeout_s)
        refuse_to_block(settings.backend)

        def start(item: Item) -> tuple[State, Run, Callable[[], None]]:
            run = settings.new_run()
            state = State(run)
            return state, run, lambda: self._run_item(state, item)

        return iter_batch(
            items, start, concurrency=concurrency, in_order=in_order, progress_bar=progress_bar
        )

    def _run_item(self, state: State, item: Item) -> None:
        try:
            bound = (
                self._signature.bind(**item)
                if isinstance(item, Mapping)
                else self._signature.bind(*item)
            )
        except TypeError as exc:
            state._end(exc)
            return
        with contextlib.suppress(BaseException):  # the state reports it to the caller
            execute(self._fn, state, bound)

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Sampling]:
        """Keywords of a run → the function's arguments, and the default sampling."""
        sampling = SAMPLING_FIELDS - self._signature.parameters.keys()
        return (
            {name: value for name, value in kwargs.items() if name not in sampling},
            sampling_of({name: value for name, value in kwargs.items() if name in sampling}),
        )


def function(fn: Callable[Concatenate[State, P], R]) -> Program[P, R]:
    """Make a program of a function whose first parameter is the state.

    @phloem.function
    def greet(s, name):
        s += phloem.user(f"Greet {name}.") + phloem.assistant(phloem.gen("greeting"))

    greet.run(name="Ada")["greeting"]
    """
    return Program(fn)


def execute(fn: Callable[..., Any], state: State, bound: inspect.BoundArguments) -> None:
    """Run `fn` on `state` to the end of all its calls; what it raises ends the run."""
    run = state._run
    state.arguments = MappingProxyType(bound.arguments)
    failure: BaseException | None = None
    try:
        state.returned = fn(state, *bound.args, **bound.kwargs)
        run.wait()
        failure = run.unhandled()
    except BaseException as exc:
        failure = exc
        run.cancel()
        raise
    finally:
        run.ended = "its program has ended"
        state._end(failure)


def _settings(
    backend: BackendLike | None, sampling: Sampling, timeout_s: float | None
) -> _Settings:
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be more than 0, not {timeout_s}")
    chosen = default_backend() if backend is None else as_backend(backend)
    return _Settings(chosen, sampling, timeout_s)


def _in_thread(work: Callable[[], None]) -> Future[None]:
    """Run `work` in a daemon thread of its own: a stuck program must not keep Python from exiting,
    as a thread pool's threads would."""
    done: Future[None] = Future()
    done.set_running_or_notify_cancel()

    def body() -> None:
        try:
            work()
        except BaseException as exc:
            done.set_exception(exc)
        else:
            done.set_result(None)

    threading.Thread(target=body, name="phloem-program", daemon=True).start()
    return done

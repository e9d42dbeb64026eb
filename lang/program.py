"""`@phloem.function`: a plain function of a state becomes a program that can be run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from concurrent.futures import Future
from dataclasses import dataclass
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    Literal,
    NoReturn,
    ParamSpec,
    TypeVar,
    Unpack,
    overload,
)

from phloem.lang import ir
from phloem.lang.backend.base import Backend, Call
from phloem.lang.backend.choose import BackendLike, as_backend, default_backend, refuse_to_block
from phloem.lang.background import background
from phloem.lang.batch import iter_batch
from phloem.lang.errors import UsageError
from phloem.lang.feed import Feed
from phloem.lang.options import RUN_FIELDS, RunOptions, run_sampling
from phloem.lang.outline import Outline, outline_of, outlining
from phloem.lang.run import Run, backend_here
from phloem.lang.sampling import Sampling
from phloem.lang.state import Record, State
from phloem.lang.stream import Stream

if TYPE_CHECKING:
    from phloem.lang.remote import Remote
    from phloem.lang.results import OutputLike

P = ParamSpec("P")
R = TypeVar("R")

Item = Mapping[str, Any] | Sequence[Any]
"""The arguments of one program of a batch: a dict of them by name, or a tuple in their order."""


class BatchOptions(RunOptions, total=False):
    """The options of a batch."""

    backend: BackendLike | None
    """Where the programs run; the default backend if left out."""
    timeout_s: float | None
    """Seconds that each call may take."""
    concurrency: int | None
    """Programs that run at a time (64)."""
    num_threads: int | Literal["auto"]
    """SGLang's name of `concurrency`; "auto" leaves it as it is."""
    progress_bar: bool | None
    """None shows one on stderr if that is a terminal."""
    output: OutputLike | None
    """A file that each program adds a line to as it ends, and that the batch goes on from."""


_CONCURRENCY = 64

# parameters of the methods that run programs, which a function's own would hide
_OPTIONS = frozenset(
    {
        *(BatchOptions.__annotations__.keys() - RUN_FIELDS),
        "stream",
        "use_thread",
        "raise_on_error",
        "generator_style",
        "in_order",
    }
)


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
    engine; the default one if left out), `timeout_s` for each call, and any of `RunOptions` as the
    default for the program's calls. A name that is both belongs to the function.
    """

    def __init__(
        self,
        fn: Callable[Concatenate[State, P], R],
        given: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._given = given
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
        self._whole = inspect.Signature(parameters[1:])
        self._signature = inspect.Signature([p for p in parameters[1:] if p.name not in given])

    @overload  # a function's own first argument may be of any type, even a state
    def __call__(  # type: ignore[overload-overlap]
        self, s: State, *args: P.args, **kwargs: P.kwargs
    ) -> R: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> State: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """With a state: go on on it. Without: `run`, on the backend of the program around."""
        if args and isinstance(args[0], State):
            if not self._given:
                return self._fn(*args, **kwargs)
            bound = self._bind(args[1:], kwargs)
            return self._fn(args[0], *bound.args, **bound.kwargs)
        if outlining.get():
            return self._outline(args, kwargs)
        return self.run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<Program {self._fn.__module__}.{self._fn.__qualname__}>"

    def run(
        self,
        *args: Any,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        stream: bool = False,
        use_thread: bool = True,
        **kwargs: Any,
    ) -> State:
        """Run to the end and return the state; every variable is final then.

        An exception of the program itself is raised here, its calls cancelled. A failed call that
        the program did not read is in `state.error()` and is raised by `state["x"]`. `stream=True`
        is `stream()`, whose result is the state while it grows. With `use_thread=False` the program
        waits for each call before it goes on.

        Raises what the program raises, `TypeError` for arguments that are none of the function's,
        and `UsageError` when there is no backend.
        """
        if stream:
            return self.stream(*args, backend=backend, timeout_s=timeout_s, **kwargs)
        bound, sampling = self._split(args, kwargs)
        settings = _settings(backend, sampling, timeout_s)
        refuse_to_block(settings.backend)
        run = settings.new_run()
        run.one_by_one = not use_thread
        state = State(run)
        execute(self._fn, state, bound)
        return state

    async def arun(
        self,
        *args: Any,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> State:
        """`run` for asyncio programs; cancelling the task cancels the calls. Raises what `run`
        raises."""
        bound, sampling = self._split(args, kwargs)
        run = _settings(backend, sampling, timeout_s).new_run()
        state = State(run)
        await _in_thread_awaited(lambda: execute(self._fn, state, bound), run)
        return state

    def run_remote(
        self,
        *args: Any,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        stream: bool = False,
        **kwargs: Any,
    ) -> State:
        """`run` in one round trip: the function runs first, without any value, and what it appends
        is sent whole to a Phloem server (`POST /programs/run`), which makes the calls.

        It has to be straight-line: values may be appended, joined by `+`, assigned and returned.
        Raises `UsageError`, with the line, for what needs to know one, or what the server does not
        run; and for a backend that is no such server. A failed call ends the others. With `stream`
        this returns at once, and the variables can be read as they come, each whole.
        """
        record: Record | None = Feed() if stream else None
        remote, work = self._remote(args, kwargs, backend, timeout_s, record)
        if record is not None:
            return Stream(remote.state, remote.run, record, _in_thread(work))
        work()
        return remote.state

    async def arun_remote(
        self,
        *args: Any,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> State:
        """`run_remote` for asyncio programs; cancelling the task ends the program in the server."""
        remote, work = self._remote(args, kwargs, backend, timeout_s)
        await _in_thread_awaited(work, remote.run)
        return remote.state

    def stream(
        self,
        *args: Any,
        backend: BackendLike | None = None,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> Stream:
        """Start the program and return at once; read its text from the result as it comes. Raises
        what `run` raises but for the program's own, which `Stream.result` does."""
        bound, sampling = self._split(args, kwargs)
        run = _settings(backend, sampling, timeout_s).new_run(stream=True)
        record: Record = Feed()
        state = State(run, record=record)
        done = _in_thread(lambda: execute(self._fn, state, bound))
        return Stream(state, run, record, done)

    @overload
    def run_batch(
        self,
        items: Iterable[Item],
        *,
        raise_on_error: bool = False,
        generator_style: Literal[False] = False,
        **options: Unpack[BatchOptions],
    ) -> list[State]: ...
    @overload
    def run_batch(
        self,
        items: Iterable[Item],
        *,
        raise_on_error: bool = False,
        generator_style: Literal[True],
        **options: Unpack[BatchOptions],
    ) -> Iterator[State]: ...
    def run_batch(
        self,
        items: Iterable[Item],
        *,
        raise_on_error: bool = False,
        generator_style: bool = False,
        **options: Unpack[BatchOptions],
    ) -> list[State] | Iterator[State]:
        """Run one program an item, `concurrency` (64) at a time; the states in the items' order.

        What goes wrong in one is its state's `error()` and does not disturb the others, unless
        `raise_on_error`. `progress_bar` None shows one on stderr if that is a terminal. `output`
        is a file that each program, as it ends, adds a line to, and that the batch goes on from
        when it is run again (see `BatchOutput`). With `generator_style` this is `iter_batch`.

        Raises what `iter_batch` raises, and with `raise_on_error` the first failure.
        """
        batch = self.iter_batch(items, **options)
        if raise_on_error:
            batch = _raising(batch)
        return batch if generator_style else list(batch)

    def iter_batch(
        self, items: Iterable[Item], *, in_order: bool = True, **options: Unpack[BatchOptions]
    ) -> Iterator[State]:
        """`run_batch` as an iterator, in the items' order or as they complete.

        Items are taken as they are needed, so they may be endless and memory stays bounded;
        `state.arguments` tells which item a state is of. Leaving the loop cancels the rest.

        Raises what the items raise, `ValueError` and `TypeError` for wrong options, `UsageError`
        when there is no backend, and `OSError` and `ValueError` for an `output` that cannot be
        written or is of other items.
        """
        concurrency = _concurrency(options.get("concurrency"), options.get("num_threads"))
        sampling = run_sampling({k: v for k, v in options.items() if k not in _OPTIONS})
        settings = _settings(options.get("backend"), sampling, options.get("timeout_s"))
        refuse_to_block(settings.backend)
        at_once = min(concurrency, len(items)) if isinstance(items, Sized) else concurrency

        def start(item: Item) -> tuple[State, Run, Callable[[], None]]:
            run = settings.new_run()
            run.recorder.trace.programs = at_once
            state = State(run)
            return state, run, lambda: self._run_item(state, item)

        batch = functools.partial(
            iter_batch,
            concurrency=concurrency,
            in_order=in_order,
            progress_bar=options.get("progress_bar"),
        )
        output = options.get("output")
        if output is None:
            return batch(items, start)
        from phloem.lang.results import recorded

        return recorded(output, items, start, batch)

    def bind(self, **arguments: Any) -> Program[..., R]:
        """The program with these arguments given; its runs take the others. Raises `TypeError`
        for a name that is none of the function's."""
        self._signature.bind_partial(**arguments)
        return Program(self._fn, MappingProxyType({**self._given, **arguments}))

    def trace(self, *, backend: BackendLike | None = None, **arguments: Any) -> Outline:
        """The program's expressions, without running it: `arguments` are as given, the others
        placeholders. `backend` is SGLang's, whose template the tracer needed; it is not asked.
        (What calls of a run did is `state.trace`.)

        Raises what the function raises, in particular `TypeError` where a placeholder would become
        a part of an f-string.
        """
        return self._outline((), arguments)

    def cache(self, backend: BackendLike | None = None) -> None:
        """Have the constant beginning of the program's prompt computed, so that its runs find it
        in the server's cache. Does nothing where a prompt begins with what only a run knows.

        Raises `BackendError` when the backend cannot.
        """
        settings = _settings(backend, Sampling(max_tokens=1), None)
        refuse_to_block(settings.backend)
        outline, _ = self._try_outline((), {})  # as far as it goes
        prompt = outline.prefix()
        if prompt is not None:
            background.wait_for(_drain(settings.backend, Call(prompt, settings.sampling)))

    def compile(self, *, backend: BackendLike | None = None) -> NoReturn:
        """SGLang's `compile` is gone there, and never was needed here: `run` and `run_batch` do
        what a compiled function did, `trace` prints its graph. Raises `UsageError`."""
        raise UsageError(
            f"programs are not compiled: use {self._fn.__name__}.run, .run_batch or .trace"
        )

    def _remote(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        backend: BackendLike | None,
        timeout_s: float | None,
        record: Record | None = None,
    ) -> tuple[Remote, Callable[[], None]]:
        """A run in a server, and what runs it to the end."""
        from phloem.lang.remote import Remote

        bound, sampling = self._split(args, kwargs)
        settings = _settings(backend, sampling, timeout_s)
        remote = Remote(settings.backend, sampling, timeout_s, record)
        return remote, lambda: remote.execute(self._fn, bound)

    def _outline(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Outline:
        outline, failure = self._try_outline(args, kwargs)
        if failure is not None:
            raise failure
        return outline

    def _try_outline(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Outline, Exception | None]:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        missing = {
            name: ir.Placeholder("argument", name)
            for name, parameter in self._signature.parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        }
        bound = self._merged(missing | given)
        title = f"{self._fn.__name__}({', '.join(self._signature.parameters)})"
        return outline_of(title, self._fn, bound.args, bound.kwargs)

    def _run_item(self, state: State, item: Item) -> None:
        try:
            if isinstance(item, str):
                raise TypeError(f"an item of a batch is a dict or a tuple, not the text {item!r}")
            bound = self._bind((), item) if isinstance(item, Mapping) else self._bind(item, {})
        except TypeError as exc:
            state._end(exc)
            return
        with contextlib.suppress(BaseException):  # the state reports it to the caller
            execute(self._fn, state, bound)

    def _split(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[inspect.BoundArguments, Sampling]:
        """Arguments of a run → the function's own, and the default sampling."""
        options = RUN_FIELDS - self._whole.parameters.keys()
        own = {name: value for name, value in kwargs.items() if name not in options}
        sampling = {name: value for name, value in kwargs.items() if name in options}
        return self._bind(args, own), run_sampling(sampling)

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
        bound = self._signature.bind(*args, **kwargs)
        return self._merged(bound.arguments) if self._given else bound

    def _merged(self, arguments: Mapping[str, Any]) -> inspect.BoundArguments:
        """`arguments`, and those that were given to `bind`."""
        both = {**self._given, **arguments}
        order = {name: both[name] for name in self._whole.parameters if name in both}
        return inspect.BoundArguments(self._whole, order)


@overload
def function(
    fn: Callable[Concatenate[State, P], R], num_api_spec_tokens: None = None
) -> Program[P, R]: ...
@overload
def function(
    *, num_api_spec_tokens: None = None
) -> Callable[[Callable[Concatenate[State, P], R]], Program[P, R]]: ...
def function(fn: Any = None, num_api_spec_tokens: int | None = None) -> Any:
    """Make a program of a function whose first parameter is the state.

        @phloem.function
        def greet(s, name):
            s += phloem.user(f"Greet {name}.") + phloem.assistant(phloem.gen("greeting"))

        greet.run(name="Ada")["greeting"]

    SGLang's `num_api_spec_tokens` (several `gen` guessed in one call of a paid API) can only be
    None.
    """
    if num_api_spec_tokens is not None:
        raise ValueError("num_api_spec_tokens: calls are never guessed ahead; leave it out")
    return function if fn is None else Program(fn)


def execute(fn: Callable[..., Any], state: State, bound: inspect.BoundArguments) -> None:
    """Run `fn` on `state` to the end of all its calls; what it raises ends the run."""
    run = state._run
    state._arguments = MappingProxyType(bound.arguments)
    failure: BaseException | None = None
    outer = backend_here.set(run.backend)
    try:
        state._returned = fn(state, *bound.args, **bound.kwargs)
        run.calls.close()
        run.wait()
        failure = run.unhandled()
    except BaseException as exc:
        failure = exc
        run.cancel()
        raise
    finally:
        backend_here.reset(outer)
        run.end("its program has ended")
        run.recorder.end(fn.__qualname__, failure)
        state._end(failure)


def _settings(
    backend: BackendLike | None, sampling: Sampling, timeout_s: float | None
) -> _Settings:
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be more than 0, not {timeout_s}")
    chosen = as_backend(backend) if backend is not None else backend_here.get() or default_backend()
    return _Settings(chosen, sampling, timeout_s)


def _concurrency(concurrency: int | None, num_threads: int | Literal["auto"] | None) -> int:
    threads = None if num_threads == "auto" else num_threads
    if concurrency is not None and threads is not None:
        raise TypeError("num_threads and concurrency are the same option: give one of them")
    chosen = concurrency if threads is None else threads
    if chosen is None:
        return _CONCURRENCY
    if chosen < 1:
        raise ValueError(f"concurrency must be at least 1, not {chosen}")
    return chosen


def _raising(batch: Iterator[State]) -> Iterator[State]:
    for state in batch:
        if (failure := state.error()) is not None:
            raise failure
        yield state


async def _drain(backend: Backend, call: Call) -> None:
    async for _ in backend.generate(call):
        pass


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


async def _in_thread_awaited(work: Callable[[], None], run: Run) -> None:
    """`_in_thread`, to its end; cancelling that cancels the run."""
    try:
        await asyncio.wrap_future(_in_thread(work))
    except asyncio.CancelledError:
        run.cancel()
        raise

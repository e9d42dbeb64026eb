"""Compiled grammars by key: one compile at a time for each key, a bounded cache, deadlines.

Compiles run in threads (engines release the GIL). A thread cannot be stopped, so a compile that
passes its deadline is only *reported*, by `overdue`; whoever owns the process decides to end it.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from phloem.constrained.base import ConstraintError, LimitExceeded
from phloem.constrained.grammar import Grammar
from phloem.constrained.spec import Constraint

FAILURE_SECONDS = 60.0
MAX_FAILURES = 1_024
MAX_KNOWN = 8_192
MEASURED_EVERY = 64
"""Grammars grow as they are used: when so many were obtained, their size is looked at again."""


class Hurried(Exception):
    """Building was given up because it took so long, and others wait behind it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Compiled:
    """The outcome of one request to compile: exactly one of `grammar` and `error` is set. `cached`
    when nothing was compiled for this request alone."""

    key: str
    grammar: Grammar | None
    error: ConstraintError | None
    seconds: float
    cached: bool


@dataclasses.dataclass(frozen=True, slots=True)
class CompilerStatistics:
    """Counts since the start, and what is held now."""

    compiles: int
    cache_hits: int
    evictions: int
    grammars: int
    grammar_bytes: int
    compiling: int


class GrammarCompiler:
    """Compiles by `build` in `threads` threads; keeps at most `cache_bytes` of grammars.

    Where `build` raises `Hurried`, `patiently` builds, in a thread apart. `again` builds what was
    built before and evicted (None: as `build`); whoever asks for it waits.
    `on_done` is called from a compile thread, or from `request` when nothing has to be compiled.
    Failures are remembered for a minute. All methods are thread-safe.
    """

    def __init__(
        self,
        build: Callable[[Constraint], Grammar],
        on_done: Callable[[Compiled], None],
        *,
        patiently: Callable[[Constraint], Grammar] | None = None,
        again: Callable[[Constraint], Grammar] | None = None,
        threads: int = 1,
        timeout_s: float = 5.0,
        cache_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._patiently = patiently or build
        self._again = again or build
        self._on_done = on_done
        self._timeout_s = timeout_s
        self._cache_bytes = cache_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._grammars: OrderedDict[str, Grammar] = OrderedDict()
        self._constraints: OrderedDict[str, Constraint] = OrderedDict()
        self._failures: OrderedDict[str, tuple[float, ConstraintError]] = OrderedDict()
        self._waiting: dict[str, int] = {}
        self._started: dict[str, float] = {}
        self._obtained = 0
        self._counts = {"compiles": 0, "cache_hits": 0, "evictions": 0}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar-compile")
        self._slow_pool = ThreadPoolExecutor(1, thread_name_prefix="grammar-compile-slow")

    def request(self, key: str, constraint: Constraint) -> None:
        """Have `on_done` called once for this request, sooner or later."""
        with self._lock:
            done = self._known(key)
            if done is None:
                first = key not in self._waiting
                self._waiting[key] = self._waiting.get(key, 0) + 1
                if not first:
                    return
        if done is not None:
            self._on_done(done)
            return
        self._submit(self._pool, key, constraint, self._build)

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        key: str,
        constraint: Constraint,
        build: Callable[[Constraint], Grammar],
    ) -> None:
        future: Future[None] = pool.submit(self._compile, key, constraint, build)
        future.add_done_callback(_raise)

    def _known(self, key: str) -> Compiled | None:
        grammar = self._grammars.get(key)
        if grammar is not None:
            self._grammars.move_to_end(key)
            self._counts["cache_hits"] += 1
            return Compiled(key, grammar, None, 0.0, cached=True)
        failure = self._failures.get(key)
        if failure is not None and self._clock() - failure[0] < FAILURE_SECONDS:
            self._counts["cache_hits"] += 1
            return Compiled(key, None, failure[1], 0.0, cached=True)
        return None

    def _compile(
        self, key: str, constraint: Constraint, build: Callable[[Constraint], Grammar]
    ) -> None:
        start = self._clock()
        with self._lock:
            self._started[key] = start
            self._counts["compiles"] += 1
        grammar, error = None, None
        try:
            grammar = build(constraint)
        except Hurried:
            with self._lock:
                self._started.pop(key, None)
            self._submit(self._slow_pool, key, constraint, self._patiently)
            return
        except ConstraintError as refused:
            error = refused
        except MemoryError:
            error = LimitExceeded("compiling the constraint needs too much memory")
        except Exception as unexpected:  # a bad constraint ends its own request only
            error = ConstraintError(
                f"the constraint cannot be compiled ({type(unexpected).__name__})",
                code="compile_failed",
            )
        done = Compiled(key, grammar, error, self._clock() - start, cached=False)
        with self._lock:
            self._started.pop(key, None)
            waiting = self._waiting.pop(key, 0)
            self._store(done, constraint)
        if waiting:
            self._on_done(done)
        for _ in range(waiting - 1):  # one compile, so that it is counted once
            self._on_done(dataclasses.replace(done, seconds=0.0, cached=True))

    def _store(self, done: Compiled, constraint: Constraint) -> None:
        if done.grammar is None:
            assert done.error is not None
            self._failures[done.key] = (self._clock(), done.error)
            while len(self._failures) > MAX_FAILURES:
                self._failures.popitem(last=False)
            return
        if done.key in self._grammars:
            return
        self._constraints[done.key] = constraint
        self._constraints.move_to_end(done.key)
        while len(self._constraints) > MAX_KNOWN:
            self._constraints.popitem(last=False)
        self._grammars[done.key] = done.grammar
        self._trim()

    def _trim(self) -> None:
        held = self._held_bytes()
        while held > self._cache_bytes and len(self._grammars) > 1:
            _, evicted = self._grammars.popitem(last=False)
            held -= evicted.memory_bytes
            self._counts["evictions"] += 1

    def _held_bytes(self) -> int:
        """Measured anew each time: grammars grow as they are used."""
        return sum(grammar.memory_bytes for grammar in self._grammars.values())

    def obtain(self, key: str) -> Grammar | None:
        """The grammar of a key that was compiled before: from the cache, or compiled again here
        and now if it was evicted meanwhile. None for a key that never compiled."""
        with self._lock:
            grammar = self._grammars.get(key)
            if grammar is not None:
                self._grammars.move_to_end(key)
                self._obtained += 1
                if self._obtained % MEASURED_EVERY == 0:
                    self._trim()
                return grammar
            constraint = self._constraints.get(key)
        if constraint is None:
            return None
        grammar = self._again(constraint)
        with self._lock:
            self._counts["compiles"] += 1
            self._store(Compiled(key, grammar, None, 0.0, cached=False), constraint)
        return grammar

    def overdue(self) -> list[Compiled]:
        """Requests whose compile has passed the deadline, as errors; each is told once."""
        now = self._clock()
        late: list[Compiled] = []
        with self._lock:
            for key, start in self._started.items():
                if now - start >= self._timeout_s and key in self._waiting:
                    error = LimitExceeded(
                        f"compiling the constraint took longer than {self._timeout_s:g} s",
                        code="compile_timeout",
                    )
                    late += [Compiled(key, None, error, now - start, cached=False)] * (
                        self._waiting.pop(key)
                    )
        return late

    def next_deadline(self) -> float | None:
        """Seconds after which `overdue` may have something to tell; None when nobody waits."""
        with self._lock:
            if not self._waiting:
                return None
            starts = [s for k, s in self._started.items() if k in self._waiting]
        # What waits may start at any moment from now.
        return max(min(starts, default=self._clock()) + self._timeout_s - self._clock(), 0.0)

    def statistics(self) -> CompilerStatistics:
        with self._lock:
            return CompilerStatistics(
                grammars=len(self._grammars),
                grammar_bytes=self._held_bytes(),
                compiling=len(self._started),
                **self._counts,
            )

    def close(self) -> None:
        """Take no more requests; what runs is not waited for."""
        for pool in (self._pool, self._slow_pool):
            pool.shutdown(wait=False, cancel_futures=True)


def _raise(future: Future[None]) -> None:
    """A failure of ours, not of a constraint, must not pass unseen."""
    if not future.cancelled():
        future.result()

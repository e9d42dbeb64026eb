"""One compile a key, a bounded cache, remembered failures, deadlines that are told once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import pytest

from phloem.constrained.base import (
    ConstraintError,
    LimitExceeded,
    MalformedConstraint,
    Matcher,
)
from phloem.constrained.compiler import (
    FAILURE_SECONDS,
    MEASURED_EVERY,
    Compiled,
    GrammarCompiler,
    Hurried,
)
from phloem.constrained.grammar import Grammar
from phloem.constrained.spec import Constraint, Regex


class FakeGrammar:
    engine = "fake"

    def __init__(self) -> None:
        self.memory_bytes = 100

    def matcher(self) -> Matcher:
        raise NotImplementedError


class FakeBackend:
    """Compiles when it is let; fails for the patterns `bad`, `huge` and `bug`."""

    def __init__(self) -> None:
        self.compiled: list[str] = []
        self.let = threading.Event()
        self.let.set()
        self.entered = threading.Semaphore(0)

    def compile(self, constraint: Constraint) -> Grammar:
        assert isinstance(constraint, Regex)
        self.compiled.append(constraint.pattern)
        self.entered.release()
        assert self.let.wait(30)
        if constraint.pattern == "bad":
            raise MalformedConstraint("no")
        if constraint.pattern == "huge":
            raise MemoryError
        if constraint.pattern == "bug":
            raise KeyError("x")
        return Grammar(FakeGrammar())


Make = Callable[..., GrammarCompiler]


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
def done() -> queue.Queue[Compiled]:
    return queue.Queue()


@pytest.fixture
def clock() -> list[float]:
    return [0.0]


@pytest.fixture
def make(backend: FakeBackend, done: queue.Queue[Compiled], clock: list[float]) -> Make:
    def make(**options: Any) -> GrammarCompiler:
        return GrammarCompiler(backend.compile, done.put, clock=lambda: clock[0], **options)

    return make


def test_compiles_once_then_comes_from_the_cache(
    make: Make, backend: FakeBackend, done: queue.Queue[Compiled]
) -> None:
    compiler = make()
    compiler.request("k", Regex(pattern="a"))
    first = done.get(timeout=30)
    assert first.grammar is not None
    assert not first.cached
    compiler.request("k", Regex(pattern="a"))
    second = done.get_nowait()
    assert second.cached
    assert second.grammar is first.grammar
    assert backend.compiled == ["a"]
    assert compiler.statistics().cache_hits == 1


def test_requests_for_a_key_in_the_making_wait_for_the_same_compile(
    make: Make, backend: FakeBackend, done: queue.Queue[Compiled]
) -> None:
    compiler = make(threads=2)
    backend.let.clear()
    for _ in range(3):
        compiler.request("k", Regex(pattern="a"))
    backend.let.set()
    outcomes = [done.get(timeout=30) for _ in range(3)]
    assert outcomes[0].grammar is not None
    assert all(outcome.grammar is outcomes[0].grammar for outcome in outcomes)
    assert [outcome.cached for outcome in outcomes] == [False, True, True]
    assert backend.compiled == ["a"]


@pytest.mark.parametrize(
    ("pattern", "error"),
    [("bad", MalformedConstraint), ("huge", LimitExceeded), ("bug", ConstraintError)],
)
def test_failures_are_answered_and_remembered_for_a_while(
    make: Make,
    backend: FakeBackend,
    done: queue.Queue[Compiled],
    clock: list[float],
    pattern: str,
    error: type[ConstraintError],
) -> None:
    compiler = make()
    for _ in range(2):
        compiler.request("k", Regex(pattern=pattern))
        assert isinstance(done.get(timeout=30).error, error)
    assert len(backend.compiled) == 1
    clock[0] += FAILURE_SECONDS
    compiler.request("k", Regex(pattern=pattern))
    assert not done.get(timeout=30).cached


def test_the_cache_is_bounded_and_evicted_grammars_come_back(
    make: Make, backend: FakeBackend, done: queue.Queue[Compiled]
) -> None:
    compiler = make(cache_bytes=250)
    for key in "abc":
        compiler.request(key, Regex(pattern=key))
        done.get(timeout=30)
    statistics = compiler.statistics()
    assert (statistics.grammars, statistics.grammar_bytes, statistics.evictions) == (2, 200, 1)
    assert compiler.obtain("a") is not None
    assert backend.compiled == ["a", "b", "c", "a"]
    assert compiler.obtain("unknown") is None


def test_a_grammar_that_grows_counts_as_it_is_now(make: Make, done: queue.Queue[Compiled]) -> None:
    compiler = make(cache_bytes=450)
    for key in "abcd":
        compiler.request(key, Regex(pattern=key))
        compiled = done.get(timeout=30).grammar
        assert compiled is not None
        assert isinstance(compiled.compiled, FakeGrammar)
        compiled.compiled.memory_bytes = 200  # its states, once it was used
    assert compiler.statistics().evictions == 2
    assert compiler.statistics().grammar_bytes == 400
    compiler.request("e", Regex(pattern="e"))
    done.get(timeout=30)
    assert compiler.statistics().grammars == 2


def test_grammars_that_grow_in_use_are_measured_again(
    make: Make, done: queue.Queue[Compiled]
) -> None:
    compiler = make(cache_bytes=450)
    for key in "abcd":
        compiler.request(key, Regex(pattern=key))
        done.get(timeout=30)
    for _ in range(MEASURED_EVERY):
        grammar = compiler.obtain("b")
        assert grammar is not None
        assert isinstance(grammar.compiled, FakeGrammar)
        grammar.compiled.memory_bytes = 200  # its masks, say
    assert compiler.statistics().evictions == 1
    assert compiler.statistics().grammar_bytes == 400


def test_nobody_waits_behind_what_takes_long(
    backend: FakeBackend, done: queue.Queue[Compiled]
) -> None:
    slow = FakeBackend()
    slow.let.clear()

    def build(constraint: Constraint) -> Grammar:
        if constraint == Regex(pattern="long"):
            raise Hurried
        return backend.compile(constraint)

    compiler = GrammarCompiler(build, done.put, patiently=slow.compile)
    compiler.request("long", Regex(pattern="long"))
    compiler.request("long", Regex(pattern="long"))
    assert slow.entered.acquire(timeout=30)
    compiler.request("k", Regex(pattern="a"))
    assert done.get(timeout=30).key == "k"
    slow.let.set()
    assert {done.get(timeout=30).key for _ in range(2)} == {"long"}
    assert slow.compiled == ["long"]
    compiler.close()


def test_what_was_evicted_is_built_again_in_its_own_way(
    backend: FakeBackend, done: queue.Queue[Compiled]
) -> None:
    again = FakeBackend()
    compiler = GrammarCompiler(backend.compile, done.put, again=again.compile, cache_bytes=100)
    for key in "ab":
        compiler.request(key, Regex(pattern=key))
        done.get(timeout=30)
    assert compiler.obtain("a") is not None
    assert (backend.compiled, again.compiled) == (["a", "b"], ["a"])
    compiler.close()


def test_an_overdue_compile_is_told_once(
    make: Make, backend: FakeBackend, done: queue.Queue[Compiled], clock: list[float]
) -> None:
    compiler = make(timeout_s=5)
    assert compiler.next_deadline() is None
    backend.let.clear()
    compiler.request("k", Regex(pattern="a"))
    # Whether the thread has begun or not, whoever sleeps must wake in time.
    assert compiler.next_deadline() == 5
    compiler.request("k", Regex(pattern="a"))
    assert backend.entered.acquire(timeout=30)
    assert compiler.overdue() == []
    assert compiler.next_deadline() == 5
    clock[0] = 5
    late = compiler.overdue()
    assert [(d.key, d.error.reason if d.error else "") for d in late] == [
        ("k", "compile_timeout")
    ] * 2
    assert compiler.overdue() == []
    assert compiler.next_deadline() is None
    backend.let.set()
    compiler.close()

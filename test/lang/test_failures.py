"""Whatever fails, the error surfaces at its variable and nothing waits for ever.

Every test here hangs (and so fails by its timeout) if any waiter is left alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest

import phloem
from phloem.lang.backend.base import Call, Delta
from phloem.lang.background import background
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(20)


class Boom(Exception):
    """What the scripted model raises."""


def until(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.005)


def run(body: Callable[[State], Any], backend: phloem.MockBackend, **options: Any) -> State:
    return phloem.function(body).run(backend=backend, **options)


def gen_op(s: State) -> None:
    s += phloem.gen("x")


def select_op(s: State) -> None:
    s += phloem.select("x", ["a", "b"])


def many_op(s: State) -> None:
    s += phloem.gen("x", n=3)


def gather_op(s: State) -> None:
    group = s.fork(3)
    group += phloem.gen("x")
    group.join()


def append_op(s: State) -> None:
    group = s.fork(3)
    group += phloem.gen("x_part")
    group.join("append")
    s += phloem.gen("x")


def unnamed_op(s: State) -> None:
    s += phloem.gen() + phloem.gen("x")


@pytest.mark.parametrize(
    "op", [gen_op, select_op, many_op, gather_op, append_op, unnamed_op], ids=lambda op: op.__name__
)
def test_every_op_fails_at_its_variable_and_at_what_builds_on_it(
    op: Callable[[State], None],
) -> None:
    def body(s: State) -> None:
        s += "q"
        op(s)
        s += " then " + phloem.gen("later")
        forked = s.fork(2)
        forked += phloem.gen("branch")
        forked.join()

    backend = phloem.MockBackend(lambda call: Boom("down"), scores=Boom("down"))
    state = run(body, backend)
    for name in ("x", "later", "branch"):
        with pytest.raises(phloem.GenerationError, match="down") as caught:
            state[name]
        assert isinstance(caught.value.cause, Boom)
    assert isinstance(state.error(), phloem.GenerationError)
    if op not in (many_op, gather_op):  # their answers are not in the text, "later" is
        with pytest.raises(phloem.GenerationError, match="down"):
            state.text()


def test_the_error_names_the_variable_whose_call_failed() -> None:
    def body(s: State) -> None:
        s += "q" + phloem.gen("first") + phloem.gen("second") + phloem.gen("third")

    state = run(body, phloem.MockBackend({"first": "1", "second": Boom("no")}))
    assert state["first"] == "1"
    with pytest.raises(phloem.GenerationError, match="'second' failed: Boom: no") as caught:
        state["third"]
    assert caught.value.variable == "second"


def test_nothing_that_a_backend_raises_ends_the_loop() -> None:
    state = run(gen_op, phloem.MockBackend({"x": SystemExit(1)}))
    with pytest.raises(phloem.GenerationError, match="SystemExit"):
        state["x"]
    assert run(gen_op, phloem.MockBackend({"x": "alive"}))["x"] == "alive"


def test_a_failed_fork_leaves_its_siblings_alone() -> None:
    def body(s: State) -> None:
        group = s.fork(3)
        group += lambda i: str(i) + phloem.gen(f"v{i}")
        s["good"] = [group[0]["v0"], group[2]["v2"]]
        with pytest.raises(phloem.GenerationError):
            group[1]["v1"]
        assert isinstance(group[1].error(), phloem.GenerationError)
        assert group[0].error() is None

    state = run(body, phloem.MockBackend({"v0": "a", "v1": Boom(), "v2": "c"}))
    assert state["good"] == ["a", "c"]
    assert state.error() is None  # the program met the failure and went on


def test_an_exception_of_the_program_is_raised_and_cancels_its_calls() -> None:
    def body(s: State) -> None:
        s += phloem.gen("slow")
        raise Boom("mine")

    backend = phloem.MockBackend({"slow": "x"}, latency_s=3600)
    with pytest.raises(Boom, match="mine"):
        run(body, backend)


def test_reading_a_failed_variable_in_the_program_raises_from_run() -> None:
    def body(s: State) -> None:
        s += phloem.gen("x")
        s["x"]

    with pytest.raises(phloem.GenerationError, match="'x' failed: Boom"):
        run(body, phloem.MockBackend({"x": Boom()}))


def test_a_call_has_a_deadline() -> None:
    def body(s: State) -> None:
        s += "q"
        fork = s.copy()
        fork += phloem.select("pick", ["a", "b"])
        s += phloem.gen("x")
        for state, name in ((s, "x"), (fork, "pick")):
            with pytest.raises(phloem.GenerationError, match=r"timeout_s=0.05") as caught:
                state[name]
            assert isinstance(caught.value.cause, phloem.BackendUnavailable)

    backend = phloem.MockBackend({"x": "x"}, latency_s=3600)
    run(body, backend, timeout_s=0.05)
    assert backend.cancelled == 1


def test_a_backend_that_breaks_its_promises_is_an_error() -> None:
    class Broken(phloem.MockBackend):
        def __init__(self, *deltas: Delta) -> None:
            super().__init__()
            self.deltas = deltas

        async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
            for delta in self.deltas:
                yield delta

    for deltas, reason in (
        ((Delta(text="x"),), "never ended"),
        ((Delta(index=1, finish="stop"),), "unasked answer 1"),
        ((Delta(finish="stop"), Delta(text="more")), "after its end"),
        ((), "never ended"),
    ):
        with pytest.raises(phloem.GenerationError, match=reason):
            run(gen_op, Broken(*deltas))["x"]


def test_waiting_on_the_loop_is_refused() -> None:
    """A backend that reads a variable of its own program would wait for itself."""
    states: list[State] = []

    def answer(call: Call) -> str:
        return str(states[0]["x"])

    def body(s: State) -> None:
        states.append(s)
        s += phloem.gen("x")

    with pytest.raises(phloem.GenerationError, match="event loop"):
        run(body, phloem.MockBackend(answer))["x"]


def test_stream_cancel_ends_the_program_and_its_calls() -> None:
    seen: list[BaseException] = []

    @phloem.function
    def program(s: State) -> None:
        s += phloem.gen("x")
        try:
            s["x"]
        except phloem.GenerationError as error:
            seen.append(error.cause)
        s += phloem.gen("y")  # begun after the cancel: ends the same way

    backend = phloem.MockBackend({"x": "x"}, latency_s=3600)
    stream = program.stream(backend=backend)
    until(lambda: backend.calls)
    stream.cancel()
    state = stream.result()
    assert isinstance(seen[0], phloem.Cancelled)
    with pytest.raises(phloem.GenerationError, match="cancelled"):
        state["y"]
    assert backend.cancelled == 1
    assert len(backend.calls) == 1


async def test_arun_and_its_cancellation() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += phloem.gen("x")

    state = await program.arun(backend=phloem.MockBackend({"x": "async"}))
    assert state["x"] == "async"
    with pytest.raises(Boom):
        await phloem.function(lambda s: (_ for _ in ()).throw(Boom())).arun(
            backend=phloem.MockBackend()
        )
    backend = phloem.MockBackend({"x": "x"}, latency_s=3600)
    task = asyncio.create_task(program.arun(backend=backend))
    await asyncio.to_thread(until, lambda: backend.calls)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: backend.cancelled)


def test_a_stopped_loop_fails_what_was_in_flight_and_starts_anew() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += phloem.gen("x")

    backend = phloem.MockBackend({"x": "x"}, latency_s=3600)
    stream = program.stream(backend=backend)
    until(lambda: backend.calls)
    background.stop()
    with pytest.raises(phloem.GenerationError, match="Cancelled"):
        stream.result()["x"]
    assert program.run(backend=phloem.MockBackend({"x": "again"}))["x"] == "again"


def test_an_interrupted_run_cancels() -> None:
    """What Ctrl-C does to `run`: the exception passes through, the calls end."""

    def body(s: State) -> None:
        s += phloem.gen("x")
        raise KeyboardInterrupt

    backend = phloem.MockBackend({"x": "x"}, latency_s=3600)
    with pytest.raises(KeyboardInterrupt):
        run(body, backend)

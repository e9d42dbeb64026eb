"""Many programs: order, isolation, bounds."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator

import pytest

import phloem
from phloem.lang.backend.base import Call, TextPrompt
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(60)


@phloem.function
def double(s: State, i: int) -> None:
    s += str(i)
    s += phloem.gen("first")
    s += phloem.gen("second")


def echo(call: Call) -> str:
    assert isinstance(call.prompt, TextPrompt)
    return f"({call.prompt.text})"


def test_a_thousand_programs_in_order() -> None:
    states = double.run_batch(({"i": i} for i in range(1000)), backend=phloem.MockBackend(echo))
    assert [state["second"] for state in states] == [f"({i}({i}))" for i in range(1000)]
    assert all(state.error() is None for state in states)


def test_failures_stay_with_their_programs() -> None:
    """A third of all calls fail at random: each program ends in its value or its own error."""
    chance = random.Random(7)

    def answer(call: Call) -> str | BaseException:
        return ValueError(f"call {call.name}") if chance.random() < 1 / 3 else echo(call)

    states = double.run_batch([(i,) for i in range(300)], backend=phloem.MockBackend(answer))
    failed = [state for state in states if state.error() is not None]
    assert 100 < len(failed) < 250
    for i, state in enumerate(states):
        assert state.arguments == {"i": i}
        error = state.error()
        if error is None:
            assert state["second"] == f"({i}({i}))"
        else:
            assert isinstance(error, phloem.GenerationError)
            with pytest.raises(phloem.GenerationError, match=f"call {error.variable}"):
                state["second"]


def test_errors_of_every_kind_are_kept() -> None:
    @phloem.function
    def moody(s: State, kind: str) -> str:
        if kind == "python":
            raise LookupError("mine")
        if kind == "exit":
            raise SystemExit(3)
        s += "q" + phloem.gen("x")
        if kind == "read":
            s["x"]
        return kind

    backend = phloem.MockBackend(lambda call: ValueError("theirs"))
    items = [{"kind": k} for k in ("python", "exit", "read", "unread")] + [{"typo": "x"}]
    states = moody.run_batch(items, backend=backend)
    kinds = [LookupError, SystemExit, phloem.GenerationError, phloem.GenerationError, TypeError]
    assert [type(state.error()) for state in states] == kinds
    with pytest.raises(phloem.GenerationError, match="LookupError: mine"):
        states[0]["x"]  # never defined: the reason, not a KeyError
    with pytest.raises(LookupError, match="mine"):
        moody.run_batch(items, backend=backend, raise_on_error=True)


def test_as_completed() -> None:
    """The first item ends only after all others were received."""
    others_received = threading.Event()

    @phloem.function
    def program(s: State, i: int) -> None:
        assert i != 0 or others_received.wait(20)
        s += "q" + phloem.gen("x")

    order: list[int] = []
    items = [{"i": i} for i in range(6)]
    for state in program.iter_batch(
        items, backend=phloem.MockBackend({"x": "x"}), in_order=False, concurrency=3
    ):
        assert state.error() is None
        order.append(state.arguments["i"])
        if len(order) == 5:
            others_received.set()
    assert sorted(order) == list(range(6))
    assert order[-1] == 0


def test_an_endless_batch_is_lazy_and_can_be_left() -> None:
    taken = itertools.count()

    def items() -> Iterator[dict[str, int]]:
        for i in taken:
            yield {"i": i}

    batch = double.iter_batch(items(), backend=phloem.MockBackend(echo), concurrency=4)
    got = [next(batch).arguments["i"] for _ in range(50)]
    assert got == list(range(50))
    batch.close()  # type: ignore[attr-defined]
    assert next(taken) <= 50 + 2 * 4 + 1


def test_concurrency_is_bounded_and_reached() -> None:
    lock = threading.Lock()
    running = 0
    peak = 0
    full = threading.Barrier(5)

    @phloem.function
    def program(s: State) -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        full.wait(20)
        with lock:
            running -= 1

    program.run_batch([{}] * 20, backend=phloem.MockBackend(), concurrency=5)
    assert peak == 5


def test_a_failing_source_raises_here() -> None:
    def items() -> Iterator[dict[str, int]]:
        yield {"i": 0}
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        double.run_batch(items(), backend=phloem.MockBackend(echo))


def test_leaving_a_batch_cancels_what_runs() -> None:
    def latency(call: Call) -> float:
        return 0.0 if call.prompt == TextPrompt("0") else 3600

    backend = phloem.MockBackend(echo, latency_s=latency)
    ends_at_once = phloem.function(lambda s, i: s.__iadd__(str(i) + phloem.gen("x")))
    batch = ends_at_once.iter_batch([(i,) for i in range(4)], backend=backend, concurrency=4)
    assert next(batch)["x"] == "(0)"
    while len(backend.calls) < 4:
        time.sleep(0.005)
    batch.close()  # type: ignore[attr-defined]
    while backend.cancelled < 3:
        time.sleep(0.005)


def test_empty_batch_and_bad_options() -> None:
    assert double.run_batch([], backend=phloem.MockBackend()) == []
    with pytest.raises(ValueError, match="concurrency"):
        double.run_batch([], backend=phloem.MockBackend(), concurrency=0)
    with pytest.raises(TypeError, match="unknown option 'i'"):
        double.run_batch([], backend=phloem.MockBackend(), i=3)  # type: ignore[call-overload]


def test_progress_bar_on_stderr_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    backend = phloem.MockBackend({"first": "x", "second": ValueError()})
    double.run_batch([{"i": 1}] * 3, backend=backend)
    assert capsys.readouterr() == ("", "")
    double.run_batch([{"i": 1}] * 3, backend=backend, progress_bar=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert "3/3" in err
    assert "3 failed" in err

"""Faults of SGLang's client, each of which this one must not have: a test a fault."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable

import pytest

import phloem
from phloem.constrained.spec import Regex
from phloem.lang.backend.base import Call, Delta
from phloem.lang.choices import ChoiceScore, ChoicesMethod, decide
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(20)


def until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.005)


def test_a_variable_after_a_failed_call_is_an_error_and_no_wait() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += "a" + phloem.gen("bad")
        s += "b" + phloem.gen("after")
        s.fork(2).join()
        s += phloem.select("last", ["x", "y"])

    state = program.run(backend=phloem.MockBackend({"bad": OSError("gone"), "after": "1"}))
    for name in ("bad", "after", "last"):
        with pytest.raises(phloem.GenerationError, match="'bad' failed: OSError: gone"):
            state[name]


@pytest.mark.parametrize("method", list(ChoicesMethod))
def test_every_method_of_choosing_works(method: ChoicesMethod) -> None:
    @phloem.function
    def program(s: State) -> None:
        s += "Q" + phloem.select("x", ["aa", "b"], choices_method=method)

    backend = phloem.MockBackend(scores={"aa": [-0.5, -0.1], "b": -2.0})
    assert program.run(backend=backend)["x"] in ("aa", "b")


@pytest.mark.parametrize("chars", [1, 3, 100])
def test_a_stream_loses_no_text(chars: int) -> None:
    @phloem.function
    def program(s: State) -> None:
        s += "Say: " + phloem.gen("x") + "!"

    backend = phloem.MockBackend({"x": "Hello world, this is longer text"}, piece_chars=chars)
    stream = program.stream(backend=backend)
    assert "".join(stream.text_iter("x")) == "Hello world, this is longer text"
    assert "".join(stream.text_iter()) == "Say: Hello world, this is longer text!"


def test_a_failed_item_of_a_batch_tells_its_cause() -> None:
    @phloem.function
    def program(s: State, bad: bool) -> None:
        if bad:
            raise LookupError("mine")
        s += "a" + phloem.gen("x")

    good, bad = program.run_batch(
        [{"bad": False}, {"bad": True}], backend=phloem.MockBackend({"x": "1"})
    )
    assert good["x"] == "1"
    assert isinstance(bad.error(), LookupError)
    with pytest.raises(phloem.GenerationError, match="LookupError: mine"):
        bad["x"]


def test_a_mean_counts_logprobs_of_zero() -> None:
    sure = ChoiceScore(("a", "b"), (-1.0, 0.0))
    unsure = ChoiceScore(("a", "c"), (-0.9, -0.9))
    assert sure.mean == -0.5
    assert decide(ChoicesMethod.TOKEN_LENGTH_NORMALIZED, [sure, unsure]).index == 0


def test_importing_it_costs_nothing() -> None:
    code = "import phloem, sys; phloem.gen, phloem.function; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_any_number_of_images_is_refused_at_once_and_not_after_the_first() -> None:
    for images in (1, 2):
        with pytest.raises(phloem.UsageError, match="image"):
            [phloem.image("a.png") for _ in range(images)]


def test_forks_keep_all_of_an_expression() -> None:
    @phloem.function
    def program(s: State) -> None:
        forks = s.fork(2)
        forks += "a" + phloem.gen("x", regex="[0-9]") + phloem.gen("y", dtype=int)
        forks.join()

    backend = phloem.MockBackend({"x": "1", "y": "2"})
    program.run(backend=backend)
    assert all(isinstance(call.constraint, Regex) for call in backend.calls)
    assert [call.name for call in backend.calls].count("y") == 2


async def test_calls_have_deadlines_and_an_async_path_and_can_be_cancelled() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += "a" + phloem.gen("x")

    backend = phloem.MockBackend({"x": "1"}, latency_s=3600)
    state = await program.arun(backend=backend, timeout_s=0.05)
    with pytest.raises(phloem.GenerationError, match="timeout_s"):
        state["x"]
    task = asyncio.create_task(program.arun(backend=backend))
    await asyncio.to_thread(until, lambda: len(backend.calls) == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(until, lambda: backend.cancelled == 2)


def test_roles_nest_where_that_means_something_and_say_so_where_not() -> None:
    @phloem.function
    def answer(s: State) -> None:
        s += phloem.assistant(phloem.gen("x"))

    @phloem.function
    def program(s: State) -> None:
        s += phloem.user("Q")
        with s.assistant():
            s += "Well, "
            answer(s)
        with pytest.raises(phloem.UsageError, match="do not nest"):
            s += phloem.user(phloem.system("x"))

    backend = phloem.MockBackend({"x": "yes"})
    assert program.run(backend=backend).messages()[1]["content"] == "Well, yes"


def test_a_stream_has_reasoning_apart() -> None:
    class Thinking(phloem.MockBackend):
        async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
            yield Delta(reasoning="Hm. ")
            yield Delta(text="Yes")
            yield Delta(finish="stop")

    @phloem.function
    def program(s: State) -> None:
        s += phloem.user("Q")
        s += phloem.assistant(phloem.separate_reasoning(phloem.gen("x"), model_type="qwen3"))

    stream = program.run(backend=Thinking(), stream=True)
    assert "".join(stream.text_iter()) == "user: Q\nassistant: Yes"
    assert "".join(stream.text_iter("x_reasoning_content")) == "Hm. "

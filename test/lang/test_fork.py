"""Forks: independent, concurrent, joined without loss."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import phloem
from phloem.lang.backend.base import Call, Delta, TextPrompt
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(30)


def run(body: Any, backend: phloem.MockBackend) -> State:
    return phloem.function(body).run(backend=backend)


class Barrier(phloem.MockBackend):
    """Answers only once `parties` calls are waiting: proof that they run at the same time."""

    def __init__(self, parties: int) -> None:
        super().__init__(lambda call: "x")
        self._barrier = asyncio.Barrier(parties)

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        await self._barrier.wait()
        async for delta in super().generate(call):
            yield delta


def test_forks_and_independent_calls_run_at_once() -> None:
    def body(s: State) -> None:
        forks = s.fork(3)
        forks += "go" + phloem.gen("x")
        s += "too" + phloem.gen("y")
        forks.join()

    assert run(body, Barrier(4))["x"] == ["x"] * 3


def test_forks_see_the_past_and_not_each_other() -> None:
    def body(s: State) -> None:
        s["v"] = "old"
        s += "root "
        left, right = s.fork(2)
        left += "left"
        left["v"] = "new"
        right += "right"
        assert (s["v"], left["v"], right["v"]) == ("old", "new", "old")
        assert (left.text(), right.text(), s.text()) == ("root left", "root right", "root ")
        copy = s.copy()
        copy += "copy"
        assert copy.text() == "root copy"

    run(body, phloem.MockBackend())


def test_group() -> None:
    def body(s: State) -> None:
        group = s.fork(3)
        group += "a"
        group += ["0", "1", "2"]
        group += lambda i: phloem.gen("x") + str(i)
        group[1] += "!"
        assert len(group) == 3
        assert [state.text() for state in group] == ["a0x0", "a1x1!", "a2x2"]
        assert group["x"] == ["x", "x", "x"]
        with pytest.raises(phloem.UsageError, match="2 things to append to 3 forks"):
            group += ["a", "b"]
        with pytest.raises(TypeError, match="cannot be replaced"):
            group[0] = s

    run(body, phloem.MockBackend({"x": "x"}))


def test_join_gathers_what_forks_have_defined() -> None:
    def body(s: State) -> None:
        s["old"] = 1
        group = s.fork(2)
        group += "q" + phloem.gen("both")
        group[0]["one"] = "only here"
        group.join()
        assert (s["both"], s["one"], s["old"]) == (["b0", "b1"], ["only here"], 1)
        assert group[0]["one"] == "only here"  # still readable
        with pytest.raises(phloem.UsageError, match="joined"):
            group[0] += "more"
        with pytest.raises(phloem.UsageError, match="joined"):
            group.join()

    run(body, phloem.MockBackend({"both": ["b0", "b1"]}))


def test_rounds_of_forks_gather_the_same_name() -> None:
    def body(s: State) -> None:
        s["own"] = "mine"
        s += "q"
        s["seen"] = []
        for _ in range(2):
            group = s.fork(2)
            group += phloem.gen("x") + phloem.gen("own")
            group.join()
            s["seen"] = [*s["seen"], s["x"]]
        assert s["own"] == "mine"

    state = run(body, phloem.MockBackend({"x": ["a", "b", "c", "d"], "own": "theirs"}))
    assert state["seen"] == [["a", "b"], ["c", "d"]]


def test_join_appends_in_order() -> None:
    def body(s: State) -> None:
        s += "list:"
        group = s.fork(3)
        group += lambda i: f" {i}=" + phloem.gen("v")
        group.join("append")
        s += "; sum=" + phloem.gen("sum")

    backend = phloem.MockBackend({"v": ["a", "b", "c"], "sum": "abc"})
    state = run(body, backend)
    assert state.text() == "list: 0=a 1=b 2=c; sum=abc"
    assert backend.calls[-1].prompt == TextPrompt("list: 0=a 1=b 2=c; sum=")


def test_join_appends_inside_an_open_message() -> None:
    def body(s: State) -> None:
        s.user("q")
        with s.assistant():
            s += "Parts:"
            group = s.fork(2)
            group += lambda i: f" {i}." + phloem.gen("part")
            group.join("append")
            s += "."

    state = run(body, phloem.MockBackend({"part": ["a", "b"]}))
    assert state.messages()[-1] == {"role": "assistant", "content": "Parts: 0.a 1.b."}


def test_fork_and_join_refuse_nonsense() -> None:
    def body(s: State) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            s.fork(0)
        with pytest.raises(ValueError, match="join mode"):
            s.fork(2).join("concat")  # type: ignore[arg-type]

    run(body, phloem.MockBackend({"x": "x"}))


def test_nested_forks() -> None:
    """A tree 1 → 3 → 2: each leaf's prompt is its own path."""

    def body(s: State) -> None:
        s += "r"
        outer = s.fork(3)
        outer += lambda i: str(i)
        for state in outer:
            inner = state.fork(2)
            inner += lambda j: "ab"[j] + phloem.gen("leaf")
            inner.join()
        outer.join()

    backend = phloem.MockBackend(lambda call: str(getattr(call.prompt, "text", "")))
    assert run(body, backend)["leaf"] == [["r0a", "r0b"], ["r1a", "r1b"], ["r2a", "r2b"]]


def test_forks_in_threads_of_their_own() -> None:
    def body(s: State) -> None:
        group = s.fork(8)

        def work(state: State) -> None:
            for step in range(5):
                state += phloem.gen(f"v{step}")
                state[f"v{step}"]

        threads = [threading.Thread(target=work, args=(state,)) for state in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        group.join()

    state = run(body, phloem.MockBackend(lambda call: (call.name or "?") + ";"))
    assert state["v4"] == ["v4;"] * 8


OPS = st.lists(st.sampled_from(["text", "gen", "fork", "join", "append"]), max_size=12)


@settings(max_examples=60, deadline=None)
@given(OPS)
def test_random_programs_against_a_sequential_model(ops: list[str]) -> None:
    """Any program of text, calls, forks and joins yields the text that a model, which does all of
    it in order and at once, yields."""

    def body(s: State) -> str:
        expected = ""
        children: list[tuple[phloem.State, str]] = []
        for i, op in enumerate(ops):
            if op == "text":
                s += f"<{i}>"
                expected += f"<{i}>"
            elif op == "gen":
                s += phloem.gen(f"v{i}")
                expected += f"[v{i}|{len(expected)}]"
            elif op == "fork":
                child = s.copy()
                child += f"({i}" + phloem.gen(f"c{i}") + ")"
                grown = f"{expected}({i}"
                children.append((child, grown + f"[c{i}|{len(grown)}])"))
            else:
                group = s.fork(2)
                group += lambda k, i=i: f"{k}" + phloem.gen(f"f{i}")  # type: ignore[misc]
                parts = [f"{k}[f{i}|{len(expected) + 1}]" for k in range(2)]
                group.join("gather" if op == "join" else "append")
                if op == "append":
                    expected += "".join(parts)
                else:
                    assert s[f"f{i}"] == [part[1:] for part in parts]
        for child, text in children:
            assert child.text() == text
        return expected

    def answer(call: Call) -> str:
        assert isinstance(call.prompt, TextPrompt)
        return f"[{call.name}|{len(call.prompt.text)}]"

    state = run(body, phloem.MockBackend(answer))
    assert state.text() == state.returned

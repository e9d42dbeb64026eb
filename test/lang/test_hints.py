"""What the calls of a run tell of themselves: one program, which of them are siblings, what is
queued behind them, and that no other follows."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

import phloem as sgl
from phloem.constrained.spec import Ebnf, Regex
from phloem.lang.backend.base import BackendInfo, Call, Delta, Prompt
from phloem.lang.background import background
from phloem.lang.choices import ChoiceScore
from phloem.lang.hints import Hint, call_here, take_hint
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(30)


class Listening:
    """A backend that notes the hint of each call, by its variable or its choices. The one called
    `held` is sent when the program's function has returned; `FAILS` fails, `HANGS` never ends."""

    def __init__(self, held: str = "") -> None:
        self.heard: dict[str, Hint | None] = {}
        self.ended: list[str] = []
        self.held = held

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        queued = call_here.get()
        while call.name == self.held and queued is not None and not queued.calls._closed:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        self.heard[call.name or "?"] = take_hint()
        await asyncio.sleep(3600 if call.name == "HANGS" else 0)
        if call.name == "FAILS":
            raise sgl.RequestRefused("no")
        yield Delta(text="so", finish="stop")

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        self.heard["/".join(choices)] = take_hint()
        return [ChoiceScore((choice,), (-1.0 - i,)) for i, choice in enumerate(choices)]

    async def info(self) -> BackendInfo:
        return BackendInfo("listening")

    async def aclose(self) -> None:
        """Nothing to let go of."""

    async def end_program(self, program: str) -> None:
        self.ended.append(program)

    def ends(self) -> list[str]:
        """The programs that have ended, once all that was to be told has been."""

        async def told() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*others, return_exceptions=True)

        background.wait_for(told())
        return self.ended


@sgl.function
def thinks(s: sgl.State) -> None:
    s += "Think. " + sgl.gen("first")
    forks = s.fork(3)
    for i, fork in enumerate(forks):
        if i == 2:
            fork += sgl.select("mood", choices=["good", "bad"])
        else:
            fork += sgl.gen(f"idea {i}")
        fork += sgl.gen(f"detail {i}")
    forks.join()
    s += sgl.gen("last")


def test_all_calls_of_a_run_are_of_one_program_and_no_other() -> None:
    programs = []
    for _ in range(2):
        backend = Listening()
        thinks.run(backend=backend).sync()
        (program,) = {hint.program for hint in backend.heard.values() if hint is not None}
        assert None not in backend.heard.values() and len(backend.heard) == 8
        programs.append(program)
    assert programs[0] != programs[1]
    assert call_here.get() is None and take_hint() is None


def test_the_first_calls_of_forks_are_siblings() -> None:
    backend = Listening()
    thinks.run(backend=backend).sync()
    groups = {name: (hint.group, hint.width) for name, hint in backend.heard.items() if hint}
    siblings = {groups[name] for name in ("idea 0", "idea 1", "good/bad")}
    ((group, width),) = siblings
    assert group and width == 3
    for name in ("first", "detail 0", "detail 2", "last"):
        assert groups[name] == ("", 0)


def test_forks_of_one_run_are_groups_of_their_own() -> None:
    @sgl.function
    def twice(s: sgl.State) -> None:
        for number in range(2):
            for i, fork in enumerate(s.fork(2)):
                fork += "a" + sgl.gen(f"{number}.{i}")
        (alone,) = s.fork(1)
        alone += sgl.gen("alone")

    backend = Listening()
    twice.run(backend=backend).sync()
    groups = {name: hint.group for name, hint in backend.heard.items() if hint}
    assert groups["0.0"] == groups["0.1"] != groups["1.0"] == groups["1.1"]
    assert groups["alone"] == ""


# ---------------------------------------------------------------------- what is queued behind


@sgl.function
def spells(s: State) -> None:
    s += "A" + sgl.gen("a", regex="a")
    s += sgl.gen("b", regex="b") + sgl.gen("again", regex="b") + sgl.gen("free")
    s += sgl.select("c", choices=["x", "y"]) + sgl.gen("d", grammar='root ::= "d"')


def run_held(program: Any, held: str) -> Listening:
    """`program`, whose call `held` is sent when its function has returned."""
    backend = Listening(held)
    assert program.run(backend=backend).error() is None
    return backend


def test_constraints_of_calls_that_wait_are_said_once() -> None:
    backend = run_held(spells, "a")
    ahead = {name: hint.ahead for name, hint in backend.heard.items() if hint}
    assert ahead.pop("a") == (Regex(pattern="b"), Ebnf(grammar='root ::= "d"'))
    assert set(ahead.values()) == {()} and len(ahead) == 5


def test_what_is_not_queued_yet_is_not_waited_for() -> None:
    backend = Listening()

    @sgl.function
    def reads(s: State) -> None:
        for letter in "abc":
            s += "A" + sgl.gen(letter, regex=letter)
            assert s[letter] == "so"

    reads.run(backend=backend)
    assert [hint and (hint.remaining, hint.ahead) for hint in backend.heard.values()] == [
        (None, ())
    ] * 3


def test_at_most_sixteen_constraints_and_no_huge_ones() -> None:
    @sgl.function
    def many(s: State) -> None:
        s += "A" + sgl.gen("first") + sgl.gen("huge", regex="x" * 70_000)
        for i in range(20):
            s += sgl.gen(f"n{i}", regex=f"{i}")

    backend = run_held(many, "first")
    hints = [hint for hint in backend.heard.values() if hint]
    assert [len(hint.ahead) for hint in hints[:4]] == [16, 4, 0, 0]
    assert [one.pattern for one in hints[0].ahead if isinstance(one, Regex)][:2] == ["0", "1"]


def test_calls_that_are_sent_at_once_wait_for_nobody() -> None:
    """So that it does not matter in which order they arrive: each of the last ones says 0."""

    @sgl.function
    def tree(s: State) -> None:
        s += "A" + sgl.gen("root")
        forks = s.fork(3)
        forks += lambda i: f"{i}" + sgl.gen(f"leaf {i}", regex=f"{i}")
        forks.join()

    backend = run_held(tree, "root")
    said = {name: (h.remaining, len(h.ahead)) for name, h in backend.heard.items() if h}
    assert said == {"root": (3, 3), **{f"leaf {i}": (0, 0) for i in range(3)}}
    assert backend.ends() == []


# ---------------------------------------------------------------------- the end


def test_the_last_call_ends_its_program() -> None:
    backend = run_held(spells, "a")
    said = [hint and hint.remaining for hint in backend.heard.values()]
    assert said == [5, 4, 3, 2, 1, 0]
    assert backend.ends() == []


@pytest.mark.parametrize("held", [True, False])
def test_a_program_of_one_call_is_none(held: bool) -> None:
    @sgl.function
    def one(s: State) -> Any:
        s += "A" + sgl.gen("a")
        return None if held else s["a"]

    backend = run_held(one, "a") if held else Listening()
    if not held:
        one.run(backend=backend)
    assert (backend.heard["a"] is None) == held
    assert backend.ends() == []


def test_a_program_that_could_go_on_is_ended_apart() -> None:
    @sgl.function
    def reads(s: State) -> Any:
        s += "A" + sgl.gen("a") + sgl.gen("b")
        return s["b"]

    backend = Listening()
    reads.run(backend=backend)
    (program,) = {hint.program for hint in backend.heard.values() if hint}
    assert backend.ends() == [program]


@pytest.mark.parametrize("how", ["raises", "last call fails", "cancelled"])
def test_a_program_that_ends_badly_is_ended_apart(how: str) -> None:
    backend = Listening()

    @sgl.function
    def bad(s: State) -> None:
        s += "A" + sgl.gen("a") + sgl.gen("b")
        assert s["b"] == "so"
        if how == "raises":
            raise ZeroDivisionError
        s += sgl.gen("FAILS" if how == "last call fails" else "HANGS")

    if how == "raises":
        with pytest.raises(ZeroDivisionError):
            bad.run(backend=backend)
    elif how == "cancelled":
        with bad.stream(backend=backend) as stream:
            assert stream["b"] == "so"
        stream.sync()
    else:
        assert isinstance(bad.run(backend=backend).error(), sgl.GenerationError)
    assert len(backend.ends()) == 1


def test_nobody_learns_what_becomes_of_an_end(recwarn: pytest.WarningsRecorder) -> None:
    class Silent(Listening):
        async def end_program(self, program: str) -> None:
            self.ended.append(program)
            raise sgl.BackendUnavailable("gone")

    @sgl.function
    def reads(s: State) -> Any:
        s += "A" + sgl.gen("a") + sgl.gen("b")
        return s["b"]

    backend = Silent()
    assert reads.run(backend=backend).returned == "so"
    assert len(backend.ends()) == 1
    gc.collect()
    assert not recwarn.list

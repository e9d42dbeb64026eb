"""What the calls of a run tell of themselves: one program, and which of them are siblings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import phloem as sgl
from phloem.lang.backend.base import BackendInfo, Call, Delta, Prompt
from phloem.lang.choices import ChoiceScore
from phloem.lang.hints import Hint, hint_fields, hint_here


class Listening:
    """A backend that notes the hint of each call, by its variable or its choices."""

    def __init__(self) -> None:
        self.heard: dict[str, Hint | None] = {}
        self.fields: list[dict[str, Any]] = []

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        self.heard[call.name or "?"] = hint_here.get()
        self.fields.append(hint_fields())
        await asyncio.sleep(0)
        yield Delta(text="so", finish="stop")

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        self.heard["/".join(choices)] = hint_here.get()
        return [ChoiceScore((choice,), (-1.0 - i,)) for i, choice in enumerate(choices)]

    async def info(self) -> BackendInfo:
        return BackendInfo("listening")

    async def aclose(self) -> None:
        """Nothing to let go of."""


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
    assert hint_here.get() is None and hint_fields() == {}


def test_the_first_calls_of_forks_are_siblings() -> None:
    backend = Listening()
    thinks.run(backend=backend).sync()
    groups = {name: (hint.group, hint.width) for name, hint in backend.heard.items() if hint}
    siblings = {groups[name] for name in ("idea 0", "idea 1", "good/bad")}
    ((group, width),) = siblings
    assert group and width == 3
    for name in ("first", "detail 0", "detail 2", "last"):
        assert groups[name] == ("", 0)
    with_plans = [fields for fields in backend.fields if "plan" in fields]
    assert [fields["plan"] for fields in with_plans] == [{"group": group, "width": 3}] * 2
    assert all(fields["program"] for fields in backend.fields)


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

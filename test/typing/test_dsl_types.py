"""What type checkers see of the DSL: strict mypy reads this file with the other tests, and an
expectation that no longer holds (`type: ignore` included) fails it. Its programs also run."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal, TypedDict, assert_type

import msgspec
import pydantic

import phloem
from phloem.lang import ir
from phloem.lang.group import Group
from phloem.lang.outline import Outline
from phloem.lang.stream import Stream


class Trip(pydantic.BaseModel):
    city: str


class Place(msgspec.Struct):
    name: str


@dataclasses.dataclass
class Day:
    date: str


class Cost(TypedDict):
    euros: int


PLACE = phloem.gen("place", schema=Place)


@phloem.function
def plan(s: phloem.State, city: str, days: int = 1) -> list[str]:
    s += phloem.user(f"{days} days in {city}?")
    with s.assistant():
        s += "Go to " + phloem.gen("where", temperature=0.0, stop=["\n"]) + "."
        s += phloem.gen("trip", json_schema=Trip)
        s += phloem.select("again", ["yes", "no"])
    group = assert_type(s.fork(2), Group)
    assert_type(group[0], phloem.State)
    return ["a"]


@phloem.function()
def typed(s: phloem.State) -> str:
    trip = assert_type(phloem.gen("trip", schema=Trip, max_tokens=30), ir.Gen[Trip])
    days = assert_type(phloem.gen("days", schema=list[int]), ir.Gen[list[int]])
    mark = assert_type(phloem.gen("mark", choices=["!", "?"]), ir.Select)
    s += "Plan: " + trip + days + PLACE + mark
    forks = s.fork(2)
    forks += phloem.gen("more", schema=Literal["a", "b"])
    assert_type(s[trip], Trip)
    assert_type(s[days], list[int])
    assert_type(s[mark], str)
    assert_type(forks[PLACE], list[Place])
    assert_type(s["trip"], Any)
    return s[trip].city + s[PLACE].name + s[mark]


def test_forms_of_schemas() -> None:
    assert_type(phloem.gen("day", schema=Day), ir.Gen[Day])
    assert_type(phloem.gen("days", schema=dict[str, Day]), ir.Gen[dict[str, Day]])
    assert_type(phloem.gen("cost", schema=Cost), ir.Gen[Cost])
    assert_type(phloem.gen("any", schema={"type": "object"}), ir.Gen[Any])
    assert_type(phloem.gen("text", json_schema=Day), ir.Gen[str])
    assert_type(phloem.gen("text", regex="[a-z]+"), ir.Gen[str])
    assert_type(phloem.gen_int("number", minimum=1), ir.Gen[str])


@phloem.function
def several(s: phloem.State, count: int) -> list[str]:
    """Of several answers the value is a list; how many there are has to be written to be seen."""
    days = assert_type(phloem.gen("days", schema=list[int], n=2), ir.Gen[list[list[int]]])
    texts = assert_type(phloem.gen("texts", n=3, max_tokens=4, stop="."), ir.Gen[list[str]])
    lines = assert_type(phloem.gen("lines", 4, n=2, regex="[a-z]+"), ir.Gen[list[str]])
    ages = assert_type(phloem.gen_int("ages", n=2, minimum=1), ir.Gen[list[str]])
    s += "A" + days + texts + lines + ages
    assert_type(s[days], list[list[int]])
    assert_type(s[texts][0], str)
    assert_type(s.fork(2)[texts], list[list[str]])
    assert_type(phloem.gen("x", n=1), ir.Gen[str])
    assert_type(phloem.gen("x", n=None, schema=Day), ir.Gen[Day])
    assert_type(phloem.gen("x", 16, 0, 1, "."), ir.Gen[str])
    assert_type(phloem.gen("x", 16, None, 2), ir.Gen[Any])
    assert_type(phloem.gen("x", n=count), ir.Gen[Any])
    assert_type(phloem.gen("x", n=count, schema=Day), ir.Gen[Any])
    assert_type(phloem.gen("x", n=100), ir.Gen[Any])
    assert_type(phloem.gen_bool("x", 8), ir.Gen[str])
    assert_type(phloem.gen_float("x", n=16), ir.Gen[list[str]])
    assert_type(phloem.gen_string("x", 8, 2), ir.Gen[Any])
    return s[texts]


def test_programs_keep_their_signature() -> None:
    backend = phloem.MockBackend({"where": "bed", "trip": '{"city": "Rome"}'})
    state = assert_type(plan.run(city="Rome", days=2, backend=backend), phloem.State)
    assert_type(state.text(), str)
    assert_type(state.messages(), list[dict[str, str]])
    assert_type(state.error(), BaseException | None)
    assert_type(plan.run_batch([{"city": "Rome"}], backend=backend), list[phloem.State])
    assert_type(plan.iter_batch([("Rome",)], backend=backend), Iterator[phloem.State])
    lazily = plan.run_batch([("Rome",)], generator_style=True, backend=backend)
    assert_type(lazily, Iterator[phloem.State])
    stream = assert_type(plan.stream("Rome", backend=backend), Stream)
    assert_type(plan.run("Rome", stream=True, backend=backend), phloem.State)
    assert_type("".join(stream.text_iter("where")), str)
    assert_type(stream.text_async_iter(), AsyncIterator[str])
    pieces = stream.text_async_iter("where", return_meta_data=True)
    assert_type(pieces, AsyncIterator[tuple[str, dict[str, Any]]])
    assert_type(plan.trace(city="Rome"), Outline)
    bound = plan.bind(city="Rome")
    assert_type(bound.run(backend=backend), phloem.State)


def test_values_have_the_type_that_was_asked_for() -> None:
    answers = {"trip": '{"city":"Rome"}', "days": "[1]", "place": '{"name":"Inn"}', "more": '"a"'}
    state = typed.run(backend=phloem.MockBackend(answers))
    assert_type(state[PLACE], Place)
    assert_type(state.value("trip", Trip), Trip)
    assert_type(state.value("days", list[int]), list[int])
    assert (state.returned, state[PLACE], state.value("trip", Trip)) == (
        "RomeInn!",
        Place("Inn"),
        Trip(city="Rome"),
    )


def test_several_answers_are_a_list() -> None:
    answers = {
        "days": ["[1]", "[2]"],
        "texts": ["a", "b", "c"],
        "lines": ["x"] * 2,
        "ages": ["3"] * 2,
    }
    state = several.run(count=2, backend=phloem.MockBackend(answers))
    assert state.returned == ["a", "b", "c"]
    assert (state["days"], state["ages"]) == ([[1], [2]], ["3", "3"])


@phloem.function
def outer(s: phloem.State) -> None:
    assert_type(plan(s, "Rome", days=2), list[str])


def other_uses(s: phloem.State) -> None:
    assert_type(typed(s), str)
    assert_type(plan("Rome", days=2), phloem.State)


def mistakes_are_seen(s: phloem.State) -> None:
    plan(s)  # type: ignore[call-overload]
    plan(s, city=3)  # type: ignore[call-overload]
    phloem.gen("x", temprature=0)  # type: ignore[call-overload]
    phloem.gen("x", max_tokens="3")  # type: ignore[call-overload]
    phloem.gen_int("x", max_tokens="3")  # type: ignore[call-overload]
    phloem.gen("x", choices=["a", "b"], n=2)  # type: ignore[call-overload]
    phloem.select("x", "ab", choices_method=3)  # type: ignore[arg-type]
    s += 3  # type: ignore[arg-type]
    s.fork("2")  # type: ignore[arg-type]
    s.fork(2).join("sideways")  # type: ignore[arg-type]
    plan.run_batch([{"city": "Rome"}], concurency=3)  # type: ignore[call-overload]
    print(s[PLACE].town)  # type: ignore[attr-defined]


def test_outer() -> None:
    backend = phloem.MockBackend({"where": "bed", "trip": "{}"})
    assert outer.run(backend=backend).text().endswith("yes")

"""What type checkers see of the DSL: strict mypy reads this file with the other tests, and an
expectation that no longer holds (`type: ignore` included) fails it. Its programs also run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_type

import pydantic

import phloem
from phloem.lang.state import Group
from phloem.lang.stream import Stream


class Trip(pydantic.BaseModel):
    city: str


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


def test_programs_keep_their_signature() -> None:
    backend = phloem.MockBackend({"where": "bed", "trip": '{"city": "Rome"}'})
    state = assert_type(plan.run(city="Rome", days=2, backend=backend), phloem.State)
    assert_type(state.text(), str)
    assert_type(state.messages(), list[dict[str, str]])
    assert_type(plan.run_batch([{"city": "Rome"}], backend=backend), list[phloem.State])
    assert_type(plan.iter_batch([("Rome",)], backend=backend), Iterator[phloem.State])
    stream = assert_type(plan.stream("Rome", backend=backend), Stream)
    assert_type("".join(stream.text_iter("where")), str)


@phloem.function
def outer(s: phloem.State) -> None:
    assert_type(plan(s, "Rome", days=2), list[str])


def mistakes_are_seen(s: phloem.State) -> None:
    plan(s)  # type: ignore[call-arg]
    plan(s, city=3)  # type: ignore[arg-type]
    phloem.gen("x", temprature=0)  # type: ignore[call-arg]
    phloem.gen("x", max_tokens="3")  # type: ignore[arg-type]
    phloem.select("x", "ab", method=3)  # type: ignore[arg-type]
    s += 3  # type: ignore[arg-type]
    s.fork("2")  # type: ignore[arg-type]
    s.fork(2).join("sideways")  # type: ignore[arg-type]


def test_outer() -> None:
    backend = phloem.MockBackend({"where": "bed", "trip": "{}"})
    assert outer.run(backend=backend).text().endswith("yes")

"""What knowing programs is worth, in simulated time: the same on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import traces
from simulator import Plans, Simulation, Trace
from step_cost import stored_cost

from phloem.srt.messages import CallPlan
from phloem.srt.scheduler.trace import TraceRequest


def built(kind: Any, scale: float, seed: int = 0) -> list[TraceRequest]:
    builder = traces.Builder(random.Random(seed))
    kind(builder, scale)
    return builder.requests()


def without_ids(requests: Sequence[TraceRequest]) -> list[TraceRequest]:
    return [msgspec.structs.replace(request, program="") for request in requests]


def simulated(requests: Sequence[TraceRequest], **more: Any) -> Simulation:
    simulation = Simulation(Trace(requests), stored_cost(), 16384, {"max_running": 16}, **more)
    simulation.run()
    return simulation


def program_ends(requests: Sequence[TraceRequest], simulation: Simulation) -> list[float]:
    """When the programs of `requests` were over, whatever the scheduler knew of them."""
    ends: dict[str, float] = {}
    for request in requests:
        over = simulation.over.get(request.id, simulation.over.get(request.program, 0.0))
        ends[request.program] = max(ends.get(request.program, 0.0), over)
    return sorted(ends.values())


@pytest.mark.parametrize("seed", range(3))
def test_trees_of_thought_end_one_after_the_other(seed: int) -> None:
    """With ids, half of the programs are over long before all are; without, all end at the end."""
    requests = built(traces.tree_of_thought, 0.5, seed)
    known = program_ends(requests, simulated(requests))
    unknown = program_ends(requests, simulated(without_ids(requests)))
    half = len(known) // 2 - 1
    assert known[half] < 0.65 * known[-1]
    assert unknown[half] > 0.75 * unknown[-1]
    assert known[-1] <= 1.05 * unknown[-1], "and next to nothing is lost"


def map_reduce(programs: int, width: int, *, ids: bool = True) -> list[TraceRequest]:
    """A question, then parts of a long text that share nothing, then an answer of all of them; the
    parts of all programs come at about the same time."""
    requests = []
    for number in range(programs):
        name = f"p{number}" if ids else ""
        first = TraceRequest(
            id=f"{number}.q",
            arrival=0.001 * number,
            prompt=[(f"q{number}", 20)],
            output=2,
            program=name,
        )
        parts = [
            TraceRequest(
                id=f"{number}.{i}",
                after=[first.id],
                arrival=0.5 + 0.01 * ((7 * number + 3 * i) % 10),
                prompt=[(f"part {number}.{i}", 60 + 40 * ((5 * i + number) % 7))],
                output=20,
                program=name,
            )
            for i in range(width)
        ]
        join = TraceRequest(
            id=f"{number}.j",
            after=[part.id for part in parts],
            prompt=[(f"join {number}", 100)],
            output=8,
            program=name,
        )
        requests += [first, *parts, join]
    return requests


def spans(simulation: Simulation, programs: int, width: int) -> list[float]:
    """For each program, from the first answer of its parts to the last."""
    found = []
    for number in range(programs):
        times = [
            simulation.arrived[f"{number}.{i}"] + simulation.ttft[f"{number}.{i}"]
            for i in range(width)
        ]
        found.append(max(times) - min(times))
    return found


def test_siblings_that_share_nothing_are_served_together() -> None:
    programs, width = 6, 5
    limits = {"max_running": 2}
    runs = {}
    for name, ids, hints in (("none", False, False), ("ids", True, False), ("plans", True, True)):
        trace = Trace(map_reduce(programs, width, ids=ids))
        runs[name] = Simulation(trace, stored_cost(), 16384, limits, hints=hints)
        runs[name].run()
    mean = {name: sum(spans(run, programs, width)) for name, run in runs.items()}
    assert mean["plans"] < 0.5 * mean["none"]
    assert mean["plans"] <= mean["ids"] < mean["none"]
    joins = {
        name: sorted(run.arrived[f"{number}.j"] for number in range(programs))
        for name, run in runs.items()
    }
    assert joins["plans"][programs // 2] < joins["none"][programs // 2], "joins come early"
    assert joins["plans"][-1] <= 1.15 * joins["none"][-1]


def test_plans_are_what_the_trace_does() -> None:
    requests = built(traces.tree_of_thought, 1 / 12)
    plans = Plans(Trace(requests))
    told = [plans.of(request) for request in requests]
    assert all(isinstance(plan, CallPlan) for plan in told)
    remaining = [plan.remaining for plan in told if plan]
    assert remaining == list(range(len(requests) - 1, -1, -1))
    widths = {plan.width for plan in told if plan}
    assert widths == {0, 3}
    forks = [plan.fork for plan in told if plan]
    assert sorted(set(forks)) == [0, 1, 3]


def test_short_programs_do_not_wait_for_long_ones_that_say_so() -> None:
    """Long programs came first; short ones say that they are nearly over."""
    builder = traces.Builder(random.Random(1))
    for _ in range(12):
        builder.program()
        prompt: Any = [builder.part("task", 60, 60)]
        last: list[TraceRequest] = []
        for _ in range(12):
            last = [builder.ask(prompt, 30, last)]
            prompt = [*prompt, (f"output of {last[0].id}", 30)]
    for _ in range(12):
        builder.program()
        builder.ask([builder.part("question", 60, 60)], 8)
    requests = [request for program in builder.programs for request in program]
    short = {request.program for request in requests[-12:]}
    latency = {}
    for hints in (False, True):
        trace = Trace(requests)
        run = Simulation(trace, stored_cost(), 16384, {"max_running": 4}, hints=hints)
        run.run()
        latency[hints] = sum(run.over[name] for name in short)
    assert latency[True] < 0.25 * latency[False]

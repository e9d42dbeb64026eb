"""What a step costs the scheduler, in instructions: it follows the batch, and not what is cached,
what waits, or how long the server has been up."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from phloem.srt.messages import SamplingParams
from phloem.srt.scheduler.order import CORRECTIONS, POLICIES
from phloem.srt.scheduler.plan import SCAN_LIMIT

Build = Callable[..., Any]
Instructions = Callable[[Callable[[], object]], int]

ENDLESS = SamplingParams(max_tokens=500, ignore_eos=True)


def cache(h: Any, tokens: int, prompt: int = 50) -> None:
    """Put so many tokens into the tree, in prompts of 50."""
    rng = random.Random(1)
    for i in range(tokens // prompt):
        h.submit(f"cached{i}", [rng.randrange(64) for _ in range(prompt)], 0)
        while h.replies[f"cached{i}"].end is None:
            h.scheduler.apply(h.worker.run(h.plan()))
            h.collect()
        del h.replies[f"cached{i}"]


def wait(h: Any, count: int) -> None:
    rng = random.Random(2)
    roots = [[rng.randrange(64) for _ in range(40)] for _ in range(20)]
    for i in range(count):
        rid = f"waiting{i}"
        h.submit(rid, [*roots[i % 20], i % 64, i // 64], 4, tenant=f"t{i % 3}")


def rows(h: Any, count: int) -> None:
    for i in range(count):
        h.submit(f"row{i}", [i % 64, 3, 5], sampling=ENDLESS, priority=5)
    for _ in range(4):
        h.step()


def step_cost(h: Any, instructions: Instructions, steps: int = 6) -> int:
    """Instructions of plan and apply, without the worker's: the least of some steps."""
    costs = []
    for _ in range(steps):
        plans: list[Any] = []
        cost = instructions(lambda plans=plans: plans.append(h.scheduler.next_step()))  # type: ignore[misc]
        result = h.worker.run(plans[0])
        cost += instructions(lambda result=result: h.scheduler.apply(result))  # type: ignore[misc]
        h.collect()
        costs.append(cost)
    return min(costs)


def test_a_step_costs_the_same_with_ten_or_fifty_thousand_cached_tokens(
    harness: Build, instructions: Instructions
) -> None:
    costs = []
    for tokens in (500, 50_000):
        h = harness(kv_slots=100_001, max_running=9)
        cache(h, tokens)
        rows(h, 8)
        costs.append(step_cost(h, instructions))
    assert costs[1] <= 1.1 * costs[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_costs_the_same_with_a_hundred_or_five_thousand_waiting(
    harness: Build, instructions: Instructions, policy: str
) -> None:
    """All rows are taken; then one is free each step, so that one of the crowd is admitted."""
    for spare, slack in ((0, 1.1), (1, 2.0)):
        costs = []
        for count in (100, 5000):
            h = harness(
                kv_slots=20_001, max_running=8 + spare, max_waiting=9999, schedule_policy=policy
            )
            rows(h, 8)
            wait(h, count)
            h.probes = 0
            costs.append(step_cost(h, instructions))
            assert h.probes <= 6 * (2 * SCAN_LIMIT + CORRECTIONS)
        assert costs[1] <= slack * costs[0]


def test_a_step_costs_as_much_more_as_it_has_more_rows(
    harness: Build, instructions: Instructions
) -> None:
    costs = {}
    for count in (1, 8, 64):
        h = harness(kv_slots=50_001, max_running=64, max_step_tokens=256)
        rows(h, count)
        costs[count] = step_cost(h, instructions)
    each = (costs[64] - costs[8]) / 56
    assert each <= 1.3 * (costs[8] - costs[1]) / 7, "not more for each row the more there are"


def test_a_step_costs_the_same_after_a_thousand_requests(
    harness: Build, instructions: Instructions
) -> None:
    h = harness(kv_slots=50_001, max_running=9, block_tokens=16)
    costs = []
    for round_ in range(2):
        for i in range(4):
            h.submit(f"row{round_}-{i}", [i, 3, 5], sampling=ENDLESS)
        for _ in range(4):
            h.step()
        costs.append(step_cost(h, instructions))
        for i in range(4):
            h.abort(f"row{round_}-{i}")
        if not round_:
            rng = random.Random(3)
            for i in range(1000):
                prompt = [rng.randrange(64) for _ in range(20)]
                h.submit(f"r{i}", prompt, 2, tenant=f"t{i}", program=f"p{i}")
            h.run()
    assert costs[1] <= 1.1 * costs[0]

"""What a step is planned to do: chunks, preemption, displacement, order. `decide` is pure, so each
case is a view, a budget and the decision."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from phloem.radix import Lease
from phloem.radix.node import Root
from phloem.srt.messages import Draft, SamplingParams
from phloem.srt.scheduler.cost import StepCost, StepSize
from phloem.srt.scheduler.plan import (
    DECODE_RESERVE,
    ITL_CROWD,
    ITL_FACTOR,
    ITL_FLOOR_SECONDS,
    LEAST_CHUNK,
    SCAN_LIMIT,
    Budget,
    Decision,
    View,
    decide,
    new_slots,
)
from phloem.srt.scheduler.request import Request, Status

Build = Callable[..., Any]


@dataclass
class FakeCache:
    """A tree that has what it is told."""

    hits: dict[int, tuple[int, int]] = field(default_factory=dict)
    """uid → (cached, of these unlocked)"""
    soles: dict[int, int] = field(default_factory=dict)
    pins: int = 0
    holds: int = 0
    lower: dict[int, int | None] = field(default_factory=dict)
    quotas: dict[str, int] = field(default_factory=dict)
    asked: int = 0
    _tokens: dict[int, int] = field(default_factory=dict)

    def probe(self, tokens: array[int], namespace: str, limit: int) -> tuple[int, int]:
        self.asked += 1
        return self.hits.get(tokens[0], (0, 0))  # each request's first token is its uid

    def sole(self, request: Request) -> int:
        return self.soles.get(request.uid, 0)

    def pinned(self) -> int:
        return self.pins

    def held(self) -> int:
        return self.holds

    def restorable(self, request: Request, cached: int) -> int | None:
        return self.lower.get(request.uid, 0)

    def quota(self, tenant: str) -> int | None:
        return self.quotas.get(tenant)


def request(uid: int, length: int, output: int = 0, **more: Any) -> Request:
    fields: dict[str, Any] = {"max_output": output + 100, "arrival": float(uid)} | more
    return Request(
        uid=uid,
        rid=f"r{uid}",
        tokens=array("i", [uid] + [0] * (length + output - 1)),
        prompt_len=length,
        sampling=SamplingParams(),
        seed=0,
        stop_ids=frozenset(),
        deadline=1e9,
        **fields,
    )


def decoding(uid: int, length: int, **more: Any) -> Request:
    """Running, with one token to compute."""
    one = request(uid, length, 1, status=Status.RUNNING, epoch=uid, **more)
    one.lease = Lease(Root("", 0), 0, "")
    one.computed_len = length
    return one


def prefilling(uid: int, length: int, done: int, **more: Any) -> Request:
    one = request(uid, length, status=Status.RUNNING, epoch=uid, **more)
    one.lease = Lease(Root("", 0), 0, "")
    one.computed_len = done
    return one


def plan(
    running: list[Request],
    waiting: list[Request],
    cache: FakeCache | None = None,
    *,
    free: int = 10_000,
    evictable: int = 0,
    tokens: int = 512,
    rows: int = 8,
    cost: StepCost | None = None,
    itl_target: float | None = None,
    page_size: int = 1,
    draft_rows: int = 4,
) -> Decision:
    budget = Budget(tokens, rows, cost or untaught(), itl_target, draft_rows)

    def once() -> Decision:
        view = View(
            running=running,
            waiting=waiting,
            queued=len(waiting),
            passed=set(),
            free=free,
            evictable=evictable,
            cache=cache or FakeCache(),
            page_size=page_size,
        )
        return decide(view, budget)

    first, second = once(), once()
    assert first == second, "equal views give equal decisions"
    return first


def work(decision: Decision) -> list[tuple[int, int, int]]:
    return [(w.request.uid, w.start, w.count) for w in decision.work]


def untaught() -> StepCost:
    """What a step takes by default, after a large one: chunks are not held back for want of it."""
    cost, large = StepCost(), StepSize(1, 4096, 0)
    cost.learn(large, cost.seconds(large))
    return cost


def taught() -> StepCost:
    """2 ms a step, 1 ms a row, 0.1 ms a token."""
    sizes = (1, 1, 50), (4, 4, 900), (2, 200, 30_000), (9, 60, 5_000), (1, 4096, 8_000)
    cost = StepCost()
    for _ in range(100):
        for rows, tokens, pairs in sizes:
            cost.learn(StepSize(rows, tokens, pairs), 0.002 + 0.001 * rows + 0.0001 * tokens)
    return cost


# ----------------------------------------------------------------------------- order of service


def test_decode_rows_come_before_chunks_and_these_before_new_ones() -> None:
    running = [prefilling(1, 100, 40), decoding(2, 30)]
    decision = plan(running, [request(3, 20)], tokens=100, itl_target=100.0)
    assert work(decision) == [(2, 30, 1), (1, 40, 60), (3, 0, 20)]
    assert [w.admit for w in decision.work] == [False, False, True]


def test_the_token_budget_is_kept() -> None:
    running = [decoding(1, 10), decoding(2, 10), prefilling(3, 500, 0)]
    decision = plan(running, [request(4, 50)], tokens=64, itl_target=100.0)
    assert sum(w.count for w in decision.work) == 64
    assert work(plan(running, [], tokens=1)) == [(1, 10, 1)]


def test_what_does_not_fit_keeps_those_behind_it_waiting() -> None:
    big, small = request(1, 90), request(2, 5)
    decision = plan([decoding(9, 10)], [big, small], free=60)
    assert work(decision) == [(9, 10, 1)]


def test_each_admission_leaves_room_for_the_next_tokens_of_all() -> None:
    waiting = [request(uid, 10) for uid in range(1, 9)]
    for free in (9, 10, 26, 52, 78, 200):
        admitted = len(plan([], waiting, free=free).work)
        # the first one always starts; each of the others needs its prompt and its reserve
        assert admitted == max(1, min(8, free // (10 + DECODE_RESERVE)))


def test_rows_are_bounded() -> None:
    running = [decoding(uid, 5) for uid in range(1, 4)]
    assert len(plan(running, [request(7, 3), request(8, 3)], rows=4).work) == 4


def test_no_more_than_a_few_waiting_requests_are_looked_at() -> None:
    cache = FakeCache(lower=dict.fromkeys(range(1, 1000)))  # all are on their way up
    decision = plan([], [request(uid, 5) for uid in range(1, 1000)], cache)
    assert decision.work == []
    assert cache.asked <= 2 * SCAN_LIMIT  # `plan` decides twice


# ----------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("target", [0.02, 0.05, 0.2])
def test_chunks_are_sized_to_the_latency_target(target: float) -> None:
    cost, running = taught(), [decoding(1, 50), prefilling(2, 6000, 100)]
    decision = plan(running, [], tokens=4096, cost=cost, itl_target=target)
    (_, start, count) = work(decision)[1]
    assert count > LEAST_CHUNK

    def seconds(count: int) -> float:
        pairs = 51 + StepSize.chunk(start, count)
        return cost.seconds(StepSize(2, 1 + count, pairs))

    assert seconds(count) <= target * 1.001
    assert seconds(count + 2) >= target * 0.999


def test_without_a_target_a_step_may_take_some_times_what_it_takes_anyway() -> None:
    cost, running = taught(), [decoding(uid, 50) for uid in range(1, 41)]
    running.append(prefilling(99, 6000, 0))
    decision = plan(running, [], tokens=4096, rows=64, cost=cost)
    count = decision.work[-1].count
    alone = cost.seconds(StepSize(40, 40, 40 * 51))
    allowed = max(ITL_FLOOR_SECONDS, ITL_FACTOR * alone)
    size = StepSize(41, 40 + count, 40 * 51 + StepSize.chunk(0, count))
    assert 0.9 * allowed <= cost.seconds(size) <= 1.001 * allowed


@pytest.mark.parametrize(("crowd", "factor"), [(1, 1), (4, 1), (8, 2), (200, ITL_CROWD)])
def test_a_step_may_take_longer_where_more_wait_for_a_prompt(crowd: int, factor: float) -> None:
    cost, running = taught(), [decoding(uid, 50) for uid in range(1, 5)]
    running.append(prefilling(99, 60_000, 0))
    waiting = [request(100 + i, 50) for i in range(crowd - 1)]
    decision = plan(running, waiting, tokens=4096, rows=5, cost=cost)
    count = decision.work[-1].count
    size = StepSize(5, 4 + count, 4 * 51 + StepSize.chunk(0, count))
    allowed = factor * ITL_FLOOR_SECONDS
    assert 0.95 * allowed <= cost.seconds(size) <= 1.001 * allowed


def test_nobody_waits_for_a_prompt_that_has_the_machine_to_itself() -> None:
    decision = plan([prefilling(1, 6000, 0)], [], cost=taught(), itl_target=0.001)
    assert work(decision) == [(1, 0, 512)]


def test_a_prompt_comes_forward_however_tight_the_target_is() -> None:
    running = [decoding(1, 50), prefilling(2, 6000, 0), prefilling(3, 6000, 0)]
    decision = plan(running, [request(4, 500)], cost=taught(), itl_target=1e-6)
    assert work(decision) == [(1, 50, 1), (2, 0, LEAST_CHUNK)]


@pytest.mark.parametrize("page_size", [16, 64])
def test_chunks_end_with_a_page(page_size: int) -> None:
    decision = plan([prefilling(1, 1000, 0)], [], tokens=200, page_size=page_size)
    assert work(decision) == [(1, 0, 200 - 200 % page_size)]
    last = plan([prefilling(1, 1000, 960)], [], tokens=200, page_size=page_size)
    assert work(last) == [(1, 960, 40)]


@pytest.mark.parametrize(
    ("count", "spare", "page", "expected"),
    [(1, 0, 1, 1), (5, 2, 1, 3), (1, 0, 16, 16), (16, 0, 16, 16), (17, 0, 16, 32), (5, 5, 16, 0)],
)
def test_slots_come_in_pages(count: int, spare: int, page: int, expected: int) -> None:
    assert new_slots(count, spare, page) == expected


# ----------------------------------------------------------------------------- preemption


def test_eviction_comes_before_preemption() -> None:
    running = [decoding(1, 10), decoding(2, 10)]
    decision = plan(running, [], free=0, evictable=2)
    assert decision.preempt == [] and len(decision.work) == 2


def test_the_victim_is_the_one_with_least_to_compute_again() -> None:
    running = [decoding(1, 40), decoding(2, 30), decoding(3, 20)]
    cache = FakeCache(soles={1: 40, 2: 5, 3: 20})
    decision = plan(running, [], cache, free=2)
    assert [r.uid for r in decision.preempt] == [2]
    assert sorted(w.request.uid for w in decision.work) == [1, 3]


def test_lower_priorities_are_preempted_first() -> None:
    running = [decoding(1, 9, priority=0), decoding(2, 9, priority=-5), decoding(3, 9, priority=3)]
    cache = FakeCache(soles={1: 2, 2: 50, 3: 1})
    decision = plan(running, [], cache, free=1)
    assert [r.uid for r in decision.preempt] == [2]


@pytest.mark.parametrize("first_priority", [0, 5])
def test_the_first_is_never_preempted(first_priority: int) -> None:
    """First by priority, then by admission: whatever it costs the others."""
    running = [decoding(uid, 10) for uid in range(1, 6)]
    running[2].priority = first_priority
    first = running[2] if first_priority else running[0]
    cache = FakeCache(soles={r.uid: 0 for r in running})
    decision = plan(running, [], cache, free=0)
    # nothing that is preempted frees a slot here, so all but the first go, and it waits
    assert first not in decision.preempt and len(decision.preempt) == 4


def test_pins_go_when_all_else_is_spent() -> None:
    running = [decoding(1, 10), decoding(2, 10)]
    assert not plan(running, [], FakeCache(pins=50, soles={2: 5}), free=0).unpin
    decision = plan(running[:1], [], FakeCache(pins=50), free=0)
    assert decision.unpin and work(decision) == [(1, 10, 1)]
    assert not plan(running[:1], [], FakeCache(pins=0), free=0).unpin


# ----------------------------------------------------------------------------- displacement


def test_a_higher_priority_takes_the_row_of_a_lower_one() -> None:
    running = [decoding(1, 10), decoding(2, 10, priority=-1)]
    decision = plan(running, [request(3, 10, priority=1)], rows=2)
    assert [r.uid for r in decision.preempt] == [2]


def test_equals_are_not_displaced() -> None:
    running = [decoding(1, 10), decoding(2, 10)]
    for priority in (0, -1):
        decision = plan(running, [request(3, 10, priority=priority)], rows=2)
        assert decision.preempt == [] and len(decision.work) == 2


def test_nobody_is_displaced_in_vain() -> None:
    """Even without all that is of lower priority there would be no room."""
    running = [decoding(1, 10, priority=9), decoding(2, 10, priority=-1)]
    cache = FakeCache(soles={2: 10})
    decision = plan(running, [request(3, 500, priority=1)], cache, free=50, rows=2)
    assert decision.preempt == [] and len(decision.work) == 2


# ----------------------------------------------------------------------------- tenants


def test_a_tenant_over_its_quota_gives_back_the_cheapest_but_never_its_oldest() -> None:
    running = [decoding(uid, 30, tenant="a") for uid in (1, 2, 3)]
    cache = FakeCache(quotas={"a": 70}, soles={1: 1, 2: 30, 3: 8})
    decision = plan(running, [], cache)
    assert [r.uid for r in decision.preempt] == [3]
    alone = plan(running[:1], [], FakeCache(quotas={"a": 5}))
    assert alone.preempt == [] and len(alone.work) == 1


def test_a_quota_is_no_obstacle_for_others() -> None:
    cache = FakeCache(quotas={"a": 50})
    waiting = [request(2, 40, tenant="a"), request(3, 40, tenant="b")]
    decision = plan([decoding(1, 30, tenant="a")], waiting, cache)
    assert [w.request.uid for w in decision.work] == [1, 3]


# ----------------------------------------------------------------------------- lower tiers


def test_what_a_lower_tier_has_is_fetched_before_the_request_starts() -> None:
    waiting = [request(1, 100), request(2, 10)]
    cache = FakeCache(lower={1: 64})
    decision = plan([], waiting, cache)
    assert decision.restore == [waiting[0]] and work(decision) == [(2, 0, 10)]


def test_nothing_is_fetched_that_has_no_room() -> None:
    cache = FakeCache(lower={1: 64})
    decision = plan([], [request(1, 100)], cache, free=50)
    assert decision.restore == [] and work(decision) == [(1, 0, 50)]


# ----------------------------------------------------------------------------- in the scheduler


def test_a_displaced_request_keeps_its_answer(harness: Build) -> None:
    h = harness(max_running=2)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    for i in range(2):
        h.submit(f"low{i}", [i + 1] * 8, sampling=sampling)
    for _ in range(5):
        h.step()
    h.submit("high", [9] * 8, sampling=sampling, priority=1)
    for _ in range(2):
        h.step()
    assert h.replies["high"].tokens, "it starts at once"
    h.run()
    assert h.scheduler.counters.preemptions_total == 1
    for rid, prompt in (("low0", [1] * 8), ("low1", [2] * 8), ("high", [9] * 8)):
        assert h.replies[rid].tokens == h.expected(prompt, 30, eos=False)


def test_four_times_the_pool_ends_without_an_error(harness: Build) -> None:
    h = harness(kv_slots=201, max_running=16)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    prompts = {f"r{i}": [i % 60, i // 60, 5, 6] * 5 for i in range(64)}
    for rid, prompt in prompts.items():
        h.submit(rid, prompt, sampling=sampling)
    steps = h.run()
    for rid, prompt in prompts.items():
        assert h.replies[rid].tokens == h.expected(prompt, 30, eos=False)
    least = 64 * (20 + 29)
    assert h.worker.computed <= 1.2 * least, "what preemption throws away is little"
    assert steps <= 3 * 64 * 30 / (200 / 50), "rows are kept busy"


# --------------------------------------------------------------------------- drafts

DRAFT = Draft([7, 8, 9, 7, 8], [0, 2, 3, 5])


def drafts(decision: Decision) -> dict[int, int]:
    """uid → tokens of its draft that are computed."""
    return {w.request.uid: w.draft.computed for w in decision.work if w.draft is not None}


def drafting(uid: int, length: int, **more: Any) -> Request:
    one = decoding(uid, length, **more)
    one.draft = DRAFT
    return one


@pytest.mark.parametrize(
    ("tokens", "computed"), [(20, [5, 5]), (9, [5, 2]), (6, [3]), (5, [3]), (3, []), (2, [])]
)
def test_drafts_have_what_is_left_of_a_step(tokens: int, computed: list[int]) -> None:
    running = [drafting(1, 10), drafting(2, 10)]
    decision = plan(running, [], tokens=tokens)
    assert work(decision) == [(1, 10, 1), (2, 10, 1)]
    assert list(drafts(decision).values()) == computed


def test_a_waiting_prompt_comes_before_drafts() -> None:
    decision = plan([drafting(1, 10)], [request(2, 5)], tokens=8)
    assert work(decision) == [(1, 10, 1), (2, 0, 5)]
    assert drafts(decision) == {1: 2}
    assert drafts(plan([drafting(1, 10)], [request(2, 50)], tokens=8)) == {}


@pytest.mark.parametrize(
    ("free", "spare", "page", "computed"),
    [(6, 0, 1, 5), (5, 0, 1, 3), (1, 0, 1, 0), (0, 4, 4, 3), (4, 0, 4, 3), (7, 2, 4, 5)],
)
def test_drafts_have_what_is_left_of_the_slots(
    free: int, spare: int, page: int, computed: int
) -> None:
    one = drafting(1, 12 * page)
    one.spare_slots = list(range(spare))
    decision = plan([one], [], free=free, page_size=page)
    assert drafts(decision).get(1, 0) == computed
    assert not decision.preempt and not decision.unhold


def test_drafts_keep_within_a_tenants_quota() -> None:
    running = [drafting(1, 10, tenant="a"), drafting(2, 10, tenant="a"), drafting(3, 10)]
    decision = plan(running, [], FakeCache(quotas={"a": 30}))
    assert drafts(decision) == {1: 5, 2: 3, 3: 5}


def test_a_batch_that_is_too_large_has_no_drafts() -> None:
    running = [drafting(uid, 10) for uid in range(1, 4)]
    assert len(drafts(plan(running, [], draft_rows=3))) == 3
    assert drafts(plan(running, [], draft_rows=2)) == {}
    assert drafts(plan(running[:2], [request(9, 5)], draft_rows=2)) == {}


def test_a_row_that_does_not_get_so_far_has_no_draft() -> None:
    one = drafting(1, 10)
    one.tokens.extend([5, 5, 5])  # forced
    assert drafts(plan([one], [], tokens=3)) == {}
    assert drafts(plan([one], [], tokens=6)) == {1: 2}

"""The orders of the waiting queue, against what a look at all requests would give."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator
from itertools import islice

import pytest

from phloem.radix import common_prefix
from phloem.srt.messages import SamplingParams
from phloem.srt.scheduler.order import (
    CORRECTIONS,
    GROUP_TOKENS,
    OVERHEAD_TOKENS,
    PATIENCE,
    POLICIES,
    SHARES,
    Lookups,
    Neighbours,
    Order,
)
from phloem.srt.scheduler.plan import SCAN_LIMIT
from phloem.srt.scheduler.queue import WaitingQueue
from phloem.srt.scheduler.request import Request
from phloem.srt.scheduler.tenants import Shares, TenantLimits

Instructions = Callable[[Callable[[], object]], int]

TOKEN_SECONDS = 0.0005
SEEDS = range(30)


class Cache:
    """Prompts whose every token is cached; counts how often it is asked."""

    def __init__(self, prompts: list[array[int]]) -> None:
        self.prompts = prompts
        self.asked = 0

    def cached(self, request: Request) -> int:
        self.asked += 1
        return self.truth(request)

    def truth(self, request: Request) -> int:
        limit = request.match_limit
        return max((common_prefix(p, request.tokens, limit) for p in self.prompts), default=0)

    @property
    def lookups(self) -> Lookups:
        return Lookups(self.cached, lambda request: request.tokens, lambda: TOKEN_SECONDS)


def request(
    uid: int, tokens: array[int] | list[int], arrival: float = 0.0, **more: object
) -> Request:
    return Request(
        uid=uid,
        rid=f"r{uid}",
        tokens=array("i", tokens),
        prompt_len=len(tokens),
        sampling=SamplingParams(),
        seed=0,
        max_output=16,
        stop_ids=frozenset(),
        arrival=arrival,
        deadline=1e9,
        **more,  # type: ignore[arg-type]
    )


def random_prompts(rng: random.Random, count: int) -> list[array[int]]:
    """Prompts with a few roots, some forks, and different ends."""
    roots = [[rng.randrange(4) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
    prompts = []
    for _ in range(count):
        prompt = rng.choice(roots)[: rng.randrange(1, 50)]
        prompts.append(array("i", prompt + [rng.randrange(3) for _ in range(rng.randrange(1, 20))]))
    return prompts


def filled(policy: str, rng: random.Random, count: int = 40) -> tuple[Order, Cache, list[Request]]:
    cache = Cache(random_prompts(rng, 6))
    lane = POLICIES[policy](cache.lookups)
    requests = [
        request(uid, prompt, arrival=uid * 0.01)
        for uid, prompt in enumerate(random_prompts(rng, count))
    ]
    for each in requests:
        lane.add(each)
    return lane, cache, requests


# ----------------------------------------------------------------------------- all policies


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_each_waiting_request_is_ranked_once(policy: str, seed: int) -> None:
    rng = random.Random(seed)
    lane, cache, requests = filled(policy, rng)
    waiting = {r.uid: r for r in requests}
    for now in range(60):
        ranked = list(lane.ranked(float(now)))
        assert sorted(r.uid for r in ranked) == sorted(waiting)
        assert len(lane) == len(waiting)
        list(islice(lane.ranked(float(now)), rng.randrange(4)))  # a look at the first is no change
        cache.prompts = random_prompts(rng, rng.randrange(7))
        for _ in range(rng.randrange(4)):
            if waiting and rng.random() < 0.6:
                gone = waiting.pop(rng.choice(list(waiting)))
                lane.remove(gone)
                if rng.random() < 0.7 and len(lane):
                    lane.admitted(gone)
            else:
                new = request(100 + 10 * now + rng.randrange(9), rng.choice(requests).tokens, now)
                if new.uid not in waiting:
                    waiting[new.uid] = new
                    lane.add(new)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_ranking_that_nobody_finishes_leaves_all_in_place(policy: str) -> None:
    lane, cache, requests = filled(policy, random.Random(5))
    for stop in range(len(requests)):
        cache.prompts = random_prompts(random.Random(stop), stop % 5)
        ranking: Iterator[Request] = lane.ranked(9.0)
        list(islice(ranking, stop))
        ranking.close()  # type: ignore[attr-defined]
        assert {r.uid for r in lane.ranked(9.0)} == {r.uid for r in requests}


# ----------------------------------------------------------------------------- lpm


@pytest.mark.parametrize("seed", SEEDS)
def test_lpm_is_sorted_by_what_is_cached(seed: int) -> None:
    lane, cache, requests = filled("lpm", random.Random(seed))
    expected = sorted(requests, key=lambda r: (-cache.truth(r), r.uid))
    assert list(lane.ranked(1.0)) == expected


@pytest.mark.parametrize("seed", SEEDS)
def test_lpm_notices_what_was_evicted(seed: int) -> None:
    rng = random.Random(seed)
    lane, cache, requests = filled("lpm", rng)
    cache.prompts = [prompt[: rng.randrange(1, 30)] for prompt in cache.prompts[::2]]
    expected = sorted(requests, key=lambda r: (-cache.truth(r), r.uid))
    assert list(lane.ranked(1.0)) == expected
    assert list(lane.ranked(1.0)) == expected


@pytest.mark.parametrize("policy", ["lpm", "fair"])
def test_an_admission_moves_those_that_share_its_prefix_to_the_front(policy: str) -> None:
    cache = Cache([])
    lane = POLICIES[policy](cache.lookups)
    prefix = list(range(200))
    first = request(1, [*prefix, 1])
    others = [request(uid, [1000 + uid, *range(250)]) for uid in range(2, 40)]
    last = request(50, [*prefix, 2])
    for each in (first, *others, last):
        lane.add(each)
    assert next(iter(lane.ranked(0.0))) is first
    lane.remove(first)
    cache.prompts = [first.tokens]
    lane.admitted(first)
    assert next(iter(lane.ranked(0.0))) is last


@pytest.mark.parametrize("seed", SEEDS)
def test_neighbours_come_by_what_they_share(seed: int) -> None:
    rng = random.Random(seed)
    neighbours = Neighbours(Cache([]).lookups)
    others = [
        request(uid, prompt, namespace=rng.choice(["", "other"]))
        for uid, prompt in enumerate(random_prompts(rng, 120))
    ]
    for other in others:
        neighbours.add(other)
    for one in others[:20]:
        neighbours.remove(one)
        shared = {
            other.uid: common_prefix(one.tokens, other.tokens, len(one.tokens))
            for other in others
            if other is not one and other.namespace == one.namespace
        }
        found = list(neighbours.around(one))
        assert {other.uid: length for other, length in found} == {
            uid: length for uid, length in shared.items() if length
        }
        lengths = [length for _, length in found]
        assert lengths == sorted(lengths, reverse=True)
        neighbours.add(one)


# ----------------------------------------------------------------------------- fixed orders


def test_fcfs_goes_by_arrival_whatever_is_cached() -> None:
    lane, _, requests = filled("fcfs", random.Random(1))
    assert list(lane.ranked(1.0)) == requests


def test_a_preempted_request_comes_back_to_where_it_was() -> None:
    lane, _, requests = filled("fcfs", random.Random(1))
    lane.remove(requests[3])
    lane.add(requests[3])
    assert list(lane.ranked(1.0)) == requests


def test_random_is_drawn_once() -> None:
    lane, _, requests = filled("random", random.Random(1))
    order = list(lane.ranked(1.0))
    assert order != requests
    for each in requests[:20]:
        lane.remove(each)
    for each in reversed(requests[:20]):
        lane.add(each)
    assert list(lane.ranked(2.0)) == order


# ----------------------------------------------------------------------------- dfs-weight


@pytest.mark.parametrize("seed", SEEDS)
def test_dfs_weight_stays_in_a_subtree_until_it_is_served(seed: int) -> None:
    rng = random.Random(seed)
    lane, _, requests = filled("dfs-weight", rng)
    waiting = list(requests)
    last: Request | None = None
    while waiting:
        chosen = next(iter(lane.ranked(0.0)))
        if last is not None:
            shared = {r.uid: common_prefix(last.tokens, r.tokens, 999) for r in waiting}
            nearest = max(shared.values())
            if nearest >= min(GROUP_TOKENS, len(last.tokens)):
                assert shared[chosen.uid] == nearest
            else:
                assert _group_size(chosen, waiting) == max(_group_size(r, waiting) for r in waiting)
        waiting.remove(chosen)
        lane.remove(chosen)
        lane.admitted(chosen)
        last = chosen


def _group_size(one: Request, waiting: list[Request]) -> int:
    return sum(r.tokens[:GROUP_TOKENS] == one.tokens[:GROUP_TOKENS] for r in waiting)


# ----------------------------------------------------------------------------- fair


def test_fair_takes_the_larger_cached_share_first() -> None:
    cached = array("i", range(800))
    cache = Cache([cached])
    lane = POLICIES["fair"](cache.lookups)
    eighths = list(range(8))
    random.Random(3).shuffle(eighths)
    for uid, eighth in enumerate(eighths):
        lane.add(request(uid, [*cached[: 100 * eighth], *[9999] * (800 - 100 * eighth)]))
    shares = [8 * cache.truth(r) // 800 for r in lane.ranked(0.0)]
    assert shares == sorted(shares, reverse=True)


def test_fair_is_first_come_first_served_among_equals() -> None:
    lane = POLICIES["fair"](Cache([]).lookups)
    equals = [request(uid, [uid] * 100, arrival=uid * 0.001) for uid in range(20)]
    for each in random.Random(1).sample(equals, 20):
        lane.add(each)
    assert list(lane.ranked(1.0)) == equals


@pytest.mark.parametrize("seed", range(60))
def test_fair_starves_nobody(seed: int) -> None:
    """One cold request among clients that ask small, cached questions for ever.

    A waiting request rises by a level each `pace * work`, and starts at least at 0; a new one
    starts at most at SHARES and rises as well, but waits for no more than the others' turns. So
    there is a time at which the cold one stands above all of them.
    """
    rng = random.Random(seed)
    cached = array("i", range(rng.choice([50, 300, 2000])))
    cache = Cache([cached])
    lane = POLICIES["fair"](cache.lookups)
    clients = rng.randrange(1, 30)
    cold = request(0, [-1] * rng.choice([10, 100, 1000]))
    lane.add(cold)
    serving = [rng.choice([0.2, 1.0, 3.0]) * TOKEN_SECONDS * OVERHEAD_TOKENS for _ in range(99)]
    pace = PATIENCE / SHARES * TOKEN_SECONDS
    rise = pace * 2 * (len(cold.tokens) + OVERHEAD_TOKENS)
    turn = max(serving) * (clients + 1)
    # in a turn of all others, each of these rises from SHARES by so many levels at most
    others = SHARES + 1 + turn / (pace * OVERHEAD_TOKENS)
    latest = rise * (others + 1) + turn
    now, uid = 0.0, 1
    for _ in range(clients):
        lane.add(request(uid, [*cached, uid], arrival=now))
        uid += 1
    while True:
        chosen = next(iter(lane.ranked(now)))
        lane.remove(chosen)
        if chosen is cold:
            break
        now += serving[uid % 99]
        assert now <= latest, "the cold request starves"
        lane.add(request(uid, [*cached, uid], arrival=now))
        uid += 1


# ----------------------------------------------------------------------------- what it costs


def crowd(policy: str, count: int) -> tuple[Order, Cache]:
    rng = random.Random(count)
    roots = [[rng.randrange(1000) for _ in range(60)] for _ in range(10)]
    cache = Cache([array("i", root) for root in roots[:5]])
    lane = POLICIES[policy](cache.lookups)
    for uid in range(count):
        lane.add(request(uid, [*roots[uid % 10], uid], arrival=uid * 1e-4))
    return lane, cache


@pytest.mark.parametrize("policy", POLICIES)
def test_a_look_at_the_front_costs_the_same_at_any_length(
    policy: str, instructions: Instructions
) -> None:
    costs, asked = [], []
    for count in (100, 10_000):
        lane, cache = crowd(policy, count)
        before = cache.asked
        costs.append(instructions(lambda lane=lane: list(islice(lane.ranked(9.0), SCAN_LIMIT))))  # type: ignore[misc]
        asked.append(cache.asked - before)
    assert max(asked) <= 2 * SCAN_LIMIT
    assert costs[1] <= 1.5 * costs[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_coming_and_going_costs_binary_searches(policy: str, instructions: Instructions) -> None:
    costs = []
    for count in (100, 10_000):
        lane, cache = crowd(policy, count)
        new = request(count, [5, 6, 7])
        before = cache.asked

        def come_and_go(lane: Order = lane, new: Request = new) -> None:
            lane.add(new)
            lane.remove(new)
            lane.admitted(new)

        costs.append(instructions(come_and_go))
        assert cache.asked - before <= 1
    assert costs[1] <= 3 * costs[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flush_under_a_long_queue_is_no_cliff(policy: str) -> None:
    """All that was known of 10,000 waiting requests is wrong at once."""
    lane, cache = crowd(policy, 10_000)
    cache.prompts = []
    for _ in range(20):
        before = cache.asked
        ranking = lane.ranked(9.0)
        front = list(islice(ranking, SCAN_LIMIT))
        ranking.close()  # type: ignore[attr-defined]
        assert len(front) == SCAN_LIMIT
        assert cache.asked - before <= SCAN_LIMIT + 2 * CORRECTIONS


# ----------------------------------------------------------------------------- the queue


def queue(policy: str = "fcfs", **tenants: TenantLimits) -> tuple[WaitingQueue, Shares]:
    shares = Shares(tenants)
    return WaitingQueue(policy, Cache([]).lookups, shares), shares


def test_higher_priorities_come_first_in_any_order() -> None:
    for policy in POLICIES:
        waiting, _ = queue(policy)
        rng = random.Random(2)
        for uid in range(40):
            waiting.add(request(uid, [uid, 1], arrival=uid, priority=rng.randrange(-3, 4)))
        priorities = [r.priority for r in waiting.ranked(100.0)]
        assert priorities == sorted(priorities, reverse=True)


def test_the_policy_can_be_switched_at_any_time() -> None:
    rng = random.Random(4)
    waiting, _ = queue("fair")
    inside: dict[int, Request] = {}
    for uid, prompt in enumerate(random_prompts(rng, 200)):
        inside[uid] = request(
            uid, prompt, arrival=uid, priority=uid % 2, tenant=rng.choice(["", "a", "b"])
        )
        waiting.add(inside[uid])
        if rng.random() < 0.3:
            waiting.set_policy(rng.choice(list(POLICIES)))
        if rng.random() < 0.3:
            gone = inside.pop(rng.choice(list(inside)))
            (waiting.admit if rng.random() < 0.5 else waiting.remove)(gone)
            assert gone not in waiting
        assert len(waiting) == len(inside)
        assert {r.uid for r in waiting.ranked(uid)} == set(inside)


def test_a_policy_that_does_not_exist_changes_nothing() -> None:
    waiting, _ = queue("lpm")
    waiting.add(request(1, [1]))
    with pytest.raises(KeyError):
        waiting.set_policy("best")
    assert waiting.policy == "lpm" and len(waiting) == 1


def test_switching_the_policy_is_not_a_new_start_for_the_tenants() -> None:
    waiting, shares = queue("fcfs")
    for tenant in ("a", "b"):
        waiting.add(request(len(waiting), [1], tenant=tenant))
        shares.started(tenant)
    shares.charge("a", 1000)
    shares.charge("b", 10)
    shares.stopped("a")
    shares.stopped("b")
    waiting.set_policy("lpm")
    assert shares.served("a") - shares.served("b") == 990


def test_tenants_take_turns_by_weight() -> None:
    waiting, _ = queue(heavy=TenantLimits(weight=3.0), light=TenantLimits(weight=1.0))
    for uid in range(400):
        waiting.add(request(uid, [1] * 10, tenant=("light", "heavy")[uid % 2]))
    for count in (4, 40, 200):
        front = [r.tenant for r in islice(waiting.ranked(0.0), count)]
        assert abs(front.count("heavy") - 0.75 * count) <= 1


def test_a_tenant_over_its_share_waits_behind_the_others() -> None:
    waiting, shares = queue()
    for uid in range(20):
        waiting.add(request(uid, [1] * 10, tenant=("greedy", "modest")[uid % 2]))
    shares.charge("greedy", 55)
    front = [r.tenant for r in islice(waiting.ranked(0.0), 6)]
    assert front[:5] == ["modest"] * 5

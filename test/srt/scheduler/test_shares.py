"""Tenants: service by weight, no credit for pauses, quotas that stop nobody else."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from phloem.srt.messages import Abort, Failed, SamplingParams
from phloem.srt.questions import AskStats
from phloem.srt.scheduler.tenants import Shares, TenantLimits

Build = Callable[..., Any]


def endless(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


# ----------------------------------------------------------------------------- accounts


@pytest.mark.parametrize("seed", range(40))
def test_service_follows_the_weights(seed: int) -> None:
    """Whoever has been served least for its weight goes next, whatever the requests' sizes: while
    all have something to do, no two differ by more than their largest requests, per weight."""
    rng = random.Random(seed)
    weights = {f"t{i}": rng.choice([0.25, 1.0, 3.0, 10.0]) for i in range(rng.randrange(2, 8))}
    shares = Shares({name: TenantLimits(weight=weight) for name, weight in weights.items()})
    for name in weights:
        shares.joined(name)
    served, largest = dict.fromkeys(weights, 0), dict.fromkeys(weights, 0)
    for _ in range(2000):
        name = min(weights, key=shares.served)
        shares.started(name)
        size = rng.randrange(1, 1000)
        shares.charge(name, size)
        shares.stopped(name)
        served[name] += size
        largest[name] = max(largest[name], size)
        rates = {n: served[n] / weights[n] for n in weights}
        for one in weights:
            for other in weights:
                bound = max(largest[one] / weights[one], largest[other] / weights[other])
                assert rates[one] - rates[other] <= bound + 1e-6


def test_a_pause_earns_no_credit() -> None:
    shares = Shares({"busy": TenantLimits(), "idle": TenantLimits()})
    shares.joined("busy")
    shares.charge("busy", 5000)
    shares.joined("idle")
    assert shares.served("idle") == shares.served("busy")


def test_a_pause_costs_nothing_either() -> None:
    """Who was served more than the others before the pause still was."""
    shares = Shares({"ahead": TenantLimits(), "behind": TenantLimits()})
    for name in ("ahead", "behind"):
        shares.joined(name)
    shares.charge("ahead", 900)
    shares.left("ahead")
    shares.joined("ahead")
    assert shares.served("ahead") == 900


def test_accounts_of_unknown_tenants_go_with_their_requests() -> None:
    shares = Shares({"known": TenantLimits()})
    for i in range(1000):
        name = f"passer-by {i}"
        shares.joined(name)
        shares.started(name)
        shares.left(name)
        shares.charge(name, 10)
        shares.stopped(name)
    assert shares.tenants == ["known"]


# ----------------------------------------------------------------------------- in the scheduler


def test_a_flood_does_not_delay_another_tenant(harness: Build) -> None:
    h = harness(kv_slots=129, max_running=2, max_step_tokens=32)
    for i in range(60):
        h.submit(f"flood{i}", [i % 60, 1, 2], sampling=endless(6), tenant="flood")
    h.step()
    h.submit("modest", [9, 9], sampling=endless(2), tenant="modest")
    steps = 0
    while h.replies["modest"].end is None:
        h.step()
        steps += 1
    assert steps <= 12
    assert sum(h.replies[f"flood{i}"].end is not None for i in range(60)) < 10


@pytest.mark.parametrize("policy", ["fair", "fcfs", "lpm", "dfs-weight", "random"])
def test_the_heavier_tenant_is_served_more(harness: Build, policy: str) -> None:
    tenants = {"heavy": TenantLimits(weight=3.0), "light": TenantLimits(weight=1.0)}
    h = harness(max_running=2, max_step_tokens=64, tenants=tenants, schedule_policy=policy)
    rng = random.Random(1)
    for i in range(300):
        prompt = [rng.randrange(64) for _ in range(10)]
        h.submit(f"r{i}", prompt, sampling=endless(4), tenant=("heavy", "light")[i % 2])
    for _ in range(300):
        h.step()
    done = [i for i in range(300) if h.replies[f"r{i}"].end is not None]
    heavy = sum(i % 2 == 0 for i in done)
    assert 60 < len(done) < 200
    assert heavy / len(done) == pytest.approx(0.75, abs=0.05)


# ----------------------------------------------------------------------------- quotas


def test_a_request_that_no_quota_can_hold_is_refused_with_the_numbers(harness: Build) -> None:
    h = harness(tenants={"small": TenantLimits(kv_quota=20)})
    h.submit("big", [1] * 30, 4, tenant="small")
    end = h.replies["big"].end
    assert isinstance(end, Failed) and end.error.kind == "PromptTooLong"
    assert "30" in end.error.message and "20" in end.error.message
    h.submit("fits", [1] * 10, sampling=endless(1000), tenant="small")
    h.run()
    assert len(h.replies["fits"].tokens) == 10
    h.submit("free", [1] * 30, 4, tenant="another")
    h.run()
    assert h.replies["free"].tokens


def test_a_tenant_stays_within_its_quota_and_still_ends(harness: Build) -> None:
    h = harness(tenants={"a": TenantLimits(kv_quota=60)})
    for i in range(8):
        h.submit(f"r{i}", [i + 1] * 10, sampling=endless(25), tenant="a")
    most = 0
    while h.step():
        most = max(most, h.scheduler.ledger.held_by("a"))
    assert most <= 60 + 8  # a token each, until the next plan
    for i in range(8):
        assert h.replies[f"r{i}"].tokens == h.expected([i + 1] * 10, 25, eos=False)


def test_a_full_quota_does_not_keep_others_waiting(harness: Build) -> None:
    """However many requests of the tenant stand in front."""
    h = harness(max_step_tokens=256, tenants={"full": TenantLimits(kv_quota=40)})
    h.submit("long", [1] * 20, sampling=endless(19), tenant="full")
    h.step()
    h.scheduler.shares.joined("other")
    h.scheduler.shares.charge("other", 10**6)
    for i in range(200):
        h.submit(f"full{i}", [2, i % 60], 8, tenant="full")
    h.submit("other", [3] * 8, 2, tenant="other")
    h.scheduler.shares.left("other")
    h.step()
    h.step()
    assert h.replies["other"].tokens, "there was room for it"


def test_what_is_shared_between_tenants_counts_for_each(harness: Build) -> None:
    h = harness(tenants={"a": TenantLimits(), "b": TenantLimits()})
    h.submit("one", [1] * 30, sampling=endless(20), tenant="a")
    h.submit("two", [*[1] * 30, 2], sampling=endless(20), tenant="b")
    h.step()
    stats = h.ask(AskStats)
    slots = {use.tenant: use.slots for use in stats.tenants}
    assert slots == {"a": 30, "b": 31}
    assert stats.locked + stats.private == 31
    h.scheduler.receive(Abort("one"))
    h.collect()
    assert {use.tenant: use.slots for use in h.ask(AskStats).tenants} == {"a": 0, "b": 31}

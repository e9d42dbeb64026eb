"""Pins: what they hold stays, within a budget, for a time, and never at the price of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from phloem.srt.messages import Flush, SamplingParams
from phloem.srt.questions import AskStats, Pin, Pinned, Refused, Unpin, Unpinned
from phloem.srt.scheduler.pins import MAX_PINS
from phloem.srt.wire import pack

Build = Callable[..., Any]

SYSTEM = [7, 8, 9] * 6


def endless(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def warmed(harness: Build, **limits: Any) -> Any:
    """A harness with SYSTEM in its cache."""
    h = harness(**({"kv_slots": 101, "pin_share": 0.5} | limits))
    h.submit("warm", [*SYSTEM, 1], 0)
    h.run()
    return h


def fill(h: Any, count: int = 12) -> None:
    """Requests that push everything else out of the cache."""
    for i in range(count):
        h.submit(f"fill{h.worker.steps}-{i}", [20 + i] * 30, 2)
        h.run()


def hit(h: Any) -> int:
    rid = f"hit{h.worker.steps}"
    h.submit(rid, [*SYSTEM, 2], 1)
    h.run()
    cached: int = h.replies[rid].cached
    return cached


def test_what_is_pinned_survives_eviction(harness: Build) -> None:
    h = warmed(harness)
    fill(h)
    assert hit(h) == 0, "without a pin it is gone"
    answer = h.ask(Pin, name="system", prompt=pack([*SYSTEM, 3]))
    assert isinstance(answer, Pinned)
    assert (answer.tokens, answer.pinned, answer.budget) == (18, 18, 50)
    fill(h)
    assert hit(h) == 18


def test_an_unpinned_prompt_goes_like_any_other(harness: Build) -> None:
    h = warmed(harness)
    h.ask(Pin, name="system", prompt=pack([*SYSTEM, 3]))
    assert h.ask(Unpin, name="system").tokens == 18
    fill(h)
    assert hit(h) == 0
    again = h.ask(Unpin, name="system")
    assert isinstance(again, Refused) and again.error.code == "pin_not_found"


def test_a_pin_ends_with_its_time(harness: Build) -> None:
    h = warmed(harness)
    h.ask(Pin, name="system", prompt=pack([*SYSTEM, 3]), ttl_s=5.0)
    (pin,) = h.ask(AskStats).pins
    assert pin.name == "system" and pin.tokens == 18 and pin.expires_s == pytest.approx(5.0)
    h.clock.advance(4.9)
    h.scheduler.expire()
    assert h.ask(AskStats).pinned == 18
    h.clock.advance(0.2)
    h.scheduler.expire()
    stats = h.ask(AskStats)
    assert not stats.pins and stats.pinned == stats.locked == 0


@pytest.mark.parametrize("ttl", [0.0, -1.0])
def test_a_pin_that_ends_at_once_is_refused(harness: Build, ttl: float) -> None:
    answer = warmed(harness).ask(Pin, name="x", prompt=pack([*SYSTEM, 3]), ttl_s=ttl)
    assert isinstance(answer, Refused) and answer.error.param == "ttl_s"


def test_what_is_not_cached_cannot_be_pinned(harness: Build) -> None:
    h = warmed(harness)
    for fields in (
        {"prompt": pack([50, 51])},
        {"prompt": pack([*SYSTEM, 3]), "namespace": "elsewhere"},
    ):
        answer = h.ask(Pin, name="x", **fields)
        assert isinstance(answer, Refused) and answer.error.code == "not_cached"
    assert h.ask(AskStats).pins == []


def test_the_budget_is_kept_and_a_refusal_changes_nothing(harness: Build) -> None:
    h = warmed(harness, pin_share=0.2)
    assert h.ask(Pin, name="a", prompt=pack([*SYSTEM, 3])).tokens == 18
    refused = h.ask(Pin, name="b", prompt=pack([*SYSTEM[:4], 3]))
    assert isinstance(refused, Refused) and refused.error.code == "pin_budget_exceeded"
    assert "18" in refused.error.message and "20" in refused.error.message
    assert h.ask(Pin, name="b", prompt=pack([*SYSTEM[:2], 3])).pinned == 20
    assert [use.name for use in h.ask(AskStats).pins] == ["a", "b"]


def test_a_name_moves_to_its_new_prompt(harness: Build) -> None:
    h = warmed(harness, pin_share=0.2)
    h.ask(Pin, name="a", prompt=pack([*SYSTEM, 3]))
    answer = h.ask(Pin, name="a", prompt=pack([*SYSTEM[:10], 3]))
    assert isinstance(answer, Pinned) and answer.pinned == answer.tokens == 10
    assert h.ask(AskStats).locked == 10


def test_the_number_of_pins_is_bounded(harness: Build) -> None:
    h = warmed(harness, kv_slots=2 * MAX_PINS + 1, pin_share=1.0)
    for i in range(MAX_PINS):
        assert isinstance(h.ask(Pin, name=f"p{i}", prompt=pack([7, 0])), Pinned)
    assert isinstance(h.ask(Pin, name="one more", prompt=pack([7, 0])), Refused)
    assert isinstance(h.ask(Pin, name="p5", prompt=pack([7, 8, 0])), Pinned)
    assert isinstance(h.ask(Unpin, name="p5"), Unpinned)


def test_a_flush_takes_the_pins_of_its_namespace(harness: Build) -> None:
    h = warmed(harness)
    h.submit("there", [*SYSTEM, 1], 0, namespace="there")
    h.run()
    h.ask(Pin, name="here", prompt=pack([*SYSTEM, 3]))
    h.ask(Pin, name="there", prompt=pack([*SYSTEM, 3]), namespace="there")
    h.ask(Flush, namespace="there")
    assert [use.name for use in h.ask(AskStats).pins] == ["here"]
    assert hit(h) == 18
    h.ask(Flush, namespace=None)
    assert h.ask(AskStats).pins == [] and h.scheduler.ledger.pool.free == 100


@pytest.mark.parametrize("pin_share", [0.5, 1.0])
@pytest.mark.parametrize("size", [60, 85, 98])
def test_no_request_fails_for_a_pin(harness: Build, pin_share: float, size: int) -> None:
    """One that needs the pinned slots gets them, running or about to run, and the pins are gone."""
    h = warmed(harness, pin_share=pin_share)
    h.ask(Pin, name="system", prompt=pack([*SYSTEM, 3]))
    h.submit("big", [40] * size, sampling=endless(100 - size))
    h.run()
    assert h.replies["big"].tokens == h.expected([40] * size, 100 - size, eos=False)
    assert h.ask(AskStats).pins == []


def test_pins_are_the_last_resort(harness: Build) -> None:
    """Before a pin goes, all that is only cached goes, and others are preempted."""
    h = warmed(harness)
    h.ask(Pin, name="system", prompt=pack([*SYSTEM, 3]))
    prompts = {f"r{i}": [30 + i] * 10 for i in range(4)}
    for rid, prompt in prompts.items():
        h.submit(rid, prompt, sampling=endless(40))
    h.run()
    assert h.scheduler.counters.preemptions_total > 0
    for rid, prompt in prompts.items():
        assert h.replies[rid].tokens == h.expected(prompt, 40, eos=False)
    assert [use.name for use in h.ask(AskStats).pins] == ["system"]


def test_shared_prefixes_are_counted_for_each_pin_but_held_once(harness: Build) -> None:
    h = warmed(harness)
    h.ask(Pin, name="a", prompt=pack([*SYSTEM, 3]))
    h.ask(Pin, name="b", prompt=pack([*SYSTEM[:9], 3]))
    stats = h.ask(AskStats)
    assert (stats.pinned, stats.locked) == (27, 18)
    assert h.scheduler.ledger.pinned() == 18
    h.ask(Unpin, name="a")
    assert h.scheduler.ledger.pinned() == 9

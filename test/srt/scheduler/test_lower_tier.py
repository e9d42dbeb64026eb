"""The lower tier: what left the pool, or the process, comes back; what is damaged never does."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from phloem.srt.messages import Abort, Failed, Flush, SamplingParams, StepResult
from phloem.srt.questions import AskExplain, AskStats
from phloem.srt.scheduler.lower_tier import MAX_RESTORES, SAVING_SHARE
from phloem.srt.testing import FakeWorker
from phloem.srt.tier.chain import block_keys
from phloem.srt.tier_messages import KvLoad, KvSave
from phloem.srt.wire import pack

Build = Callable[..., Any]

BLOCK = 4
PROMPT = [1 + i % 50 for i in range(22)]


def tiered(harness: Build, **limits: Any) -> Any:
    return harness(**({"kv_slots": 401, "block_tokens": BLOCK} | limits))


def ask(h: Any, rid: str, prompt: list[int], **more: Any) -> int:
    """The cached tokens of one request, whose answer is right."""
    h.submit(rid, prompt, 3, **more)
    h.run()
    assert h.replies[rid].tokens == h.expected(prompt, 3)
    cached: int = h.replies[rid].cached
    return cached


def use(h: Any) -> Any:
    (tier,) = h.ask(AskStats).tiers
    return tier


# ----------------------------------------------------------------------------- down and up


def test_after_a_restart_what_was_asked_before_hits_at_once(harness: Build) -> None:
    h = tiered(harness)
    ask(h, "before", PROMPT)
    h.restart()
    computed = h.worker.computed
    assert computed == 0
    assert ask(h, "after", [*PROMPT, 60]) == 20, "as many tokens as whole blocks have"
    assert h.worker.computed == 3 + len(h.replies["after"].tokens) - 1
    assert use(h).loaded_tokens_total == 20


def test_what_was_evicted_comes_back(harness: Build) -> None:
    h = tiered(harness)
    ask(h, "before", PROMPT)
    h.ask(Flush)
    assert ask(h, "after", [*PROMPT, 60]) == 20


def test_answers_are_kept_as_well(harness: Build) -> None:
    h = tiered(harness)
    h.submit("turn", PROMPT, sampling=SamplingParams(max_tokens=15, ignore_eos=True))
    h.run()
    said = h.replies["turn"].tokens
    h.restart()
    assert ask(h, "next", [*PROMPT, *said, 5]) == 36


def test_a_prefix_in_the_pool_is_continued_from_below(harness: Build) -> None:
    h = tiered(harness)
    ask(h, "long", PROMPT)
    h.ask(Flush)
    h.submit("short", PROMPT[:7], 0)
    h.run()
    before = use(h).loaded_tokens_total
    assert ask(h, "again", [*PROMPT, 60]) == 20
    assert use(h).loaded_tokens_total - before == 20 - 7


def test_namespaces_are_apart_below_too(harness: Build) -> None:
    h = tiered(harness)
    ask(h, "one", PROMPT, namespace="one")
    h.restart()
    assert ask(h, "two", PROMPT, namespace="two") == 0
    assert ask(h, "again", [*PROMPT, 60], namespace="one") == 20


@pytest.mark.parametrize("page_size", [4, 16])
def test_blocks_hold_whole_pages(harness: Build, page_size: int) -> None:
    h = tiered(harness, page_size=page_size, block_tokens=2 * page_size, kv_slots=100 * page_size)
    prompt = [1 + i % 50 for i in range(5 * page_size + 1)]
    ask(h, "before", prompt)
    h.restart()
    assert ask(h, "after", [*prompt, 60]) == 4 * page_size


def test_a_block_is_written_once(harness: Build) -> None:
    h = tiered(harness)
    for i in range(5):
        ask(h, f"r{i}", [*PROMPT, 60, i])
    assert use(h).saved_tokens_total == use(h).blocks * BLOCK
    orders = [k for i in range(5) for k in block_keys(array("i", [*PROMPT, 60, i]), "", BLOCK)]
    assert use(h).blocks == len(set(orders))


# ----------------------------------------------------------------------------- off the step path


def test_steps_go_on_while_the_tier_works(harness: Build) -> None:
    h = tiered(harness)
    ask(h, "before", PROMPT)
    h.restart()
    h.submit("fetched", [*PROMPT, 60], 3)
    h.submit("other", [9, 9, 9], 3)
    plan = h.plan()
    assert plan is not None and len(plan.rows) == 1, "the other one starts at once"
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    (order,) = h.transfers
    assert isinstance(order, KvLoad)
    assert h.ask(AskStats).loading == 20
    h.carry_out(1)
    assert h.ask(AskStats).loading == 0
    h.run()
    assert h.replies["fetched"].cached == 20


def test_requests_that_want_the_same_blocks_wait_for_one_load(harness: Build) -> None:
    h = tiered(harness)
    ask(h, "before", PROMPT)
    h.restart()
    for i in range(4):
        h.submit(f"r{i}", [*PROMPT, 60 + i], 2)
    assert h.plan() is None
    assert len(h.transfers) == 1
    h.run()
    assert [h.replies[f"r{i}"].cached for i in range(4)][1:] != []
    assert h.worker.computed <= 4 * 3 + sum(len(r.tokens) for r in h.replies.values())
    assert min(h.replies[f"r{i}"].cached for i in range(4)) == 20


def test_slots_that_are_being_written_are_left_alone(harness: Build) -> None:
    """The tier has not answered yet, and the pool is full of other things."""
    h = tiered(harness, kv_slots=201)
    h.submit("kept", PROMPT, 2)
    while h.replies["kept"].end is None:
        plan = h.plan()
        assert plan is not None
        h.scheduler.apply(h.worker.run(plan))
        h.collect()
    assert [type(order) for order in h.transfers] == [KvSave]
    held = h.scheduler.ledger.tree.locked
    assert held >= 20
    for i in range(6):
        h.submit(f"fill{i}", [20 + i] * 30, 2)
        while h.replies[f"fill{i}"].end is None:
            plan = h.plan()
            assert plan is not None
            h.scheduler.apply(h.worker.run(plan))
            h.collect()
    h.run()  # CheckedTier looks at what is in the slots
    h.restart()
    assert ask(h, "again", [*PROMPT, 60]) == 20


def test_what_waits_to_be_written_is_bounded(harness: Build) -> None:
    h = tiered(harness, kv_slots=401, max_running=16)
    for i in range(16):
        h.submit(f"r{i}", [i + 1] * 24, 0)
    while (plan := h.plan()) is not None:
        h.scheduler.apply(h.worker.run(plan))
        h.collect()
    assert h.scheduler.ledger.tree.locked <= 400 // SAVING_SHARE
    h.run()
    kept = use(h)
    assert kept.dropped_tokens_total > 0
    assert kept.saved_tokens_total + kept.dropped_tokens_total == 16 * 24
    assert h.scheduler.ledger.tree.locked == 0


# ----------------------------------------------------------------------------- faults


@pytest.mark.parametrize("damaged", [0, 2, 4])
def test_a_damaged_block_is_never_used(harness: Build, damaged: int) -> None:
    h = tiered(harness)
    ask(h, "before", PROMPT)
    keys = block_keys(array("i", PROMPT), "", BLOCK)
    h.restart()
    h.lower.damaged = {keys[damaged]}
    assert ask(h, "after", [*PROMPT, 60]) == damaged * BLOCK
    assert use(h).corrupt_blocks_total == 1
    h.lower.damaged = set()
    h.restart()
    assert ask(h, "written again", [*PROMPT, 61]) == 20


def test_a_tier_that_cannot_write_costs_nothing_but_itself(harness: Build) -> None:
    h = tiered(harness)
    h.lower.broken = True
    ask(h, "before", PROMPT)
    assert use(h).blocks == 0 and use(h).dropped_tokens_total >= 20
    assert h.scheduler.ledger.tree.locked == 0
    assert ask(h, "still in the pool", [*PROMPT, 60]) >= 20
    h.lower.broken = False
    ask(h, "third", [*PROMPT, 61])
    h.restart()
    assert ask(h, "after", [*PROMPT, 62]) == 20


def test_a_full_tier_forgets_its_oldest(harness: Build) -> None:
    h = tiered(harness, tier_limit=6)
    ask(h, "old", PROMPT)
    ask(h, "new", [60, *PROMPT])
    h.restart()
    assert use(h).blocks <= 6
    assert ask(h, "new again", [60, *PROMPT, 5]) >= 20
    assert ask(h, "old again", [*PROMPT, 5]) == 0


def test_a_block_that_is_lost_again_and_again_is_computed_in_the_end(harness: Build) -> None:
    """Damaged, written again by nobody, or evicted before its turn: no request waits for ever."""
    h = tiered(harness, kv_slots=61, max_running=1)
    ask(h, "before", PROMPT)
    h.restart()
    h.submit("first", [40] * 50, sampling=SamplingParams(max_tokens=10, ignore_eos=True))
    h.step()
    h.submit("wanted", [*PROMPT, 60], 3)
    h.run()
    assert h.replies["wanted"].tokens == h.expected([*PROMPT, 60], 3)
    assert h.scheduler.ledger.tier.idle
    assert MAX_RESTORES >= 1


def test_a_failed_step_writes_nothing(harness: Build) -> None:
    h = tiered(harness)
    h.submit("a", PROMPT, 4)
    plan = h.plan()
    assert plan is not None
    h.scheduler.apply(StepResult(plan.step_id, [], error="out of memory"))
    h.collect()
    assert not h.transfers
    assert isinstance(h.replies["a"].end, Failed)
    h.check()
    assert ask(h, "b", PROMPT) == 0


def test_an_abort_while_blocks_are_on_their_way_gives_all_back(harness: Build) -> None:
    h = tiered(harness)
    ask(h, "before", PROMPT)
    h.restart()
    h.submit("gone", [*PROMPT, 60], 3)
    assert h.plan() is None
    h.scheduler.receive(Abort("gone"))
    h.collect()
    assert h.replies["gone"].end is not None
    h.run()
    stats = h.ask(AskStats)
    assert stats.loading == stats.private == stats.locked == 0
    assert ask(h, "later", [*PROMPT, 61]) == 20


def test_a_damaged_store_gives_no_wrong_answer(harness: Build) -> None:
    """The fake worker notices KV of another prefix: so this test can fail."""
    h = tiered(harness)
    ask(h, "before", PROMPT)
    h.restart()
    key = block_keys(array("i", PROMPT), "", BLOCK)[1]
    h.lower._blocks[key] = h.lower._blocks[block_keys(array("i", PROMPT), "", BLOCK)[0]]
    with pytest.raises(AssertionError, match="does not hold"):
        ask(h, "after", [*PROMPT, 60])


# ----------------------------------------------------------------------------- asking


def test_explain_tells_what_could_be_fetched(harness: Build) -> None:
    h = tiered(harness)
    ask(h, "before", PROMPT)
    h.restart()
    answer = h.ask(AskExplain, prompt=pack([*PROMPT, 60]))
    assert (answer.matched, answer.restorable) == (0, 20)
    assert h.ask(AskExplain, prompt=pack([60, *PROMPT])).restorable == 0
    assert h.ask(AskExplain, prompt=pack(PROMPT[:8])).restorable == 7, "the last is computed"


def test_without_a_tier_nothing_is_ordered(harness: Build) -> None:
    h = harness()
    h.submit("a", PROMPT, 2)
    h.run()
    assert not h.transfers and h.ask(AskStats).tiers == []
    assert isinstance(h.worker, FakeWorker)

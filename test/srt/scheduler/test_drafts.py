"""Drafts in steps: the same output in fewer steps, slots exact, nothing taken from anybody."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from phloem.constrained.spec import Regex
from phloem.srt.messages import Draft, JumpForward, SamplingParams, Tokens
from phloem.srt.scheduler.drafts import DraftLimits, cut, within
from phloem.srt.scheduler.request import Request
from phloem.srt.scheduler.tenants import TenantLimits

Build = Callable[..., Any]
DRAFTS = DraftLimits(tokens=16, batch=4)
CONSTRAINT = Regex(pattern="a*")


def submit(h: Any, rid: str, prompt: list[int], count: int = 60, **more: Any) -> None:
    sampling = more.pop("sampling", SamplingParams(max_tokens=count, ignore_eos=True))
    jump = more.pop("jump", JumpForward.CANONICAL)
    h.submit(rid, prompt, sampling=sampling, constraint=CONSTRAINT, jump=jump, **more)


def requests_of(h: Any) -> list[Request]:
    return list(h.scheduler.ledger.running.values())


@pytest.mark.parametrize("page", [1, 16])
def test_the_same_tokens_in_fewer_steps(harness: Build, page: int) -> None:
    """Whatever is guessed; and all slots are back with each result."""
    outputs, steps = [], []
    for drafts in (DraftLimits(), DRAFTS):
        for hits in (0.0, 0.7, 1.0):
            h = harness(kv_slots=page * 65, page_size=page, drafts=drafts)
            h.hits = hits
            for i in range(3):
                submit(h, f"r{i}", [i, 2, 3])
            steps.append(h.run())
            outputs.append([h.replies[f"r{i}"].tokens for i in range(3)])
            counters = h.scheduler.counters
            guesses = counters.accepted_guesses_total, counters.rejected_guesses_total
            assert (guesses == (0, 0)) == (drafts is not DRAFTS)
            assert (hits == 1.0) <= (guesses[1] == 0)
    assert all(output == outputs[0] for output in outputs)
    assert steps[0] == steps[1] == steps[2] >= steps[3] > steps[4] > steps[5]


def test_what_was_guessed_is_counted(harness: Build) -> None:
    h = harness(drafts=DRAFTS, kv_slots=2000)
    ends, drawn = [], 0
    for i in range(12):
        submit(h, f"r{i}", [i, 2, 3])
        h.run()
        end = h.replies[f"r{i}"].end
        assert isinstance(end, Tokens)
        ends.append(end)
        drawn += len(h.replies[f"r{i}"].tokens) - end.forced_tokens
    counters = h.scheduler.counters
    assert sum(end.accepted_guesses for end in ends) == counters.accepted_guesses_total > 0
    assert sum(end.rejected_guesses for end in ends) == counters.rejected_guesses_total > 0
    assert sum(end.forced_tokens for end in ends) == counters.forced_tokens_total
    closed = counters.forced_tokens_total + drawn - counters.generated_tokens_total
    assert 0 <= closed <= 12  # an end that is the only legal token is not counted
    assert counters.accepted_guesses_total <= drawn


def test_a_large_batch_has_no_drafts_but_goes_on_learning(harness: Build) -> None:
    h = harness(drafts=DraftLimits(tokens=16, batch=2), max_running=4, kv_slots=1000)
    h.hold_jumps = True
    asked: list[tuple[int, int | None]] = []

    def jump() -> None:
        running = len(h.scheduler.ledger.running)
        asked.extend((running, row.draft) for order in h.jumps for row in order.rows)
        h.jump()

    for i in range(3):
        submit(h, f"r{i}", [i, 2, 3], 20 if i else 60)
    for _ in range(300):
        jump()
        h.step()
    opening = asked[:3]
    assert {draft for _, draft in opening} == {None}
    assert set(asked[3:]) == {(3, 0), (1, 16)}


def test_without_drafts_nobody_is_asked_to_learn(harness: Build) -> None:
    h = harness()
    h.hold_jumps = True
    submit(h, "r", [1, 2, 3], 10)
    h.jump()
    h.step()
    assert [row.draft for order in h.jumps for row in order.rows] == [None]


def test_drafts_preempt_nobody(harness: Build) -> None:
    """A pool that just holds both: they finish without a preemption, as without drafts."""
    for drafts in (DraftLimits(), DRAFTS):
        h = harness(kv_slots=1 + 2 * 43, drafts=drafts, max_running=2)
        for i in range(2):
            submit(h, f"r{i}", [i, 2, 3], 40)
        h.run()
        assert h.scheduler.counters.preemptions_total == 0


def test_a_quota_bounds_drafts_too(harness: Build) -> None:
    h = harness(drafts=DRAFTS, tenants={"a": TenantLimits(kv_quota=60)}, kv_slots=1000)
    h.hits = 1.0
    for i in range(2):
        submit(h, f"r{i}", [i, 2, 3], 27, tenant="a")
    h.run()  # checks after each step
    assert h.scheduler.counters.accepted_guesses_total > 0


def test_an_abort_under_way_gives_a_drafts_slots_back(harness: Build) -> None:
    h = harness(drafts=DRAFTS)
    h.hits = 1.0
    submit(h, "r", [1, 2, 3], 60)
    while (plan := h.plan()) is not None and plan.rows[0].draft is None:
        h.scheduler.apply(h.worker.run(plan))
        h.collect()
    assert requests_of(h)[0].draft_slots
    h.abort("r")
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    h.check()
    assert not requests_of(h)
    assert h.scheduler.counters.accepted_guesses_total == 0


def test_a_failed_step_gives_a_drafts_slots_back(harness: Build) -> None:
    h = harness(drafts=DRAFTS)
    h.hits = 1.0
    submit(h, "r", [1, 2, 3], 60)
    while (plan := h.plan()) is not None and plan.rows[0].draft is None:
        h.scheduler.apply(h.worker.run(plan))
        h.collect()
    assert plan is not None
    failed = h.worker.run(plan)
    failed = type(failed)(plan.step_id, [], error="no")
    h.scheduler.apply(failed)
    h.collect()
    h.check()
    assert not requests_of(h)


# --------------------------------------------------------------------------- cutting

WHOLE = Draft([10, 11, 12, 13, 14], [0, 1, 4, 5])
ENDING = Draft([10, 11, 12, 13, 14], [0, 1, 4])


@pytest.mark.parametrize(
    ("draft", "most", "left"),
    [
        (WHOLE, 9, WHOLE),
        (WHOLE, 5, WHOLE),
        (WHOLE, 4, Draft([10, 11, 12, 13], [0, 1, 4])),
        (WHOLE, 3, Draft([10], [0, 1])),
        (WHOLE, 0, None),
        (ENDING, 4, ENDING),  # the last token is not computed
        (ENDING, 3, Draft([10], [0, 1])),
        (Draft([10, 11], [0]), 0, Draft([10, 11], [0])),
        (None, 9, None),
    ],
)
def test_a_draft_is_cut_where_a_token_is_drawn(
    draft: Draft | None, most: int, left: Draft | None
) -> None:
    assert cut(draft, most) == left


def request(count: int, stops: set[int]) -> Request:
    return Request(
        uid=1,
        rid="r",
        tokens=array("i", [1, 2, 3, 4]),
        prompt_len=3,
        sampling=SamplingParams(),
        seed=0,
        max_output=count,
        stop_ids=frozenset(stops),
        arrival=0.0,
        deadline=1.0,
    )


@pytest.mark.parametrize(
    ("draft", "count", "stops", "left"),
    [
        (WHOLE, 7, set(), WHOLE),
        (WHOLE, 6, set(), Draft([10, 11, 12, 13], [0, 1, 4])),  # one more is to be drawn
        (ENDING, 7, set(), ENDING),  # and so many are what the end needs
        (ENDING, 6, set(), Draft([10, 11, 12, 13], [0, 1, 4])),
        (WHOLE, 2, set(), None),
        (WHOLE, 99, {13}, Draft([10], [0, 1])),
        (WHOLE, 99, {14}, Draft([10, 11, 12, 13], [0, 1, 4])),
        (WHOLE, 99, {10}, None),
        (ENDING, 99, {14}, Draft([10, 11, 12, 13], [0, 1, 4])),
        (None, 99, {10}, None),
    ],
)
def test_what_ends_an_output_is_not_left_to_a_draft(
    draft: Draft | None, count: int, stops: set[int], left: Draft | None
) -> None:
    assert within(draft, request(count, stops)) == left

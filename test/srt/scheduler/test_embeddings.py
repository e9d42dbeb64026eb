"""Embeddings and scores in the scheduler: right however they are batched, chunked and preempted;
a mean stays apart from the tree, the last token's shares, and so do scored branches."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from phloem.constrained.spec import Regex
from phloem.srt.messages import Failed, FinishReason, Pooling, RowResult, StepResult, Tokens

Build = Callable[..., Any]


def embedding(h: Any, rid: str) -> bytes:
    end = h.replies[rid].end
    assert isinstance(end, Tokens) and end.finish is FinishReason.LENGTH, end
    assert end.embedding is not None
    return end.embedding


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("max_step_tokens", [7, 64, 4096])
@pytest.mark.parametrize("page_size", [1, 4])
def test_whatever_the_chunks(
    harness: Build, pooling: Pooling, max_step_tokens: int, page_size: int
) -> None:
    h = harness(kv_slots=4000, max_step_tokens=max_step_tokens, page_size=page_size)
    rng = random.Random(1)
    prefix = [rng.randrange(64) for _ in range(50)]
    prompts = [[*prefix[: rng.randrange(1, 50)], rng.randrange(64)] for _ in range(20)]
    for i, prompt in enumerate(prompts):
        h.submit(f"r{i}", prompt, 0, embed=pooling)
    h.run()
    for i, prompt in enumerate(prompts):
        assert embedding(h, f"r{i}") == h.worker.embedding_of(prompt, pooling)
        assert h.replies[f"r{i}"].tokens == []


def test_a_mean_takes_nothing_from_the_tree_and_leaves_nothing(harness: Build) -> None:
    h = harness()
    prompt = list(range(1, 41))
    h.submit("first", prompt, 1)
    h.run()
    before, computed = h.scheduler.ledger.tree.evictable, h.worker.computed
    h.submit("mean", prompt, 0, embed=Pooling.MEAN)
    h.submit("other", [50, *prompt], 0, embed=Pooling.MEAN)
    h.run()
    assert h.worker.computed - computed == 40 + 41
    assert h.replies["mean"].cached == 0
    assert h.scheduler.ledger.tree.evictable == before


def test_the_last_token_needs_no_other_to_be_computed(harness: Build) -> None:
    h = harness()
    prompt = list(range(1, 41))
    h.submit("first", prompt, 1)
    h.run()
    computed = h.worker.computed
    for i in range(4):
        h.submit(f"r{i}", [*prompt, 50 + i], 0, embed=Pooling.LAST)
    h.run()
    assert h.worker.computed - computed == 4
    assert all(h.replies[f"r{i}"].cached == 40 for i in range(4))


@pytest.mark.parametrize("seed", range(6))
def test_preempted_it_begins_anew(harness: Build, seed: int) -> None:
    """A pool too small for all: embeddings among generations, nobody's answer changes."""
    rng = random.Random(seed)
    h = harness(kv_slots=120, max_running=6, max_step_tokens=16, page_size=rng.choice([1, 4]))
    wanted = {}
    for i in range(30):
        prompt = [rng.randrange(1, 64) for _ in range(rng.randrange(1, 60))]
        pooling = rng.choice([*Pooling, None])
        h.submit(f"r{i}", prompt, 0 if pooling else 20, embed=pooling, priority=rng.randrange(3))
        if pooling:
            wanted[f"r{i}"] = h.worker.embedding_of(prompt, pooling)
        for _ in range(rng.randrange(4)):
            h.step()
    h.run()
    assert h.scheduler.counters.preemptions_total > 0
    for rid, expected in wanted.items():
        assert embedding(h, rid) == expected
    assert h.scheduler.ledger.private == 0


def test_it_ends_as_any_request(harness: Build) -> None:
    h = harness(max_step_tokens=8)
    for rid in ("aborted", "late", "failed"):
        h.submit(rid, list(range(40)), 0, embed=Pooling.MEAN, deadline_s=0.5)
    h.plan()
    h.abort("aborted")
    h.scheduler.apply(h.worker.run(h.scheduler.in_flight.plan))
    h.collect()
    assert h.finish_of("aborted") is FinishReason.ABORT
    plan = h.plan()
    rows = [RowResult(row.epoch, error="not finite") for row in plan.rows]
    h.scheduler.apply(StepResult(plan.step_id, rows))
    h.clock.advance(1)
    h.scheduler.expire()
    h.collect()
    h.run()
    kinds = {h.replies[rid].end.error.kind for rid in ("late", "failed")}
    assert kinds == {"InternalError", "DeadlineExceeded"}
    h.check()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1}, "max_tokens"),
        ({"constraint": Regex(pattern="a")}, "embed"),
        ({"prompt_logprobs_from": 0}, "embed"),
    ],
)
def test_it_comes_alone(harness: Build, fields: dict[str, Any], param: str) -> None:
    h = harness()
    h.submit("r", [1, 2], embed=Pooling.MEAN, **{"max_tokens": 0, **fields})
    end = h.replies["r"].end
    assert isinstance(end, Failed)
    assert end.error.param == param


@pytest.mark.parametrize("max_step_tokens", [16, 64, 4096])
@pytest.mark.parametrize("warm", [False, True])
def test_scored_branches_compute_their_prefix_once(
    harness: Build, max_step_tokens: int, warm: bool
) -> None:
    """The prefix but its last token, whose logits each branch reads, is shared."""
    h = harness(kv_slots=4001, max_running=32, max_step_tokens=max_step_tokens)
    prefix = [1 + i % 50 for i in range(120)]
    if warm:
        h.submit("chat", [*prefix, 7, 7, 7], 1)
        h.run()
    before = h.worker.computed
    for i in range(20):
        h.submit(f"r{i}", [*prefix, 51 + i % 10, i], 0, prompt_logprobs_from=120)
    h.run()
    alone = 20 * (1 + 2)  # the last token of the prefix, and the choice's
    assert h.worker.computed - before <= (0 if warm else 119) + alone
    for i in range(20):
        logprobs = h.replies[f"r{i}"].end.prompt_logprobs
        assert [(one.token, one.logprob) for one in logprobs] == [(51 + i % 10, -120), (i, -121)]

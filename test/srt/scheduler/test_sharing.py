"""In-flight sharing: whatever arrives together, each distinct token is computed once.

The least that can be computed: every distinct token of all prompts and answers (but the last of
each answer, which nobody reads), and for a prompt that others have as a whole already, its last
token again, since the logits after it are asked for. `FakeWorker.computed` is what was computed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from phloem.srt.messages import SamplingParams, Tokens
from phloem.srt.scheduler.order import POLICIES

Build = Callable[..., Any]


def least(h: Any) -> tuple[int, int]:
    """(distinct tokens, prompts of which the last token may have to be computed again)."""
    prefixes: Counter[tuple[int, ...]] = Counter()
    for reply in h.replies.values():
        sequence = reply.prompt + reply.tokens[:-1]
        prefixes.update(tuple(sequence[: i + 1]) for i in range(len(sequence)))
    again = sum(prefixes[tuple(reply.prompt)] > 1 for reply in h.replies.values())
    return len(prefixes), again


def roomy(harness: Build, policy: str, **limits: Any) -> Any:
    """So large that nothing is evicted."""
    return harness(kv_slots=20_001, max_running=64, schedule_policy=policy, **limits)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_step_tokens", [16, 64, 4096])
def test_a_burst_with_one_prefix_computes_it_once(
    harness: Build, policy: str, max_step_tokens: int
) -> None:
    h = roomy(harness, policy, max_step_tokens=max_step_tokens)
    prefix = [1 + i % 50 for i in range(120)]
    for i in range(20):
        h.submit(f"r{i}", [*prefix, 51 + i % 10, i], 0)
    h.run()
    assert h.worker.computed == 120 + 10 + 20
    cached = sorted(h.replies[f"r{i}"].cached for i in range(20))
    assert cached == [0] + [120] * 9 + [121] * 10


@pytest.mark.parametrize("policy", POLICIES)
def test_n_answers_to_one_prompt_compute_it_once(harness: Build, policy: str) -> None:
    """n = 8: the prompt as often as one token, its last, demands."""
    h = roomy(harness, policy, max_step_tokens=4096)
    prompt = list(range(1, 41))
    for i in range(8):
        h.submit(f"r{i}", prompt, 0)
    plan = h.plan()
    assert plan is not None and len(plan.rows) == 8, "they all start at once"
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    assert h.worker.computed == 40 + 7
    assert sorted(h.replies[f"r{i}"].cached for i in range(8)) == [0] + [39] * 7


@pytest.mark.parametrize("policy", POLICIES)
def test_forks_of_a_running_answer_share_it(harness: Build, policy: str) -> None:
    """Branches go on from an answer: with what its request computed, not again."""
    h = roomy(harness, policy)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    h.submit("trunk", [5, 6, 7], sampling=sampling)
    h.run()
    said = h.replies["trunk"].tokens
    before = h.worker.computed
    for i in range(6):
        h.submit(f"branch{i}", [5, 6, 7, *said, 40 + i], 0)
    h.run()
    assert h.worker.computed - before == 1 + 6  # the answer's last token, and one of each
    assert sorted(h.replies[f"branch{i}"].cached for i in range(6)) == [14] + [15] * 5


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("late", [1, 2, 3, 5])
def test_late_arrivals_follow_the_chunks(harness: Build, policy: str, late: int) -> None:
    h = roomy(harness, policy, max_step_tokens=20)
    prompt = [1 + i % 60 for i in range(100)]
    h.submit("first", [*prompt, 61], 0)
    for _ in range(late):
        h.step()
    for i in range(4):
        h.submit(f"late{i}", [*prompt[: 100 - 20 * i], 62, i], 0)
    h.run()
    assert h.worker.computed == 101 + 4 * 2
    assert [h.replies[f"late{i}"].cached for i in range(4)] == [100, 80, 60, 40]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(12))
def test_random_trees_of_requests_compute_each_token_once(
    harness: Build, policy: str, seed: int
) -> None:
    """Bursts, forks, repeats, early and late: never more than the least."""
    rng = random.Random(seed)
    h = roomy(harness, policy, max_step_tokens=rng.choice([8, 40, 1000]))
    prompts = [[rng.randrange(64) for _ in range(rng.randrange(1, 60))] for _ in range(3)]
    for i in range(40):
        stem = rng.choice(prompts)
        stem = stem[: rng.randrange(1, len(stem) + 1)]
        prompt = stem + [rng.randrange(64) for _ in range(rng.randrange(1, 12))]
        prompts.append(prompt)
        for copy in range(rng.choice([1, 1, 1, 3])):
            h.submit(f"r{i}-{copy}", prompt, 0)
        for _ in range(rng.randrange(3)):
            h.step()
    h.run()
    distinct, again = least(h)
    assert distinct <= h.worker.computed <= distinct + again
    unshared = sum(len(reply.prompt) for reply in h.replies.values())
    assert h.worker.computed == unshared - sum(reply.cached for reply in h.replies.values())


@pytest.mark.parametrize("seed", range(12))
def test_answers_cost_their_own_tokens_and_no_more(harness: Build, seed: int) -> None:
    rng = random.Random(seed)
    h = roomy(harness, "fair", max_step_tokens=64)
    stems = [[rng.randrange(64) for _ in range(30)] for _ in range(3)]
    for i in range(30):
        h.submit(f"r{i}", [*rng.choice(stems), i], sampling=SamplingParams(max_tokens=5))
        if rng.random() < 0.5:
            h.step()
    h.run()
    distinct, _ = least(h)
    assert h.worker.computed == distinct  # no prompt is another's, so no answer is


@pytest.mark.parametrize("page_size", [4, 16])
def test_with_pages_only_whole_ones_are_shared(harness: Build, page_size: int) -> None:
    h = harness(kv_slots=64 * page_size, page_size=page_size, max_step_tokens=4096)
    prefix = [1 + i % 50 for i in range(5 * page_size + 3)]
    for i in range(4):
        h.submit(f"r{i}", [*prefix, 60 + i], 0)
    h.run()
    assert sorted(h.replies[f"r{i}"].cached for i in range(4)) == [0] + [5 * page_size] * 3
    assert h.worker.computed == 5 * page_size + 4 * 4


def test_a_resumed_request_reports_what_it_found_at_first(harness: Build) -> None:
    h = harness(kv_slots=65, max_running=8)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    for i in range(5):
        h.submit(f"r{i}", [1, 2, 3, 10 + i] * 2, sampling=sampling)
    h.run()
    assert h.scheduler.counters.preemptions_total > 0
    for reply in h.replies.values():
        assert isinstance(reply.end, Tokens)
        assert reply.end.cached_tokens == reply.prefix
    assert sorted(reply.cached for reply in h.replies.values()) == [0, 3, 3, 3, 3]

"""Answers of the cache: what is there, why a prompt hits or misses; looking changes nothing."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from phloem.radix import common_prefix
from phloem.srt.messages import EndProgram, Failed, Flush, Flushed, SamplingParams
from phloem.srt.questions import (
    AskExplain,
    AskPolicy,
    AskStats,
    AskTree,
    MissReason,
    Pin,
    Policy,
    Refused,
)
from phloem.srt.scheduler.answers import SHOWN_NAMESPACES
from phloem.srt.scheduler.order import POLICIES
from phloem.srt.scheduler.past import MAX_REQUESTS
from phloem.srt.wire import pack, unpack

Build = Callable[..., Any]

PROMPT = [1 + i % 50 for i in range(20)]


def warmed(harness: Build, *prompts: list[int], **limits: Any) -> Any:
    h = harness(**limits)
    for i, prompt in enumerate(prompts or (PROMPT,)):
        h.submit(f"warm{i}", prompt, 0)
        h.run()
    return h


def explain(h: Any, prompt: list[int], namespace: str = "") -> Any:
    return h.ask(AskExplain, prompt=pack(prompt), namespace=namespace)


# ----------------------------------------------------------------------------- reasons


def test_whole(harness: Build) -> None:
    answer = explain(warmed(harness), PROMPT)
    assert (answer.matched, answer.reason) == (19, MissReason.WHOLE)
    assert unpack(answer.prompt) == PROMPT and not answer.at_admission


def test_never_seen(harness: Build) -> None:
    h = warmed(harness)
    assert explain(h, [*PROMPT, 60, 61]).reason is MissReason.NEVER_SEEN
    empty = explain(harness(), PROMPT)
    assert (empty.matched, empty.reason) == (0, MissReason.NEVER_SEEN)


def test_other_token_and_what_is_there_instead(harness: Build) -> None:
    h = warmed(harness, [*PROMPT, 60, 61], [*PROMPT, 62, 63])
    h.submit("again", [*PROMPT, 62, 63, 7], 0)
    h.run()
    answer = explain(h, [*PROMPT, 5, 6])
    assert (answer.matched, answer.reason) == (20, MissReason.OTHER_TOKEN)
    assert answer.branches == 2
    assert [unpack(tokens)[0] for tokens in answer.cached] == [62, 60], "the most used one first"


def test_in_the_middle_of_an_edge_too(harness: Build) -> None:
    answer = explain(warmed(harness), [*PROMPT[:7], 60, 61])
    assert (answer.matched, answer.reason, answer.branches) == (7, MissReason.OTHER_TOKEN, 1)
    assert unpack(answer.cached[0]) == PROMPT[7:]


def test_evicted_when_and_for_whom(harness: Build) -> None:
    h = warmed(harness, kv_slots=41)
    h.clock.advance(10.0)
    h.submit("greedy", [60] * 35, 0)
    h.run()
    h.clock.advance(5.0)
    answer = explain(h, PROMPT)
    assert answer.reason is MissReason.EVICTED
    assert answer.evicted_by == "greedy"
    assert answer.evicted_s == pytest.approx(5.0, abs=0.1)
    assert (answer.matched, answer.evicted_tokens) == (5, 14), "of the 19 that it may give"


def test_flushed(harness: Build) -> None:
    h = warmed(harness)
    assert h.ask(Flush).tokens == 20
    answer = explain(h, PROMPT)
    assert (answer.matched, answer.reason) == (0, MissReason.FLUSHED)


def test_computing(harness: Build) -> None:
    h = harness(max_step_tokens=8)
    h.submit("running", PROMPT, 0)
    h.step()
    answer = explain(h, [*PROMPT, 60])
    assert (answer.matched, answer.reason) == (8, MissReason.COMPUTING)
    assert explain(h, [*PROMPT[:8], 60]).reason is not MissReason.COMPUTING


def test_another_namespace(harness: Build) -> None:
    h = warmed(harness)
    answer = explain(h, PROMPT, "theirs")
    assert (answer.matched, answer.reason) == (0, MissReason.NAMESPACE)
    assert [(e.namespace, e.matched) for e in answer.elsewhere] == [("", 19)]


def test_limited_by_the_logprobs_that_were_asked_for(harness: Build) -> None:
    h = warmed(harness)
    h.submit("scored", PROMPT, 0, prompt_logprobs_from=5)
    h.run()
    answer = h.ask(AskExplain, rid="scored")
    assert (answer.matched, answer.reason) == (4, MissReason.LIMITED)


def test_all_reasons_have_a_test() -> None:
    tested = {name.removeprefix("test_").partition("_and")[0] for name in globals()}
    short = {"evicted_when", "another_namespace", "limited_by_the_logprobs_that_were_asked_for"}
    names = {reason.value for reason in MissReason} - tested
    assert names <= {"evicted", "namespace", "limited"} and short <= tested


# ----------------------------------------------------------------------------- past requests


def test_a_past_request_is_explained_as_it_was(harness: Build) -> None:
    h = warmed(harness)
    h.submit("asked", [*PROMPT[:10], 60, 61], 2)
    h.run()
    h.ask(Flush)
    answer = h.ask(AskExplain, rid="asked")
    assert answer.at_admission and answer.rid == "asked"
    assert (answer.matched, answer.reason) == (10, MissReason.OTHER_TOKEN)
    assert unpack(answer.prompt) == [*PROMPT[:10], 60, 61]
    assert answer.matched == h.replies["asked"].cached


def test_a_waiting_request_is_explained_as_it_is(harness: Build) -> None:
    h = warmed(harness, max_running=1)
    h.submit("running", [60], sampling=SamplingParams(max_tokens=9, ignore_eos=True))
    h.step()
    h.submit("waiting", [*PROMPT, 5], 2)
    answer = h.ask(AskExplain, rid="waiting")
    assert answer.matched == 20 and not answer.at_admission


def test_an_unknown_request_is_refused(harness: Build) -> None:
    answer = harness().ask(AskExplain, rid="nobody")
    assert isinstance(answer, Refused) and answer.error.code == "request_not_found"


def test_the_oldest_requests_are_forgotten(harness: Build) -> None:
    h = harness()
    for i in range(MAX_REQUESTS + 3):
        h.submit(f"r{i}", [i % 60, 3], 0)
        h.run()
    assert isinstance(h.ask(AskExplain, rid="r2"), Refused)
    assert h.ask(AskExplain, rid="r3").rid == "r3"


@pytest.mark.parametrize("seed", range(25))
def test_what_is_explained_is_what_is_given(harness: Build, seed: int) -> None:
    """`matched` is the longest common prefix with all that is in the tree; and a request that is
    admitted next gets just that."""
    rng = random.Random(seed)
    page = rng.choice([1, 1, 4])
    h = harness(kv_slots=page * rng.choice([41, 101]), page_size=page)
    for i in range(60):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        paths = [path for path in _paths(h) if path]
        limit = len(prompt) - 1
        best = max((common_prefix(path, array("i", prompt), limit) for path in paths), default=0)
        answer = explain(h, prompt)
        assert answer.matched == best - best % page
        h.submit(f"r{i}", prompt, rng.randrange(3))
        h.run()
        assert h.replies[f"r{i}"].cached == answer.matched


def _paths(h: Any) -> list[array[int]]:
    """Token sequences from the root to each node's end."""
    open_: list[array[int]] = []
    paths = []
    for node in h.scheduler.ledger.tree.dump():
        del open_[node.depth :]
        above = open_[-1] if open_ else array("i")
        open_.append(above + array("i", node.tokens))
        paths.append(open_[-1])
    return paths


# ----------------------------------------------------------------------------- looking


def test_looking_changes_nothing(harness: Build) -> None:
    h = warmed(harness, PROMPT, [*PROMPT[:5], 60])
    tree = h.scheduler.ledger.tree
    before = list(tree.dump())
    for _ in range(3):
        explain(h, [*PROMPT, 1])
        h.ask(AskTree, preview=5)
        h.ask(AskStats)
        h.ask(AskExplain, rid="warm0")
    assert list(tree.dump()) == before
    h.check()


def test_the_statistics_add_up(harness: Build) -> None:
    h = warmed(harness, PROMPT, [*PROMPT, 60, 61], kv_slots=101, pin_share=0.3)
    h.ask(Pin, name="p", prompt=pack(PROMPT))
    h.submit("running", [9] * 10, sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    for _ in range(3):
        h.step()
    stats = h.ask(AskStats)
    assert (stats.capacity, stats.free, stats.page_size) == (100, 100 - 22 - 12, 1)
    assert stats.free + stats.evictable + stats.locked + stats.private == 100
    assert (stats.locked, stats.private) == (20 + 10, 2)
    assert (stats.pinned, stats.pin_budget) == (20, 30)
    assert stats.hit_tokens_total == 20 + 20  # the second prompt's, and the pin's
    assert sum(use.tokens for use in stats.namespaces) == 32
    assert stats.schedule_policy == "fair" and stats.eviction_policy == "lru"


def test_the_largest_namespaces_are_listed(harness: Build) -> None:
    h = harness(kv_slots=2001)
    for i in range(SHOWN_NAMESPACES + 20):
        h.submit(f"r{i}", [1] * (1 + i % 12), 0, namespace=f"n{i}")
        h.run()
    stats = h.ask(AskStats)
    assert stats.namespaces_total == SHOWN_NAMESPACES + 20
    assert len(stats.namespaces) == SHOWN_NAMESPACES
    sizes = [use.tokens for use in stats.namespaces]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 12


def test_the_tree_is_shown_in_bounds(harness: Build) -> None:
    h = warmed(harness, [*PROMPT, 60], [*PROMPT, 61], [*PROMPT[:3], 62], [9, 9])
    whole = h.ask(AskTree, preview=3)
    assert not whole.truncated
    known: dict[int, Any] = {}
    for node in whole.nodes:
        assert node.parent == 0 or node.parent in known, "parents come first"
        known[node.node] = node
        start = known[node.parent].start + known[node.parent].tokens if node.parent else 0
        assert node.start == start and len(unpack(node.preview)) == min(3, node.tokens)
    assert sum(node.tokens for node in whole.nodes) == 20 + 1 + 1 + 1 + 2
    few = h.ask(AskTree, limit=2)
    assert few.truncated and len(few.nodes) == 2
    below = h.ask(AskTree, prefix=pack(PROMPT[:10]))
    assert sum(node.tokens for node in below.nodes) == 17 + 2
    assert h.ask(AskTree, namespace="none").nodes == []
    assert all(node.total >= 5 for node in h.ask(AskTree, min_tokens=5).nodes)


# ----------------------------------------------------------------------------- changing


def test_the_order_can_be_asked_and_changed(harness: Build) -> None:
    h = harness()
    answer = h.ask(AskPolicy)
    assert isinstance(answer, Policy) and answer.policy == "fair"
    assert answer.policies == list(POLICIES)
    assert h.ask(AskPolicy, policy="lpm").policy == "lpm"
    refused = h.ask(AskPolicy, policy="best")
    assert isinstance(refused, Refused) and refused.error.param == "policy"
    assert h.ask(AskStats).schedule_policy == "lpm"


def test_a_flush_takes_one_namespace(harness: Build) -> None:
    h = warmed(harness)
    h.submit("there", PROMPT, 0, namespace="there")
    h.run()
    answer = h.ask(Flush, namespace="there")
    assert isinstance(answer, Flushed) and answer.tokens == 20
    assert explain(h, PROMPT).matched == 19


def test_programs_are_counted_until_they_end(harness: Build) -> None:
    h = harness()
    for i in range(3):
        h.submit(f"r{i}", [i + 1, 5], 1, program=f"p{i % 2}")
        h.run()
    assert h.ask(AskStats).programs == 2
    h.scheduler.receive(EndProgram("p0"))
    assert h.ask(AskStats).programs == 1
    h.scheduler.receive(EndProgram("never heard of"))
    assert h.ask(AskStats).programs == 1


def test_questions_are_answered_between_plan_and_result(harness: Build) -> None:
    h = warmed(harness)
    h.submit("running", [9] * 10, 5)
    plan = h.plan()
    assert plan is not None
    for kind, fields in (
        (AskStats, {}),
        (AskTree, {}),
        (AskExplain, {"prompt": pack(PROMPT)}),
        (AskPolicy, {"policy": "dfs-weight"}),
    ):
        assert not isinstance(h.ask(kind, **fields), Refused)
    assert h.ask(Flush) is None, "it waits for the step in flight"
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    assert not h._asked, "and is answered then"
    h.run()
    assert not isinstance(h.replies["running"].end, Failed)


def test_an_empty_prompt_cannot_be_explained(harness: Build) -> None:
    answer = harness().ask(AskExplain)
    assert isinstance(answer, Refused) and answer.error.param == "prompt"

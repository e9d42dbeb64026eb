"""The scheduler against a fake worker whose KV is checked slot by slot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from phloem.constrained.spec import Regex
from phloem.srt.errors import ErrorInfo
from phloem.srt.messages import (
    Abort,
    Drain,
    Drained,
    Failed,
    FinishReason,
    Flush,
    Flushed,
    GrammarCompiled,
    GrammarReady,
    GrammarReplay,
    RowResult,
    SamplingParams,
    StepResult,
    Tokens,
)

Build = Callable[..., Any]


def test_one_request_gives_the_answer_computed_from_scratch(harness: Build) -> None:
    h = harness()
    h.submit("a", [5, 6, 7], 20)
    h.run()
    assert h.replies["a"].tokens == h.expected([5, 6, 7], 20)


def test_a_long_prompt_is_computed_in_chunks_beside_running_rows(harness: Build) -> None:
    h = harness(max_step_tokens=16)
    h.submit("short", [1, 2], 30, sampling=SamplingParams(max_tokens=30, ignore_eos=True))
    h.step()
    h.submit("long", list(range(1, 61)), 4)
    before = len(h.replies["short"].tokens)
    steps = 0
    while not h.replies["long"].tokens:
        h.step()
        steps += 1
    assert steps == 4  # 60 tokens at 15 a step: one token of the budget is the decode row's
    assert len(h.replies["short"].tokens) == before + steps
    h.run()
    assert h.replies["long"].tokens == h.expected(list(range(1, 61)), 4)


def test_requests_that_arrive_together_compute_their_prefix_once(harness: Build) -> None:
    h = harness(max_step_tokens=512)
    prefix = [3] * 40
    for i in range(6):
        h.submit(f"r{i}", [*prefix, 10 + i], 3)
    plan = h.plan()
    assert plan is not None and len(plan.rows) == 6, "sharing must not cost a step"
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    assert h.worker.computed == 40 + 6
    h.run()
    for i in range(6):
        assert h.replies[f"r{i}"].tokens == h.expected([*prefix, 10 + i], 3)


def test_a_late_request_follows_the_chunks_of_a_running_prefill(harness: Build) -> None:
    h = harness(max_step_tokens=32)
    prefix = [1 + i % 50 for i in range(100)]
    h.submit("first", [*prefix, 1], 2)
    h.step()
    h.submit("second", [*prefix, 2], 2)
    h.run()
    unique = 101 + 1
    decoded = len(h.replies["first"].tokens) + len(h.replies["second"].tokens) - 2
    assert h.worker.computed == unique + decoded
    assert h.replies["second"].cached == 100
    assert h.replies["second"].tokens == h.expected([*prefix, 2], 2)


def test_identical_prompts_share_all_but_the_last_token(harness: Build) -> None:
    h = harness()
    prompt = list(range(1, 31))
    for i in range(4):
        h.submit(f"r{i}", prompt, 5)
    h.run()
    answer = h.expected(prompt, 5)
    assert all(h.replies[f"r{i}"].tokens == answer for i in range(4))
    assert [h.replies[f"r{i}"].cached for i in range(4)] == [0, 29, 29, 29]


def test_outputs_are_cached_for_the_next_turn(harness: Build) -> None:
    h = harness()
    prompt = [9, 8, 7, 6]
    h.submit("turn1", prompt, 10)
    h.run()
    answer = h.replies["turn1"].tokens
    h.submit("turn2", [*prompt, *answer, 5, 5], 3)
    h.run()
    assert h.replies["turn2"].cached == len(prompt) + len(answer) - 1


def test_when_slots_run_out_the_youngest_is_preempted_and_resumes(harness: Build) -> None:
    h = harness(kv_slots=65, max_running=8)
    prompts = {f"r{i}": [i + 1] * 10 for i in range(5)}
    for rid, prompt in prompts.items():
        h.submit(rid, prompt, 40, sampling=SamplingParams(max_tokens=40, ignore_eos=True))
    h.run()
    assert h.scheduler.counters.preemptions_total > 0
    for rid, prompt in prompts.items():
        assert h.replies[rid].tokens == h.expected(prompt, 40, eos=False)
        assert h.finish_of(rid) is FinishReason.LENGTH


def test_a_request_may_use_the_whole_pool(harness: Build) -> None:
    h = harness(kv_slots=33)
    h.submit("other", [7] * 20, 2)
    h.submit("big", [1, 2, 3], None, sampling=SamplingParams(ignore_eos=True))
    h.run()
    assert len(h.replies["big"].tokens) == 32 - 3


def test_a_prompt_that_can_never_fit_is_refused_with_the_numbers(harness: Build) -> None:
    h = harness(kv_slots=33)
    h.submit("big", [1] * 40, 4)
    end = h.replies["big"].end
    assert isinstance(end, Failed) and end.error.kind == "PromptTooLong"
    assert "40" in end.error.message and "32" in end.error.message
    assert not h.replies["big"].accepted


def test_max_tokens_is_clamped_to_the_context(harness: Build) -> None:
    h = harness(context_length=12)
    h.submit("a", [1] * 8, sampling=SamplingParams(max_tokens=1000, ignore_eos=True))
    h.run()
    assert len(h.replies["a"].tokens) == 4
    assert h.finish_of("a") is FinishReason.LENGTH


def test_max_tokens_zero_computes_the_prompt_and_ends(harness: Build) -> None:
    h = harness()
    h.submit("warm", [4] * 20, 0)
    h.run()
    assert h.replies["warm"].tokens == []
    assert h.finish_of("warm") is FinishReason.LENGTH
    h.submit("hit", [*[4] * 20, 5], 1)
    h.run()
    assert h.replies["hit"].cached == 20


@pytest.mark.parametrize("bad", [[-1], [64], [2, 999_999]])
def test_token_ids_outside_the_vocabulary_are_refused(harness: Build, bad: list[int]) -> None:
    h = harness()
    h.submit("a", bad)
    end = h.replies["a"].end
    assert isinstance(end, Failed)
    assert end.error.kind == "InvalidRequest" and end.error.param == "prompt"


def test_abort_gives_everything_back(harness: Build) -> None:
    h = harness(max_running=2)
    for i in range(4):
        h.submit(f"r{i}", [i + 1] * 12, sampling=SamplingParams(max_tokens=50, ignore_eos=True))
    h.step()
    plan = h.plan()
    assert plan is not None
    for i in range(4):
        h.scheduler.receive(Abort(f"r{i}"))
    h.collect()
    assert h.replies["r3"].end is not None, "a waiting request ends at once"
    assert h.replies["r0"].end is None, "one in the step in flight ends with it"
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    h.check()
    assert all(h.finish_of(f"r{i}") is FinishReason.ABORT for i in range(4))
    assert h.plan() is None
    assert h.scheduler.ledger.tree.locked == 0
    assert h.scheduler.ledger.private == 0


def test_abort_of_an_unknown_request_is_nothing(harness: Build) -> None:
    h = harness()
    h.scheduler.receive(Abort("nobody"))
    h.collect()


def test_a_deadline_ends_waiting_and_running_requests(harness: Build) -> None:
    h = harness(max_running=1)
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    h.submit("runs", [1, 2], sampling=sampling, deadline_s=0.05)
    h.submit("waits", [3, 4], sampling=sampling, deadline_s=0.03)
    for _ in range(30):
        if not h.step():
            break
        h.scheduler.expire()
        h.collect()
    for rid in ("runs", "waits"):
        end = h.replies[rid].end
        assert isinstance(end, Failed) and end.error.kind == "DeadlineExceeded"
    h.check()


def test_a_deadline_during_a_step_ends_with_the_step(harness: Build) -> None:
    h = harness()
    h.submit("a", [1, 2], 50, deadline_s=1.0)
    plan = h.plan()
    assert plan is not None
    h.clock.advance(2.0)
    h.scheduler.expire()
    h.collect()
    assert h.replies["a"].end is None
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    assert isinstance(h.replies["a"].end, Failed)


def test_the_queue_is_bounded(harness: Build) -> None:
    h = harness(max_waiting=3)
    for i in range(5):
        h.submit(f"r{i}", [1, 2])
    refused = [rid for rid, reply in h.replies.items() if isinstance(reply.end, Failed)]
    assert refused == ["r3", "r4"]
    end = h.replies["r3"].end
    assert isinstance(end, Failed) and end.error.kind == "QueueFull" and end.error.retry_after


def test_a_used_request_id_is_refused_and_the_first_lives(harness: Build) -> None:
    h = harness()
    h.submit("a", [1, 2], 4)
    reply = h.replies["a"]
    h.submit("a", [3, 4], 4)
    assert isinstance(h.replies["a"].end, Failed)
    h.replies["a"] = reply
    h.run()
    assert reply.tokens == h.expected([1, 2], 4)


def test_stop_tokens_end_the_answer_and_are_reported(harness: Build) -> None:
    h = harness()
    stop = h.expected([1, 2, 3], 6, eos=False)[3]
    h.submit(
        "a",
        [1, 2, 3],
        sampling=SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(stop,)),
    )
    h.run()
    end = h.replies["a"].end
    assert isinstance(end, Tokens)
    assert end.finish is FinishReason.STOP and end.matched == stop
    assert h.replies["a"].tokens[-1] == stop


def test_priority_goes_first(harness: Build) -> None:
    h = harness(max_running=1)
    h.submit("running", [1], 3)
    h.step()
    h.submit("low", [2], 2)
    h.submit("high", [3], 2, priority=5)
    order = []
    while h.step():
        order += [r for r in ("low", "high") if h.replies[r].tokens and r not in order]
    assert order == ["high", "low"]


def test_a_failed_step_fails_its_requests_and_drops_the_tree(harness: Build) -> None:
    h = harness()
    endless = SamplingParams(max_tokens=20, ignore_eos=True)
    h.submit("a", [1] * 10, sampling=endless)
    h.submit("b", [2] * 10, sampling=endless)
    h.step()
    plan = h.plan()
    assert plan is not None
    h.scheduler.apply(StepResult(plan.step_id, [], error="out of memory"))
    h.collect()
    h.check()
    for rid in ("a", "b"):
        end = h.replies[rid].end
        assert isinstance(end, Failed) and end.error.kind == "InternalError"
    assert h.scheduler.ledger.pool.free == h.scheduler.ledger.pool.capacity
    h.submit("c", [1] * 10, 5)
    h.run()
    assert h.replies["c"].tokens == h.expected([1] * 10, 5)
    assert h.replies["c"].cached == 0


def test_a_row_error_ends_that_request_alone(harness: Build) -> None:
    h = harness()
    h.submit("bad", [1, 1], 20)
    h.submit("good", [2, 2], 5)
    plan = h.plan()
    assert plan is not None
    result = h.worker.run(plan)
    rows = [RowResult(result.rows[0].epoch, error="no legal token"), result.rows[1]]
    h.scheduler.apply(StepResult(plan.step_id, rows))
    h.collect()
    h.run()
    end = h.replies["bad"].end
    assert isinstance(end, Failed) and end.error.message == "no legal token"
    assert h.replies["good"].tokens == h.expected([2, 2], 5)


def test_a_stale_result_changes_nothing(harness: Build) -> None:
    h = harness()
    h.submit("a", [1, 2, 3], 4)
    h.scheduler.apply(StepResult(99, [RowResult(1, 5)]))
    h.run()
    assert h.replies["a"].tokens == h.expected([1, 2, 3], 4)


def test_flush_waits_for_the_step_in_flight(harness: Build) -> None:
    h = harness()
    h.submit("old", [1] * 10, 2)
    h.run()
    h.submit("new", [2] * 10, 2)
    plan = h.plan()
    assert plan is not None
    h.scheduler.receive(Flush(7))
    assert not h.scheduler.to_frontend
    h.scheduler.apply(h.worker.run(plan))
    flushed = [m for m in h.scheduler.to_frontend if isinstance(m, Flushed)]
    assert len(flushed) == 1 and flushed[0].id == 7 and flushed[0].tokens >= 11
    h.collect()
    h.run()
    assert h.replies["new"].tokens == h.expected([2] * 10, 2)


def test_drain_finishes_what_runs_and_refuses_the_rest(harness: Build) -> None:
    h = harness()
    h.submit("a", [1, 2], 5)
    h.scheduler.receive(Drain())
    h.submit("late", [3], 2)
    end = h.replies["late"].end
    assert isinstance(end, Failed) and end.error.kind == "Unavailable"
    while (plan := h.scheduler.next_step()) is not None:
        h.scheduler.apply(h.worker.run(plan))
    assert any(isinstance(m, Drained) for m in h.scheduler.to_frontend)
    h.collect()
    assert h.replies["a"].tokens == h.expected([1, 2], 5)


def test_sharing_can_be_switched_off(harness: Build) -> None:
    h = harness(sharing=False)
    for i in range(3):
        h.submit(f"r{i}", [1] * 20, 2)
    h.run()
    assert all(reply.cached == 0 for reply in h.replies.values())
    assert h.scheduler.ledger.pool.free == h.scheduler.ledger.pool.capacity


def test_namespaces_do_not_share(harness: Build) -> None:
    h = harness()
    h.submit("a", [1] * 20, 2, namespace="one")
    h.submit("b", [1] * 20, 2, namespace="two")
    h.run()
    h.submit("c", [1] * 20, 2, namespace="two")
    h.run()
    assert [h.replies[r].cached for r in "abc"] == [0, 0, 19]


def test_prompt_logprobs_are_whole_with_a_cached_prefix(harness: Build) -> None:
    h = harness(max_step_tokens=8)
    prompt = list(range(1, 31))
    h.submit("warm", prompt, 1)
    h.run()
    for start in (0, 1, 10, 29):
        h.submit(f"from{start}", prompt, 0, prompt_logprobs_from=start)
        h.run()
        end = h.replies[f"from{start}"].end
        assert isinstance(end, Tokens) and end.prompt_logprobs is not None
        got = [None if e is None else int(-e.logprob) for e in end.prompt_logprobs]
        assert got == ([None] if start == 0 else []) + list(range(max(start, 1), 30))
    h.check()


def test_sampled_stop_id_before_min_tokens_does_not_stop(harness: Build) -> None:
    h = harness()
    answer = h.expected([4, 4], 8, eos=False)
    sampling = SamplingParams(
        max_tokens=8, min_tokens=6, ignore_eos=True, stop_token_ids=(answer[1],)
    )
    h.submit("a", [4, 4], sampling=sampling)
    h.run()
    assert len(h.replies["a"].tokens) >= 6


# ----------------------------------------------------------------------------- constraints


def test_one_compile_serves_all_that_wait_for_it(harness: Build) -> None:
    h = harness()
    h.hold_compiles = True
    for i in range(3):
        h.submit(f"r{i}", [i + 1], 3, constraint=Regex(pattern="a+"))
    assert len(h.pending) == 1
    assert h.plan() is None
    assert not any(r.accepted for r in h.replies.values())
    h.compile_pending()
    h.collect()
    assert all(r.accepted for r in h.replies.values())
    h.run()
    assert all(h.grammar_steps)
    assert not h.matchers, "ended requests close their matchers"


def test_a_constraint_that_does_not_compile_fails_before_any_kv(harness: Build) -> None:
    h = harness()
    h.hold_compiles = True
    h.submit("a", [1] * 10, 3, constraint=Regex(pattern="("))
    error = ErrorInfo(kind="InvalidConstraint", message="unbalanced", param="regex")
    h.scheduler.grammar(GrammarCompiled(h.pending.pop().key, error, 0.1))
    h.collect()
    end = h.replies["a"].end
    assert isinstance(end, Failed) and end.error == error
    assert not h.replies["a"].accepted
    assert h.worker.computed == 0


def test_a_new_grammar_process_gets_the_history_again(harness: Build) -> None:
    h = harness()
    h.submit("a", [1, 2], 30, constraint=Regex(pattern="a+"))
    for _ in range(3):
        h.step()
    plan = h.plan()
    assert plan is not None
    h.matchers.clear()
    h.grammar_steps.clear()
    h.scheduler.grammar(GrammarReady({}))
    h.collect()  # the grammar is compiled again,
    h.collect()  # then the history follows
    (step,) = h.grammar_steps
    (row,) = step.rows
    assert step.step_id == plan.step_id
    assert row.at == 0 and row.tokens == h.replies["a"].tokens
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    h.run()
    assert h.replies["a"].end is not None


def test_no_mask_is_ordered_before_the_new_process_has_the_grammar(harness: Build) -> None:
    h = harness()
    endless = SamplingParams(max_tokens=30, ignore_eos=True)
    h.submit("free", [5, 5], sampling=endless)
    h.submit("bound", [1, 2], 30, constraint=Regex(pattern="a+"))
    h.step()
    plan = h.plan()
    assert plan is not None
    h.hold_compiles = True
    h.matchers.clear()
    h.grammar_steps.clear()
    h.scheduler.grammar(GrammarReady({}))
    h.collect()
    assert not h.grammar_steps
    assert len(h.pending) == 1
    h.compile_pending()
    h.collect()
    assert [step.step_id for step in h.grammar_steps] == [plan.step_id]
    h.hold_compiles = False
    h.scheduler.apply(h.worker.run(plan))
    h.collect()
    h.run()
    assert h.replies["bound"].end is not None


def test_a_replay_is_answered_only_for_the_step_in_flight(harness: Build) -> None:
    h = harness()
    h.submit("a", [1, 2], 30, constraint=Regex(pattern="a+"))
    plan = h.plan()
    assert plan is not None
    (uid,) = h.matchers
    h.grammar_steps.clear()
    h.scheduler.grammar(GrammarReplay(plan.step_id + 5, [uid]))
    h.scheduler.grammar(GrammarReplay(plan.step_id, [uid + 1]))
    h.collect()
    assert not h.grammar_steps
    h.scheduler.grammar(GrammarReplay(plan.step_id, [uid]))
    h.collect()
    assert len(h.grammar_steps) == 1


def test_a_constraint_that_kills_the_grammar_process_is_given_up(harness: Build) -> None:
    h = harness()
    h.hold_compiles = True
    h.submit("bomb", [1], 3, constraint=Regex(pattern="bomb"))
    h.scheduler.grammar(GrammarReady({}))
    h.collect()
    assert len(h.pending) == 2, "it is tried once more"
    h.scheduler.grammar(GrammarReady({}))
    h.collect()
    end = h.replies["bomb"].end
    assert isinstance(end, Failed) and end.error.kind == "Unavailable"
    h.hold_compiles = False
    h.submit("next", [1], 3, constraint=Regex(pattern="bomb"))
    h.run()
    assert h.replies["next"].accepted

"""Random histories: arrivals, shared prefixes, aborts, deadlines, failing steps, grammar restarts.

After each step the slots add up and the tree is sound (the harness checks it); at the end every
request had exactly one terminal reply, and every answer that was finished is the one computed
from scratch, whatever was cached, preempted or batched on the way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from phloem.constrained.spec import Regex
from phloem.srt.messages import (
    Abort,
    Failed,
    FinishReason,
    Flush,
    GrammarReady,
    SamplingParams,
    StepResult,
    Tokens,
)

Build = Callable[..., Any]


class History:
    """One seeded random life of a scheduler."""

    def __init__(self, build: Build, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.h = build(
            kv_slots=rng.choice([40, 80, 200, 1000]) + 1,
            max_running=rng.choice([1, 2, 5, 16]),
            max_waiting=rng.choice([4, 1000]),
            max_step_tokens=rng.choice([1, 7, 32, 256]),
            sharing=rng.random() < 0.9,
            eviction_policy=rng.choice(["lru", "lfu", "fifo"]),
        )
        # A step of fewer tokens than rows is legal: some rows then skip a step.
        self.prompts: dict[str, tuple[list[int], SamplingParams]] = {}
        self.roots = [[rng.randrange(64) for _ in range(rng.randrange(1, 40))] for _ in range(4)]
        self.count = 0

    def submit(self) -> None:
        rng = self.rng
        prompt = list(rng.choice(self.roots))
        for _ in range(rng.randrange(3)):
            prompt += [rng.randrange(3)] * rng.randrange(1, 6)
        done = [t for t, r in self.h.replies.items() if isinstance(r.end, Tokens) and r.tokens]
        if done and rng.random() < 0.2:  # a next turn
            previous = rng.choice(done)
            prompt = self.prompts[previous][0] + self.h.replies[previous].tokens + prompt[:3]
        sampling = SamplingParams(
            max_tokens=rng.choice([0, 1, 5, 20, None]), ignore_eos=rng.random() < 0.3
        )
        rid = f"r{self.count}"
        self.count += 1
        self.prompts[rid] = (prompt, sampling)
        more: dict[str, object] = {}
        if rng.random() < 0.2:
            more["constraint"] = Regex(pattern=f"a{{{rng.randrange(4)}}}")
            self.prompts[rid] = (prompt, SamplingParams(max_tokens=sampling.max_tokens))
        if rng.random() < 0.1:
            more["prompt_logprobs_from"] = rng.randrange(len(prompt))
        if rng.random() < 0.1:
            more["deadline_s"] = rng.random() * 0.5
        if rng.random() < 0.2:
            more["namespace"] = "other"
        if rng.random() < 0.2:
            more["priority"] = rng.randrange(-2, 3)
        self.h.submit(rid, prompt, sampling=self.prompts[rid][1], **more)

    def abort(self) -> None:
        live = [rid for rid, reply in self.h.replies.items() if reply.end is None]
        if live:
            self.h.scheduler.receive(Abort(self.rng.choice(live)))
            self.h.collect()

    def step(self, *, quiet: bool = False) -> bool:
        """A step, with things happening between its plan and its result unless `quiet`."""
        plan = self.h.plan()
        if plan is None:
            return False
        result = self.h.worker.run(plan)
        self.h.clock.advance(0.01)
        for _ in range(0 if quiet else self.rng.randrange(2)):
            self.event()
        if not quiet and self.rng.random() < 0.01:
            result = StepResult(plan.step_id, [], error="injected")
        self.h.scheduler.apply(result)
        self.h.collect()
        self.h.check()
        self.h.scheduler.expire()
        self.h.collect()
        return True

    def event(self) -> None:
        dice = self.rng.random()
        if dice < 0.5:
            self.submit()
        elif dice < 0.7:
            self.abort()
        elif dice < 0.75:
            self.h.scheduler.receive(Flush(1))
        elif dice < 0.8:
            self.h.matchers.clear()
            self.h.scheduler.grammar(GrammarReady({}))
        self.h.collect()

    def verify(self) -> None:
        """Every request ended once; what was finished is what it would be alone."""
        for rid, (prompt, sampling) in self.prompts.items():
            reply = self.h.replies[rid]
            assert reply.end is not None, f"{rid} never ended"
            limit = self.h.scheduler.context_length - len(prompt)
            if sampling.max_tokens is not None:
                limit = min(limit, sampling.max_tokens)
            expected = self.h.expected(prompt, max(0, limit), eos=not sampling.ignore_eos)
            if isinstance(reply.end, Failed) or reply.end.finish is FinishReason.ABORT:
                assert reply.tokens == expected[: len(reply.tokens)]
            else:
                assert reply.tokens == expected


@pytest.mark.parametrize("seed", range(40))
def test_random_history(harness: Build, seed: int) -> None:
    history = History(harness, seed)
    for _ in range(200):
        if history.rng.random() < 0.2:
            history.event()
        history.step()
    for _ in range(20_000):
        if not history.step(quiet=True):
            break
    else:
        raise AssertionError("the scheduler never falls idle")
    history.verify()
    scheduler = history.h.scheduler
    snapshot = scheduler.snapshot()
    assert snapshot.running == snapshot.waiting == snapshot.compiling == 0
    assert snapshot.kv_locked == snapshot.kv_private == 0
    assert snapshot.kv_free + snapshot.kv_evictable == snapshot.kv_slots
    assert not history.h.matchers, "matchers of ended requests are closed"
    assert scheduler.deadlines.next_deadline() is None

"""A scheduler with a fake worker, a manual clock and a grammar process that always agrees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from phloem.srt.messages import (
    Accepted,
    Failed,
    FinishReason,
    GrammarClose,
    GrammarCompile,
    GrammarCompiled,
    GrammarStep,
    SamplingParams,
    StepPlan,
    Submit,
    ToGrammar,
    Tokens,
)
from phloem.srt.scheduler.core import Scheduler, SchedulerLimits
from phloem.srt.testing import FakeWorker, ManualClock
from phloem.srt.wire import pack


@dataclass
class Reply:
    """What the frontend heard of one request."""

    tokens: list[int] = field(default_factory=list)
    accepted: bool = False
    end: Tokens | Failed | None = None
    cached: int = 0
    terminal: int = 0


@dataclass
class Harness:
    """Drives a scheduler as its process would, and keeps the replies."""

    scheduler: Scheduler
    worker: FakeWorker
    clock: ManualClock
    replies: dict[str, Reply] = field(default_factory=dict)
    grammar_steps: list[GrammarStep] = field(default_factory=list)
    matchers: dict[int, int] = field(default_factory=dict)
    """uid → output tokens its matcher was told of."""
    hold_compiles: bool = False
    pending: list[GrammarCompile] = field(default_factory=list)

    def submit(
        self, rid: str, prompt: list[int], max_tokens: int | None = 8, **more: object
    ) -> None:
        sampling = more.pop("sampling", SamplingParams(max_tokens=max_tokens, temperature=0.0))
        assert isinstance(sampling, SamplingParams)
        self.replies[rid] = Reply()
        self.scheduler.receive(Submit(rid, pack(prompt), sampling, **more))  # type: ignore[arg-type]
        self.collect()

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.next_step()
        self.collect()
        return plan

    def step(self) -> bool:
        """One step from plan to result; False when there was nothing to do."""
        plan = self.plan()
        if plan is None:
            return False
        result = self.worker.run(plan)
        self.clock.advance(0.01)
        self.scheduler.apply(result)
        self.collect()
        self.check()
        return True

    def run(self, limit: int = 100_000) -> int:
        """Steps until nothing is left to do; how many."""
        for steps in range(limit):
            if not self.step():
                return steps
        raise AssertionError(f"still busy after {limit} steps")

    def collect(self) -> None:
        """Take what the scheduler says; compile what it asks for."""
        for order in self.scheduler.grammars.outbox:
            self._obey(order)
        self.scheduler.grammars.outbox.clear()
        if not self.hold_compiles:
            self.compile_pending()
        for message in self.scheduler.to_frontend:
            if isinstance(message, Accepted | Tokens | Failed):
                self._hear(message)
        self.scheduler.to_frontend.clear()

    def _obey(self, order: ToGrammar) -> None:
        match order:
            case GrammarCompile():
                self.pending.append(order)
            case GrammarStep():
                self.grammar_steps.append(order)
                for row in order.rows:
                    assert row.at <= self.matchers.get(row.uid, 0), "a matcher was skipped ahead"
                    self.matchers[row.uid] = row.at + len(row.tokens)
            case GrammarClose(uids):
                for uid in uids:
                    self.matchers.pop(uid, None)

    def _hear(self, message: Accepted | Tokens | Failed) -> None:
        reply = self.replies[message.rid]
        assert reply.end is None, "a reply after the terminal one"
        match message:
            case Accepted():
                assert not reply.accepted
                reply.accepted = True
            case Tokens():
                reply.tokens += message.tokens
                reply.cached = message.cached_tokens
                reply.end = message if message.finish is not None else None
            case Failed():
                reply.end = message

    def compile_pending(self) -> None:
        pending, self.pending = self.pending, []
        for order in pending:
            self.scheduler.grammar(GrammarCompiled(order.key, None, 0.001))

    def check(self) -> None:
        """Invariants 1 and 2 of the design: every slot has one owner, locks nest."""
        ledger = self.scheduler.ledger
        ledger.tree.check()
        total = ledger.pool.free + ledger.tree.evictable + ledger.tree.locked + ledger.private
        assert total == ledger.pool.capacity
        rows = [r.row for r in ledger.running.values()]
        assert len(set(rows)) == len(rows)

    def expected(self, prompt: list[int], max_tokens: int, eos: bool = True) -> list[int]:
        """The answer computed from scratch, alone."""
        tokens = list(prompt)
        for _ in range(max_tokens):
            tokens.append(self.worker.next_token(tokens))
            if eos and tokens[-1] in self.worker.eos_ids:
                break
        return tokens[len(prompt) :]

    def finish_of(self, rid: str) -> FinishReason:
        end = self.replies[rid].end
        assert isinstance(end, Tokens) and end.finish is not None, f"{rid}: {end}"
        return end.finish


@pytest.fixture
def harness() -> Callable[..., Harness]:
    """Builds a harness; keyword arguments are the limits, `kv_slots` and `vocab_size`."""

    def build(
        kv_slots: int = 257,
        max_running: int = 8,
        max_waiting: int = 1000,
        max_step_tokens: int = 64,
        vocab_size: int = 64,
        context_length: int = 1 << 20,
        sharing: bool = True,
        eviction_policy: str = "lru",
    ) -> Harness:
        clock = ManualClock()
        worker = FakeWorker(kv_slots, max_running, vocab_size, context_length)
        limits = SchedulerLimits(
            max_running=max_running,
            max_waiting=max_waiting,
            max_step_tokens=max_step_tokens,
            request_timeout_s=1e6,
            eviction_policy=eviction_policy,
            sharing=sharing,
        )
        return Harness(Scheduler(limits, worker.ready(), clock), worker, clock)

    return build

"""Random histories: whatever may happen to a scheduler, in any order, in many small pools.

Clients come, share prefixes, go on from answers, leave, run into deadlines; operators pin, flush,
ask, change the order; steps fail, the grammar process and the lower tier break, the worker and the
scheduler die and come back. After each step the slots add up and nothing is kept of what is over
(`Harness.check`, every now and then with a look at each node); each request ends exactly once, with
the answer that it would have had alone, or with an error that something gave it a reason for.

The many short histories take PHLOEM_HISTORY_STEPS steps in all.
"""

from __future__ import annotations

import os
import random
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from phloem.constrained.spec import Regex
from phloem.radix import POLICIES as EVICTION_POLICIES
from phloem.radix import TreeMirror
from phloem.srt.errors import ErrorInfo
from phloem.srt.messages import (
    CallPlan,
    Drain,
    EndProgram,
    Failed,
    FinishReason,
    Flush,
    GrammarCompiled,
    GrammarReady,
    GrammarReplay,
    JumpForward,
    Pooling,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    Tokens,
    Watch,
)
from phloem.srt.questions import AskExplain, AskPolicy, AskStats, AskTree, Pin, Refused, Unpin
from phloem.srt.scheduler.drafts import DraftLimits
from phloem.srt.scheduler.holds import HOLD_SECONDS
from phloem.srt.scheduler.order import POLICIES
from phloem.srt.scheduler.tenants import TenantLimits
from phloem.srt.testing import chain
from phloem.srt.wire import pack, unpack

Build = Callable[..., Any]

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("PHLOEM_HISTORY_STEPS", "1000000"))
SEEDS = 100
LIFE = 700
"""Steps of one history, about."""
FULL_CHECK = 32
"""One in so many steps of a short history is followed by a look at the whole tree."""
PAGES = (1, 1, 1, 1, 4, 4, 16, 64)
VOCABULARY = 64


@dataclass
class Case:
    """What the history knows of a request: what it must give, and how it may fail."""

    prompt: list[int]
    limit: int
    stops: frozenset[int]
    deadline: float
    logprobs_from: int | None = None
    embed: Pooling | None = None
    excuses: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Scale:
    """Sizes of a history's world, in pages and tokens."""

    pages: tuple[int, ...]
    rows: tuple[int, ...]
    budget: tuple[int, ...]
    prompt: int
    outputs: tuple[int | None, ...]
    crowd: int


SMALL = Scale((8, 24, 64, 128), (2, 4, 8), (4, 16, 64), 9, (0, 2, 6, 20, 40), 12)
WIDE = Scale((20, 60, 200, 900), (1, 2, 5, 16), (1, 7, 32, 256), 45, (0, 1, 5, 20, None), 40)


class History:
    """One seeded random life of a scheduler."""

    def __init__(self, build: Build, seed: int, scale: Scale) -> None:
        self.rng = rng = random.Random(seed)
        self.scale = scale
        self.page = page = rng.choice(PAGES)
        self.tiered = rng.random() < 0.5
        pages = rng.choice(scale.pages) * (3 if self.tiered else 1)  # a part of it may be saved
        self.capacity = max(2, pages // page.bit_length()) * page
        self.tenants = {
            "": TenantLimits(),
            "a": TenantLimits(weight=3.0, kv_quota=rng.choice([None, self.capacity // 2])),
            "b": TenantLimits(weight=0.5, kv_quota=rng.choice([None, self.capacity // 3])),
        }
        self.max_waiting = rng.choice([4, 1000, 1000])
        self.h = build(
            kv_slots=self.capacity + page,
            page_size=page,
            max_running=rng.choice(scale.rows),
            max_waiting=self.max_waiting,
            max_step_tokens=rng.choice(scale.budget) * page,
            vocab_size=VOCABULARY,
            sharing=rng.random() < 0.93,
            eviction_policy=rng.choice(list(EVICTION_POLICIES)),
            schedule_policy=rng.choice(list(POLICIES)),
            pin_share=rng.choice([0.0, 0.25, 0.6]),
            itl_target_s=rng.choice([None, None, 0.003, 0.2]),
            drafts=rng.choice([DraftLimits(), DraftLimits(3, 2), DraftLimits(16, 8)]),
            tenants=self.tenants,
            block_tokens=page * rng.choice([1, 2, 4]) if self.tiered else None,
            tier_limit=rng.choice([3, 10, 10_000]),
        )
        self.h.on_end = self.verify
        self.h.keep_orders = False
        self.cases: dict[str, Case] = {}
        longest = max(2, min(self.capacity - 1, scale.prompt * page))
        self.roots = [
            [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, longest))] for _ in range(3)
        ]
        self.said: deque[list[int]] = deque(self.roots, maxlen=12)
        """Prompts with their answers, to go on from."""
        self.count = self.steps = self.ended = self.rows = 0
        self.delay = rng.choice([0.1, 0.5, 0.9]) if self.h.lower is not None else 1.0
        self.mirror = TreeMirror(page) if rng.random() < 0.5 else None
        self.watch()
        self.events = self.weighted_events()

    def weighted_events(self) -> list[Callable[[], object]]:
        """What may happen, each as often as it should."""
        return [
            event
            for weight, event in (
                (90, self.submit),
                (8, self.burst),
                (22, self.abort),
                (3, self.flush),
                (3, self.wait),
                (4, self.grammar_process),
                (3, self.grammar_dies),
                (8, self.pin),
                (5, self.unpin),
                (10, self.explain),
                (4, self.explain_request),
                (5, self.look),
                (4, self.change_policy),
                (5, self.end_program),
                (4, self.tier_fault),
                (2, self.stale_result),
                (1, self.watch),
                (1, self.die),
            )
            for _ in range(weight)
        ]

    # ------------------------------------------------------------------ clients

    def prompt(self) -> list[int]:
        rng = self.rng
        prompt = list(rng.choice(self.said))
        if rng.random() < 0.5:
            del prompt[rng.randrange(1, len(prompt) + 1) :]
        for _ in range(rng.randrange(3)):
            prompt += [rng.randrange(3)] * rng.randrange(1, 2 + self.page)
        if len(prompt) >= self.capacity and rng.random() < 0.9:
            del prompt[self.capacity // 2 :]
        return prompt

    def submit(self, prompt: list[int] | None = None) -> None:
        rng = self.rng
        if len(self.cases) >= self.scale.crowd:
            return
        prompt = prompt or self.prompt()
        constrained = rng.random() < 0.25
        sampling = SamplingParams(
            max_tokens=rng.choice(self.scale.outputs),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=(rng.randrange(VOCABULARY),) if rng.random() < 0.2 else (),
        )
        more: dict[str, Any] = {"tenant": rng.choice(["", "", "a", "b", "c"])}
        if constrained:
            more["constraint"] = Regex(pattern=f"a{{{rng.randrange(4)}}}")
            more["jump"] = rng.choice(list(JumpForward))
        elif rng.random() < 0.08:
            more["embed"] = rng.choice(list(Pooling))
            sampling = SamplingParams(max_tokens=0)
        if "embed" not in more and rng.random() < 0.08:
            more["prompt_logprobs_from"] = rng.randrange(len(prompt))
        if rng.random() < 0.1:
            more["deadline_s"] = rng.random() * 0.5
        if rng.random() < 0.2:
            more["namespace"] = "other"
        if rng.random() < 0.2:
            more["priority"] = rng.randrange(-2, 3)
        if rng.random() < 0.4:
            more["program"] = f"p{rng.randrange(3)}"
            more["plan"] = self.call_plan() if rng.random() < 0.7 else None
        self._submit(prompt, sampling, more)

    def call_plan(self) -> CallPlan:
        """What a program says of its calls to come, which it does not keep to."""
        rng = self.rng
        in_group = rng.random() < 0.5
        constraints = [Regex(pattern=f"a{{{i}}}") for i in range(4) if rng.random() < 0.15]
        return CallPlan(
            remaining=rng.choice([None, None, 0, 1, 5]),
            fork=rng.choice([0, 0, 1, 3]),
            group=f"g{rng.randrange(3)}" if in_group else "",
            width=rng.randrange(2, 5) if in_group else 0,
            next_constraints=list(constraints),
        )

    def _submit(self, prompt: list[int], sampling: SamplingParams, more: dict[str, Any]) -> None:
        rid = f"r{self.count}"
        self.count += 1
        limits = self.tenants.get(more["tenant"], TenantLimits())
        longest = self.capacity if limits.kv_quota is None else min(self.capacity, limits.kv_quota)
        room = longest - len(prompt)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos or "constraint" in more:
            stops |= set(self.h.worker.eos_ids)
        deadline = self.h.clock() + more.get("deadline_s", 1e6)
        scored, embed = more.get("prompt_logprobs_from"), more.get("embed")
        case = Case(prompt, limit, frozenset(stops), deadline, scored, embed)
        self.cases[rid] = case
        scheduler = self.h.scheduler
        if len(scheduler.waiting) + scheduler.grammars.waiting >= self.max_waiting:
            case.excuses.add("QueueFull")
        elif room < 0 or (room == 0 and sampling.max_tokens != 0):
            case.excuses.add("PromptTooLong")
        certain = bool(case.excuses)
        self.h.submit(rid, prompt, sampling=sampling, **more)
        assert not certain or rid not in self.cases, "it should have been refused at once"

    def burst(self) -> None:
        """Requests that arrive together, with one prefix."""
        prompt = self.prompt()
        for _ in range(self.rng.randrange(2, 5)):
            self.submit([*prompt, self.rng.randrange(4)])

    def abort(self) -> None:
        alive = [rid for rid in self.cases if not self.h.replies[rid].cancelled]
        if alive:
            self.h.abort(self.rng.choice(alive))

    def wait(self) -> None:
        self.h.clock.advance(self.rng.choice([0.3, 0.3, 0.3, HOLD_SECONDS]) * self.rng.random())
        self.h.scheduler.expire()
        self.h.collect()

    # ------------------------------------------------------------------ operators

    def flush(self) -> None:
        self.h.ask(Flush, namespace=self.rng.choice([None, "", "other"]))

    def pin(self) -> None:
        self.h.ask(
            Pin,
            name=f"n{self.rng.randrange(3)}",
            prompt=pack(self.prompt()),
            namespace=self.rng.choice(["", "", "other"]),
            ttl_s=self.rng.choice([None, 0.05, 0.5]),
        )

    def unpin(self) -> None:
        self.h.ask(Unpin, name=f"n{self.rng.randrange(3)}")

    def explain(self) -> None:
        prompt, namespace = self.prompt(), self.rng.choice(["", "other"])
        answer = self.h.ask(AskExplain, prompt=pack(prompt), namespace=namespace)
        tree = self.h.scheduler.ledger.tree
        assert answer.matched == tree.match(array("i", prompt), namespace)

    def explain_request(self) -> None:
        rid = f"r{self.rng.randrange(self.count + 1)}"
        answer = self.h.ask(AskExplain, rid=rid)
        assert isinstance(answer, Refused) or answer.rid == rid

    def look(self) -> None:
        stats = self.h.ask(AskStats)
        assert stats.free + stats.evictable + stats.locked + stats.private == stats.capacity
        tree = self.h.ask(AskTree, limit=self.rng.randrange(1, 30), preview=2)
        assert len(tree.nodes) == stats.nodes or tree.truncated

    def change_policy(self) -> None:
        name = self.rng.choice([None, "none such", *POLICIES])
        answer = self.h.ask(AskPolicy, policy=name)
        assert isinstance(answer, Refused) == (name == "none such")

    def end_program(self) -> None:
        self.h.scheduler.receive(EndProgram(f"p{self.rng.randrange(4)}"))

    def watch(self) -> None:
        """Follow the tree's changes, from a copy of all of it on."""
        if self.mirror is not None:
            self.h.scheduler.receive(Watch(True))

    def compare(self) -> None:
        """Who follows the changes knows what the tree has."""
        if self.mirror is None:
            return
        tree = self.h.scheduler.ledger.tree
        self.mirror.apply(tree.events)
        tree.events.clear()
        assert self.mirror.nodes == tree.nodes
        for prompt in self.said:
            assert self.mirror.match(prompt) == tree.match(prompt)

    # ------------------------------------------------------------------ faults

    def grammar_process(self) -> None:
        """It is slow, or refuses a grammar, or has lost a matcher."""
        h, rng = self.h, self.rng
        h.hold_compiles = rng.random() < 0.4
        h.hold_jumps = rng.random() < 0.4
        if h.pending and rng.random() < 0.3:
            order = h.pending.pop()
            for request in h.scheduler._by_rid.values():
                if request.grammar_key == order.key:
                    self.cases[request.rid].excuses.add("InvalidConstraint")
            error = ErrorInfo(kind="InvalidConstraint", message="no")
            h.scheduler.grammar(GrammarCompiled(order.key, error, 0.01))
        flight = h.scheduler.in_flight
        if flight is not None:
            h.scheduler.grammar(GrammarReplay(flight.plan.step_id, list(h.matchers)))
        h.collect()

    def grammar_dies(self) -> None:
        for request in self.h.scheduler._by_rid.values():
            if request.constraint is not None:
                self.cases[request.rid].excuses.add("Unavailable")
        self.h.matchers.clear()
        self.h.pending.clear()
        self.h.jumps.clear()
        self.h.scheduler.grammar(GrammarReady({}))
        self.h.collect()

    def tier_fault(self) -> None:
        lower, rng = self.h.lower, self.rng
        if lower is None:
            return
        lower.broken = rng.random() < 0.3
        blocks = list(lower._blocks)
        lower.damaged = set(rng.sample(blocks, len(blocks) // 4))

    def stale_result(self) -> None:
        step_id = self.rng.choice([-1, self.h.scheduler._next_step + 5])
        self.h.scheduler.apply(StepResult(step_id, [RowResult(1, 1)]))

    def die(self) -> None:
        if self.rng.random() < 0.5:
            return
        for case in self.cases.values():
            case.excuses.add("Unavailable")
        self.h.restart()
        self.watch()

    def spoil(self, plan: StepPlan, result: StepResult) -> StepResult:
        """A step that fails, or one row of it. A failed step's slots hold anything."""
        requests = [work.request for work in self.h.scheduler.in_flight.work]
        if self.rng.random() < 0.5 and result.rows:
            i = self.rng.randrange(len(result.rows))
            self.cases[requests[i].rid].excuses.add("InternalError")
            rows = list(result.rows)
            rows[i] = RowResult(rows[i].epoch, error="no legal token")
            return StepResult(plan.step_id, rows)
        for request in self.h.scheduler.ledger.running.values():
            self.cases[request.rid].excuses.add("InternalError")
        for row in plan.rows:
            for slot in unpack(row.slots):
                self.h.worker.kv[slot] = (-1, -1, -1)
        return StepResult(plan.step_id, [], error="injected")

    # ------------------------------------------------------------------ time

    def happen(self) -> None:
        self.rng.choice(self.events)()

    def step(self, *, quiet: bool = False) -> bool:
        """A step, with things happening around its result unless `quiet`; False when there is
        nothing left to do."""
        h, rng = self.h, self.rng
        plan = h.plan()
        if plan is None:
            return self._unblock()
        self.steps += 1
        self.rows += len(plan.rows)
        result = h.worker.run(plan)
        h.clock.advance(0.01)
        if not quiet:
            if rng.random() < 0.4:
                self.happen()
            if rng.random() < 0.01 and h.scheduler.in_flight is not None:
                result = self.spoil(plan, result)
        h.scheduler.apply(result)
        h.collect()
        if h.transfers and rng.random() < self.delay:
            h.carry_out(rng.randrange(3))
        h.scheduler.expire()
        h.collect()
        return True

    def _unblock(self) -> bool:
        """Nothing was planned: only somebody else's answer may be the reason."""
        h = self.h
        busy = bool(h.transfers or h.pending or h.jumps)
        h.carry_out(1)
        h.jump()
        if h.pending:
            h.compile_pending()
            h.collect()
        assert busy or not (h.scheduler.ledger.running or len(h.scheduler.waiting)), "a stall"
        return busy

    def live(self, steps: int, full: int) -> None:
        while self.steps < steps:
            if self.rng.random() < 0.5 or not self.cases:
                self.happen()
            self.step()
            looks = self.steps % full == 0
            self.h.check(full=looks)
            if looks:
                self.compare()

    def finish(self) -> None:
        """Everybody leaves in their own time; then nothing is held."""
        h = self.h
        h.hold_compiles = h.hold_jumps = False
        h.collect()
        drains = self.rng.random() < 0.3
        if drains:
            h.scheduler.receive(Drain())
            self._refuse()
        for _ in range(20_000):
            if not self.step(quiet=True):
                break
        else:
            raise AssertionError("the scheduler never falls idle")
        h.check()
        self.compare()
        assert h.drained == drains
        assert not self.cases and not h.matchers
        for name in ("n0", "n1", "n2"):
            h.ask(Unpin, name=name)
        for program in range(4):
            h.scheduler.receive(EndProgram(f"p{program}"))
        snapshot = h.scheduler.snapshot()
        assert snapshot.running == snapshot.waiting == snapshot.compiling == 0
        assert snapshot.kv_locked == snapshot.kv_private == 0
        assert snapshot.kv_free + snapshot.kv_evictable == snapshot.kv_slots
        assert h.scheduler.deadlines.next_deadline() is None
        stats = h.ask(AskStats)
        assert stats.programs == 0 and not stats.pins
        assert not len(h.scheduler.programs) and not len(h.scheduler.ledger.holds)
        assert not h.scheduler._flushes and not h._asked

    def _refuse(self) -> None:
        """While the server shuts down, nobody is let in."""
        rid = f"r{self.count}"
        self.cases[rid] = Case([1], 0, frozenset(), 0.0, excuses={"Unavailable"})
        self.h.submit(rid, [1])
        assert rid not in self.cases

    # ------------------------------------------------------------------ truth

    def verify(self, rid: str, reply: Any) -> None:
        """The request ended: as it had to."""
        case = self.cases.pop(rid)
        del self.h.replies[rid]
        self.ended += 1
        end = reply.end
        whole = not isinstance(end, Failed) and end.finish is not FinishReason.ABORT
        forced = self.h.forced.pop(rid, {})
        closed = self.h.closed.pop(rid, None)
        self._verify_tokens(case, reply.tokens, end if whole else None, forced, closed)
        if isinstance(end, Failed):
            kind = end.error.kind
            late = kind == "DeadlineExceeded" and case.deadline <= self.h.clock()
            assert late or kind in case.excuses, f"{rid} failed: {end.error}"
        elif not whole:
            assert reply.cancelled
        else:
            assert end.cached_tokens == min(reply.prefix, len(case.prompt))
            self.said.append(case.prompt + reply.tokens)

    def _verify_tokens(
        self,
        case: Case,
        tokens: list[int],
        end: Tokens | None,
        forced: dict[int, int],
        closed: int | None,
    ) -> None:
        draw, state = self.h.worker._draw, 0
        for token in case.prompt:
            state = chain(state, token)
        stopped = False
        for place, token in enumerate(tokens):
            wanted = forced.get(place, draw(state))
            if place == closed:
                wanted = min(self.h.worker.eos_ids)
            assert not stopped and token == wanted, "another answer than alone"
            stopped = token in case.stops
            state = chain(state, token)
        assert len(tokens) <= max(0, case.limit)
        if end is not None:
            assert stopped or len(tokens) == case.limit
            assert end.finish is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert end.matched == (tokens[-1] if stopped else None)
            if case.embed is not None:
                assert end.embedding == self.h.worker.embedding_of(case.prompt, case.embed)
            if case.logprobs_from is not None and case.limit <= 1:
                self._verify_logprobs(case.logprobs_from, len(case.prompt), end)

    @staticmethod
    def _verify_logprobs(start: int, length: int, end: Tokens) -> None:
        """They come with the first message, which here is the last one as well."""
        assert end.prompt_logprobs is not None
        got = [None if e is None else int(-e.logprob) for e in end.prompt_logprobs]
        assert got == ([None] if start == 0 else []) + list(range(max(start, 1), length))


@pytest.mark.parametrize("seed", range(40))
def test_a_wide_history(harness: Build, seed: int) -> None:
    history = History(harness, seed, WIDE)
    history.live(150, full=1)
    history.finish()
    assert history.ended


@pytest.mark.parametrize("seed", range(SEEDS))
def test_many_short_histories(harness: Build, seed: int) -> None:
    steps = life = 0
    while steps < STEPS / SEEDS:
        history = History(harness, seed * 1_000_000 + life, SMALL)
        history.live(LIFE, full=FULL_CHECK)
        history.finish()
        steps += history.steps
        life += 1

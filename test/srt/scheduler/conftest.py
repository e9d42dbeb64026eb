"""A scheduler with a fake worker, a fake lower tier, a manual clock and a grammar process that
always agrees. After each step the harness checks what must always hold (docs/architecture.md).
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from phloem.srt.errors import ErrorInfo
from phloem.srt.messages import (
    Abort,
    Accepted,
    Answer,
    Draft,
    Drained,
    Failed,
    FinishReason,
    Flush,
    Flushed,
    Forced,
    GrammarClose,
    GrammarCompile,
    GrammarCompiled,
    GrammarJump,
    GrammarJumped,
    GrammarJumpRow,
    GrammarRow,
    GrammarStep,
    Question,
    SamplingParams,
    StepPlan,
    Submit,
    ToGrammar,
    Tokens,
)
from phloem.srt.questions import (
    AskExplain,
    AskPolicy,
    AskStats,
    AskTree,
    CacheExplanation,
    CacheStats,
    CacheTree,
    Pin,
    Pinned,
    Policy,
    Refused,
    Unpin,
    Unpinned,
)
from phloem.srt.scheduler.core import Scheduler, SchedulerLimits
from phloem.srt.scheduler.holds import MAX_HOLDS
from phloem.srt.scheduler.lower_tier import SAVING_SHARE
from phloem.srt.scheduler.past import MAX_REQUESTS, MAX_TOKENS
from phloem.srt.scheduler.pins import MAX_PINS
from phloem.srt.scheduler.programs import MAX_GROUPS, MAX_PROGRAMS
from phloem.srt.scheduler.request import Request, Status
from phloem.srt.scheduler.tenants import TenantLimits
from phloem.srt.testing import FakeTier, FakeWorker, ManualClock, chain
from phloem.srt.tier_messages import KvLoad, KvSave, StopTier, ToTier
from phloem.srt.wire import pack, unpack

LOST = ErrorInfo(kind="Unavailable", message="the scheduler died")
ANSWERS: dict[type, type] = {
    AskExplain: CacheExplanation,
    AskPolicy: Policy,
    AskStats: CacheStats,
    AskTree: CacheTree,
    Flush: Flushed,
    Pin: Pinned,
    Unpin: Unpinned,
}
"""Question → the answer to it that is no refusal."""
_ANSWERED = frozenset({*ANSWERS.values(), Refused})


@dataclass
class Reply:
    """What the frontend heard of one request, and what it should hear."""

    prompt: list[int]
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    accepted: bool = False
    end: Tokens | Failed | None = None
    cached: int = 0
    prefix: int | None = None
    """Tokens that the worker was given KV of when the request was first admitted."""
    cancelled: bool = False


class CheckedTier(FakeTier):
    """Notices KV under a name that another prefix has."""

    def run(self, order: ToTier) -> list[Any]:
        if isinstance(order, KvSave):
            slots, size = unpack(order.slots), self.block_tokens
            for i, key in enumerate(order.keys):
                block = tuple(self.worker.kv[s] for s in slots[i * size : (i + 1) * size])
                known = self.known.setdefault(key, block)
                assert known == block, "two prefixes have one name, or a slot changed under way"
        return super().run(order)

    @property
    def known(self) -> dict[bytes, tuple[Any, ...]]:
        return self.__dict__.setdefault("_known", {})  # type: ignore[no-any-return]


@dataclass
class Harness:
    """Drives a scheduler as its process would, and keeps the replies."""

    limits: SchedulerLimits
    worker: FakeWorker
    clock: ManualClock
    lower: FakeTier | None = None
    replies: dict[str, Reply] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    grammar_steps: list[GrammarStep] = field(default_factory=list)
    matchers: dict[int, list[int]] = field(default_factory=dict)
    """uid → output tokens its matcher was told of, or has forced."""
    forced: dict[str, dict[int, int]] = field(default_factory=dict)
    """rid → place in the output → the token that was forced there."""
    closed: dict[str, int] = field(default_factory=dict)
    """rid → place in the output behind which nothing but the end was legal."""
    guessed: dict[str, list[tuple[int, Draft]]] = field(default_factory=dict)
    """rid → drafts, and the place in the output where each began."""
    hits: float = 0.7
    """How often a guess is right."""
    hold_compiles: bool = False
    pending: list[GrammarCompile] = field(default_factory=list)
    hold_jumps: bool = False
    jumps: list[GrammarJump] = field(default_factory=list)
    transfers: deque[KvSave | KvLoad] = field(default_factory=deque)
    """Orders that the lower tier has not carried out."""
    probes: int = 0
    """Times that a prompt was looked up in the tree to plan a step."""
    drained: int = 0
    on_end: Callable[[str, Reply], None] | None = None
    keep_orders: bool = True

    def __post_init__(self) -> None:
        self._asked: dict[int, type[Question]] = {}
        self._questions = 0
        self.start()

    def start(self) -> None:
        """A new scheduler for the worker and the lower tier that there are."""
        self.scheduler = Scheduler(self.limits, self.worker.ready(), self.clock)
        ledger = self.scheduler.ledger
        look = ledger.probe

        def probe(*arguments: Any) -> tuple[int, int]:
            self.probes += 1
            return look(*arguments)

        setattr(ledger, "probe", probe)  # noqa: B010 (mypy knows it as a method)
        if self.lower is not None:
            self.lower.worker = self.worker
            self.scheduler.tier(self.lower.ready())

    def restart(self) -> None:
        """Worker and scheduler die and come back empty; the lower tier has what it has."""
        for rid in self.alive:
            reply = self.replies[rid]
            self._ended(rid, reply, Failed(rid, LOST))
        self._asked.clear()
        self.matchers.clear()
        self.pending.clear()
        self.jumps.clear()
        self.transfers.clear()
        old = self.worker
        self.worker = FakeWorker(
            old.kv_slots, old.max_rows, old.vocab_size, old.context_length, old.eos_ids
        )
        self.start()

    @property
    def alive(self) -> list[str]:
        """Requests without a terminal reply."""
        return [rid for rid, reply in self.replies.items() if reply.end is None]

    # ------------------------------------------------------------------ what clients do

    def submit(
        self, rid: str, prompt: list[int], max_tokens: int | None = 8, **more: object
    ) -> None:
        sampling = more.pop("sampling", SamplingParams(max_tokens=max_tokens, temperature=0.0))
        assert isinstance(sampling, SamplingParams)
        self.replies[rid] = Reply(prompt, sampling)
        self.scheduler.receive(Submit(rid, pack(prompt), sampling, **more))  # type: ignore[arg-type]
        self.collect()

    def abort(self, rid: str) -> None:
        self.replies[rid].cancelled = True
        self.scheduler.receive(Abort(rid))
        self.collect()

    def ask(self, kind: type[Any], **fields: object) -> Any:
        """The answer to a question; None for a flush that waits for the step in flight."""
        self._questions += 1
        self._asked[self._questions] = kind
        self.scheduler.receive(kind(self._questions, **fields))
        self.collect()
        answer = self.answers.pop(self._questions, None)
        assert answer is not None or kind is Flush, "questions are answered at once"
        return answer

    # ------------------------------------------------------------------ steps

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.next_step()
        self.collect()
        if plan is not None:
            self._look_at(plan)
        return plan

    def _look_at(self, plan: StepPlan) -> None:
        """No cancelled request takes part; note what the worker gets from the cache."""
        flight = self.scheduler.in_flight
        assert flight is not None
        for row, work in zip(plan.rows, flight.work, strict=True):
            reply = self.replies[work.request.rid]
            assert not reply.cancelled, "a step for a request that was aborted"
            if row.start is not None and reply.prefix is None:
                reply.prefix = len(row.start.prefix_slots) // 4

    def step(self) -> bool:
        """One step from plan to result, and what the lower tier was told; False when there was
        nothing to do."""
        plan = self.plan()
        if plan is not None:
            result = self.worker.run(plan)
            self.clock.advance(0.01)
            self.scheduler.apply(result)
            self.collect()
        done = self.carry_out(len(self.transfers))
        self.check()
        return plan is not None or done > 0

    def run(self, limit: int = 100_000) -> int:
        """Steps until nothing is left to do; how many."""
        for steps in range(limit):
            if not self.step():
                return steps
        raise AssertionError(f"still busy after {limit} steps")

    def carry_out(self, count: int) -> int:
        """Have the lower tier do its next `count` orders; how many there were."""
        done = 0
        while done < count and self.transfers:
            assert self.lower is not None, "an order for a tier that is not there"
            for message in self.lower.run(self.transfers.popleft()):
                self.scheduler.tier(message)
                self.collect()
            done += 1
        return done

    # ------------------------------------------------------------------ what the scheduler says

    def collect(self) -> None:
        """Take what the scheduler says; compile what it asks for, which may make it say more."""
        scheduler = self.scheduler
        for message in scheduler.to_frontend:
            if isinstance(message, Accepted | Tokens | Failed):
                self._hear(message)
            elif type(message) in _ANSWERED:
                self._is_answered(message)  # type: ignore[arg-type]
            elif isinstance(message, Drained):
                self.drained += 1
        scheduler.to_frontend.clear()
        for order in scheduler.grammars.outbox:
            self._obey(order)
        scheduler.grammars.outbox.clear()
        for transfer in scheduler.to_tier:
            assert not isinstance(transfer, StopTier), "its driver ends the tier"
            self.transfers.append(transfer)
        scheduler.to_tier.clear()
        if self.pending and not self.hold_compiles:
            self.compile_pending()
            self.collect()
        if self.jumps and not self.hold_jumps:
            self.jump()

    def _is_answered(self, answer: Answer) -> None:
        assert answer.id not in self.answers, "a second answer to a question"
        self.answers[answer.id] = answer
        kind = self._asked.pop(answer.id, None)  # None: the test asked by itself
        assert kind is None or isinstance(answer, ANSWERS[kind] | Refused)

    def _obey(self, order: ToGrammar) -> None:
        match order:
            case GrammarCompile():
                self.pending.append(order)
            case GrammarStep():
                if self.keep_orders:
                    self.grammar_steps.append(order)
                self._check_mask_rows(order)
                for row in order.rows:
                    matcher = self._move(row)
                    request = self.scheduler.ledger.running[row.uid]
                    history = self.replies[request.rid].tokens + request.unsent
                    assert matcher == history, "a matcher is elsewhere than its request"
            case GrammarJump():
                assert order.rows
                self.jumps.append(order)
            case GrammarClose(uids):
                for uid in uids:
                    self.matchers.pop(uid, None)

    def _check_mask_rows(self, order: GrammarStep) -> None:
        """Each draw has a row of the mask buffer to itself."""
        drafts = self.limits.drafts
        places = [row.mask_row for row in order.rows]
        for row in order.rows:
            if row.draft is not None:
                assert 0 < row.draft.computed <= drafts.tokens or row.draft.draws == [0]
                places += range(row.draft_row, row.draft_row + len(row.draft.draws) - 1)
        assert len(set(places)) == len(places)
        assert max(places) < self.limits.max_running + drafts.tokens * drafts.batch

    def _move(self, row: GrammarRow | GrammarJumpRow) -> list[int]:
        matcher = self.matchers.setdefault(row.uid, [])
        assert row.at <= len(matcher), "a matcher was skipped ahead"
        matcher[row.at :] = row.tokens
        return matcher

    def jump(self) -> None:
        """Answer what is asked of forced tokens: some, that follow from those before them."""
        pending, self.jumps = self.jumps, []
        for order in pending:
            self.scheduler.grammar(GrammarJumped([self._forced(row) for row in order.rows]))
        self.collect()

    def _forced(self, row: GrammarJumpRow) -> Forced:
        request = self.scheduler.grammars.asked(row.uid)
        if request is None:
            return Forced(row.uid, [5, 5])  # it has ended, or another process was asked
        matcher = self._move(row)
        tokens, ends = self._forced_after(matcher)
        places = self.forced.setdefault(request.rid, {})
        for place, token in enumerate(tokens, start=len(matcher)):
            last = place + 1 >= request.max_output or token in request.stop_ids
            if last and request.status is Status.COMPILING:
                break  # that one is drawn: of the real mask it would be the only token
            places[place] = token
        if ends and request.status is Status.RUNNING:
            self.closed[request.rid] = len(matcher) + len(tokens)
        matcher += tokens
        running = request.status is Status.RUNNING
        guessing = bool(row.draft) and running and not ends
        draft = self._guess(request, matcher, row.draft or 0) if guessing else None
        return Forced(row.uid, tokens, ends, draft)

    @staticmethod
    def _forced_after(matcher: list[int]) -> tuple[list[int], bool]:
        """What an output forces, and whether nothing but the end may follow that."""
        rng = random.Random(repr(matcher))
        tokens = [rng.randrange(64) for _ in range(rng.choice([0, 0, 1, 2, 7]))]
        return tokens, rng.random() < 0.05

    def _guess(self, request: Request, output: list[int], most: int) -> Draft | None:
        """What may come behind `output`: right ones are what the worker will draw."""
        rng = random.Random(repr((output, most)))
        prompt = request.tokens[: request.prompt_len].tolist()
        tokens: list[int] = []
        draws = [0]
        while True:
            right = rng.random() < self.hits
            so_far = [*output, *tokens]
            guess = self.worker.next_token([*prompt, *so_far]) if right else rng.randrange(64)
            forced, ends = self._forced_after([*so_far, guess])
            if len(tokens) + 1 + len(forced) > most:
                break
            tokens += [guess, *forced]
            if ends:
                break
            draws.append(len(tokens))
        if not tokens:
            return None
        draft = Draft(tokens, draws)
        self.guessed.setdefault(request.rid, []).append((len(output), draft))
        return draft

    def _follow_drafts(self, rid: str, tokens: list[int]) -> None:
        """Note what was forced where an output took the way that a draft had guessed."""
        places = self.forced.setdefault(rid, {})
        for begin, draft in self.guessed.pop(rid, []):
            bounds = [*draft.draws[1:], len(draft.tokens)]
            for at, end in zip(draft.draws, bounds, strict=True):
                guess = draft.tokens[at : at + 1]
                if not guess or tokens[begin + at : begin + at + 1] != guess:
                    break
                for place in range(at + 1, end):
                    places[begin + place] = draft.tokens[place]
                if end == len(draft.tokens) and draft.ends:
                    self.closed[rid] = begin + end

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
                if message.finish is not None:
                    self._ended(message.rid, reply, message)
            case Failed():
                self._ended(message.rid, reply, message)

    def _ended(self, rid: str, reply: Reply, end: Tokens | Failed) -> None:
        reply.end = end
        self._follow_drafts(rid, reply.tokens)
        if self.on_end is not None:
            self.on_end(rid, reply)

    def compile_pending(self) -> None:
        pending, self.pending = self.pending, []
        for order in pending:
            self.scheduler.grammar(GrammarCompiled(order.key, None, 0.001))

    # ------------------------------------------------------------------ what must hold

    def check(self, *, full: bool = True) -> None:
        """Every slot has one owner, locks nest (`full` looks at each node), nothing is kept of
        what is over, and nobody holds more than was granted."""
        ledger = self.scheduler.ledger
        if full:
            ledger.tree.check()
        pool, tree = ledger.pool, ledger.tree
        assert pool.free + tree.evictable + tree.locked + ledger.private == pool.capacity
        assert pool.private == ledger.private, "slots that belong to nobody alive"
        assert pool.in_tree == tree.evictable + tree.locked
        if self.scheduler.in_flight is None:
            assert not any(r.draft_slots for r in ledger.running.values())
        rows = {r.row for r in ledger.running.values()}
        assert len(rows) == len(ledger.running) <= self.limits.max_running
        assert min(rows, default=0) >= 0
        self._check_sizes()
        for name, tenant in self.limits.tenants.items():
            if tenant.kv_quota is not None:
                self._check_quota(name, tenant.kv_quota)

    def _check_sizes(self) -> None:
        """Nothing outlives the requests but what has a bound of its own."""
        s, alive = self.scheduler, len(self.alive)
        assert len(s._by_rid) == alive
        assert len(s.waiting) + len(s.ledger.running) + s.grammars.waiting == alive
        assert sum(len(lane) for lanes in s.waiting._lanes.values() for lane in lanes.values()) == (
            len(s.waiting)
        )
        assert len(s.deadlines._live) <= alive
        assert len(s.deadlines._heap) <= 2 * alive + 64
        assert len(s.shares._accounts) <= alive + len(self.limits.tenants)
        assert len(s.answers.past) <= MAX_REQUESTS
        assert s.answers.past._tokens <= MAX_TOKENS
        pins, tier = s.ledger.pins, s.ledger.tier
        assert len(pins) <= MAX_PINS and pins.tokens <= pins.budget
        holds, programs = s.ledger.holds, s.programs
        assert len(holds) <= MAX_HOLDS and holds.tokens <= holds.budget
        assert holds.tokens == sum(hold.lease.length for hold in holds._holds.values())
        assert sum(len(names) for names in holds._names.values()) == len(holds)
        assert {name for name, _ in holds._holds} <= set(programs._live)
        assert len(programs) <= MAX_PROGRAMS and len(programs._groups) <= MAX_GROUPS
        assert sum(member.alive for member in programs._live.values()) <= alive
        assert len(tier._saves) + len(tier._loads) == len(self.transfers)
        assert tier._saving_tokens <= s.ledger.pool.capacity // SAVING_SHARE
        blocks = sum(len(order.keys) for order in self.transfers)
        assert len(tier._saving) + len(tier._loading) <= blocks

    def _check_quota(self, tenant: str, quota: int) -> None:
        """Running requests may have got a token each since the plan that kept the quota, and those
        that were forced behind it."""
        running = [r for r in self.scheduler.ledger.running.values() if r.tenant == tenant]
        held = sum(len(r.tokens) for r in running)
        since = sum(r.remaining if r.decoding else 1 for r in running)
        assert len(running) <= 1 or held <= quota + since

    def expected(self, prompt: list[int], max_tokens: int, eos: bool = True) -> list[int]:
        """The answer computed from scratch, alone."""
        state, answer = 0, []
        for token in prompt:
            state = chain(state, token)
        for _ in range(max_tokens):
            answer.append(self.worker._draw(state))
            state = chain(state, answer[-1])
            if eos and answer[-1] in self.worker.eos_ids:
                break
        return answer

    def finish_of(self, rid: str) -> FinishReason:
        end = self.replies[rid].end
        assert isinstance(end, Tokens) and end.finish is not None, f"{rid}: {end}"
        return end.finish


@pytest.fixture
def harness() -> Callable[..., Harness]:
    """Builds a harness; keyword arguments are the limits and those of the fakes."""

    def build(
        kv_slots: int = 257,
        max_running: int = 8,
        max_waiting: int = 1000,
        max_step_tokens: int = 64,
        vocab_size: int = 64,
        context_length: int = 1 << 20,
        tenants: dict[str, TenantLimits] | None = None,
        block_tokens: int | None = None,
        tier_limit: int = 1 << 30,
        **limits: Any,
    ) -> Harness:
        worker = FakeWorker(kv_slots, max_running, vocab_size, context_length)
        lower = None
        if block_tokens is not None:
            lower = CheckedTier(worker, block_tokens, tier_limit)
        granted = SchedulerLimits(
            max_running=max_running,
            max_waiting=max_waiting,
            max_step_tokens=max_step_tokens,
            request_timeout_s=1e6,
            tenants=tenants or {},
            **limits,
        )
        return Harness(granted, worker, ManualClock(), lower)

    return build


@pytest.fixture
def instructions() -> Callable[[Callable[[], object]], int]:
    """Counts the interpreter's instructions in a call: its cost, the same on every machine. What C
    code does in between (searching a sorted list, comparing arrays) is one instruction."""

    def count(work: Callable[[], object]) -> int:
        counted = 0

        def trace(frame: FrameType, event: str, _: object) -> Any:
            nonlocal counted
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            counted += event == "opcode"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            work()
        finally:
            sys.settrace(before)
        return counted

    return count

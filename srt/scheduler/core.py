"""The scheduler: integers in, integers out. No socket, no clock of its own, no torch.

A driver (the process loop, or a test with a fake worker and a manual clock) calls

    receive(message)   what the frontend says
    grammar(message)   what the grammar process says
    next_step()        the plan of the next step, or None when nothing can run
    apply(result)      the worker's answer to the step in flight
    expire()           deadlines

and takes what is to be sent from `to_frontend` and `grammars.outbox` after each call. Every
accepted request ends in exactly one terminal message: `Tokens` with a finish reason, or `Failed`.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from phloem.radix import policy_by_name
from phloem.srt.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PhloemError,
    QueueFull,
    Unavailable,
)
from phloem.srt.messages import (
    Abort,
    Accepted,
    Drain,
    Drained,
    EndProgram,
    Failed,
    FinishReason,
    Flush,
    Flushed,
    Forced,
    FromGrammar,
    GrammarCompiled,
    GrammarJumped,
    GrammarReady,
    GrammarReplay,
    JumpForward,
    RowResult,
    StatsSnapshot,
    StepPlan,
    StepResult,
    Submit,
    ToFrontend,
    TokenLogprob,
    Tokens,
    ToScheduler,
    Watch,
    WorkerReady,
)
from phloem.srt.scheduler.answers import Answers
from phloem.srt.scheduler.cost import StepCost, StepSize
from phloem.srt.scheduler.drafts import DraftLimits, append_drafted, within
from phloem.srt.scheduler.grammars import Grammars
from phloem.srt.scheduler.intake import ModelBounds, request_of
from phloem.srt.scheduler.ledger import Ledger
from phloem.srt.scheduler.order import Lookups
from phloem.srt.scheduler.output import (
    Ending,
    append_drawn,
    append_forced,
    append_stop,
    take_message,
)
from phloem.srt.scheduler.past import Past
from phloem.srt.scheduler.plan import Budget, Decision, Work, decide
from phloem.srt.scheduler.programs import Programs
from phloem.srt.scheduler.queue import DeadlineQueue, WaitingQueue
from phloem.srt.scheduler.refusals import row_error, too_short
from phloem.srt.scheduler.request import Request, Status
from phloem.srt.scheduler.stats import Counters
from phloem.srt.scheduler.tenants import Shares, TenantLimits
from phloem.srt.tier_messages import FromTier, ToTier

log = logging.getLogger(__name__)

MAX_DECISIONS = 4
"""A decision that only makes room (preempts, drops pins) is followed by another one at once."""


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Bounds the operator set. Times are seconds."""

    max_running: int
    max_waiting: int
    max_step_tokens: int
    request_timeout_s: float
    eviction_policy: str = "lru"
    schedule_policy: str = "fair"
    sharing: bool = True
    page_size: int = 1
    pin_share: float = 0.0
    itl_target_s: float | None = None
    drafts: DraftLimits = field(default_factory=DraftLimits)
    tenants: dict[str, TenantLimits] = field(default_factory=dict)


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    work: list[Work]
    size: StepSize
    sent: float

    @property
    def masked(self) -> list[Request]:
        """Requests whose sampling waits for a mask."""
        rows = zip(self.plan.rows, self.work, strict=True)
        return [work.request for row, work in rows if row.masked]


class Scheduler:
    """Owner of all requests. `clock` gives seconds and never goes back. `sort_key` is for
    recordings: see `Lookups`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        worker: WorkerReady,
        clock: Callable[[], float],
        *,
        sort_key: Callable[[Request], array[int]] | None = None,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.shares = Shares(limits.tenants)
        self.ledger = Ledger(
            worker.kv_slots,
            limits.max_running,
            policy=policy_by_name(limits.eviction_policy),
            clock=clock,
            shares=self.shares,
            sharing=limits.sharing,
            page_size=limits.page_size,
            pin_share=limits.pin_share,
        )
        self.model = ModelBounds(
            context_length=min(worker.context_length, self.ledger.pool.capacity),
            vocab_size=worker.vocab_size,
            eos_ids=frozenset(worker.eos_ids),
        )
        self.programs = Programs(self.ledger.tree, self.ledger.holds, clock)
        self.cost = StepCost()
        lookups = Lookups(
            cached=self.ledger.cached,
            sort_key=sort_key or (lambda request: request.tokens),
            token_seconds=lambda: self.cost.token_seconds,
            standing=self.programs.standing,
        )
        self.waiting = WaitingQueue(limits.schedule_policy, lookups, self.shares)
        self.deadlines = DeadlineQueue()
        self.counters = Counters()
        self.to_frontend: list[ToFrontend] = []
        self.grammars = Grammars()
        self.draining = self._drained = False
        self.watched = False
        """Whether the frontend wants to hear of changes of the tree."""
        self.published = False
        """Whether the driver wants to, whoever else does."""
        self._by_rid: dict[str, Request] = {}
        self._budget = Budget(
            tokens=limits.max_step_tokens,
            rows=limits.max_running,
            cost=self.cost,
            itl_target=limits.itl_target_s,
            draft_rows=limits.drafts.batch,
        )
        self._next_uid = 0
        self._next_step = 0
        self._flushes: list[Flush] = []
        self.answers = Answers(
            self.ledger, self.waiting, self.shares, limits.eviction_policy, clock, Past()
        )
        self.in_flight: _InFlight | None = None

    # ------------------------------------------------------------------ from the frontend

    def receive(self, message: ToScheduler) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(rid):
                if (request := self._by_rid.get(rid)) is not None:
                    self._abort(request)
            case Flush():
                self._flushes.append(message)
                self._flush_if_quiet()
            case Drain():
                self.draining = True
                self._drained_if_empty()
            case EndProgram(program):
                self.programs.end(program)
            case Watch(on):
                self.watched = on
                self.ledger.tree.watch(on or self.published)
            case _:
                self.to_frontend.append(self.answers.answer(message, self._by_rid))

    def _submit(self, message: Submit) -> None:
        try:
            request = self._admit(message)
        except PhloemError as error:
            self.counters.failed_total += 1
            self.to_frontend.append(Failed(message.rid, error.to_info()))
            return
        self._by_rid[request.rid] = request
        self.programs.joined(request)
        self.deadlines.add(request)
        self.counters.requests_total += 1
        if request.constraint is None:
            self._enqueue(request)
        else:
            self.grammars.require(request)
        if message.plan is not None:
            self.grammars.prepare(message.plan.next_constraints)

    def _admit(self, message: Submit) -> Request:
        """Check what only the scheduler can know; raises what the client should read."""
        if self.draining:
            raise Unavailable("the server is shutting down")
        if message.rid in self._by_rid:
            raise InvalidRequest(f"request id {message.rid!r} is in use", param="rid")
        if len(self.waiting) + self.grammars.waiting >= self.limits.max_waiting:
            raise QueueFull(
                f"{self.limits.max_waiting} requests are waiting already", retry_after=1.0
            )
        quota = self.shares.quota(message.tenant)
        context = self.model.context_length
        self._next_uid += 1
        return request_of(
            message,
            self.model,
            uid=self._next_uid,
            now=self.clock(),
            timeout_s=self.limits.request_timeout_s,
            longest=context if quota is None else min(context, quota),
        )

    def _enqueue(self, request: Request) -> None:
        if request.status is Status.COMPILING:
            request.move_to(Status.WAITING)
        self.to_frontend.append(Accepted(request.rid))
        self.waiting.add(request)

    def _abort(self, request: Request) -> None:
        """No step after the one in flight; a request without a row ends at once."""
        request.aborted = True
        if not self._is_in_flight(request):
            self._end(request, Tokens(request.rid, [], FinishReason.ABORT))
            self.counters.aborted_total += 1

    def _is_in_flight(self, request: Request) -> bool:
        return self.in_flight is not None and any(
            work.request is request for work in self.in_flight.work
        )

    # ------------------------------------------------------------------ from the grammar process

    def grammar(self, message: FromGrammar) -> None:
        match message:
            case GrammarReady(remembered=remembered):
                self._grammar_restarted()
                self.grammars.prepare(remembered)
            case GrammarCompiled():
                self._compiled(message)
            case GrammarReplay():
                self._replay(message)
            case GrammarJumped(rows):
                for row in rows:
                    self._jumped(row)

    def _compiled(self, message: GrammarCompiled) -> None:
        if message.cached:
            self.counters.grammar_cache_hits_total += 1
        else:
            self.counters.grammar_compiles_total += 1
            self.counters.grammar_compile_seconds_total += message.seconds
        was_missing = self.grammars.is_missing(message.key)
        for request in self.grammars.compiled(message.key):
            if message.error is not None:
                self._fail(request, PhloemError.from_info(message.error))
            elif (error := too_short(request, message.minimum)) is not None:
                self._fail(request, error)
            elif not self.grammars.order_jumps([request]):
                self._enqueue(request)
        if was_missing:  # a new process has it now; the step in flight may wait for its masks
            self._send_histories(lambda request: request.grammar_key == message.key)
            if message.error is None:
                self.grammars.order_jumps_again(message.key)
            else:
                for request in self.grammars.owed(message.key):
                    self._jumped(Forced(request.uid, []))  # its next mask will tell

    def _grammar_restarted(self) -> None:
        for request in self.grammars.restarted(list(self._by_rid.values())):
            self._fail(
                request, Unavailable("the grammar process died while it compiled this constraint")
            )

    def _jumped(self, row: Forced) -> None:
        """What is forced behind the request's last token is known, and the request goes on."""
        request = self.grammars.jumped(row.uid)
        if request is None:
            return
        if request.status is Status.COMPILING:
            # Not the last token: there is one way for a request to end.
            own = itertools.takewhile(lambda token: token not in request.stop_ids, row.tokens)
            self._force(request, list(own)[: max(0, request.max_output - 1)])
            self._enqueue(request)
            return
        ending = self._force(request, row.tokens)
        if ending is None and row.ends:
            ending = append_stop(request, min(self.model.eos_ids))
        request.draft = within(row.draft, request)
        self._emit(request, ending)

    def _force(self, request: Request, tokens: list[int]) -> Ending | None:
        before = request.forced_tokens
        ending = append_forced(request, tokens)
        forced = request.forced_tokens - before
        request.grammar_tokens += forced  # its matcher has accepted them
        self.counters.forced_tokens_total += forced
        self.counters.generated_tokens_total += forced
        return ending

    def _replay(self, message: GrammarReplay) -> None:
        if self.in_flight is not None and self.in_flight.plan.step_id == message.step_id:
            self._send_histories(lambda request: request.uid in message.uids)

    def _send_histories(self, wanted: Callable[[Request], bool]) -> None:
        """Order masks of the step in flight again, with all output so far."""
        flight = self.in_flight
        if flight is not None:
            masked = [request for request in flight.masked if wanted(request)]
            self.grammars.order_masks(flight.plan.step_id, masked, from_start=True)

    # ------------------------------------------------------------------ from the lower tier

    @property
    def to_tier(self) -> list[ToTier]:
        """Orders for the lower tier, which the driver sends."""
        return self.ledger.tier.outbox

    def tier(self, message: FromTier) -> None:
        self.ledger.tier.receive(message)
        self._drained_if_empty()

    # ------------------------------------------------------------------ steps

    def next_step(self) -> StepPlan | None:
        """Decide and commit the next step. None while one is in flight, or with nothing to do."""
        if self.in_flight is not None or not (self.ledger.running or len(self.waiting)):
            return None
        if self.grammars.holding:
            return None
        began = self.clock()
        for _ in range(MAX_DECISIONS):
            passed: set[str] = set()
            with closing(self.waiting.ranked(began, passed)) as waiting:
                view = self.ledger.view(waiting, len(self.waiting), passed)
                decision = decide(view, self._budget)
            plan, work = self._commit(decision, began)
            if work or not decision.changes:
                break
        if not work:
            return None
        self._next_step += 1
        size = StepSize(
            rows=len(work),
            tokens=sum(w.size for w in work),
            pairs=sum(StepSize.chunk(w.start, w.size) for w in work),
        )
        self.in_flight = flight = _InFlight(plan, work, size, self.clock())
        self.grammars.order_masks(plan.step_id, flight.masked)
        self.counters.schedule_seconds_total += self.clock() - began
        return plan

    def _commit(self, decision: Decision, now: float) -> tuple[StepPlan, list[Work]]:
        for admission in decision.work:
            if admission.admit:
                request = admission.request
                self.shares.started(request.tenant)
                self.waiting.admit(request)
                if request.started is None:
                    request.started = now
                    self.programs.started(request)
                    self.answers.admitted(request)
        return self.ledger.commit(decision, self._next_step, self._requeue)

    def _requeue(self, request: Request) -> None:
        self.counters.preemptions_total += 1
        request.prompt_logprobs.clear()  # read again, from the same place, when it resumes
        self.waiting.add(request)
        self.shares.stopped(request.tenant)

    def apply(self, result: StepResult) -> None:
        """Book what a step gave. A result of another step than the one in flight is ignored."""
        flight = self.in_flight
        if flight is None or flight.plan.step_id != result.step_id:
            log.warning("result of step %d, which is not in flight", result.step_id)
            return
        began = self.clock()
        self.in_flight = None
        self._count_step(flight, result, began)
        if result.error is not None or len(result.rows) != len(flight.work):
            self._step_failed(result.error or "the worker's result does not fit the plan")
        else:
            self.cost.learn(flight.size, began - flight.sent)
            drawn = [
                work.request
                for work, row in zip(flight.work, result.rows, strict=True)
                if self._apply_row(work, row)
            ]
            self._jump(drawn)
        self._flush_if_quiet()
        self.counters.schedule_seconds_total += self.clock() - began

    def _count_step(self, flight: _InFlight, result: StepResult, now: float) -> None:
        counters = self.counters
        counters.steps_total += 1
        counters.step_seconds_total += now - flight.sent
        counters.forward_seconds_total += result.forward_seconds
        counters.mask_wait_seconds_total += result.mask_wait_seconds
        counters.sample_seconds_total += result.sample_seconds

    def _step_failed(self, reason: str) -> None:
        """No row has valid KV for this step's tokens, and some of them are in the tree: all that
        runs ends in an error, and the tree starts anew."""
        log.error("step failed: %s", reason)
        error = InternalError("the model failed to compute this step")
        for request in list(self.ledger.running.values()):
            self._fail(request, error, keep=False)
        self.ledger.discard_all()

    def _apply_row(self, work: Work, row: RowResult) -> bool:
        """Book one row; whether it drew a token behind which others may be forced."""
        request = work.request
        if row.epoch != request.epoch or request.status is not Status.RUNNING:
            return False
        prefill = max(0, min(work.end, request.prompt_len) - work.start)
        self.counters.computed_prefill_tokens_total += prefill
        request.computed_len = work.end
        ends = self._follow(request, row)
        computed = request.computed_len - work.start  # of its sequence
        self.shares.charge(request.tenant, computed)
        self.programs.charge(request, computed)
        if row.prompt_logprobs and not request.announced:
            request.prompt_logprobs += row.prompt_logprobs
        if request.aborted:
            self.counters.aborted_total += 1
            self._end(request, Tokens(request.rid, [], FinishReason.ABORT))
        elif request.expired:
            self._fail(request, self._deadline_error(request))
        elif row.error is not None:
            self._fail(request, row_error(row.error, row.fault))
        elif row.token >= 0:
            return self._token(request, row)
        elif ends:
            self._emit(request, append_stop(request, min(self.model.eos_ids)))
        elif request.computed_len == len(request.tokens) and request.max_output == 0:
            request.embedding = row.embedding
            self._emit(request, Ending(FinishReason.LENGTH))
        return False

    def _follow(self, request: Request, row: RowResult) -> bool:
        """Book what a row drew along its draft; whether nothing but the end may follow."""
        if (draft := request.draft) is None:
            return False
        accepted = 0 if request.aborted or request.expired or row.error else row.accepted
        self.ledger.settle(request, accepted)
        append_drafted(request, draft, accepted, self.counters)
        request.closed_by_budget |= row.closing
        return accepted == len(draft.tokens) and draft.ends

    def _token(self, request: Request, row: RowResult) -> bool:
        """Add the token that was drawn; whether it is to be seen what is forced behind it."""
        self.counters.generated_tokens_total += 1
        request.closed_by_budget |= row.closing
        ending = append_drawn(request, row.token)
        if ending is None and request.jump is not JumpForward.OFF:
            return True
        self._emit(request, ending, None if row.logprob is None else [row.logprob])
        return False

    def _jump(self, requests: list[Request]) -> None:
        """These have drawn a token each: it goes out with those that are forced behind it."""
        draft = self.limits.drafts.wanted(len(self.ledger.running))
        asked = {request.uid for request in self.grammars.order_jumps(requests, draft)}
        for request in requests:
            if request.uid not in asked:
                self._emit(request)

    def _emit(
        self,
        request: Request,
        ending: Ending | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> None:
        """Send what was not sent of the output, and its end if it has one."""
        if not request.announced:
            self.counters.prompt_tokens_total += request.prompt_len
            self.counters.cached_tokens_total += request.cached_tokens or 0
        message = take_message(request, ending, logprobs)
        if ending is None:
            self.to_frontend.append(message)
        else:
            self._end(request, message)

    # ------------------------------------------------------------------ ends

    def _fail(self, request: Request, error: PhloemError, *, keep: bool = True) -> None:
        self.counters.failed_total += 1
        self._end(request, Failed(request.rid, error.to_info()), keep=keep)

    def _end(self, request: Request, message: Tokens | Failed, *, keep: bool = True) -> None:
        """Take the request out of wherever it is and send its one terminal message. `keep` as in
        `Ledger.finish`."""
        computed = request.status is Status.RUNNING
        match request.status:
            case Status.RUNNING:
                self.ledger.finish(request, keep=keep)
                self.shares.stopped(request.tenant)
            case Status.WAITING:
                self.waiting.remove(request)
                request.move_to(Status.FINISHED)
            case Status.COMPILING:
                self.grammars.withdraw(request)
                request.move_to(Status.FINISHED)
            case Status.FINISHED:
                raise RuntimeError(f"request {request.rid} ended twice")
        del self._by_rid[request.rid]
        self.programs.left(request, whole=computed and keep)
        self.deadlines.discard(request)
        self.grammars.close(request)
        self.to_frontend.append(message)
        self._drained_if_empty()

    def expire(self) -> None:
        """End what is past its time: requests, pins, programs. A request in the step in flight ends
        with that step."""
        self.ledger.pins.expire()
        self.programs.expire()
        for request in self.deadlines.pop_expired(self.clock()):
            request.expired = True
            if not self._is_in_flight(request):
                self._fail(request, self._deadline_error(request))

    def _deadline_error(self, request: Request) -> DeadlineExceeded:
        allowed = request.deadline - request.arrival
        return DeadlineExceeded(
            f"the request did not finish within its {allowed:g} s "
            f"({request.output_len} tokens were generated)",
            code="deadline_exceeded",
        )

    def _drained_if_empty(self) -> None:
        if self.draining and not self._drained and not self._by_rid and self.ledger.tier.idle:
            self._drained = True
            self.to_frontend.append(Drained())

    def _flush_if_quiet(self) -> None:
        """Answer flushes: at once, but never between a plan and its result."""
        if self.in_flight is None:
            for flush in self._flushes:
                dropped = self.ledger.flush(flush.namespace)
                self.to_frontend.append(Flushed(flush.id, dropped))
            self._flushes.clear()

    # ------------------------------------------------------------------ what it says of itself

    def snapshot(self, *, bad_messages: int = 0) -> StatsSnapshot:
        self.counters.bad_messages_total = bad_messages
        tree = self.ledger.tree
        return self.counters.snapshot(
            running=len(self.ledger.running),
            waiting=len(self.waiting),
            compiling=self.grammars.waiting,
            kv_slots=self.ledger.pool.capacity,
            kv_free=self.ledger.pool.free,
            kv_evictable=tree.evictable,
            kv_locked=tree.locked,
            kv_private=self.ledger.private,
            tree_nodes=tree.nodes,
            evicted_tokens_total=tree.stats().evicted_total,
        )

"""The scheduler: integers in, integers out. No socket, no clock of its own, no torch.

A driver (the process loop, or a test with a fake worker and a manual clock) calls

    receive(message)   what the frontend says
    grammar(message)   what the grammar process says
    next_step()        the plan of the next step, or None when nothing can run
    apply(result)      the worker's answer to the step in flight
    expire()           deadlines

and takes what is to be sent from `to_frontend` and `to_grammar` after each call. Every accepted
request ends in exactly one terminal message: `Tokens` with a finish reason, or `Failed`.
"""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Callable, Collection
from dataclasses import dataclass

from phloem.constrained.spec import Constraint, constraint_key
from phloem.radix import policy_by_name
from phloem.srt.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    PhloemError,
    PromptTooLong,
    QueueFull,
    Unavailable,
)
from phloem.srt.messages import (
    Abort,
    Accepted,
    Drain,
    Drained,
    Failed,
    FinishReason,
    Flush,
    Flushed,
    FromGrammar,
    GrammarClose,
    GrammarCompile,
    GrammarCompiled,
    GrammarReady,
    GrammarReplay,
    GrammarRow,
    GrammarStep,
    RowResult,
    StatsSnapshot,
    StepPlan,
    StepResult,
    Submit,
    ToFrontend,
    ToGrammar,
    TokenLogprob,
    Tokens,
    ToScheduler,
    WorkerReady,
    unpack,
)
from phloem.srt.scheduler.ledger import Ledger
from phloem.srt.scheduler.plan import Budget, Work, decide
from phloem.srt.scheduler.queue import DeadlineQueue, WaitingQueue
from phloem.srt.scheduler.request import Request, Status
from phloem.srt.scheduler.stats import Counters

log = logging.getLogger(__name__)

MAX_COMPILE_ATTEMPTS = 2
"""Grammar processes that may die over one constraint before it is refused."""


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Bounds the operator set. Times are seconds."""

    max_running: int
    max_waiting: int
    max_step_tokens: int
    request_timeout_s: float
    eviction_policy: str = "lru"
    sharing: bool = True


@dataclass(frozen=True)
class _InFlight:
    plan: StepPlan
    work: list[Work]
    sent: float


class Scheduler:
    """Owner of all requests. `clock` gives seconds and never goes back."""

    def __init__(
        self, limits: SchedulerLimits, worker: WorkerReady, clock: Callable[[], float]
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.ledger = Ledger(
            worker.kv_slots,
            limits.max_running,
            policy=policy_by_name(limits.eviction_policy),
            sharing=limits.sharing,
        )
        self.context_length = min(worker.context_length, self.ledger.pool.capacity)
        self.vocab_size = worker.vocab_size
        self.eos_ids = frozenset(worker.eos_ids)
        self.waiting = WaitingQueue()
        self.deadlines = DeadlineQueue()
        self.counters = Counters()
        self.to_frontend: list[ToFrontend] = []
        self.to_grammar: list[ToGrammar] = []
        self.draining = False
        self._by_rid: dict[str, Request] = {}
        self._compiling: dict[str, list[Request]] = {}
        self._compile_attempts: dict[str, int] = {}
        self._recompiling: set[str] = set()
        """Grammars of running requests that a new grammar process does not have yet."""
        self._next_uid = 0
        self._next_step = 0
        self._flushes: list[Flush] = []
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

    def _submit(self, message: Submit) -> None:
        try:
            request = self._admit(message)
        except PhloemError as error:
            self.counters.failed_total += 1
            self.to_frontend.append(Failed(message.rid, error.to_info()))
            return
        self._by_rid[request.rid] = request
        self.deadlines.add(request)
        self.counters.requests_total += 1
        if request.constraint is None:
            self._enqueue(request)
        else:
            self._compile(request)

    def _admit(self, message: Submit) -> Request:
        """Check what only the scheduler can know; raises what the client should read."""
        if self.draining:
            raise Unavailable("the server is shutting down")
        if message.rid in self._by_rid:
            raise InvalidRequest(f"request id {message.rid!r} is in use", param="rid")
        if len(self.waiting) + self._compiling_count() >= self.limits.max_waiting:
            raise QueueFull(
                f"{self.limits.max_waiting} requests are waiting already", retry_after=1.0
            )
        tokens = array("i", unpack(message.prompt))
        sampling = message.sampling
        self._check_tokens(tokens, message)
        room = self.context_length - len(tokens)
        max_output = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        if room < 0 or (room == 0 and sampling.max_tokens != 0):
            raise PromptTooLong(
                f"the prompt has {len(tokens)} tokens; prompt and output together may have "
                f"{self.context_length}",
                param="prompt",
                code="context_length_exceeded",
            )
        stop_ids = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos or message.constraint is not None:
            stop_ids |= self.eos_ids
        now = self.clock()
        timeout = message.deadline_s
        self._next_uid += 1
        return Request(
            uid=self._next_uid,
            rid=message.rid,
            tokens=tokens,
            prompt_len=len(tokens),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            max_output=max_output,
            stop_ids=stop_ids,
            arrival=now,
            deadline=now + (self.limits.request_timeout_s if timeout is None else timeout),
            namespace=message.namespace,
            priority=message.priority,
            constraint=message.constraint,
            grammar_key=None if message.constraint is None else constraint_key(message.constraint),
            prompt_logprobs_from=message.prompt_logprobs_from,
            private=message.prompt_logprobs_from is not None,
            status=Status.WAITING if message.constraint is None else Status.COMPILING,
        )

    def _check_tokens(self, tokens: array[int], message: Submit) -> None:
        if not tokens:
            raise InvalidRequest("the prompt is empty", param="prompt")
        for name, ids in (
            ("prompt", tokens),
            ("stop_token_ids", message.sampling.stop_token_ids),
            ("logit_bias", message.sampling.logit_bias),
        ):
            bad = next((t for t in _extremes(ids) if not 0 <= t < self.vocab_size), None)
            if bad is not None:
                raise InvalidRequest(
                    f"token id {bad} is outside the vocabulary of {self.vocab_size}", param=name
                )

    def _compile(self, request: Request) -> None:
        key, constraint = request.grammar_key, request.constraint
        assert key is not None and constraint is not None
        waiters = self._compiling.setdefault(key, [])
        waiters.append(request)
        if len(waiters) == 1:
            self._send_compile(key, constraint)

    def _send_compile(self, key: str, constraint: Constraint) -> None:
        if key in self._compiling:
            self._compile_attempts[key] = self._compile_attempts.get(key, 0) + 1
        self.to_grammar.append(GrammarCompile(key, constraint))

    def _compiling_count(self) -> int:
        return sum(len(waiters) for waiters in self._compiling.values())

    def _enqueue(self, request: Request) -> None:
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
            case GrammarReady():
                self._grammar_restarted()
            case GrammarCompiled():
                self._compiled(message)
            case GrammarReplay():
                self._replay(message)

    def _compiled(self, message: GrammarCompiled) -> None:
        if message.cached:
            self.counters.grammar_cache_hits_total += 1
        else:
            self.counters.grammar_compiles_total += 1
            self.counters.grammar_compile_seconds_total += message.seconds
        self._compile_attempts.pop(message.key, None)
        if message.key in self._recompiling:
            self._recompiling.discard(message.key)
            self._replay_grammar(message.key)
        for request in self._compiling.pop(message.key, []):
            if message.error is not None:
                self._fail(request, PhloemError.from_info(message.error))
            else:
                request.move_to(Status.WAITING)
                self._enqueue(request)

    def _grammar_restarted(self) -> None:
        """A new process knows nothing: what waits for a compile, or will need a mask, is sent
        again, and matchers are rebuilt from the token history once their grammar is there. A
        grammar that was being compiled when two processes died is not given a third."""
        self._recompiling.clear()
        for key, waiters in list(self._compiling.items()):
            if self._compile_attempts[key] >= MAX_COMPILE_ATTEMPTS:
                error = Unavailable("the grammar process died while it compiled this constraint")
                self._compiled(GrammarCompiled(key, error.to_info(), 0.0, cached=True))
            elif not waiters:
                del self._compiling[key], self._compile_attempts[key]
        for request in self._by_rid.values():
            request.grammar_tokens = 0
            key, constraint = request.grammar_key, request.constraint
            if key is None or constraint is None or key in self._recompiling:
                continue
            if request.status is not Status.COMPILING:
                self._recompiling.add(key)
            self._send_compile(key, constraint)

    def _replay(self, message: GrammarReplay) -> None:
        flight = self.in_flight
        if flight is not None and flight.plan.step_id == message.step_id:
            self._send_histories([w.request for w in flight.work if w.request.uid in message.uids])

    def _replay_grammar(self, key: str) -> None:
        """A new process has this grammar now: the step in flight may be waiting for its masks."""
        flight = self.in_flight
        if flight is not None:
            rows = zip(flight.plan.rows, flight.work, strict=True)
            self._send_histories(
                [w.request for row, w in rows if row.masked and w.request.grammar_key == key]
            )

    def _send_histories(self, requests: Collection[Request]) -> None:
        """All output tokens so far of requests in the step in flight, for their masks."""
        assert self.in_flight is not None
        rows = []
        for request in requests:
            if request.grammar_key is not None and request.grammar_key not in self._recompiling:
                output = request.tokens[request.prompt_len :].tolist()
                rows.append(GrammarRow(request.uid, request.grammar_key, 0, output, request.row))
                request.grammar_tokens = len(output)
        if rows:
            self.to_grammar.append(GrammarStep(self.in_flight.plan.step_id, rows))

    # ------------------------------------------------------------------ steps

    def next_step(self) -> StepPlan | None:
        """Decide and commit the next step. None while one is in flight, or with nothing to do."""
        if self.in_flight is not None or not (self.ledger.running or len(self.waiting)):
            return None
        began = self.clock()
        decision = decide(
            self.ledger.view(iter(self.waiting)),
            Budget(tokens=self.limits.max_step_tokens, rows=self.limits.max_running),
        )
        for admission in decision.work:
            if admission.admit:
                self.waiting.remove(admission.request)
                if admission.request.started is None:
                    admission.request.started = began
        plan, work = self.ledger.commit(decision, self._next_step, self._requeue)
        if not work:
            return None
        self._next_step += 1
        self._order_masks(plan, work)
        self.in_flight = _InFlight(plan, work, self.clock())
        self.counters.schedule_seconds_total += self.clock() - began
        return plan

    def _requeue(self, request: Request) -> None:
        self.counters.preemptions_total += 1
        request.prompt_logprobs.clear()  # read again, from the same place, when it resumes
        self.waiting.add(request)

    def _order_masks(self, plan: StepPlan, work: Collection[Work]) -> None:
        rows = []
        for row, item in zip(plan.rows, work, strict=True):
            request = item.request
            key = request.grammar_key
            if row.masked and key is not None and key not in self._recompiling:
                at = request.grammar_tokens
                new = request.tokens[request.prompt_len + at :].tolist()
                rows.append(GrammarRow(request.uid, key, at, new, request.row))
                request.grammar_tokens = at + len(new)
        if rows:
            self.to_grammar.append(GrammarStep(plan.step_id, rows))

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
            for work, row in zip(flight.work, result.rows, strict=True):
                self._apply_row(work, row)
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
        for request in list(self.ledger.running.values()):
            self._fail(request, InternalError("the model failed to compute this step"))
        self.ledger.discard_all()

    def _apply_row(self, work: Work, row: RowResult) -> None:
        request = work.request
        if row.epoch != request.epoch or request.status is not Status.RUNNING:
            return
        prefill = max(0, min(work.end, request.prompt_len) - work.start)
        self.counters.computed_prefill_tokens_total += prefill
        request.computed_len = work.end
        if row.prompt_logprobs and not request.announced:
            request.prompt_logprobs += row.prompt_logprobs
        if request.aborted:
            self.counters.aborted_total += 1
            self._end(request, Tokens(request.rid, [], FinishReason.ABORT))
        elif request.expired:
            self._fail(request, self._deadline_error(request))
        elif row.error is not None:
            self._fail(request, InternalError(row.error))
        elif row.token >= 0:
            self._token(request, row)
        elif request.computed_len == len(request.tokens) and request.max_output == 0:
            self._emit(request, [], row, FinishReason.LENGTH, None)

    def _token(self, request: Request, row: RowResult) -> None:
        token = row.token
        request.tokens.append(token)
        request.row_sampled = True
        self.counters.generated_tokens_total += 1
        finish, matched = None, None
        if token in request.stop_ids and self._may_stop(request, token):
            finish, matched = FinishReason.STOP, token
        elif request.output_len >= request.max_output:
            finish = FinishReason.LENGTH
        self._emit(request, [token], row, finish, matched)

    def _may_stop(self, request: Request, token: int) -> bool:
        """Before `min_tokens` the sampler bans stop ids, unless a grammar leaves nothing else."""
        return request.output_len >= request.sampling.min_tokens or request.constraint is not None

    def _emit(
        self,
        request: Request,
        tokens: list[int],
        row: RowResult,
        finish: FinishReason | None,
        matched: int | None,
    ) -> None:
        first = not request.announced
        cached = request.cached_tokens or 0
        if first:
            request.announced = True
            self.counters.prompt_tokens_total += request.prompt_len
            self.counters.cached_tokens_total += cached
        message = Tokens(
            request.rid,
            tokens,
            finish,
            cached_tokens=cached,
            matched=matched,
            logprobs=[row.logprob] if row.logprob is not None else None,
            prompt_logprobs=self._take_prompt_logprobs(request) if first else None,
            preemptions=request.preemptions,
            queue_seconds=(request.started or request.arrival) - request.arrival,
        )
        if finish is None:
            self.to_frontend.append(message)
        else:
            self._end(request, message)

    @staticmethod
    def _take_prompt_logprobs(request: Request) -> list[TokenLogprob | None] | None:
        """What was asked of the prompt; token 0 follows nothing, so it has None."""
        if request.prompt_logprobs_from is None:
            return None
        head: list[TokenLogprob | None] = [None] if request.prompt_logprobs_from == 0 else []
        entries = head + request.prompt_logprobs
        request.prompt_logprobs = []
        return entries

    # ------------------------------------------------------------------ ends

    def _fail(self, request: Request, error: PhloemError) -> None:
        self.counters.failed_total += 1
        self._end(request, Failed(request.rid, error.to_info()))

    def _end(self, request: Request, message: Tokens | Failed) -> None:
        """Take the request out of wherever it is and send its one terminal message."""
        match request.status:
            case Status.RUNNING:
                self.ledger.finish(request)
            case Status.WAITING:
                self.waiting.remove(request)
                request.move_to(Status.FINISHED)
            case Status.COMPILING:
                waiters = self._compiling.get(request.grammar_key or "")
                if waiters is not None and request in waiters:
                    waiters.remove(request)
                request.move_to(Status.FINISHED)
            case Status.FINISHED:
                raise RuntimeError(f"request {request.rid} ended twice")
        del self._by_rid[request.rid]
        self.deadlines.discard(request)
        if request.grammar_key is not None:
            self.to_grammar.append(GrammarClose([request.uid]))
        self.to_frontend.append(message)
        self._drained_if_empty()

    def expire(self) -> None:
        """End what is past its deadline. A request in the step in flight ends with that step."""
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
        if self.draining and not self._by_rid:
            self.to_frontend.append(Drained())

    def _flush_if_quiet(self) -> None:
        """Answer flushes: at once, but never between a plan and its result."""
        if self.in_flight is None:
            for flush in self._flushes:
                self.to_frontend.append(Flushed(flush.id, self.ledger.tree.flush()))
            self._flushes.clear()

    # ------------------------------------------------------------------ what it says of itself

    def snapshot(self, *, bad_messages: int = 0) -> StatsSnapshot:
        self.counters.bad_messages_total = bad_messages
        tree = self.ledger.tree
        return self.counters.snapshot(
            running=len(self.ledger.running),
            waiting=len(self.waiting),
            compiling=self._compiling_count(),
            kv_slots=self.ledger.pool.capacity,
            kv_free=self.ledger.pool.free,
            kv_evictable=tree.evictable,
            kv_locked=tree.locked,
            kv_private=self.ledger.private,
            tree_nodes=tree.nodes,
            evicted_tokens_total=tree.stats().evicted_total,
        )


def _extremes(ids: Collection[int]) -> tuple[int, ...]:
    return (min(ids), max(ids)) if ids else ()

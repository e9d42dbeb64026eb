"""A trace, the real scheduler, and a worker that only takes its time: what `policy.py` is made of.

Time is virtual. A step takes what the cost model says, requests come in at their times while steps
are under way, and the answers are those of the trace, so a run is the same on every machine but for
the scheduler's own microseconds, which are real.
"""

from __future__ import annotations

import heapq
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter
from typing import Any

from step_cost import Cost

from phloem.radix import RadixTree, SlotPool, common_prefix
from phloem.srt.messages import (
    CallPlan,
    EndProgram,
    Failed,
    RowPlan,
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    Submit,
    Tokens,
    WorkerReady,
)
from phloem.srt.scheduler.core import Scheduler, SchedulerLimits
from phloem.srt.scheduler.trace import VOCABULARY, TraceRequest
from phloem.srt.testing import ManualClock

BATCH = 16
"""Rows that share a step's fixed cost when a trace's work is estimated."""


class Ready:
    """A trace request with its tokens written out."""

    __slots__ = ("index", "output", "prompt", "request")

    def __init__(self, index: int, request: TraceRequest) -> None:
        self.index = index
        self.request = request
        self.prompt = request.prompt_tokens()
        self.output = request.output_tokens()

    @property
    def path(self) -> array[int]:
        """Tokens whose KV exists in the end: the last of the output is never computed."""
        return self.prompt + self.output[:-1]


class Trace:
    """Requests in the order of the file, and what is the least that they cost."""

    def __init__(self, requests: Sequence[TraceRequest]) -> None:
        self.calls = [Ready(index, request) for index, request in enumerate(requests)]
        self.prompt_tokens = sum(len(call.prompt) for call in self.calls)
        self.optimal_hits = self._optimal_hits()

    def _optimal_hits(self) -> int:
        """Prompt tokens that need not be computed when requests are served depth first and nothing
        is ever evicted: in lexicographic order of the prompts, a prefix before what continues it.
        The paper's theorem 3.1 has it that a pool for the longest path does for that. The last
        token of a prompt is always computed: its logits are what is asked for."""
        total = sum(len(call.path) for call in self.calls)
        pool = SlotPool(1 + total)
        tree = RadixTree(pool)
        hits = 0
        for call in sorted(self.calls, key=lambda call: call.prompt):
            path, namespace = call.path, call.request.namespace
            lease = tree.acquire(path, namespace, len(call.prompt) - 1)
            hits += lease.length
            rest = path[lease.length :]
            slots = pool.allocate(len(rest))
            duplicates = tree.extend(lease, rest, slots)
            pool.release(slots[:duplicates])
            tree.release(lease)
        return hits

    def least_seconds(self, cost: Cost) -> float:
        """Time that the trace's work takes with all sharing there is and steps of `BATCH` rows."""
        seconds = cost.token * (self.prompt_tokens - self.optimal_hits)
        for call in self.calls:
            context = len(call.prompt) + len(call.output) / 2
            each = cost.token + cost.row + cost.step / BATCH + (cost.pair + cost.kv) * context
            seconds += each * (1 + len(call.output))
        return seconds


@dataclass
class _Row:
    epoch: int
    length: int
    prompt_len: int
    output: array[int]


class TimedWorker:
    """Gives the trace's answers, and what each step would have taken."""

    def __init__(self, calls: Sequence[Ready], cost: Cost) -> None:
        self._outputs = [call.output for call in calls]
        self._cost = cost
        self._rows: dict[int, _Row] = {}

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        sizes, results = [], []
        for row in plan.rows:
            held = self._row(row)
            count = len(row.slots) // 4
            sizes.append((held.length, count))
            held.length += count
            token = held.output[held.length - held.prompt_len] if row.sample else -1
            results.append(RowResult(row.epoch, token))
        seconds = self._cost.seconds(sizes)
        return StepResult(plan.step_id, results, forward_seconds=seconds), seconds

    def _row(self, plan: RowPlan) -> _Row:
        if plan.start is not None:
            start = plan.start  # its seed is the request's number
            self._rows[plan.row] = _Row(
                plan.epoch,
                len(start.prefix_slots) // 4,
                start.prompt_len,
                self._outputs[start.seed],
            )
        return self._rows[plan.row]


@dataclass
class Outcome:
    """What a run gave. Times are seconds, `scheduler_us` microseconds of real time a step."""

    requests: int
    steps: int
    seconds: float
    hit_rate: float
    optimal_hit_rate: float
    of_optimal: float
    mean_ttft: float
    p50_ttft: float
    p99_ttft: float
    max_ttft: float
    max_slowdown: float
    """Starvation: the largest ratio of a TTFT to what the request would take alone and uncached."""
    mean_program: float
    """Programs: from the arrival of the first call to the end of the last one."""
    p99_program: float
    max_step: float
    preemptions: int
    failed: int
    scheduler_us: float


class Plans:
    """What the programs of a trace could announce: their calls left, forks, siblings."""

    def __init__(self, trace: Trace) -> None:
        self._left = Counter(call.request.program for call in trace.calls)
        self._forks: Counter[str] = Counter()
        self._widths: Counter[tuple[str, str]] = Counter()
        by_id = {call.request.id: call for call in trace.calls}
        for call in trace.calls:
            self._widths[call.request.program, _group(call.request)] += 1
            for other in map(by_id.__getitem__, call.request.after):
                before = len(other.prompt)
                self._forks[other.request.id] += (
                    common_prefix(call.prompt, other.prompt, before) == before
                )

    def of(self, request: TraceRequest) -> CallPlan | None:
        """The plan of the next call to arrive."""
        if not request.program:
            return None
        self._left[request.program] -= 1
        group = _group(request)
        width = self._widths[request.program, group]
        return CallPlan(
            remaining=self._left[request.program],
            fork=self._forks[request.id],
            group=group if width > 1 else "",
            width=width if width > 1 else 0,
        )


def _group(request: TraceRequest) -> str:
    return ",".join(request.after) or "first"


class Simulation:
    """One run of a trace through a scheduler of its own; with `hints`, programs announce what they
    do."""

    def __init__(
        self,
        trace: Trace,
        cost: Cost,
        kv_slots: int,
        limits: dict[str, Any] | None = None,
        *,
        hints: bool = False,
    ) -> None:
        self.trace = trace
        self.plans = Plans(trace) if hints else None
        self.cost = cost
        self.clock = ManualClock()
        longest = max(len(call.prompt) + len(call.output) for call in trace.calls)
        ready = WorkerReady(1 + kv_slots, max(kv_slots, longest), VOCABULARY, [], {})
        self.scheduler = Scheduler(_limits(limits or {}, len(trace.calls)), ready, self.clock)
        self.worker = TimedWorker(trace.calls, cost)
        self.arrivals: list[tuple[float, int]] = []
        self.arrived: dict[str, float] = {}
        self.ttft: dict[str, float] = {}
        self.failed: list[Failed] = []
        self.began: dict[str, float] = {}
        self.over: dict[str, float] = {}
        self.max_step = 0.0
        self.own_seconds = 0.0
        self._missing: dict[int, int] = {}
        self._followers: dict[str, list[int]] = defaultdict(list)
        self._programs_over: list[str] = []
        self._calls_left = Counter(call.request.program for call in trace.calls)
        self._by_id = {call.request.id: call for call in trace.calls}

    def run(self) -> Outcome:
        for call in self.trace.calls:
            self._missing[call.index] = len(call.request.after)
            for other in call.request.after:
                self._followers[other].append(call.index)
            if not call.request.after:
                heapq.heappush(self.arrivals, (call.request.arrival, call.index))
        while True:
            self._arrive(self.clock.now)
            began = perf_counter()
            plan = self.scheduler.next_step()
            self.own_seconds += perf_counter() - began
            self._listen()
            if plan is not None:
                self._step(plan)
            elif self.arrivals:
                self.clock.now = max(self.clock.now, self.arrivals[0][0])
            else:
                return self._outcome()

    def _arrive(self, until: float) -> None:
        while self.arrivals and self.arrivals[0][0] <= until:
            at, index = heapq.heappop(self.arrivals)
            self.clock.now = max(self.clock.now, at)
            call = self.trace.calls[index]
            request = call.request
            self.arrived[request.id] = at
            self.began.setdefault(request.program or request.id, at)
            message = Submit(
                request.id,
                call.prompt.tobytes(),
                SamplingParams(seed=index, max_tokens=len(call.output), ignore_eos=True),
                namespace=request.namespace,
                priority=request.priority,
                tenant=request.tenant,
                program=request.program,
                plan=None if self.plans is None else self.plans.of(request),
            )
            began = perf_counter()
            self.scheduler.receive(message)
            self.own_seconds += perf_counter() - began
            self._listen()

    def _step(self, plan: StepPlan) -> None:
        result, seconds = self.worker.run(plan)
        self.max_step = max(self.max_step, seconds)
        end = self.clock.now + seconds
        self._arrive(end)
        self.clock.now = end
        began = perf_counter()
        self.scheduler.apply(result)
        self.own_seconds += perf_counter() - began
        self._listen()

    def _listen(self) -> None:
        for message in self.scheduler.to_frontend:
            if isinstance(message, Tokens):
                if message.rid not in self.ttft:
                    self.ttft[message.rid] = self.clock.now - self.arrived[message.rid]
                if message.finish is not None:
                    self._ended(message.rid)
            elif isinstance(message, Failed):
                self.failed.append(message)
                self._ended(message.rid)
        self.scheduler.to_frontend.clear()
        while self._programs_over:
            self.scheduler.receive(EndProgram(self._programs_over.pop()))

    def _ended(self, rid: str) -> None:
        program = self._by_id[rid].request.program
        self.over[program or rid] = self.clock.now
        self._calls_left[program] -= 1
        if program and not self._calls_left[program]:
            self._programs_over.append(program)
        for index in self._followers.pop(rid, []):
            self._missing[index] -= 1
            if self._missing[index] == 0:
                at = self.clock.now + self.trace.calls[index].request.arrival
                heapq.heappush(self.arrivals, (at, index))

    def _alone(self, rid: str) -> float:
        """What the first token of a request takes on an idle server with nothing cached."""
        prompt = len(self._by_id[rid].prompt)
        chunk = self.scheduler.limits.max_step_tokens
        return sum(
            self.cost.seconds([(at, min(chunk, prompt - at))]) for at in range(0, prompt, chunk)
        )

    def _outcome(self) -> Outcome:
        snapshot = self.scheduler.snapshot()
        ttft = sorted(self.ttft.values()) or [0.0]
        programs = sorted(end - self.began[name] for name, end in self.over.items()) or [0.0]
        prompt = max(1, snapshot.prompt_tokens_total)
        optimal = self.trace.optimal_hits / max(1, self.trace.prompt_tokens)
        hit_rate = snapshot.cached_tokens_total / prompt
        return Outcome(
            requests=len(self.ttft),
            steps=snapshot.steps_total,
            seconds=self.clock.now,
            hit_rate=hit_rate,
            optimal_hit_rate=optimal,
            of_optimal=hit_rate / optimal if optimal else 1.0,
            mean_ttft=fmean(ttft),
            p50_ttft=_percentile(ttft, 50),
            p99_ttft=_percentile(ttft, 99),
            max_ttft=ttft[-1],
            max_slowdown=max((t / self._alone(rid) for rid, t in self.ttft.items()), default=0.0),
            mean_program=fmean(programs),
            p99_program=_percentile(programs, 99),
            max_step=self.max_step,
            preemptions=snapshot.preemptions_total,
            failed=len(self.failed),
            scheduler_us=1e6 * self.own_seconds / max(1, snapshot.steps_total),
        )


def _limits(chosen: dict[str, Any], requests: int) -> SchedulerLimits:
    values: dict[str, Any] = {
        "max_running": 32,
        "max_waiting": requests + 1,
        "max_step_tokens": 512,
        "request_timeout_s": float("inf"),
        "pin_share": 0.25,
    }
    return SchedulerLimits(**(values | chosen))


def _percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank, of sorted values."""
    return values[max(0, -(-len(values) * percent // 100) - 1)]

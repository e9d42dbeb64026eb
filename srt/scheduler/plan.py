"""What the next step computes: a pure decision over a read-only view.

`decide` looks and answers; it takes no slot, locks no node, moves no request. `Ledger.commit`
carries the decision out. The order of service:

1. rows that need one token (decode), oldest admission first;
2. rows in the middle of their prompt, as large a chunk as the token budget leaves;
3. waiting requests in queue order, as long as rows, budget and slots last.

When slots run out for a running row, the youngest admission is preempted. The oldest one is never
preempted for a younger one and fits the pool alone, so it finishes: that is the proof of progress.

In-flight sharing: KV of a step's new tokens is written before attention reads, layer by layer, so
a row may read what another row computes in the same step. A waiting request whose prompt continues
along a running prefill is admitted with the planned part of that prefill as its prefix; if the two
agree even further, it waits until the prefill has come that far. Shared tokens are computed once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from phloem.radix import common_prefix
from phloem.srt.scheduler.request import Request

SCAN_LIMIT = 64
"""Waiting requests looked at in one step, so that a step's cost does not follow the queue."""

DECODE_RESERVE = 16
"""Slots kept for the next tokens of each running row when a request is admitted: with none, an
admission would be followed by a preemption a step later."""


class Cache(Protocol):
    """The tree as a plan may see it."""

    def probe(self, tokens: array[int], namespace: str, limit: int) -> tuple[int, int]:
        """(cached prefix length, how many of these tokens are unlocked), nothing touched."""
        ...

    def sole(self, request: Request) -> int:
        """Tokens in the tree that only this request's lease keeps from eviction."""
        ...


@dataclass(frozen=True)
class Budget:
    """Bounds of a step."""

    tokens: int
    rows: int


@dataclass(frozen=True)
class View:
    """What is there: running requests in order of admission, waiting ones in queue order."""

    running: Sequence[Request]
    waiting: Iterable[Request]
    free: int
    evictable: int
    cache: Cache
    sharing: bool = True


@dataclass(frozen=True)
class Work:
    """Compute tokens [start, start + count) of `request`; `admit` gives it a row first."""

    request: Request
    start: int
    count: int
    admit: bool = False

    @property
    def end(self) -> int:
        return self.start + self.count


@dataclass
class Decision:
    """Preempt these (in this order), then do this work (in this order)."""

    preempt: list[Request] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)


def decide(view: View, budget: Budget) -> Decision:
    """Plan one step. Pure: equal views give equal decisions."""
    planner = _Planner(view, budget)
    planner.serve_running()
    if not planner.decision.preempt:
        planner.admit_waiting()
    return planner.decision


class _Planner:
    """Counters of one `decide` call."""

    def __init__(self, view: View, budget: Budget) -> None:
        self.view = view
        self.budget = budget
        self.tokens_left = budget.tokens
        self.available = view.free + view.evictable
        self.decision = Decision()
        self.alive = list(view.running)

    def serve_running(self) -> None:
        """Decode rows, then prefill chunks, preempting the youngest when slots run out."""
        decoding = [r for r in self.alive if not r.is_prefilling]
        prefilling = [r for r in self.alive if r.is_prefilling]
        for request in (*decoding, *prefilling):
            if self.tokens_left == 0:
                return
            if request in self.decision.preempt:
                continue
            count = min(request.remaining, self.tokens_left)
            if not self._make_room(request, 1):
                continue
            count = min(count, self.available)
            self._add(Work(request, request.computed_len, count))

    def _make_room(self, request: Request, slots: int) -> bool:
        """Preempt until `slots` are available; False when `request` itself had to go."""
        while self.available < slots:
            victim = next(r for r in reversed(self.alive) if r not in self.decision.preempt)
            self.decision.preempt.append(victim)
            self.available += len(victim.tail_slots) + self.view.cache.sole(victim)
            planned = next((w for w in self.decision.work if w.request is victim), None)
            if planned is not None:
                self.decision.work.remove(planned)
                self.available += planned.count
                self.tokens_left += planned.count
            if victim is request:
                return False
        return True

    def _add(self, work: Work) -> None:
        self.decision.work.append(work)
        self.available -= work.count
        self.tokens_left -= work.count

    def admit_waiting(self) -> None:
        rows_left = self.budget.rows - len(self.alive)
        reserve = sum(
            min(DECODE_RESERVE, r.max_output - r.output_len) + max(0, r.remaining - 1)
            for r in self.alive
        ) - sum(max(0, w.count - 1) for w in self.decision.work)
        prefills = self._shareable_prefills()
        nobody_runs = not self.alive
        for scanned, request in enumerate(self.view.waiting):
            if rows_left == 0 or self.tokens_left == 0 or scanned == SCAN_LIMIT:
                return
            cached = self._cached(request, prefills)
            if cached is None:
                continue
            start, unlocked = cached
            need = len(request.tokens) - start
            own_reserve = min(DECODE_RESERVE, request.max_output - request.output_len)
            short = self.available - unlocked - need - own_reserve < reserve
            if short and not nobody_runs:
                return
            count = min(need, self.tokens_left, self.available - unlocked)
            if count <= 0:
                return
            nobody_runs = False
            self.available -= unlocked
            reserve += own_reserve + need - count
            work = Work(request, start, count, admit=True)
            self._add(work)
            if self.view.sharing and not request.private:
                prefills.append(work)
            rows_left -= 1

    def _shareable_prefills(self) -> list[Work]:
        """Running prompts that are on their way into the tree, with what this step adds."""
        if not self.view.sharing:
            return []
        planned = {w.request.uid: w for w in self.decision.work}
        return [
            planned.get(r.uid) or Work(r, r.computed_len, 0)
            for r in self.alive
            if r.is_prefilling and not r.private
        ]

    def _cached(self, request: Request, prefills: Sequence[Work]) -> tuple[int, int] | None:
        """(prefix length to take, how many of its tokens lose their evictability), or None when
        a running prefill is about to compute more of this prompt."""
        limit = request.match_limit
        matched, unlocked = self.view.cache.probe(request.tokens, request.namespace, limit)
        for work in prefills:
            other = work.request
            if other.namespace != request.namespace:
                continue
            shared = common_prefix(request.tokens, other.tokens, limit)
            if shared > max(matched, work.end):
                return None
            if shared > matched and shared > work.start:
                # What the other row computes in this step is locked by it already.
                matched = shared
        return matched, unlocked

"""What the next step computes: a pure decision over a read-only view.

`decide` looks and answers; it takes no slot, locks no node, moves no request. `Ledger.commit`
carries the decision out. The order of service:

1. rows that need the token they drew last (decode), and those forced behind it, oldest admission
   first;
2. rows in the middle of their prompt, as large a chunk as the token budget leaves and, while others
   decode, as the time allows that these may be kept waiting;
3. waiting requests in queue order, as long as rows, budget and slots last;
4. drafts of decoding rows, with the tokens and slots that are left then.

When slots run out, what is only held for programs goes first. If a running row still has none, the
cheapest victim is preempted: of the lowest priority, and of these the one with least to compute
again. The first by priority and admission is never preempted for another and fits the pool alone,
so it finishes: that is the proof of progress. A waiting request may also displace running ones of
lower priority, if that makes room for it.

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

import msgspec

from phloem.radix import common_prefix
from phloem.srt.messages import Draft
from phloem.srt.scheduler.cost import StepCost, StepSize
from phloem.srt.scheduler.drafts import cut
from phloem.srt.scheduler.request import Request

SCAN_LIMIT = 32
"""Waiting requests looked at in one step, so that a step's cost does not follow the queue."""

DECODE_RESERVE = 16
"""Slots kept for the next tokens of each running row when a request is admitted: with none, an
admission would be followed by a preemption a step later."""

LEAST_CHUNK = 16
"""Tokens of a prompt that a step computes however long it takes, so that prompts come forward."""

ITL_FACTOR, ITL_FLOOR_SECONDS = 2.0, 0.05
"""Without a target of the operator's: how much longer than without prompts a step may take, and
what it may take in any case."""

ITL_CROWD = 5.0
"""Both are multiplied by the requests that wait for their first token for each that waits for its
next, up to this: long chunks cost less a token, and there the many gain what the few lose."""


class Cache(Protocol):
    """The tree as a plan may see it."""

    def probe(self, tokens: array[int], namespace: str, limit: int) -> tuple[int, int]:
        """(cached prefix length, how many of these tokens are unlocked), nothing touched."""
        ...

    def sole(self, request: Request) -> int:
        """Tokens in the tree that only this request's lease keeps from eviction."""
        ...

    def pinned(self) -> int:
        """Tokens in the tree that only pins and holds for programs keep from eviction."""
        ...

    def held(self) -> int:
        """Tokens in the tree that only holds for programs keep from eviction."""
        ...

    def restorable(self, request: Request, cached: int) -> int | None:
        """Tokens after the first `cached` that a lower tier has; None while they are on their way,
        or others that the request needs."""
        ...

    def quota(self, tenant: str) -> int | None:
        """Slots that a tenant's running requests may hold; None for no bound."""
        ...


@dataclass(frozen=True)
class Budget:
    """Bounds of a step. While rows decode, chunks of prompts are kept so short that by `cost` the
    step takes at most `itl_target` seconds (None: a multiple of what it takes without). Drafts are
    for steps of at most `draft_rows` rows."""

    tokens: int
    rows: int
    cost: StepCost = field(default_factory=StepCost)
    itl_target: float | None = None
    draft_rows: int = 0


@dataclass(frozen=True)
class View:
    """What is there: running requests in order of admission, waiting ones, `queued` in number, in
    queue order, those of tenants in `passed` left out, which the plan adds to as it finds them at
    their quota."""

    running: Sequence[Request]
    waiting: Iterable[Request]
    queued: int
    passed: set[str]
    free: int
    evictable: int
    cache: Cache
    sharing: bool = True
    page_size: int = 1


class Work(msgspec.Struct, frozen=True):
    """Compute tokens [start, start + count) of `request`, and those of a `draft` behind them;
    `admit` gives it a row first."""

    request: Request
    start: int
    count: int
    admit: bool = False
    draft: Draft | None = None

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def size(self) -> int:
        """Tokens to compute, guessed ones and all."""
        return self.count if self.draft is None else self.count + self.draft.computed


@dataclass
class Decision:
    """End holds for programs until `unhold` more tokens are evictable, drop the pins and all holds
    if `unpin`, preempt these (in this order), fetch what lower tiers have of these waiting
    requests, then do this work (in this order)."""

    preempt: list[Request] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    restore: list[Request] = field(default_factory=list)
    unpin: bool = False
    unhold: int = 0

    @property
    def changes(self) -> bool:
        """Whether another decision may see more room than this one did."""
        return bool(self.preempt or self.unpin or self.unhold or self.work)


def decide(view: View, budget: Budget) -> Decision:
    """Plan one step. Pure: equal views give equal decisions."""
    planner = _Planner(view, budget)
    planner.keep_quotas()
    planner.serve_running()
    if not (planner.decision.preempt or planner.decision.unhold):
        planner.admit_waiting()
        planner.add_drafts()
    return planner.decision


def new_slots(count: int, spare: int, page_size: int) -> int:
    """Slots to allocate for `count` more tokens when `spare` are left of the last page."""
    missing = count - spare
    return -(-missing // page_size) * page_size if missing > 0 else 0


class _Planner:
    """Counters of one `decide` call."""

    def __init__(self, view: View, budget: Budget) -> None:
        self.view = view
        self.budget = budget
        self.page_size = view.page_size
        self.tokens_left = budget.tokens
        self.available = view.free + view.evictable
        self.decision = Decision()
        self.alive = list(view.running)
        self.rows = self.tokens = self.pairs = 0  # of the work so far
        self.decoding = 0
        self.chunked = False  # whether a chunk of a prompt is among the work
        self.held: int | None = None  # what ending more holds would give, once that was asked
        self.seconds = float("inf")

    # ------------------------------------------------------------------ running rows

    def keep_quotas(self) -> None:
        """Preempt, of tenants whose running requests have outgrown their quota, the cheapest."""
        for tenant in {request.tenant for request in self.alive}:
            quota = self.view.cache.quota(tenant)
            if quota is None:
                continue
            rest = [r for r in self.alive if r.tenant == tenant]
            oldest = min(rest, key=lambda r: r.epoch)
            rest.remove(oldest)
            while rest and sum(len(r.tokens) for r in (oldest, *rest)) > quota:
                victim = min(rest, key=self._cost)
                rest.remove(victim)
                self._preempt(victim)

    def serve_running(self) -> None:
        """Decode rows, then prefill chunks, preempting when slots run out."""
        decoding: list[Request] = []
        prefilling: list[Request] = []
        for request in self.alive:
            (prefilling if request.is_prefilling else decoding).append(request)
        for request in decoding:
            if self.tokens_left == 0:
                return
            self._serve(request, min(request.remaining, self.tokens_left))
        self._limit_time(len(prefilling))
        for request in prefilling:
            if self.tokens_left == 0:
                return
            count = self._chunk(request, request.computed_len)
            if count:
                self.chunked = True
                self._serve(request, count)

    def _serve(self, request: Request, count: int) -> None:
        if self.decision.preempt and request in self.decision.preempt:
            return
        spare = len(request.spare_slots)
        if not (self.available or spare or self._make_room(request)):
            return
        room = self.available + spare
        if count > room:
            count = self._whole_pages(request, request.computed_len, room)
        if count:
            self._add(Work(request, request.computed_len, count))

    def _limit_time(self, prefilling: int) -> None:
        """While rows decode, prompts get what is left of the time these may be kept waiting."""
        self.decoding = len(self.decision.work)
        if self.decoding:
            target = self.budget.itl_target
            if target is None:
                without = self.budget.cost.seconds(StepSize(self.rows, self.tokens, self.pairs))
                crowd = (prefilling + self.view.queued) / self.decoding
                target = max(ITL_FLOOR_SECONDS, ITL_FACTOR * without)
                target *= min(ITL_CROWD, max(1.0, crowd))
            self.seconds = target

    def _chunk(self, request: Request, start: int) -> int:
        """Tokens of `request`'s prompt, from `start` on, that this step has room for."""
        count = min(len(request.tokens) - start, self.tokens_left)
        if self.decoding:
            size = StepSize(self.rows, self.tokens, self.pairs)
            fits = self.budget.cost.chunk_within(self.seconds, size, start, count)
            if not self.chunked:
                fits = max(fits, LEAST_CHUNK, self.page_size)
            count = min(count, fits)
        return self._whole_pages(request, start, count)

    def _whole_pages(self, request: Request, start: int, count: int) -> int:
        """`count`, cut so that the next chunk begins with a page."""
        end = start + count
        if self.page_size == 1 or end >= len(request.tokens):
            return count
        return max(0, end - end % self.page_size - start)

    def _make_room(self, request: Request) -> bool:
        """Preempt until there is a page; False when `request` gets none in this step."""
        first = max(self.view.running, key=lambda r: (r.priority, -r.epoch))
        while self.available < self.page_size:
            if self._unhold(self.page_size):
                continue
            lower = [r for r in self.alive if r is not first and r.priority <= request.priority]
            if lower:
                victim = min(lower, key=lambda r: (r.priority, self._cost(r), -r.epoch))
                self._preempt(victim)
                if victim is request:
                    return False
            elif not self._unpin():
                return False
        return True

    def _cost(self, request: Request) -> int:
        """What a preemption may cost: tokens that others do not keep in the tree."""
        return len(request.tail_slots) + self.view.cache.sole(request)

    def _preempt(self, victim: Request) -> None:
        self.alive.remove(victim)
        self.decision.preempt.append(victim)
        self.available += self._cost(victim) + len(victim.spare_slots)
        planned = next((w for w in self.decision.work if w.request is victim), None)
        if planned is not None:
            self.decision.work.remove(planned)
            spare = len(victim.spare_slots)
            self.available += new_slots(planned.count, spare, self.page_size)
            self.tokens_left += planned.count
            self.rows -= 1
            self.decoding -= not victim.is_prefilling
            self.tokens -= planned.count
            self.pairs -= StepSize.chunk(planned.start, planned.count)

    def _unhold(self, wanted: int) -> bool:
        """Holds yield to whoever fits into `wanted` slots then; whether that gives the room."""
        missing = wanted - self.available
        if missing <= 0:
            return False
        if self.held is None:
            self.held = self.view.cache.held()
        if self.held < missing:
            return False
        self.held -= missing
        self.decision.unhold += missing
        self.available = wanted
        return True

    def _unpin(self) -> bool:
        """As the last resort, what is pinned may go, and all holds with it."""
        pinned = 0 if self.decision.unpin else self.view.cache.pinned() - self.decision.unhold
        self.decision.unpin = self.decision.unpin or pinned > 0
        self.held = 0
        self.available += pinned
        return pinned > 0

    def _add(self, work: Work) -> None:
        spare = len(work.request.spare_slots)
        self.decision.work.append(work)
        self.available -= new_slots(work.count, spare, self.page_size)
        self.tokens_left -= work.count
        self.rows += 1
        self.tokens += work.count
        self.pairs += StepSize.chunk(work.start, work.count)

    # ------------------------------------------------------------------ drafts

    def add_drafts(self) -> None:
        """Let decoding rows compute what is guessed of them, with what nobody else wants."""
        if len(self.alive) > self.budget.draft_rows:
            return
        for index, work in enumerate(self.decision.work):
            request = work.request
            if request.draft is None or work.admit or work.end < len(request.tokens):
                continue
            spare = len(request.spare_slots)
            before = new_slots(work.count, spare, self.page_size)
            room = spare + before + self.available // self.page_size * self.page_size - work.count
            most = min(self.tokens_left, room, self._quota_left(request.tenant))
            draft = cut(request.draft, most)
            if draft is None:
                continue
            self.decision.work[index] = drafted = msgspec.structs.replace(work, draft=draft)
            self.tokens_left -= draft.computed
            self.available -= new_slots(drafted.size, spare, self.page_size) - before

    def _quota_left(self, tenant: str) -> int:
        """Tokens that a tenant's running requests may grow by."""
        quota = self.view.cache.quota(tenant)
        if quota is None:
            return self.budget.tokens
        held = sum(len(r.tokens) for r in self.alive if r.tenant == tenant)
        drafted = (w.size - w.count for w in self.decision.work if w.request.tenant == tenant)
        return quota - held - sum(drafted)

    # ------------------------------------------------------------------ waiting requests

    def admit_waiting(self) -> None:
        """Admit from the queue's front on. What does not fit keeps those behind it waiting, so that
        a large request is not starved by small ones."""
        self.rows_left = self.budget.rows - len(self.alive)
        for scanned, request in enumerate(self.view.waiting):
            if self.tokens_left == 0 or scanned == SCAN_LIMIT:
                return
            if self.rows_left <= 0 and not self._lower(request):
                return
            if scanned == 0:
                self._look_at_running()
            if self._over_quota(request):
                self.view.passed.add(request.tenant)
                continue
            cached = self._cached(request)
            if cached is not None and not self._admit(request, *cached):
                return

    def _look_at_running(self) -> None:
        """What running rows still need, and which prompts among them may be shared."""
        planned = sum(max(0, work.count - 1) for work in self.decision.work)
        needed = sum(_own_reserve(r) + max(0, r.remaining - 1) for r in self.alive)
        self.reserve = needed - planned
        self.prefills = self._shareable_prefills()

    def _admit(self, request: Request, start: int, unlocked: int) -> bool:
        """Plan the admission, or a restore before it; False when nobody else may be admitted."""
        restorable = self.view.cache.restorable(request, start)
        if restorable is None:
            return True
        if restorable and self.available - unlocked - restorable >= self.reserve:
            self.decision.restore.append(request)
            self.available -= unlocked + restorable
            return True
        need = new_slots(len(request.tokens) - start, 0, self.page_size)
        own = _own_reserve(request)
        wanted = unlocked + need + own + self.reserve
        if self.rows_left > 0 and self._unhold(wanted):
            return False  # which of its own prefix is unlocked by that is not known in this step
        if (self.rows_left <= 0 or self.available < wanted) and self.alive:
            # What that frees is known for certain only once it is done: not in this step.
            self._displace(request, unlocked + need + own)
            return False
        room = self.available - unlocked
        count = self._chunk(request, start)
        if count > room:
            count = self._whole_pages(request, start, room)
        if count <= 0:
            if not self.alive:
                self._unpin()
            return False
        work = Work(request, start, count, admit=True)
        self.chunked = True
        self.available -= unlocked
        self.reserve += own + len(request.tokens) - start - count
        self._add(work)
        self.alive.append(request)
        self.rows_left -= 1
        if self.view.sharing and not request.private:
            self.prefills.append(work)
        return True

    def _lower(self, request: Request) -> list[Request]:
        """Running rows that `request` may displace, the one to go first in front."""
        admitted = {w.request.uid for w in self.decision.work if w.admit}
        lower = [r for r in self.alive if r.priority < request.priority and r.uid not in admitted]
        return sorted(lower, key=lambda r: (r.priority, -r.epoch))

    def _displace(self, request: Request, wanted: int) -> None:
        """Preempt rows of lower priority until there is a row and `wanted` slots beside what the
        others need; nothing when these are not enough."""
        rows, available, reserve = self.rows_left, self.available, self.reserve
        victims: list[Request] = []
        for victim in self._lower(request):
            if rows > 0 and available >= wanted + reserve:
                break
            victims.append(victim)
            rows += 1
            available += self._cost(victim) + len(victim.spare_slots)
            reserve = max(0, reserve - _own_reserve(victim))
        if rows > 0 and available >= wanted + reserve:
            for victim in victims:
                self._preempt(victim)

    def _over_quota(self, request: Request) -> bool:
        quota = self.view.cache.quota(request.tenant)
        if quota is None:
            return False
        others = [r for r in self.alive if r.tenant == request.tenant]
        held = sum(len(r.tokens) + _own_reserve(r) for r in others)
        return bool(others) and held + len(request.tokens) + _own_reserve(request) > quota

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

    def _cached(self, request: Request) -> tuple[int, int] | None:
        """(prefix length to take, how many of its tokens lose their evictability), or None when
        a running prefill is about to compute more of this prompt."""
        limit = request.match_limit
        matched, unlocked = self.view.cache.probe(request.tokens, request.namespace, limit)
        for work in self.prefills:
            other = work.request
            if other.namespace != request.namespace:
                continue
            shared = common_prefix(request.tokens, other.tokens, limit)
            shared -= shared % self.page_size
            if shared > max(matched, work.end):
                return None
            if shared > matched and shared > work.start:
                # What the other row computes in this step is locked by it already.
                matched = shared
        return matched, unlocked


def _own_reserve(request: Request) -> int:
    return min(DECODE_RESERVE, request.max_output - request.output_len)

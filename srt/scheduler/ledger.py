"""Who owns which KV slot. The only code that moves slots between the pool, the tree and requests.

    pool.free ──allocate──▶ request.tail ──extend──▶ tree (locked by a lease) ──release──▶ evictable
        ▲                        │                                                          │
        └────────── duplicates ──┴───────────────────────── evict ─────────────────────────┘

After every method: free + tree (locked + evictable) + tails of running requests = pool capacity.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterator

from phloem.radix import EvictionPolicy, Lease, OutOfSlots, RadixTree, SlotPool
from phloem.srt.messages import RowPlan, RowStart, StepPlan
from phloem.srt.scheduler.holds import Holds
from phloem.srt.scheduler.lower_tier import LowerTier
from phloem.srt.scheduler.pins import Pins
from phloem.srt.scheduler.plan import Decision, View, Work, new_slots
from phloem.srt.scheduler.request import Request, Status
from phloem.srt.scheduler.tenants import Shares
from phloem.srt.wire import pack

log = logging.getLogger(__name__)


class Ledger:
    """Slots, rows and leases of all running requests, and what pins, programs and the lower tier
    hold.

    `kv_slots` counts the padding page (of page size 1: slot 0) in. Rows are indices into the
    worker's slot table. `clock` gives seconds.
    """

    def __init__(
        self,
        kv_slots: int,
        max_rows: int,
        *,
        policy: EvictionPolicy,
        clock: Callable[[], float],
        shares: Shares,
        sharing: bool = True,
        page_size: int = 1,
        pin_share: float = 0.0,
    ) -> None:
        self.pool = SlotPool(kv_slots, page_size)
        self.tree = RadixTree(self.pool, policy=policy, clock=clock)
        self.shares = shares
        self.sharing = sharing
        self.page_size = page_size
        self.pins = Pins(self.tree, int(self.pool.capacity * pin_share), clock)
        self.holds = Holds(self.tree, int(self.pool.capacity * pin_share), clock)
        self.tier = LowerTier(self.tree, self.pool, self._allocate)
        self.running: dict[int, Request] = {}
        """By uid, in order of admission."""
        self._max_rows = max_rows
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._epoch = 0

    # ------------------------------------------------------------------ what a plan may see

    def probe(self, tokens: array[int], namespace: str, limit: int) -> tuple[int, int]:
        return self.tree.probe(tokens, namespace, limit) if self.sharing else (0, 0)

    def sole(self, request: Request) -> int:
        return self.tree.sole(request.lease) if request.lease is not None else 0

    def pinned(self) -> int:
        return self.tree.sole_of([*self.pins.leases(), *self.holds.leases()])

    def held(self) -> int:
        return self.tree.sole_of(self.holds.leases())

    def restorable(self, request: Request, cached: int) -> int | None:
        return self.tier.restorable(request, cached) if self.sharing else 0

    def quota(self, tenant: str) -> int | None:
        return self.shares.quota(tenant)

    def cached(self, request: Request) -> int:
        """How much of a waiting request's tokens the tree has."""
        return self.probe(request.tokens, request.namespace, request.match_limit)[0]

    def view(self, waiting: Iterator[Request], queued: int, passed: set[str]) -> View:
        return View(
            running=list(self.running.values()),
            waiting=waiting,
            queued=queued,
            passed=passed,
            free=self.pool.free,
            evictable=self.tree.evictable,
            cache=self,
            sharing=self.sharing,
            page_size=self.page_size,
        )

    @property
    def private(self) -> int:
        """Slots outside the tree: held by running requests, or waiting for a lower tier."""
        return self.tier.loading_slots + sum(
            len(r.tail_slots) + len(r.draft_slots) + len(r.spare_slots)
            for r in self.running.values()
        )

    def held_by(self, tenant: str) -> int:
        """Slots that a tenant's running requests hold, shared ones counted for each."""
        return sum(
            len(r.tail_slots)
            + len(r.draft_slots)
            + len(r.spare_slots)
            + (r.lease.length if r.lease else 0)
            for r in self.running.values()
            if r.tenant == tenant
        )

    # ------------------------------------------------------------------ carrying out a decision

    def commit(
        self, decision: Decision, step_id: int, requeue: Callable[[Request], None]
    ) -> tuple[StepPlan, list[Work]]:
        """Do what was decided: the step for the worker, and the work it holds, in the same order.

        `requeue` receives preempted requests, in good order for a new admission.
        """
        self.holds.free(decision.unhold)
        if decision.unpin:
            log.warning("%d pins were dropped: no slot was left for anybody", len(self.pins))
            self.holds.drop_all()
            self.pins.drop_all()
        for request in decision.preempt:
            self.preempt(request)
            requeue(request)
        for request in decision.restore:
            self.tier.restore(request)
        for work in decision.work:
            if work.admit:
                self._admit(work.request)
        rows: list[RowPlan] = []
        done: list[Work] = []
        draft_row = self._max_rows
        for work in decision.work:
            committed = self._take_slots(work, draft_row)
            if committed is None:
                self.preempt(work.request)
                requeue(work.request)
                continue
            row, actual = committed
            if row.draft is not None:
                draft_row += len(row.draft.draws) - 1
            rows.append(row)
            done.append(actual)
        return StepPlan(step_id, rows), done

    def _admit(self, request: Request) -> None:
        """Lock what the tree has now, before anything this step evicts."""
        request.move_to(Status.RUNNING)
        self._epoch += 1
        request.epoch = self._epoch
        request.row = self._free_rows.pop()
        request.row_sampled = request.decoding = False
        request.lease = self._acquire(request)
        self.running[request.uid] = request

    def _acquire(self, request: Request) -> Lease:
        return self.tree.acquire(
            request.tokens,
            request.namespace,
            request.match_limit if self.sharing else 0,
            priority=request.priority,
            program=request.program,
        )

    def _take_slots(self, work: Work, draft_row: int) -> tuple[RowPlan, Work] | None:
        """Slots for one row's tokens; None when the pool has none even after eviction. Masks along
        its draft will be in rows of the mask buffer from `draft_row` on."""
        request = work.request
        lease = request.lease
        assert lease is not None
        if work.admit:
            if work.start > lease.length:
                # A row ahead in this step put more of the prompt into the tree.
                self.tree.release(lease)
                lease = request.lease = self._acquire(request)
            request.computed_len = lease.length
        start = request.computed_len
        count = min(work.count, len(request.tokens) - start)
        draft = work.draft
        drafted = 0 if draft is None else draft.computed
        missing = new_slots(count + drafted, len(request.spare_slots), self.page_size)
        try:
            fresh = self._allocate(missing, request.rid)
        except OutOfSlots:
            return None
        if request.cached_tokens is None:
            request.cached_tokens = min(start, request.prompt_len)
        slots = request.spare_slots + fresh
        request.draft, request.draft_row = draft, draft_row
        request.draft_slots = slots[count : count + drafted]
        request.spare_slots = slots[count + drafted :]
        del slots[count:]
        end = start + count
        tokens = request.tokens[start:end]
        sample = end == len(request.tokens) and request.output_len < request.max_output
        row = RowPlan(
            row=request.row,
            epoch=request.epoch,
            tokens=b"" if request.row_sampled and count == 1 else pack(tokens),
            slots=pack(slots + request.draft_slots),
            sample=sample,
            masked=sample and request.constraint is not None,
            start=self._row_start(request) if work.admit else None,
            draft=draft,
            draft_row=draft_row,
        )
        paged = 0
        if request.is_prefilling and not request.private and self._can_extend(request, end):
            paged = count - count % self.page_size
            self.tree.extend(lease, tokens[:paged], slots[:paged])
        request.tail_slots += slots[paged:]
        if start != work.start or count != work.count:
            work = Work(request, start, count, work.admit, draft)
        return row, work

    def settle(self, request: Request, accepted: int) -> None:
        """The step with the request's draft is over: KV of the draft's first `accepted` tokens, by
        now the request's, stays; the other slots go back, but for the rest of a page."""
        kept = min(accepted, len(request.draft_slots))
        rest = request.draft_slots[kept:] + request.spare_slots
        request.tail_slots += request.draft_slots[:kept]
        request.computed_len += kept
        spare = -request.computed_len % self.page_size
        request.draft, request.draft_slots, request.spare_slots = None, [], rest[:spare]
        self.pool.release(rest[spare:])

    def _can_extend(self, request: Request, end: int) -> bool:
        """Whether the tree has nothing beyond this request's path yet. If it has, the request
        keeps its own copies to itself: two owners of one token would be one too many."""
        assert request.lease is not None
        length = request.lease.length
        if not self.sharing or request.tail_slots:
            request.private = True
        else:
            found, _ = self.tree.probe(request.tokens, request.namespace, end)
            request.private = found > length
        return not request.private

    def _row_start(self, request: Request) -> RowStart:
        assert request.lease is not None
        sampling = request.sampling
        penalised = (
            sampling.repetition_penalty != 1.0
            or sampling.presence_penalty != 0.0
            or sampling.frequency_penalty != 0.0
        )
        return RowStart(
            prompt_len=request.prompt_len,
            prefix_slots=pack(request.lease.slots()),
            sampling=sampling,
            seed=request.seed,
            stop_ids=sorted(request.stop_ids),
            history=pack(request.tokens[: request.computed_len]) if penalised else b"",
            prompt_logprobs_from=None if request.announced else request.prompt_logprobs_from,
            embed=request.embed,
        )

    def _allocate(self, count: int, by: str) -> list[int]:
        """Slots for request `by`, of what is free and what it has evicted."""
        if count > self.pool.free:
            self.tree.evict(count - self.pool.free, by)
        return self.pool.allocate(count)

    # ------------------------------------------------------------------ ends

    def preempt(self, request: Request) -> None:
        """Give the row back; what was computed stays in the tree, unlocked."""
        self.tree.release(self._leave(request))
        request.preemptions += 1
        request.move_to(Status.WAITING)

    def finish(self, request: Request, *, keep: bool = True) -> None:
        """As `preempt`, for good. The lower tier may hold what it lacks until it has that, unless
        its KV is not to be trusted (`keep` False)."""
        lease = self._leave(request)
        if self.sharing and keep:
            self.tier.keep(lease)
        else:
            self.tree.release(lease)
        request.move_to(Status.FINISHED)

    def _leave(self, request: Request) -> Lease:
        """Take row and tail away; the lease, by now on all of the request that is in the tree."""
        lease = request.lease
        assert lease is not None
        tail, kept = request.tail_slots, 0
        if self.sharing and tail and not request.apart:
            tokens = request.tokens[lease.length : request.computed_len]
            kept = len(tokens) - len(tokens) % self.page_size
            # the rest is half a page, or of a step that has not come back: it holds nothing yet
            duplicates = self.tree.extend(lease, tokens[:kept], tail[:kept])
            self.pool.release(tail[:duplicates])
        self.pool.release(tail[kept:] + request.draft_slots + request.spare_slots)
        del self.running[request.uid]
        self._free_rows.append(request.row)
        request.lease = None
        request.tail_slots = []
        request.draft, request.draft_slots = None, []
        request.spare_slots = []
        request.private = request.apart
        request.computed_len = 0
        request.row = -1
        request.block_keys = None
        return lease

    def flush(self, namespace: str | None = None) -> int:
        """Drop what no running request holds, of one namespace or of all; the tokens dropped."""
        self.holds.drop_all(namespace)
        self.pins.drop_all(namespace)
        return self.tree.flush(namespace)

    def discard_all(self) -> int:
        """Forget all cached KV after a failed step; no request may be running. Tokens dropped."""
        return self.flush()

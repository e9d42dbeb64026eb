"""Who owns which KV slot. The only code that moves slots between the pool, the tree and requests.

    pool.free ──allocate──▶ request.tail ──extend──▶ tree (locked by a lease) ──release──▶ evictable
        ▲                        │                                                          │
        └────────── duplicates ──┴───────────────────────── evict ─────────────────────────┘

After every method: free + tree (locked + evictable) + tails of running requests = pool capacity.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator

from phloem.radix import EvictionPolicy, OutOfSlots, RadixTree, SlotPool
from phloem.srt.messages import RowPlan, RowStart, StepPlan
from phloem.srt.scheduler.plan import Decision, View, Work
from phloem.srt.scheduler.request import Request, Status
from phloem.srt.wire import pack


class Ledger:
    """Slots, rows and leases of all running requests.

    `kv_slots` counts slot 0, which is padding. Rows are indices into the worker's slot table.
    """

    def __init__(
        self,
        kv_slots: int,
        max_rows: int,
        *,
        policy: EvictionPolicy,
        sharing: bool = True,
    ) -> None:
        self.pool = SlotPool(kv_slots)
        self.tree = RadixTree(self.pool, policy=policy)
        self.sharing = sharing
        self.running: dict[int, Request] = {}
        """By uid, in order of admission."""
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._epoch = 0

    # ------------------------------------------------------------------ what a plan may see

    def probe(self, tokens: array[int], namespace: str, limit: int) -> tuple[int, int]:
        return self.tree.probe(tokens, namespace, limit) if self.sharing else (0, 0)

    def sole(self, request: Request) -> int:
        return self.tree.sole(request.lease) if request.lease is not None else 0

    def view(self, waiting: Iterator[Request]) -> View:
        return View(
            running=list(self.running.values()),
            waiting=waiting,
            free=self.pool.free,
            evictable=self.tree.evictable,
            cache=self,
            sharing=self.sharing,
        )

    @property
    def private(self) -> int:
        """Slots held by running requests outside the tree."""
        return sum(len(r.tail_slots) for r in self.running.values())

    # ------------------------------------------------------------------ carrying out a decision

    def commit(
        self, decision: Decision, step_id: int, requeue: Callable[[Request], None]
    ) -> tuple[StepPlan, list[Work]]:
        """Do what was decided: the step for the worker, and the work it holds, in the same order.

        `requeue` receives preempted requests, in good order for a new admission.
        """
        for request in decision.preempt:
            self.preempt(request)
            requeue(request)
        for work in decision.work:
            if work.admit:
                self._admit(work.request)
        rows: list[RowPlan] = []
        done: list[Work] = []
        for work in decision.work:
            committed = self._take_slots(work)
            if committed is None:
                self.preempt(work.request)
                requeue(work.request)
                continue
            row, actual = committed
            rows.append(row)
            done.append(actual)
        return StepPlan(step_id, rows), done

    def _admit(self, request: Request) -> None:
        """Lock what the tree has now, before anything this step evicts."""
        request.move_to(Status.RUNNING)
        self._epoch += 1
        request.epoch = self._epoch
        request.row = self._free_rows.pop()
        request.row_sampled = False
        request.lease = self.tree.acquire(request.tokens, request.namespace, self._limit(request))
        self.running[request.uid] = request

    def _limit(self, request: Request) -> int:
        return request.match_limit if self.sharing else 0

    def _take_slots(self, work: Work) -> tuple[RowPlan, Work] | None:
        """Slots for one row's tokens; None when the pool has none even after eviction."""
        request = work.request
        lease = request.lease
        assert lease is not None
        if work.admit:
            if work.start > lease.length:
                # A row ahead in this step put more of the prompt into the tree.
                self.tree.release(lease)
                lease = request.lease = self.tree.acquire(
                    request.tokens, request.namespace, self._limit(request)
                )
            request.computed_len = lease.length
            if request.cached_tokens is None:
                request.cached_tokens = min(lease.length, request.prompt_len)
        start = request.computed_len
        count = min(work.count, len(request.tokens) - start)
        try:
            slots = self._allocate(count)
        except OutOfSlots:
            return None
        end = start + count
        tokens = request.tokens[start:end]
        sample = end == len(request.tokens) and request.output_len < request.max_output
        row = RowPlan(
            row=request.row,
            epoch=request.epoch,
            tokens=b"" if request.row_sampled and count == 1 else pack(tokens),
            slots=pack(slots),
            sample=sample,
            masked=sample and request.constraint is not None,
            start=self._row_start(request) if work.admit else None,
        )
        if request.is_prefilling and not request.private and self._can_extend(request, end):
            self.tree.extend(lease, tokens, slots)
        else:
            request.tail_slots += slots
        return row, Work(request, start, count, work.admit)

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
        )

    def _allocate(self, count: int) -> list[int]:
        if count > self.pool.free:
            self.tree.evict(count - self.pool.free)
        return self.pool.allocate(count)

    # ------------------------------------------------------------------ ends

    def preempt(self, request: Request) -> None:
        """Give the row back; what was computed stays in the tree, unlocked."""
        self._leave(request)
        request.preemptions += 1
        request.move_to(Status.WAITING)

    def finish(self, request: Request) -> None:
        """As `preempt`, for good."""
        self._leave(request)
        request.move_to(Status.FINISHED)

    def _leave(self, request: Request) -> None:
        lease = request.lease
        assert lease is not None
        if self.sharing and request.tail_slots:
            tokens = request.tokens[lease.length : request.computed_len]
            usable = len(tokens)  # slots of a step that has not come back hold nothing yet
            duplicates = self.tree.extend(lease, tokens, request.tail_slots[:usable])
            self.pool.release(request.tail_slots[:duplicates])
            self.pool.release(request.tail_slots[usable:])
        else:
            self.pool.release(request.tail_slots)
        self.tree.release(lease)
        del self.running[request.uid]
        self._free_rows.append(request.row)
        request.lease = None
        request.tail_slots = []
        request.private = request.prompt_logprobs_from is not None
        request.computed_len = 0
        request.row = -1

    def discard_all(self) -> int:
        """Forget all cached KV after a failed step; no request may be running. Tokens dropped."""
        return self.tree.flush()

"""The waiting queue and the deadlines, both bounded by the requests that are alive."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Generator, Iterator, Set

from phloem.srt.scheduler.order import POLICIES, Lookups, Order
from phloem.srt.scheduler.request import Request
from phloem.srt.scheduler.tenants import Shares


class WaitingQueue:
    """Waiting requests: by priority (higher first), then by the tenants' fair shares, then in the
    order of `policy`.

    A preempted request keeps its arrival, so it comes back to where it was.
    """

    def __init__(self, policy: str, lookups: Lookups, shares: Shares) -> None:
        self._policy = policy
        self._lookups = lookups
        self._shares = shares
        self._lanes: dict[int, dict[str, Order]] = {}
        self._priorities: list[int] = []
        """Those of the lanes, ascending."""
        self._by_uid: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._by_uid)

    def __contains__(self, request: Request) -> bool:
        return request.uid in self._by_uid

    @property
    def policy(self) -> str:
        return self._policy

    def set_policy(self, policy: str) -> None:
        """Order by another policy from now on. Raises `KeyError` for one that does not exist."""
        POLICIES[policy]
        self._policy = policy
        self._lanes.clear()
        self._priorities.clear()
        for request in self._by_uid.values():
            self._file(request)

    def add(self, request: Request) -> None:
        self._by_uid[request.uid] = request
        self._shares.joined(request.tenant)
        self._file(request)

    def _file(self, request: Request) -> None:
        lanes = self._lanes.get(request.priority)
        if lanes is None:
            lanes = self._lanes[request.priority] = {}
            insort(self._priorities, request.priority)
        lane = lanes.get(request.tenant)
        if lane is None:
            lane = lanes[request.tenant] = POLICIES[self._policy](self._lookups)
        lane.add(request)

    def remove(self, request: Request) -> None:
        """Raises KeyError if it is not there."""
        del self._by_uid[request.uid]
        self._shares.left(request.tenant)
        lanes = self._lanes[request.priority]
        lane = lanes[request.tenant]
        lane.remove(request)
        if not lane:
            del lanes[request.tenant]
            if not lanes:
                del self._lanes[request.priority]
                del self._priorities[bisect_left(self._priorities, request.priority)]

    def admit(self, request: Request) -> None:
        """Remove a request that begins to run; its lane may reorder what shares its prefix."""
        lane = self._lanes[request.priority][request.tenant]
        self.remove(request)
        if lane:
            lane.admitted(request)

    def ranked(self, now: float, passed: Set[str] = frozenset()) -> Generator[Request, None, None]:
        """Requests in the order of service. Tenants whom the caller puts into `passed` on the way
        are passed over from then on. The queue must not change while this runs."""
        for priority in reversed(self._priorities):
            lanes = self._lanes[priority]
            if len(lanes) == 1:
                ((tenant, lane),) = lanes.items()
                yield from _drawn(tenant, lane, now, passed)
            else:
                yield from self._interleaved(lanes, now, passed)

    def _interleaved(
        self, lanes: dict[str, Order], now: float, passed: Set[str]
    ) -> Iterator[Request]:
        """From each tenant's lane in turn, the one that was served least for its weight first."""
        heap = [(self._shares.served(tenant), i, tenant) for i, tenant in enumerate(lanes)]
        heapq.heapify(heap)
        iterators = {tenant: _drawn(tenant, lane, now, passed) for tenant, lane in lanes.items()}
        while heap:
            served, i, tenant = heap[0]
            request = next(iterators[tenant], None)
            if request is None:
                heapq.heappop(heap)
                continue
            cost = len(request.tokens) / self._shares.weight(tenant)
            heapq.heapreplace(heap, (served + cost, i, tenant))
            yield request


def _drawn(tenant: str, lane: Order, now: float, passed: Set[str]) -> Iterator[Request]:
    """A lane's requests in order, until its tenant is passed over."""
    if tenant in passed:
        return
    for request in lane.ranked(now):
        yield request
        if tenant in passed:
            return


class DeadlineQueue:
    """The earliest deadline first. Entries of ended requests are dropped when they surface, or all
    at once when they outnumber the live ones."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []
        self._live: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        self._live[request.uid] = request
        heapq.heappush(self._heap, (request.deadline, request.uid))

    def discard(self, request: Request) -> None:
        self._live.pop(request.uid, None)
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [(live.deadline, uid) for uid, live in self._live.items()]
            heapq.heapify(self._heap)

    def next_deadline(self) -> float | None:
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_expired(self, now: float) -> list[Request]:
        """Requests whose deadline passed, removed from the queue."""
        expired = []
        while (deadline := self.next_deadline()) is not None and deadline <= now:
            _, uid = heapq.heappop(self._heap)
            expired.append(self._live.pop(uid))
        return expired

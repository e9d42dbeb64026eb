"""The waiting queue and the deadlines, both bounded by the requests that are alive."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator

from phloem.srt.scheduler.request import Request


class WaitingQueue:
    """Requests by priority (higher first), then by arrival. A preempted request keeps its arrival,
    so it comes back to where it was."""

    def __init__(self) -> None:
        self._order: list[tuple[int, int]] = []
        self._by_uid: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        for _, uid in self._order:
            yield self._by_uid[uid]

    def __contains__(self, request: Request) -> bool:
        return request.uid in self._by_uid

    def add(self, request: Request) -> None:
        insort(self._order, (-request.priority, request.uid))
        self._by_uid[request.uid] = request

    def remove(self, request: Request) -> None:
        """Raises KeyError if it is not there."""
        del self._by_uid[request.uid]
        del self._order[bisect_left(self._order, (-request.priority, request.uid))]


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

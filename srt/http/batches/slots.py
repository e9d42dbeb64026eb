"""A number of requests that may run at once, given out in the order in which they are asked for."""

from __future__ import annotations

import asyncio
from collections import deque


class Slots:
    """A semaphore that is taken by several at a time, first come, first served: who asks for many
    is not overtaken by those who ask for few."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._free = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def acquire(self, count: int) -> None:
        """Wait for `count` slots, at most `limit`."""
        if not self._waiting and count <= self._free:
            self._free -= count
            return
        turn = asyncio.get_running_loop().create_future()
        place = (count, turn)
        self._waiting.append(place)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(count)  # it came in the same moment
            else:
                self._waiting.remove(place)
                self._give()
            raise

    def release(self, count: int) -> None:
        self._free += count
        self._give()

    def _give(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            count, turn = self._waiting.popleft()
            self._free -= count
            turn.set_result(None)

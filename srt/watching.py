"""Readers of the tree's changes: any number of them share one stream from the scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import Final

from phloem.radix import Cleared
from phloem.srt.errors import PhloemError, Unavailable
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import Watch

BACKLOG: Final = 256
"""Messages that may wait for one reader; who falls further behind is cut off."""


class Watchers:
    """`send` reaches the scheduler, or raises `Unavailable`.

    The scheduler is told with the first reader, and again with each later one: then it sends the
    whole tree anew, which every reader understands, and a new reader begins with.
    """

    def __init__(self, send: Callable[[Watch], None], backlog: int = BACKLOG) -> None:
        self._send = send
        self._backlog = backlog
        self._watchers: set[_Watcher] = set()

    def __len__(self) -> int:
        return len(self._watchers)

    async def watch(self) -> AsyncGenerator[KvEvents, None]:
        """The tree as it is, then its changes. Raises `Unavailable` when the backend is gone, and
        when the reader is too slow."""
        watcher = _Watcher(self._backlog)
        self._watchers.add(watcher)
        try:
            self._send(Watch(True))
            while True:
                item = await watcher.queue.get()
                if isinstance(item, PhloemError):
                    raise item
                yield item
        finally:
            self._leave(watcher)

    def deliver(self, message: KvEvents) -> None:
        """Give a message to every reader; never waits for one."""
        for watcher in list(self._watchers):
            if not watcher.started and not _is_whole(message):
                continue
            watcher.started = True
            if watcher.queue.full():
                self._leave(watcher)
                watcher.end(
                    Unavailable(
                        f"The reader is {self._backlog} messages behind and was cut off; "
                        "it may connect again.",
                        code="slow_reader",
                    )
                )
            else:
                watcher.queue.put_nowait(message)

    def fail(self, error: PhloemError) -> None:
        """End every reader with `error`. The scheduler is not told: it is gone."""
        for watcher in self._watchers:
            watcher.end(error)
        self._watchers.clear()

    def _leave(self, watcher: _Watcher) -> None:
        if watcher not in self._watchers:
            return
        self._watchers.remove(watcher)
        if not self._watchers:
            with suppress(Unavailable):
                self._send(Watch(False))


class _Watcher:
    """One reader: what it has not read yet, and whether it has the whole tree to begin with."""

    def __init__(self, backlog: int) -> None:
        self.queue: asyncio.Queue[KvEvents | PhloemError] = asyncio.Queue(maxsize=backlog)
        self.started = False

    def end(self, error: PhloemError) -> None:
        """The reader's next and last word; what it has not read is of no use any more."""
        while not self.queue.empty():
            self.queue.get_nowait()
        self.queue.put_nowait(error)


def _is_whole(message: KvEvents) -> bool:
    return bool(message.events) and isinstance(message.events[0], Cleared)

"""An append-only list that many threads and coroutines can follow while it grows."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Feed(Generic[T]):
    """Items in order, then an end. Every reader sees every item from the first on."""

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._closed = False
        self._changed = threading.Condition()
        self._listeners: list[Callable[[], None]] = []

    def push(self, item: T) -> None:
        """Append. After `close` this does nothing: readers have already seen the end."""
        with self._changed:
            if not self._closed:
                self._items.append(item)
                self._notify()

    def close(self) -> None:
        """No more items: readers end once they have read them all."""
        with self._changed:
            self._closed = True
            self._notify()

    def __iter__(self) -> Iterator[T]:
        """Items as they come; blocks between them."""
        seen = 0
        while True:
            with self._changed:
                while len(self._items) == seen and not self._closed:
                    self._changed.wait()
                fresh = self._items[seen:]
            if not fresh:
                return
            yield from fresh
            seen += len(fresh)

    async def __aiter__(self) -> AsyncIterator[T]:
        """The same on an event loop."""
        loop = asyncio.get_running_loop()
        wake = asyncio.Event()

        def listener() -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed: it left
                loop.call_soon_threadsafe(wake.set)

        with self._changed:
            self._listeners.append(listener)
        seen = 0
        try:
            while True:
                wake.clear()
                with self._changed:
                    fresh, closed = self._items[seen:], self._closed
                for item in fresh:
                    yield item
                seen += len(fresh)
                if not fresh:
                    if closed:
                        return
                    await wake.wait()
        finally:
            with self._changed:
                self._listeners.remove(listener)

    def _notify(self) -> None:
        self._changed.notify_all()
        for listener in self._listeners:
            listener()

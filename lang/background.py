"""The one event loop on which all calls of all programs run, in a thread of its own.

Programs are plain functions in plain threads; only calls to the model are asynchronous. The thread
starts with the first call, is a daemon, and is wound up when the interpreter exits: tasks are
cancelled first, so that servers see their clients leave.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any, TypeVar

T = TypeVar("T")

_EXIT_SECONDS = 2.0
_TELL_SECONDS = 5.0
_MAX_TELLING = 256


class _Inbox:
    """What threads want done on `loop`. `loop.call_soon_threadsafe` writes to a socket every time,
    and each write hands the interpreter to another thread; here one write does for all that comes
    until the loop gets to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: deque[tuple[Context, Callable[[], None]]] = deque()
        self._woken = False

    def put(self, work: Callable[[], None]) -> None:
        """Raises `RuntimeError` when the loop is closed."""
        self._waiting.append((copy_context(), work))
        if not self._woken:  # of two threads here at once, both wake it: no harm
            self._woken = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._woken = False  # first, so that what comes from now on wakes the loop again
        while self._waiting:
            context, work = self._waiting.popleft()
            try:
                context.run(work)
            except Exception as exc:
                self._loop.call_exception_handler({"message": f"{work} failed", "exception": exc})


class Background:
    """Owner of the loop thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: _Inbox | None = None
        self._cleanups: list[Callable[[], Awaitable[None]]] = []
        self._telling: set[asyncio.Task[None]] = set()

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop; started if need be."""
        with self._lock:
            return self._running()[0]

    def call_soon(self, work: Callable[[], None]) -> None:
        """Have `work` called on the loop, from whatever thread; returns at once. Calls are made in
        the order in which they came. Raises `RuntimeError` when the loop was closed just now."""
        with self._lock:
            inbox = self._running()[1]
        inbox.put(work)

    def tell(self, word: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `word()` awaited on the loop, for a few seconds at most; nobody learns what becomes
        of it. Where many are under way already, it is not. Raises as `call_soon` does."""
        self.call_soon(lambda: self._tell(word))

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop to its end, from another thread; what it returns or raises."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is on the loop, where waiting for a call would wait for ever."""
        return self._thread is threading.current_thread()

    def at_exit(self, cleanup: Callable[[], Awaitable[None]]) -> None:
        """Run `cleanup` on the loop before it stops."""
        self._cleanups.append(cleanup)

    def forget(self, cleanup: Callable[[], Awaitable[None]]) -> None:
        """Undo `at_exit`; unknown ones are fine."""
        if cleanup in self._cleanups:
            self._cleanups.remove(cleanup)

    def stop(self) -> None:
        """Cancel all tasks, clean up, stop the thread. The next use starts anew."""
        with self._lock:
            loop, thread = self._loop, self._thread
            self._loop = self._thread = self._inbox = None
        if loop is None or thread is None:
            return
        done = asyncio.run_coroutine_threadsafe(self._wind_up(), loop)
        try:
            done.result(_EXIT_SECONDS)
        except TimeoutError:
            done.cancel()
        loop.call_soon_threadsafe(loop.stop)
        thread.join(_EXIT_SECONDS)
        if not thread.is_alive():
            loop.close()

    def _running(self) -> tuple[asyncio.AbstractEventLoop, _Inbox]:
        if self._loop is None or self._inbox is None:
            self._loop = asyncio.new_event_loop()
            self._inbox = _Inbox(self._loop)
            self._thread = threading.Thread(
                target=self._loop.run_forever, name="phloem-lang", daemon=True
            )
            self._thread.start()
        return self._loop, self._inbox

    def _tell(self, word: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if len(self._telling) < _MAX_TELLING:
            task = asyncio.get_running_loop().create_task(_told(word))
            self._telling.add(task)
            task.add_done_callback(self._telling.discard)

    async def _wind_up(self) -> None:
        if self._telling:
            await asyncio.wait(self._telling, timeout=_EXIT_SECONDS / 4)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cleanups, self._cleanups = self._cleanups, []
        await asyncio.gather(*(cleanup() for cleanup in cleanups), return_exceptions=True)

    def after_fork(self) -> None:
        """In a child process there is no loop thread: forget the parent's."""
        self.__init__()  # type: ignore[misc]


async def _told(word: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with contextlib.suppress(Exception):  # nobody to tell
        async with asyncio.timeout(_TELL_SECONDS):
            await word()


background = Background()
atexit.register(background.stop)
os.register_at_fork(after_in_child=background.after_fork)

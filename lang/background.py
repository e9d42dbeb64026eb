"""The one event loop on which all calls of all programs run, in a thread of its own.

Programs are plain functions in plain threads; only calls to the model are asynchronous. The thread
starts with the first call, is a daemon, and is wound up when the interpreter exits: tasks are
cancelled first, so that servers see their clients leave.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Awaitable, Callable

_EXIT_SECONDS = 2.0


class Background:
    """Owner of the loop thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._cleanups: list[Callable[[], Awaitable[None]]] = []

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The running loop; started if need be."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="phloem-lang", daemon=True
                )
                self._thread.start()
            return self._loop

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
            self._loop = self._thread = None
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

    async def _wind_up(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        cleanups, self._cleanups = self._cleanups, []
        await asyncio.gather(*(cleanup() for cleanup in cleanups), return_exceptions=True)

    def after_fork(self) -> None:
        """In a child process there is no loop thread: forget the parent's."""
        self.__init__()  # type: ignore[misc]


background = Background()
atexit.register(background.stop)
os.register_at_fork(after_in_child=background.after_fork)

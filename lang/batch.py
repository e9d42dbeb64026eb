"""Many programs at once: a bounded number of threads, a bounded number of finished states."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Generic, TypeVar

from phloem.lang.progress import progress
from phloem.lang.run import Run
from phloem.lang.state import State

ItemT = TypeVar("ItemT")

# item → its state, its run, and what runs it to the end; the latter must not raise
Start = Callable[[ItemT], tuple[State, Run, Callable[[], None]]]


def iter_batch(
    items: Iterable[ItemT],
    start: Start[ItemT],
    *,
    concurrency: int,
    in_order: bool,
    progress_bar: bool | None,
) -> Iterator[State]:
    """The states of all items. At most `2 * concurrency` items are ahead of the consumer. What
    the iterable raises is raised here."""
    total = len(items) if isinstance(items, Sized) else None
    threads = concurrency if total is None else min(concurrency, total)
    pool = _Pool(iter(items), start, threads, 2 * concurrency)
    finished: dict[int, State] = {}
    turn = 0
    try:
        with progress(total, progress_bar) as advance:
            for index, state in pool.results():
                advance(state.error() is not None)
                if not in_order:
                    yield state
                    pool.consumed()
                    continue
                finished[index] = state
                while turn in finished:
                    yield finished.pop(turn)
                    pool.consumed()
                    turn += 1
    finally:
        pool.stop()


class _Pool(Generic[ItemT]):
    """Threads that take items one after another. They are daemons, so that a program that is stuck
    in code of its own cannot keep Python from exiting."""

    def __init__(
        self, items: Iterator[ItemT], start: Start[ItemT], threads: int, ahead: int
    ) -> None:
        self._items = enumerate(items)
        self._start = start
        self._room = threading.Semaphore(ahead)
        self._lock = threading.Lock()
        self._stopped = False
        self._active: dict[int, Run] = {}
        # (index, state); an exception of the iterable; None when a thread leaves
        self._results: queue.SimpleQueue[tuple[int, State] | Exception | None] = queue.SimpleQueue()
        self._threads = threads
        for _ in range(threads):
            threading.Thread(target=self._work, name="phloem-batch", daemon=True).start()

    def results(self) -> Iterator[tuple[int, State]]:
        """Finished states as they complete, until every thread has left."""
        running = self._threads
        while running:
            result = self._results.get()
            if result is None:
                running -= 1
            elif isinstance(result, Exception):
                raise result
            else:
                yield result

    def consumed(self) -> None:
        """The consumer is done with one state: one more item may be taken."""
        self._room.release()

    def stop(self) -> None:
        """Take no more items and cancel what runs."""
        with self._lock:
            self._stopped = True
            active = list(self._active.values())
        for run in active:
            run.cancel()
        self._room.release()  # each thread that leaves lets the next one through

    def _work(self) -> None:
        try:
            while (taken := self._take()) is not None:
                index, state, work = taken
                work()
                with self._lock:
                    del self._active[index]
                self._results.put((index, state))
        except Exception as exc:
            self._results.put(exc)
        finally:
            self._room.release()
            self._results.put(None)

    def _take(self) -> tuple[int, State, Callable[[], None]] | None:
        self._room.acquire()
        with self._lock:
            if self._stopped:
                return None
            try:
                index, item = next(self._items)
            except StopIteration:
                self._stopped = True
                return None
            state, run, work = self._start(item)
            self._active[index] = run
        return index, state, work

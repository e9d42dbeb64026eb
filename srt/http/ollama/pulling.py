"""`POST /api/pull`: the store's pull in a thread of its own, and its progress as lines.

    pulling manifest → pulling FILE, with bytes, again and again → verifying sha256 digest →
    writing manifest → success

A client that leaves stops the pull with the next bytes; what came is kept for the next one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Final

from msgspec import UNSET

from phloem.srt.errors import Unavailable
from phloem.srt.http.ollama.replies import PullLine
from phloem.srt.hub import CATALOGUE, huggingface, list_models, pull

CHECKING: Final = "checking "
"""How the store's bars begin that are about hashing."""


class _Mailbox:
    """A `Progress` in the pulling thread, whose lines the event loop takes. A bar that went on
    since is one line, however slow the reader is."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._lock = threading.Lock()
        self._lines: list[PullLine] = []
        self.digest_of: Callable[[str], str | None] = lambda _label: None
        """Label of a bar → the digest of what comes in."""
        self.left = False
        """Nobody reads any more: the next word from the thread ends its work."""
        self.fetched = False

    def say(self, text: str) -> None:
        self._put(PullLine(status=text))

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        if label.startswith(CHECKING):
            self._put(PullLine(status="verifying sha256 digest"))
            yield lambda _done: self._go_on()
            return
        self.fetched = True
        digest = self.digest_of(label) or UNSET
        status = f"pulling {label}"

        def done(count: int) -> None:
            self._put(PullLine(status=status, digest=digest, total=total, completed=count))

        done(0)
        yield done
        done(total)

    async def lines(self) -> list[PullLine]:
        """What came since the last call; waits for something."""
        await self._arrived.wait()
        self._arrived.clear()
        return self.rest()

    def rest(self) -> list[PullLine]:
        with self._lock:
            taken, self._lines = self._lines, []
        return taken

    def wake(self) -> None:
        self._arrived.set()

    def _go_on(self) -> None:
        if self.left:
            raise Unavailable("the client that asked for the pull has left")

    def _put(self, line: PullLine) -> None:
        self._go_on()
        with self._lock:
            if self._lines and self._lines[-1].status == line.status:
                self._lines.pop()
            self._lines.append(line)
        self._loop.call_soon_threadsafe(self._arrived.set)


async def pulling(name: str) -> AsyncGenerator[PullLine, None]:
    """Pull a model; the lines of its progress, the last of which is `success`. Raises what
    `phloem.srt.hub.pull` raises."""
    mailbox = _Mailbox()
    yield PullLine(status="pulling manifest")

    def work() -> None:
        mailbox.digest_of = _digests(name)
        pull(name, mailbox)

    executor = ThreadPoolExecutor(1, thread_name_prefix="phloem pull")
    task = asyncio.get_running_loop().run_in_executor(executor, work)
    task.add_done_callback(lambda _task: mailbox.wake())
    try:
        while not task.done():
            for line in await mailbox.lines():
                yield line
        for line in mailbox.rest():
            yield line
        await task
    finally:
        mailbox.left = True
        task.add_done_callback(_noticed)
        executor.shutdown(wait=False)
    if mailbox.fetched:
        yield PullLine(status="writing manifest")
    yield PullLine(status="success")


def _noticed(task: asyncio.Future[None]) -> None:
    """Nobody waits for the outcome; asyncio is not to complain of that."""
    if not task.cancelled():
        task.exception()


def _digests(name: str) -> Callable[[str], str | None]:
    """Label of a bar → the digest of the file that comes in. Asks the hub for a model that the
    store does not have. Raises as `pull` does."""
    entry = CATALOGUE.get(name)
    if entry is not None:
        return lambda _label: f"sha256:{entry.sha256}"
    repo, _, _ = name.partition(":")
    if "/" not in repo or any(model.name == name for model in list_models()):
        return lambda _label: None
    files = huggingface.inspect(repo).files.values()
    known = {
        PurePosixPath(file.name).name: f"sha256:{file.sha256}" if file.sha256 else f"git:{file.tag}"
        for file in files
    }
    return known.get

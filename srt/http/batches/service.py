"""The files and batches of one server: opened and closed with the application, and run by it.

data_dir/batches/
  state.sqlite   what there is
  files/ID       contents, input and output alike
  uploads/       what is still coming in
  servers/       a lock for each server that lives on the folder
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, TypeVar

from aiohttp import web

from phloem.srt.errors import InvalidRequest, PhloemError, Unavailable
from phloem.srt.http.batches import store
from phloem.srt.http.batches.job import Job, Workplace
from phloem.srt.http.batches.protocol import Status
from phloem.srt.http.batches.slots import Slots
from phloem.srt.http.batches.store import Paths, Task
from phloem.srt.http.claim import Claim
from phloem.srt.http.context import SERVING
from phloem.srt.tenants import OPERATOR, Tenant

logger = logging.getLogger(__name__)

DEFAULT_RUNNING: Final = 8
"""Sequences of batches that run at once where the options do not say."""

ACTIVE_PER_TENANT: Final = 4
"""Batches of one tenant that are worked on at once; more wait, and nobody waits for a tenant with
many."""

BUSY_TICK_S: Final = 1.0
"""How often the tables are looked at while there is a batch: another server may have cancelled
it."""

IDLE_TICK_S: Final = 5.0

RETRY_S: Final = 30.0
"""Before a batch is taken up again whose files could not be written."""

T = TypeVar("T")


class Batches:
    """What the routes use, and the runner behind it."""

    def __init__(self, app: web.Application) -> None:
        self._app = app
        self._ctx = app[SERVING]
        self._temporary: Path | None = None
        self._place: Workplace | None = None
        self._claim: Claim | None = None
        self._runner: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._not_before: dict[str, float] = {}  # by batch, in monotonic seconds
        self._others: set[str] = set()

    # ------------------------------------------------------------------ life

    async def open(self) -> None:
        """Take up what is in the folder. Where it cannot be used, the log says so, and the routes
        answer that they are not available: the server is of use without them."""
        data_dir = self._ctx.data_dir
        try:
            if data_dir is None:
                data_dir = self._temporary = Path(
                    await asyncio.to_thread(tempfile.mkdtemp, prefix="phloem-")
                )
            await self._open(Paths(data_dir / "batches"))
        except (OSError, sqlite3.Error) as error:
            logger.warning("Files and batches are not served: %s: %s", data_dir, error)

    async def _open(self, paths: Paths) -> None:
        await asyncio.to_thread(paths.make)
        database = store.open_database(paths.database)
        claim = Claim(paths.claims)
        loop = asyncio.get_running_loop()

        def sweep() -> None:
            known = asyncio.run_coroutine_threadsafe(database.run(store.known_files), loop)
            _sweep(paths, known.result())

        try:
            await database.__aenter__()
            await asyncio.to_thread(claim.open, sweep)
        except BaseException:
            await database.close()
            await asyncio.to_thread(claim.close)
            raise
        self._claim = claim
        limit = self._ctx.options.batch_running or DEFAULT_RUNNING
        self._place = Workplace(app=self._app, database=database, paths=paths, slots=Slots(limit))
        self._runner = asyncio.create_task(self._run(), name="phloem batches")

    async def stop(self) -> None:
        """Stop running batches; requests that are under way are made again by whoever opens the
        folder next. May be called again."""
        if self._runner is None:
            return
        tasks = [self._runner, *(task for _, task in self._jobs.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._jobs.clear()
        self._runner = None

    async def close(self) -> None:
        await self.stop()
        if self._place is not None and self._claim is not None:
            await self._place.database.close()
            await asyncio.to_thread(self._claim.close)
            self._place = None
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)

    # ------------------------------------------------------------------ for the routes

    @property
    def place(self) -> Workplace:
        """Raises `Unavailable`."""
        if self._place is None:
            raise Unavailable("Files and batches are not served; the server's log has the reason.")
        return self._place

    async def query(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` returns, in one transaction."""
        return await self.place.database.run(work)

    @property
    def server(self) -> str:
        """The name under which this server owns batches."""
        assert self._claim is not None, "not open"
        return self._claim.id

    def wake(self) -> None:
        """Something has changed in the tables."""
        self._wake.set()

    # ------------------------------------------------------------------ the runner

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._tick()
            except Exception:
                logger.exception("The batches could not be looked at")
            pause = BUSY_TICK_S if self._jobs or self._not_before else IDLE_TICK_S
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause)

    async def _tick(self) -> None:
        """Take over what has no server, start what may start, cancel what is to be, and delete
        what is past its time."""
        await self._meet_others()
        with suppress(PhloemError):  # there is no model yet
            model = self._ctx.engine.card.name
            taken = await self.query(lambda c: store.adopt(c, self.server, model, self._others))
            if taken:
                logger.info("%d batches of a server that is gone go on here", taken)
        tasks = await self.query(lambda c: store.tasks(c, self.server))
        active = Counter(task.tenant for task in tasks if task.id in self._jobs)
        now = time.monotonic()
        unfinished = {task.id for task in tasks}
        self._not_before = {k: at for k, at in self._not_before.items() if k in unfinished}
        for task in tasks:
            if task.id in self._jobs:
                if task.status is Status.CANCELLING:
                    self._jobs[task.id][0].cancel()
            elif now >= self._not_before.get(task.id, now) and (
                active[task.tenant] < ACTIVE_PER_TENANT or _ends_at_once(task)
            ):
                active[task.tenant] += self._start(task)
        for file_id in await self.query(store.delete_expired_files):
            await asyncio.to_thread(self.place.paths.file(file_id).unlink, missing_ok=True)

    def _start(self, task: Task) -> bool:
        """Work on a batch; False when its tenant is not known (any more)."""
        try:
            tenant = self._tenant(task.tenant)
        except InvalidRequest:
            return False
        job = Job(self.place, task, tenant)
        running = asyncio.create_task(self._guarded(job, task.id), name=task.id)
        self._jobs[task.id] = job, running
        return True

    async def _guarded(self, job: Job, batch_id: str) -> None:
        try:
            await job.run()
        except Exception:
            logger.exception("%s has to be taken up again in %g s", batch_id, RETRY_S)
            self._not_before[batch_id] = time.monotonic() + RETRY_S
        finally:
            self._jobs.pop(batch_id, None)
            self.wake()

    def _tenant(self, name: str) -> Tenant:
        return self._ctx.keyring.acting_for(OPERATOR, name)

    async def _meet_others(self) -> None:
        assert self._claim is not None, "not open"
        others = await asyncio.to_thread(self._claim.others)
        if others - self._others:
            count = await self.query(lambda c: store.unfinished_of(c, others))
            logger.warning(
                "%d other servers keep their files and batches in %s, too; the %d batches that"
                " are theirs to run are left to them",
                len(others),
                self.place.paths.root,
                count,
            )
        self._others = others


BATCHES: Final = web.AppKey("batches", Batches)


def install(app: web.Application) -> None:
    """Let files and batches live with `app`, which has its `Serving` already."""
    app[BATCHES] = Batches(app)
    app.cleanup_ctx.append(_life)
    app.on_shutdown.append(_stop)


def batches_of(request: web.Request) -> Batches:
    return request.config_dict[BATCHES]


async def _life(app: web.Application) -> AsyncIterator[None]:
    await app[BATCHES].open()
    yield
    await app[BATCHES].close()


async def _stop(app: web.Application) -> None:
    await app[BATCHES].stop()


def _ends_at_once(task: Task) -> bool:
    return task.status is Status.CANCELLING or task.expires_at <= time.time()


def _sweep(paths: Paths, known: set[str]) -> None:
    """Remove what was left by servers that were killed while they received or deleted a file."""
    for path in (*paths.uploads.iterdir(), *paths.files.iterdir()):
        if path.name not in known:
            path.unlink(missing_ok=True)

"""One batch, from where it stands to its end: its file checked, its requests made, its files
closed."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
from aiohttp import web

from phloem.srt.database import Database
from phloem.srt.errors import InternalError, PhloemError, QueueFull, RateLimited, Unavailable
from phloem.srt.http.batches import store
from phloem.srt.http.batches.endpoints import ENDPOINTS, Work
from phloem.srt.http.batches.journal import Journal, record_id
from phloem.srt.http.batches.lines import InputCheck, InputFile, Line, read_line
from phloem.srt.http.batches.protocol import (
    InputLine,
    LineError,
    LineResponse,
    OutputLine,
    Status,
)
from phloem.srt.http.batches.slots import Slots
from phloem.srt.http.batches.store import Paths, Task
from phloem.srt.http.context import SERVING
from phloem.srt.http.errors import REQUEST_ID, error_body, shape_of
from phloem.srt.tenants import Tenant

logger = logging.getLogger(__name__)

SLICE: Final = 256
"""Lines that are read in one go where nothing is computed in between."""

PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Before a request is made again that the server had no room for, or was not up for; the last one
for all that follow."""

MAX_DEATHS: Final = 3
"""A request that ran when the backend died is made again, but not for ever: it may be the cause."""

DEADLINE_MARGIN_S: Final = 60.0
"""A request must not end of its own when the batch expires: then it says that the batch did."""

_UNMADE: Final = {
    Status.EXPIRED: LineError(
        code="batch_expired",
        message="The completion window was over before this request was done.",
    ),
    Status.CANCELLED: LineError(
        code="batch_cancelled", message="The batch was cancelled before this request was done."
    ),
}

_LATER: Final = (QueueFull, RateLimited, Unavailable)

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """What all batches of a server share."""

    app: web.Application
    database: Database
    paths: Paths
    slots: Slots


class Job:
    """Runs one batch, which nobody else runs. When `run` is left early, by a cancellation or an
    error, a new one goes on where this one stopped."""

    def __init__(self, workplace: Workplace, task: Task, tenant: Tenant) -> None:
        self._at = workplace
        self._task = task
        self._tenant = tenant
        self._input = workplace.paths.file(task.input_file_id)
        self._limit = workplace.app[SERVING].options.max_body_bytes
        self._cancelled = asyncio.Event()
        self._journal: Journal | None = None
        if task.status is Status.CANCELLING:
            self._cancelled.set()

    def cancel(self) -> None:
        """End it: requests that run are aborted. The batch is in the status `cancelling`."""
        self._cancelled.set()

    async def run(self) -> None:
        """Raises `OSError` and `sqlite3.Error` when the folder fails; nothing is lost by that."""
        try:
            ending = await self._work_until_ended()
            if ending is not Status.FAILED:
                await self._finish(ending)
        finally:
            if self._journal is not None:
                with suppress(OSError):
                    await _uninterrupted(self._journal.close())

    async def _work_until_ended(self) -> Status:
        """The work, unless it is cancelled or late; what ended it."""
        if self._cancelled.is_set():
            return Status.CANCELLED
        left = self._task.expires_at - time.time()
        if left <= 0:
            return Status.EXPIRED
        work = asyncio.ensure_future(self._work())
        cancelled = asyncio.ensure_future(self._cancelled.wait())
        both: tuple[asyncio.Future[Any], ...] = (work, cancelled)
        try:
            await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            return Status.CANCELLED if cancelled.done() else Status.EXPIRED
        finally:
            for one in both:
                one.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _work(self) -> Status:
        if self._task.status is Status.VALIDATING:
            ended = await self._check()
            if ended is not None:
                return ended
        journal = await self._open_journal()
        lines = InputFile(self._input, self._limit)
        try:
            async with asyncio.TaskGroup() as group:
                while (line := await asyncio.to_thread(_undone, lines, journal)) is not None:
                    await self._start(group, journal, line)
        finally:
            lines.close()
        return Status.COMPLETED

    async def _finish(self, ending: Status) -> None:
        """Give what was not made its lines, and the batch its files."""
        run = self._at.database.run
        if ending is Status.COMPLETED and not await run(lambda c: store.finalize(c, self._task.id)):
            ending = Status.CANCELLED
        sizes = (0, 0)
        if self._task.total:
            journal = await self._open_journal()
            if ending is not Status.COMPLETED:
                await self._give_up(journal, _UNMADE[ending])
            sizes = await journal.close()
        await run(lambda c: store.finish(c, self._task.id, ending, sizes))
        for which, file_id in enumerate(self._output_ids()):
            if not sizes[which]:
                self._at.paths.file(file_id).unlink(missing_ok=True)
        logger.info("%s: %s", self._task.id, ending)

    # ------------------------------------------------------------------ its files

    async def _check(self) -> Status | None:
        """Look at every line; what ended the batch by that, if anything."""
        check = InputCheck(self._input, self._task.endpoint, self._limit)
        try:
            while await asyncio.to_thread(check.advance, SLICE):
                pass
        finally:
            check.close()
        run = self._at.database.run
        if check.problems:
            failed = await run(lambda c: store.fail(c, self._task.id, check.problems))
            if failed:
                logger.info("%s: failed, its file is not valid", self._task.id)
            return Status.FAILED if failed else Status.CANCELLED
        if not await run(lambda c: store.begin(c, self._task.id, check.total)):
            return Status.CANCELLED
        self._task = self._task._replace(total=check.total, status=Status.IN_PROGRESS)
        return None

    async def _open_journal(self) -> Journal:
        if self._journal is None:
            output, errors = map(self._at.paths.file, self._output_ids())
            self._journal = Journal(output, errors, self._progress)
            await _uninterrupted(asyncio.to_thread(self._journal.open))
            # The tables may be behind the files, which are what counts.
            await self._progress(self._journal.completed, self._journal.failed)
        return self._journal

    async def _progress(self, completed: int, failed: int) -> None:
        await self._at.database.run(lambda c: store.count(c, self._task.id, completed, failed))

    def _output_ids(self) -> tuple[str, str]:
        return store.output_file_id(self._task.id), store.error_file_id(self._task.id)

    async def _give_up(self, journal: Journal, error: LineError) -> None:
        """A line for each request that has none."""
        with InputFile(self._input, self._limit) as lines:
            while batch := await _uninterrupted(asyncio.to_thread(_some_undone, lines, journal)):
                for line in batch:
                    output = OutputLine(
                        id=record_id(self._task.id, line.index),
                        custom_id=_read(line).custom_id,
                        error=error,
                    )
                    journal.put(line.index, _encoder.encode(output), failed=True)
                await journal.settle()

    # ------------------------------------------------------------------ its requests

    async def _start(self, group: asyncio.TaskGroup, journal: Journal, line: Line) -> None:
        """Make a request, once there is room for it."""
        request = _read(line)
        work = await self._prepared(request)
        sequences = 1 if isinstance(work, PhloemError) else work.sequences
        taken = min(sequences, self._at.slots.limit)
        await self._at.slots.acquire(taken)
        task = group.create_task(self._make(journal, line.index, request, work))
        task.add_done_callback(lambda _: self._at.slots.release(taken))

    async def _make(
        self, journal: Journal, index: int, request: InputLine, work: Work | PhloemError
    ) -> None:
        response = await self._response(request, work)
        output = OutputLine(
            id=record_id(self._task.id, index), custom_id=request.custom_id, response=response
        )
        failed = response.status_code >= 400
        await journal.append(index, _encoder.encode(output), failed=failed)

    async def _response(self, request: InputLine, work: Work | PhloemError) -> LineResponse:
        """The reply to a request, or the error that it ends in: it is made again while that is
        the server's load, its being restarted, or the tenant's quota."""
        health = self._at.app[SERVING].engine.health
        deaths = 0
        for attempt in itertools.count():
            request_id = f"req-{uuid.uuid4().hex}"
            restarts = health().restarts
            if isinstance(work, PhloemError):
                error = work
            else:
                request_id = work.request_id
                REQUEST_ID.set(request_id)
                outcome = await self._guarded(work.run())
                if not isinstance(outcome, PhloemError):
                    return _line_response(200, request_id, outcome)
                error = outcome
            deaths += health().restarts > restarts
            if not isinstance(error, _LATER) or deaths >= MAX_DEATHS:
                break
            pause = PAUSES_S[min(attempt, len(PAUSES_S) - 1)]
            await asyncio.sleep(max(pause, error.retry_after or 0.0))
            work = await self._prepared(request)
        body = error_body(error, shape_of(self._task.endpoint))
        return _line_response(error.status, request_id, body)

    async def _prepared(self, request: InputLine) -> Work | PhloemError:
        deadline = self._task.expires_at - time.time() + DEADLINE_MARGIN_S
        endpoint = ENDPOINTS[self._task.endpoint]
        return await self._guarded(
            endpoint(bytes(request.body), self._at.app, self._tenant, deadline)
        )

    async def _guarded(self, work: Awaitable[T]) -> T | PhloemError:
        """What `work` gives, or the error that a client would be told."""
        try:
            return await work
        except PhloemError as error:
            return error
        except Exception:
            logger.exception("A request of %s failed", self._task.id)
            return InternalError("The server failed; its log has the reason.")


def _line_response(status: int, request_id: str, body: msgspec.Struct) -> LineResponse:
    return LineResponse(
        status_code=status, request_id=request_id, body=msgspec.Raw(_encoder.encode(body))
    )


def _undone(lines: InputFile, journal: Journal) -> Line | None:
    """The next request that has no line yet."""
    return next((line for line in lines if not journal.done(line.index)), None)


def _some_undone(lines: InputFile, journal: Journal) -> list[Line]:
    undone = (line for line in lines if not journal.done(line.index))
    return list(itertools.islice(undone, SLICE))


def _read(line: Line) -> InputLine:
    assert line.text is not None, "a line that was checked is not too long"
    return read_line(line.text)


async def _uninterrupted(work: Awaitable[T]) -> T:
    """What `work` gives. A cancellation waits until it is done: a thread cannot be stopped, and
    what it has opened must be closed."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise

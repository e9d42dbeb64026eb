"""Responses that are made in the background: they go on when their client leaves, and can be
looked at, followed and cancelled from any connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from typing import Final

import msgspec

from phloem.srt.errors import NotFound, QueueFull
from phloem.srt.http.context import Serving
from phloem.srt.http.errors import known_error
from phloem.srt.http.responding import streaming
from phloem.srt.http.responses.asked import Asked
from phloem.srt.http.responses.replies import Event, Response
from phloem.srt.http.responses.store import ResponseStore

MAX_RUNS: Final = 1024
"""Responses that may run in the background at once, of all tenants."""

logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


class Run:
    """One response in the making. With `log`, its events are kept for whoever follows it."""

    def __init__(self, tenant: str, asked: Asked, *, log: bool) -> None:
        self.tenant = tenant
        self.asked = asked
        self.answer = asked.answer()
        self.log: list[bytes] | None = [] if log else None
        self.accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.cancelling = False
        self.ended = False  # nothing more comes of it, though it may still have to be stored
        self._over = False
        self._changed = asyncio.Event()

    @property
    def id(self) -> str:
        return self.answer.response.id

    def publish(self, events: Iterable[Event], *, last: bool = False) -> None:
        """Keep the events, and wake those who follow."""
        for event in events:
            if self.log is not None:
                self.log.append(_encoder.encode(event))
        self._over = last
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The events from number `start` on, as JSON, to the last."""
        assert self.log is not None
        while True:
            while start < len(self.log):
                yield self.log[start]
                start += 1
            if self._over:
                return
            await self._changed.wait()

    async def wait(self) -> None:
        assert self.task is not None
        await asyncio.wait([self.task])


class Runs:
    """All that run. Closing leaves them unfinished: the store says so after the next start."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._runs: dict[tuple[str, str], Run] = {}

    def get(self, tenant: str, id_: str) -> Run | None:
        return self._runs.get((tenant, id_))

    async def start(self, ctx: Serving, run: Run) -> None:
        """Begin `run`; returns when the engine accepted it and the store knows of it. Raises what
        `streaming` raises, and `QueueFull`."""
        if len(self._runs) >= MAX_RUNS:
            raise QueueFull(f"{MAX_RUNS} responses are running in the background.")
        key = run.tenant, run.id
        self._runs[key] = run
        run.publish(run.answer.opening())
        run.task = asyncio.create_task(self._run(ctx, run))
        run.task.add_done_callback(lambda _: self._runs.pop(key, None))
        try:
            await asyncio.shield(run.accepted)
        except asyncio.CancelledError:  # the client left, and nobody knows the id
            await self.cancel(run)
            raise

    async def cancel(self, run: Run) -> Response:
        """End it, and wait until it has ended. What is over already stays as it is."""
        assert run.task is not None
        if not run.ended and not run.cancelling:
            run.cancelling = True
            run.task.cancel()
        await run.wait()
        return run.answer.response

    async def close(self) -> None:
        for run in list(self._runs.values()):
            assert run.task is not None
            run.task.cancel()
            await run.wait()

    async def _run(self, ctx: Serving, run: Run) -> None:
        try:
            await self._generate(ctx, run)
        except asyncio.CancelledError:
            if not run.accepted.done():
                run.accepted.cancel()
                with suppress(NotFound):  # it may just have been written
                    await self._store.delete(run.tenant, run.id)
                return
            if not run.cancelling:
                raise
            run.publish(run.answer.cancelled())
        except Exception as error:
            known = known_error(error, "A response")
            if not run.accepted.done():
                run.accepted.set_exception(known)
                return
            run.answer.failed(known)
        await self._finish(run)

    async def _finish(self, run: Run) -> None:
        """Store it, and only then tell that it is over: whoever hears of it may go on with it."""
        run.ended = True
        last = list(run.answer.closing())
        events = None if run.log is None else [*run.log, *map(_encoder.encode, last)]
        try:
            await self._store.save(run.tenant, run.answer.response, run.asked.sent, events=events)
        except Exception:
            logger.exception("The response %s could not be stored", run.id)
        finally:
            run.publish(last, last=True)

    async def _generate(self, ctx: Serving, run: Run) -> None:
        prepared = run.asked.prepared
        with prepared.paths.translated():
            async with streaming(ctx, prepared.call) as events:
                await self._store.save(run.tenant, run.answer.response, run.asked.sent)
                run.accepted.set_result(None)
                async for index, chunk in events:
                    run.publish(run.answer.frames(index, chunk))

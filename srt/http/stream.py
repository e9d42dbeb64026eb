"""One streamed response: events as they come, comments in silence, an end in good order."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

import msgspec
from aiohttp import web

from phloem.srt.http.errors import known_error
from phloem.srt.http.framing import SSE, Framing


class EventStream:
    """One response of events. Entering it sends the 200; leaving it ends the stream.

    A `PhloemError` raised inside becomes an error frame, since the status is already out. Writing
    waits while the client is slow to read, so a slow reader holds back its own request only.
    """

    def __init__(
        self,
        request: web.Request,
        headers: dict[str, str],
        *,
        keepalive_s: float,
        framing: Framing = SSE,
    ) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": framing.content_type,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._request = request
        self._keepalive_s = keepalive_s
        self._framing = framing
        self._last_write = 0.0
        self._keepalive: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._last_write = asyncio.get_running_loop().time()
        if self._framing.keepalive:
            self._keepalive = asyncio.create_task(self._keep_alive())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if self._keepalive is not None:
            self._keepalive.cancel()
        if exc is not None and not isinstance(exc, Exception):
            return False
        if isinstance(exc, ConnectionResetError):
            return True  # the client is gone: nobody to tell
        try:
            if exc is not None:
                await self.write(self._framing.error(known_error(exc, "A stream")))
            await self.write(self._framing.end)
            await self.response.write_eof()
        except ConnectionResetError:
            return True
        return True

    async def send(self, event: msgspec.Struct) -> None:
        """One event. Raises `ConnectionResetError` when the client is gone."""
        await self.write(self._framing.frame(event))

    async def write(self, frames: bytes) -> None:
        """Frames, of whatever kind, in one write. Raises as `send` does."""
        if frames:
            await self.response.write(frames)
            self._last_write = asyncio.get_running_loop().time()

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - self._last_write
            if silent < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - silent)
                continue
            try:
                await self.write(self._framing.keepalive)
            except ConnectionResetError:
                return

"""Server-sent events: the only place that writes `data:`.

data: {…}⏎⏎     one event          : keep-alive⏎⏎     a comment, after a while of silence
data: [DONE]⏎⏎  always the last frame, also after an error

event: NAME⏎    before the data, where a stream has events of several kinds
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

import msgspec
from aiohttp import web

from phloem.srt.errors import InternalError, PhloemError
from phloem.srt.http.errors import envelope

logger = logging.getLogger(__name__)

CONTENT_TYPE: Final = "text/event-stream; charset=utf-8"
_DONE: Final = b"data: [DONE]\n\n"
_KEEPALIVE: Final = b": keep-alive\n\n"


class EventStream:
    """One response of events. Entering it sends the 200; leaving it ends the stream.

    A `PhloemError` raised inside becomes an error frame, since the status is already out. Writing
    waits while the client is slow to read, so a slow reader holds back its own request only.
    """

    def __init__(
        self, request: web.Request, headers: dict[str, str], *, keepalive_s: float
    ) -> None:
        self.response = web.StreamResponse(
            headers={
                "Content-Type": CONTENT_TYPE,
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
                **headers,
            }
        )
        self._request = request
        self._keepalive_s = keepalive_s
        self._encoder = msgspec.json.Encoder()
        self._last_write = 0.0
        self._keepalive: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.response.prepare(self._request)
        self._last_write = asyncio.get_running_loop().time()
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
                await self.send(envelope(_known(exc)))
            await self._write(_DONE)
            await self.response.write_eof()
        except ConnectionResetError:
            return True
        return True

    async def send(self, event: msgspec.Struct) -> None:
        """One event. Raises `ConnectionResetError` when the client is gone."""
        await self._write(b"data: " + self._encoder.encode(event) + b"\n\n")

    async def send_named(self, events: Iterable[tuple[str, msgspec.Struct]]) -> None:
        """Events with their names, in one write. Raises as `send` does."""
        await self._write(
            b"".join(
                b"event: " + name.encode() + b"\ndata: " + self._encoder.encode(event) + b"\n\n"
                for name, event in events
            )
        )

    async def _write(self, data: bytes) -> None:
        await self.response.write(data)
        self._last_write = asyncio.get_running_loop().time()

    async def _keep_alive(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            silent = loop.time() - self._last_write
            if silent < self._keepalive_s:
                await asyncio.sleep(self._keepalive_s - silent)
                continue
            try:
                await self._write(_KEEPALIVE)
            except ConnectionResetError:
                return


def _known(error: Exception) -> PhloemError:
    if isinstance(error, PhloemError):
        return error
    logger.error("A stream failed", exc_info=error)
    return InternalError("The server failed while answering.")

"""HTTP as every backend over a network uses it: pooled keep-alive connections, timeouts, careful
retries, and cancelling by closing. It knows no API."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypedDict

import aiohttp
import msgspec
from yarl import URL

from phloem.lang.backend.retry import backoff
from phloem.lang.background import background
from phloem.lang.errors import BackendError, BackendUnavailable, RequestRefused, UsageError
from phloem.lang.recording.spans import note_retry

REQUEST_ID_HEADER = "X-Request-Id"

_BUSY = (429, 503, 529)  # 529 is Anthropic's "overloaded"
_CONNECT_RETRIES = 3
_LONGEST_WAIT_S = 60.0  # whatever a server's Retry-After says
_LONGEST_LINE = 1 << 20  # an event longer than this is an error
_REASON_CHARS = 500
_TELL_S = 0.5  # for what is told while the connections are to close

Body = dict[str, Any]


class TransportOptions(TypedDict, total=False):
    """How to talk to a server.

    `read_timeout_s` bounds the silence while waiting for bytes: of a whole reply that is its whole
    time. A busy server (429, 503) is asked again up to `retries` times, as late as it says.
    """

    connect_timeout_s: float
    """For opening a connection (10)."""
    read_timeout_s: float
    """Of silence while waiting for bytes (600); of a whole reply that is its whole time."""
    max_connections: int
    """Open at a time (256); further requests wait for one."""
    retries: int
    """How often a busy server (429, 503) is asked again, as late as it says (8)."""


class Transport:
    """Requests to one server, over one set of connections that lives on one event loop.

    A server that is busy, or that nobody answers for yet, is asked again with growing delays; a
    connection that is lost before the first byte of a reply, once at once. All tries of a request
    have one X-Request-Id. Once a byte of the reply is here, nothing is ever sent twice. Leaving a
    request early closes its connection, by which the server cancels it.
    """

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str] | None = None,
        *,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 600.0,
        max_connections: int = 256,
        retries: int = 8,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {base_url!r}")
        self.base_url = base_url.rstrip("/")
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        self._max_connections = max_connections
        self._retries = retries
        self._urls: dict[str, URL] = {}
        self._ids: Iterator[str] = iter(())  # of the session's requests
        self._session: aiohttp.ClientSession | None = None
        self._telling: set[asyncio.Task[Any]] = set()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def get(self, path: str) -> bytes:
        async with self.request("GET", path, None) as response:
            return await response.read()

    async def post(self, path: str, body: Body) -> bytes:
        async with self.request("POST", path, body) as response:
            return await response.read()

    async def tell(self, path: str) -> int:
        """Post once, with nothing in it: the reply's status. Does nothing, and is 0, where nothing
        has been sent before, or `aclose` was called; that waits a moment for what is told."""
        if self._session is None:
            return 0
        task = asyncio.current_task()
        assert task is not None
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)
        url = URL(self.base_url + path)  # of which there are many, so none is kept
        async with self._open().post(url, headers={REQUEST_ID_HEADER: next(self._ids)}) as response:
            await response.read()
            return response.status

    async def events(self, path: str, body: Body) -> AsyncGenerator[bytes, None]:
        """The data of each server-sent event of the reply, to its end: the caller tells by the
        last one whether the reply is whole."""
        async with self.request("POST", path, body) as response:
            rest = b""
            async for chunk in response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:"):
                        yield line[5:].strip()
                if len(rest) > _LONGEST_LINE:
                    raise BackendError(f"an event is longer than {_LONGEST_LINE} bytes")

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Body | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response of status 200. Everything that goes wrong on the wire, here or while the
        caller reads, becomes a `BackendError`."""
        data = None if body is None else msgspec.json.encode(body)
        try:
            response = await self._send(method, path, data)
            async with response:
                yield response
        except TimeoutError as exc:  # aiohttp's timeouts are TimeoutErrors and ClientErrors
            raise BackendUnavailable(f"{self.base_url}{path}: timed out: {exc}") from exc
        except (aiohttp.ClientError, OSError) as exc:
            raise BackendUnavailable(f"{self.base_url}{path}: {type(exc).__name__}: {exc}") from exc

    async def aclose(self) -> None:
        """Close all connections; calls under way fail. The next request opens new ones. May be
        awaited on any event loop."""
        background.forget(self.aclose)
        loop = self._loop
        if self._session is None or loop is None or not loop.is_running():
            self._session = None
        elif loop is asyncio.get_running_loop():
            await self._close()
        else:
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), loop))

    def close(self) -> None:
        """`aclose` for programs without an event loop."""
        if self._session is not None:
            asyncio.run(self.aclose())

    async def _close(self) -> None:
        if self._telling:
            await asyncio.wait(self._telling, timeout=_TELL_S)
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _send(self, method: str, path: str, data: bytes | None) -> aiohttp.ClientResponse:
        """Send until the server takes the request."""
        url = self._urls.get(path) or self._urls.setdefault(path, URL(self.base_url + path))
        self._open()  # which begins the ids
        headers = {REQUEST_ID_HEADER: next(self._ids)}
        busy, absent = backoff(self._retries), backoff(_CONNECT_RETRIES)
        fresh = False  # whether a lost connection would be a new one's
        while True:
            try:
                response = await self._open().request(method, url, data=data, headers=headers)
            except aiohttp.ClientConnectorError:  # nothing was sent
                delay = next(absent, None)
                if delay is None:
                    raise
                await asyncio.sleep(delay)
                continue
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError):
                # most likely an idle connection that the server closed as we used it
                if fresh:
                    raise
                fresh = True
                note_retry()
                continue
            if response.status == 200:
                return response
            async with response:
                reason = await response.read()
            delay = next(busy, None) if response.status in _BUSY else None
            if delay is None:
                raise error_of(response.status, reason)
            await asyncio.sleep(max(delay, _retry_after(response)))

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is not None and self._loop is not loop:
            raise UsageError(f"the backend of {self.base_url} is in use on another event loop")
        if self._session is None:
            self._loop = loop
            prefix = os.urandom(8).hex()
            self._ids = (f"{prefix}-{number}" for number in itertools.count())
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                headers=self._headers,
            )
            if background.is_current_thread:
                background.at_exit(self.aclose)
        return self._session


class _ErrorBody(msgspec.Struct):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _Envelope(msgspec.Struct):
    error: _ErrorBody | str


_envelope = msgspec.json.Decoder(_Envelope)


def error_parts(data: bytes) -> tuple[str, str | None, str | None]:
    """Message, field and code of an error body, of whatever shape it is."""
    try:
        error = _envelope.decode(data).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        text = data.decode(errors="replace").strip()
        return text[:_REASON_CHARS] or "no reason given", None, None
    if isinstance(error, str):
        return error, None, None
    return error.message, error.param, None if error.code is None else str(error.code)


def error_of(status: int, body: bytes) -> BackendError:
    """The error that a response of another status than 200 is."""
    message, param, code = error_parts(body)
    cls = BackendError
    if status in _BUSY or status == 504:
        cls = BackendUnavailable
    elif 400 <= status < 500:
        cls = RequestRefused
    return cls(message, status=status, param=param, code=code)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds, 0 when the server does not say, or says a date."""
    try:
        seconds = float(response.headers.get("Retry-After", "0"))
    except ValueError:
        return 0.0
    return max(0.0, min(seconds, _LONGEST_WAIT_S))  # so that NaN is 0

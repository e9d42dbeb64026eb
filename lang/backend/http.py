"""A Phloem server over HTTP: pooled keep-alive connections, timeouts, careful retries."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

import aiohttp
import msgspec

from phloem.lang.backend import wire
from phloem.lang.backend.base import BackendInfo, Call, Delta, Prompt
from phloem.lang.backend.retry import backoff
from phloem.lang.background import background
from phloem.lang.choices import ChoiceScore, boundary
from phloem.lang.errors import BackendError, BackendUnavailable, RequestRefused, UsageError

_BUSY = (429, 503)
_LONGEST_LINE = 1 << 20  # an event longer than this is an error


class HttpBackend:
    """Programs against the server at `base_url` (with or without `/v1`).

    `read_timeout_s` bounds the silence while waiting for bytes: of a whole reply that is its whole
    time. A busy server (429, 503) is asked again up to `retries` times, as late as it says; once
    the first byte of an answer is here, nothing is ever sent twice. Leaving a call early closes
    its connection, by which the server cancels it.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        connect_timeout_s: float = 10.0,
        read_timeout_s: float = 600.0,
        max_connections: int = 256,
        retries: int = 8,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url must begin with http:// or https://, not {base_url!r}")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._api_key = api_key
        self._info = None if model is None else BackendInfo(model)
        self._timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=connect_timeout_s, sock_read=read_timeout_s
        )
        self._max_connections = max_connections
        self._retries = retries
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def __repr__(self) -> str:
        return f"HttpBackend({self.base_url!r})"

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        path, body = wire.call_request(call, (await self.info()).model)
        async with self._request("POST", path, body) as response:
            if call.stream:
                async for data in _events(response):
                    for delta in wire.reply_deltas(data):
                        yield delta
            else:
                for delta in wire.reply_deltas(await response.read()):
                    yield delta

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        model = (await self.info()).model
        bodies = [wire.tokenize_request(prompt, model, choice) for choice in ("", *choices)]
        replies = await asyncio.gather(*(self._post("/tokenize", body) for body in bodies))
        prompt_ids, *full = map(wire.token_ids, replies)
        start = boundary(prompt_ids, full)
        reply = await self._post("/generate", wire.score_request(full, start))
        return wire.choice_scores(reply, [len(ids) - start for ids in full])

    async def info(self) -> BackendInfo:
        if self._info is None:
            self._info = await self.first_model()
        return self._info

    async def first_model(self) -> BackendInfo:
        """Asks the server anew, whatever `model` was given."""
        async with self._request("GET", "/v1/models", None) as response:
            return BackendInfo(*wire.first_model(await response.read()))

    async def aclose(self) -> None:
        session, self._session = self._session, None
        background.forget(self.aclose)
        if session is not None:
            await session.close()

    def close(self) -> None:
        """`aclose` for programs without an event loop."""
        loop = self._loop
        if self._session is not None and loop is not None and not loop.is_closed():
            asyncio.run_coroutine_threadsafe(self.aclose(), loop).result()

    # ------------------------------------------------------------------ transport

    async def _post(self, path: str, body: wire.Body) -> bytes:
        async with self._request("POST", path, body) as response:
            return await response.read()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, body: wire.Body | None
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

    async def _send(self, method: str, path: str, data: bytes | None) -> aiohttp.ClientResponse:
        """Send until the server takes the request."""
        delays = backoff(self._retries)
        fresh = False  # whether a lost connection would be a new one's
        while True:
            try:
                response = await self._open().request(method, self.base_url + path, data=data)
            except aiohttp.ServerDisconnectedError:
                # an idle connection that the server closed as we used it; no byte has come
                if fresh:
                    raise
                fresh = True
                continue
            if response.status == 200:
                return response
            async with response:
                reason = await response.read()
            delay = next(delays, None) if response.status in _BUSY else None
            if delay is None:
                raise _error(response.status, reason)
            await asyncio.sleep(max(delay, _retry_after(response)))

    def _open(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is not None and self._loop is not loop:
            raise UsageError(f"{self!r} is in use on another event loop")
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._api_key is not None:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._loop = loop
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=self._max_connections),
                timeout=self._timeout,
                headers=headers,
                read_bufsize=_LONGEST_LINE,
            )
            if loop is background.loop:
                background.at_exit(self.aclose)
        return self._session


def connect(base_url: str, *, api_key: str | None = None, model: str | None = None) -> HttpBackend:
    """A backend for the server at `base_url`, after asking it what it serves.

    Raises `BackendUnavailable` when nobody answers there.
    """
    backend = HttpBackend(base_url, api_key=api_key, model=model)
    asyncio.run_coroutine_threadsafe(backend.first_model(), background.loop).result()
    return backend


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Data of the server-sent events up to `[DONE]`; raises when the stream breaks off first."""
    done = False
    async for line in response.content:  # to the end, so that the connection can be kept
        if line.startswith(b"data:") and not done:
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
            else:
                yield data
    if not done:
        raise BackendUnavailable("the stream broke off before its end")


def _error(status: int, body: bytes) -> BackendError:
    message, param, code = wire.error_parts(body)
    cls = BackendError
    if status in _BUSY or status == 504:
        cls = BackendUnavailable
    elif 400 <= status < 500:
        cls = RequestRefused
    return cls(message, status=status, param=param, code=code)


def _retry_after(response: aiohttp.ClientResponse) -> float:
    """Seconds, 0 when the server does not say (or says a date, which no Phloem server does)."""
    try:
        return min(max(float(response.headers.get("Retry-After", "0")), 0.0), 60.0)
    except ValueError:
        return 0.0

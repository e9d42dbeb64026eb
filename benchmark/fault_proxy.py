"""A proxy that does to a client what networks and busy servers do, at random from a seed.

    python benchmark/fault_proxy.py --to http://127.0.0.1:30000 --rate 0.2 --seed 7

A request meets at most one fault. Most are over at once; `silent` is one that only the client's
own patience ends, so its read timeout should be short.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal, get_args

import aiohttp
from aiohttp import web

Fault = Literal[
    "dropped",  # the connection is gone before the server has seen the request
    "lost",  # … before the reply has begun
    "truncated",  # … in the middle of the reply
    "delayed",  # the reply comes late
    "silent",  # no reply comes
    "busy",  # 429, to be asked again soon
    "unavailable",  # 503
    "failed",  # 500, and the reason is a page for people
    "garbled",  # 200, and the reply is no JSON
]
FAULTS: tuple[Fault, ...] = get_args(Fault)

_FORWARDED = ("Content-Type", "Authorization", "X-Request-Id", "x-api-key", "anthropic-version")


class FaultProxy:
    """Between a client and the server at `upstream`. `seen` counts requests by what they met
    (None: nothing), `most_open` is the most connections that clients had at once."""

    def __init__(
        self,
        upstream: str,
        *,
        seed: int = 0,
        rate: float = 0.3,
        faults: tuple[Fault, ...] = FAULTS,
        most_delay_s: float = 0.02,
    ) -> None:
        self._upstream = upstream.rstrip("/")
        self._random = random.Random(seed)
        self._rate = rate
        self._faults = faults
        self._most_delay_s = most_delay_s
        self._runner: web.AppRunner | None = None
        self.seen: Counter[Fault | None] = Counter()
        self.most_open = 0

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        """Serves on the loopback interface; gives the URL for clients."""
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None)
        ) as self._session:
            await self._runner.setup()
            try:
                site = web.TCPSite(self._runner, "127.0.0.1", port)
                await site.start()
                yield f"http://127.0.0.1:{self._runner.addresses[0][1]}"
            finally:
                await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        assert self._runner is not None
        assert self._runner.server is not None
        self.most_open = max(self.most_open, len(self._runner.server.connections))
        struck = self._random.random() < self._rate
        fault = self._random.choice(self._faults) if struck else None
        self.seen[fault] += 1
        body = await request.read()
        match fault:
            case "dropped":
                return _cut(request)
            case "silent":
                await asyncio.sleep(3600)
            case "busy":
                return web.Response(status=429, text="{}", headers={"Retry-After": "0.001"})
            case "unavailable":
                return web.Response(status=503, text="no")
            case "failed":
                return web.Response(status=500, text="<html>oops</html>")
            case "garbled":
                return web.Response(text='{"choices": [{"index"')
            case "delayed":
                await asyncio.sleep(self._random.uniform(0.0, self._most_delay_s))
        return await self._forward(request, body, fault)

    async def _forward(
        self, request: web.Request, body: bytes, fault: Fault | None
    ) -> web.StreamResponse:
        headers = {name: request.headers[name] for name in _FORWARDED if name in request.headers}
        url = self._upstream + request.rel_url.raw_path_qs
        async with self._session.request(request.method, url, data=body, headers=headers) as reply:
            if fault == "lost":
                return _cut(request)
            response = web.StreamResponse(status=reply.status)
            response.content_type = reply.content_type
            response.content_length = reply.content_length
            await response.prepare(request)
            async for chunk in reply.content.iter_any():
                if fault == "truncated":
                    await response.write(chunk[: self._random.randrange(len(chunk))])
                    return _cut(request)
                await response.write(chunk)
        await response.write_eof()
        return response


def _cut(request: web.Request) -> web.Response:
    """Reset the connection; the response that is returned goes nowhere."""
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def _serve(proxy: FaultProxy, port: int) -> None:
    async with proxy.running(port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", required=True, metavar="URL", help="the server")
    parser.add_argument("--port", type=int, default=0, help="where to listen; 0 takes a free one")
    parser.add_argument("--rate", type=float, default=0.3, help="share of requests with a fault")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    proxy = FaultProxy(asked.to, seed=asked.seed, rate=asked.rate)
    asyncio.run(_serve(proxy, asked.port))


if __name__ == "__main__":
    main()

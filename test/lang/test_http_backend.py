"""The HTTP backend's transport: what goes wrong on the wire, and what is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import phloem
from phloem.lang.backend.base import Call, TextPrompt
from phloem.lang.backend.http import HttpBackend
from phloem.lang.sampling import Sampling

pytestmark = pytest.mark.timeout(30)

ANSWER = {"choices": [{"text": "hi", "finish_reason": "stop"}]}


async def ask(backend: HttpBackend, *, stream: bool = False) -> str:
    call = Call(TextPrompt("p"), Sampling(), stream=stream)
    return "".join([delta.text async for delta in backend.generate(call)])


async def test_nobody_there() -> None:
    async with TestServer(web.Application()) as server:
        url = str(server.make_url("/"))
    backend = HttpBackend(url)
    with pytest.raises(phloem.BackendUnavailable, match="Connect"):
        await ask(backend)
    await backend.aclose()
    with pytest.raises(phloem.BackendUnavailable):
        await asyncio.to_thread(phloem.connect, url)
    with pytest.raises(ValueError, match="http://"):
        HttpBackend("localhost:30000")


Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def server_of(handler: Handler, **options: Any) -> AsyncIterator[HttpBackend]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server:
        backend = HttpBackend(str(server.make_url("/")), model="m", **options)
        yield backend
        await backend.aclose()


@pytest.mark.parametrize(
    ("status", "body", "error", "reason"),
    [
        (200, b"[1]", phloem.BackendError, "not what it should be"),
        (200, b"\xff", phloem.BackendError, "not what it should be"),
        (200, b'{"choices": [{"finish_reason": "abort"}]}', phloem.BackendError, "abort"),
        (200, b'{"error": {"message": "late"}}', phloem.BackendError, "late"),
        (400, b'{"error": "plain"}', phloem.RequestRefused, "plain"),
        (401, b"", phloem.RequestRefused, "no reason given"),
        (404, b"<html>", phloem.RequestRefused, "<html>"),
        (500, b'{"error": {"message": "oops", "code": 500}}', phloem.BackendError, "oops"),
        (504, b"{}", phloem.BackendUnavailable, "504"),
    ],
)
async def test_replies_of_every_kind(
    status: int, body: bytes, error: type[Exception], reason: str
) -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body)

    async with server_of(handler) as backend:
        with pytest.raises(error, match=reason):
            await ask(backend)


async def test_headers_and_timeouts() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization", ""))
        await asyncio.sleep(10)
        return web.Response()

    async with server_of(handler, api_key="key", read_timeout_s=0.05) as backend:
        with pytest.raises(phloem.BackendUnavailable, match="timed out"):
            await ask(backend)
    assert seen == ["Bearer key"]  # sent once: a request that was taken is not sent again


async def test_a_stream_that_breaks_off_is_an_error() -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'data: {"choices": [{"text": "hi"}]}\n\n')
        return response

    async with server_of(handler) as backend:
        with pytest.raises(phloem.BackendUnavailable, match="broke off"):
            await ask(backend, stream=True)


async def test_a_busy_server_is_asked_as_often_as_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.lang.backend.retry._FIRST_S", 0.001)
    asked = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=503, text="starting", headers={"Retry-After": "soon"})

    async with server_of(handler, retries=3) as backend:
        with pytest.raises(phloem.BackendUnavailable, match="starting"):
            await ask(backend)
    assert asked == 4


async def test_a_lost_idle_connection_is_replaced_once() -> None:
    asked = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        if asked == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(ANSWER)

    async with server_of(handler) as backend:
        assert await ask(backend) == "hi"
    assert asked == 2


async def test_connections_are_kept() -> None:
    ports: set[object] = set()

    async def handler(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        ports.add(request.transport.get_extra_info("peername"))
        if not (await request.json()).get("stream"):
            return web.json_response(ANSWER)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b": ping\n\n")
        await response.write(b'data: {"choices": [{"text": "hi", "finish_reason": "stop"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    async with server_of(handler) as backend:
        for i in range(10):
            assert await ask(backend, stream=i % 2 == 0) == "hi"
    assert len(ports) == 1


async def test_one_loop_at_a_time() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async with server_of(handler) as backend:
        await backend.first_model()
        with pytest.raises(phloem.UsageError, match="another event loop"):
            await asyncio.to_thread(asyncio.run, backend.first_model())

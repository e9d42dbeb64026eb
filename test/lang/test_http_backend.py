"""The HTTP backend's transport: what goes wrong on the wire, and what is sent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import phloem
from phloem.lang.backend.base import Call, ChatPrompt, Message, TextPrompt
from phloem.lang.backend.http import HttpBackend
from phloem.lang.background import background
from phloem.lang.choices import ChoicesMethod
from phloem.lang.sampling import Sampling

pytestmark = pytest.mark.timeout(30)

ANSWER = {"choices": [{"text": "hi", "finish_reason": "stop"}]}


async def ask(backend: HttpBackend, *, stream: bool = False) -> str:
    call = Call(TextPrompt("p"), Sampling(), stream=stream)
    return "".join([delta.text async for delta in backend.generate(call)])


async def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.lang.backend.retry._FIRST_S", 0.001)
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


async def test_each_request_has_an_id_that_no_other_has() -> None:
    """Nor one of connections that were opened before, or by a process that was forked off."""
    ids: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        ids.append(request.headers["X-Request-Id"])
        return web.json_response(ANSWER)

    async with server_of(handler) as backend:
        for _ in range(2):
            await asyncio.gather(*(ask(backend) for _ in range(3)))
            await backend.aclose()
    assert len(set(ids)) == 6
    assert len({one.rpartition("-")[0] for one in ids}) == 2


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


async def test_closing_from_anywhere() -> None:
    async def handler(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async with server_of(handler) as backend:
        await asyncio.to_thread(phloem.connect, backend.base_url)
        await backend.first_model()
        await asyncio.to_thread(backend.close)
        backend.close()  # nothing is open: nothing to wait for
        assert (await backend.first_model()).model == "m"  # opens anew
        elsewhere = phloem.HttpBackend(backend.base_url, model="m")
        await asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(elsewhere.first_model(), background.loop)
        )
        await elsewhere.aclose()


SCORES = {
    "index": 1,
    "choices": [
        {"tokens": [t], "logprobs": [v], "value": v} for t, v in (("a", -2.0), ("b", -1.0))
    ],
    "usage": {"prompt_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}},
}


@pytest.mark.parametrize("method", ChoicesMethod)
async def test_a_select_is_one_round_trip(method: ChoicesMethod) -> None:
    bodies: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        assert request.path == "/v1/score"
        bodies.append(await request.json())
        return web.json_response(SCORES)

    async with server_of(handler) as backend:
        chat = ChatPrompt((Message("user", "q"),), "So")
        for prompt in (TextPrompt("p"), chat):
            selected = await backend.select(prompt, ["a", "b"], method)
            assert (selected.index, selected.values) == (1, (-2.0, -1.0))
            assert selected.usage.cached_tokens == 4
    spelt = method.value.removesuffix("_likelihood_normalized").removesuffix("_token_selection")
    asked = {"model": "m", "choices": ["a", "b"]}
    asked["normalization"] = "token" if spelt == "token_length_normalized" else spelt
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "So"}]
    assert bodies == [
        asked | {"prompt": "p"},
        asked | {"messages": messages, "continue_final_message": True},
    ]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (200, {"index": 2, "choices": SCORES["choices"]}, phloem.BackendError),
        (200, {"index": 0, "choices": []}, phloem.BackendError),
        (404, {"error": {"message": "no m", "param": "model"}}, phloem.RequestRefused),
        (
            400,
            {"error": {"message": "no", "param": "choices[0]", "code": "x"}},
            phloem.RequestRefused,
        ),
        (400, {"error": {"message": "no", "param": "prompt", "code": "invalid_value"}}, ValueError),
    ],
)
async def test_scores_that_do_not_come(status: int, body: Any, error: type[Exception]) -> None:
    asked: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.json_response(body, status=status)

    async with server_of(handler) as backend:
        for _ in range(2):
            with pytest.raises(error):
                await backend.score(TextPrompt("p"), ["a", "b"])
    assert asked == ["/v1/score"] * 2


async def test_an_event_without_an_end_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phloem.lang.backend.http_transport._LONGEST_LINE", 1000)

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b"data: " + b"x" * 500)
        return response

    async with server_of(handler) as backend:
        with pytest.raises(phloem.BackendError, match="longer than 1000 bytes"):
            await ask(backend, stream=True)

"""Over a network that fails: every call ends, in the right value or in an error, and leaves nothing
behind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fault_proxy import FAULTS, FaultProxy

import phloem
from phloem.lang.backend import http_transport, retry
from phloem.lang.backend.anthropic import AnthropicBackend
from phloem.lang.backend.base import Backend, Call, ChatPrompt, Message
from phloem.lang.backend.http import HttpBackend
from phloem.lang.backend.openai import OpenAIBackend
from phloem.lang.background import background
from phloem.lang.sampling import Sampling

pytestmark = pytest.mark.timeout(60)

CONNECTIONS = 8
LINGERING = 2 * CONNECTIONS  # a server may notice that one was closed after the next was opened
LIMITS: dict[str, Any] = {"max_connections": CONNECTIONS, "read_timeout_s": 0.3, "retries": 3}


class Upstream:
    """A server that says what it is told. `hang` in a message has it say nothing."""

    def __init__(self) -> None:
        self.working = 0
        self.left = 0
        self.ids: list[str] = []
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_post("/v1/chat/completions", self.chat)
        self.app.router.add_post("/v1/messages", self.messages)
        self.app.router.add_post("/v1/score", self.score)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]})

    async def said(self, request: web.Request) -> tuple[dict[str, Any], str]:
        self.ids.append(request.headers["X-Request-Id"])
        body = await request.json()
        text = body["messages"][-1]["content"]
        self.working += 1
        try:
            await asyncio.sleep(3600 if text == "hang" else 0)
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.working -= 1
        return body, f"<{text}>"

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body, text = await self.said(request)
        if not body.get("stream"):
            choice = {"message": {"content": text}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice]})
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {"content": letter}}]} for letter in text
        ]
        events.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        return await self.stream(request, [*map(json.dumps, events), "[DONE]"])

    async def messages(self, request: web.Request) -> web.StreamResponse:
        body, text = await self.said(request)
        if not body.get("stream"):
            content = [{"type": "text", "text": text}]
            return web.json_response({"content": content, "stop_reason": "end_turn"})
        events: list[dict[str, Any]] = [
            {"type": "content_block_delta", "delta": {"type": "text_delta", "text": letter}}
            for letter in text
        ]
        events.append({"type": "message_delta", "delta": {"stop_reason": "end_turn"}})
        events.append({"type": "message_stop"})
        return await self.stream(request, [json.dumps(event) for event in events])

    async def stream(self, request: web.Request, events: list[str]) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {event}\n\n".encode())
            await asyncio.sleep(0)
        return response

    async def score(self, request: web.Request) -> web.Response:
        body, _ = await self.said(request)
        choices = [
            {"tokens": [text], "logprobs": [-1.0], "value": -1.0} for text in body["choices"]
        ]
        return web.json_response({"index": 0, "choices": choices})


@pytest.fixture
async def upstream() -> Upstream:
    return Upstream()


@pytest.fixture
async def url(upstream: Upstream, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    monkeypatch.setattr(retry, "_FIRST_S", 0.001)
    monkeypatch.setattr(http_transport, "_LONGEST_WAIT_S", 0.01)
    async with TestServer(upstream.app, handler_cancellation=True) as server:
        yield str(server.make_url("")).rstrip("/")


def backend_of(kind: str, url: str) -> Backend:
    if kind == "anthropic":
        return AnthropicBackend("m", base_url=url, **LIMITS)
    return OpenAIBackend(url, **LIMITS) if kind == "openai" else HttpBackend(url, **LIMITS)


def call_of(text: str, *, stream: bool) -> Call:
    prompt = ChatPrompt((Message("user", text),))
    return Call(prompt, Sampling(max_tokens=9), name="x", stream=stream)


async def outcome(backend: Backend, i: int) -> str | phloem.BackendError:
    """What becomes of call number `i`: some are watched, some choose."""
    call = call_of(str(i), stream=i % 2 == 0)
    try:
        if i % 5 == 0 and isinstance(backend, HttpBackend):
            scores = await backend.score(call.prompt, ["a", "b"])
            return f"<{i}>" if len(scores) == 2 else "wrong"
        return "".join([delta.text async for delta in backend.generate(call)])
    except phloem.BackendError as error:
        return error


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (the server is not to know that it is watched)
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("kind", ["phloem", "openai", "anthropic"])
@pytest.mark.parametrize("seed", range(3))
async def test_every_call_ends_in_its_value_or_in_an_error(
    upstream: Upstream, url: str, kind: str, seed: int
) -> None:
    proxy = FaultProxy(url, seed=seed)
    async with proxy.running() as proxied:
        backend = backend_of(kind, proxied)
        outcomes = await asyncio.gather(*(outcome(backend, i) for i in range(150)))
        await backend.aclose()
    values = [(i, text) for i, text in enumerate(outcomes) if isinstance(text, str)]
    assert [text for _, text in values] == [f"<{i}>" for i, _ in values]
    assert 60 < len(values) < 150
    assert proxy.most_open <= LINGERING
    assert len(proxy.seen) > len(FAULTS) / 2
    assert upstream.working == 0


async def test_what_is_asked_again_until_it_works(upstream: Upstream, url: str) -> None:
    proxy = FaultProxy(url, rate=1.0, faults=("delayed", "busy", "dropped"))
    async with proxy.running() as proxied:
        backend = HttpBackend(proxied, **{**LIMITS, "retries": 100})
        calls = (outcome(backend, i) for i in range(10))
        errors = [one for one in await asyncio.gather(*calls) if not isinstance(one, str)]
        await backend.aclose()
    # a request that is dropped twice is given up; a busy server is not
    assert all(isinstance(error, phloem.BackendUnavailable) for error in errors)
    assert not any("429" in str(error) for error in errors)


async def test_all_tries_of_a_request_have_one_id(upstream: Upstream, url: str) -> None:
    proxy = FaultProxy(url, rate=0.6, faults=("lost",), seed=1)
    async with proxy.running() as proxied:
        backend = HttpBackend(proxied, **LIMITS)
        for i in range(1, 5):
            await outcome(backend, i)
        await backend.aclose()
    tries = [upstream.ids.count(one) for one in dict.fromkeys(upstream.ids)]
    assert sum(tries) == len(upstream.ids)
    assert max(tries) == 2
    assert len(tries) == 4


@pytest.mark.parametrize("kind", ["phloem", "openai", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_reaches_the_server(
    upstream: Upstream, url: str, kind: str, stream: bool
) -> None:
    async with FaultProxy(url, rate=0.0).running() as proxied:
        backend = backend_of(kind, proxied)

        async def hang() -> None:
            async for _ in backend.generate(call_of("hang", stream=stream)):
                pass

        tasks = [asyncio.create_task(hang()) for _ in range(3)]
        await until(lambda: upstream.working == 3)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: upstream.left == 3)
        assert await outcome(backend, 1) == "<1>"
        await backend.aclose()
    assert upstream.working == 0


@phloem.function
def several(s: phloem.State, i: int) -> None:
    s += phloem.user(f"{i}")
    forks = s.fork(2)
    forks += phloem.assistant(phloem.gen("x", max_tokens=9))
    forks.join()
    s += phloem.assistant("; ".join(s["x"]))
    s += phloem.user("last")
    s += phloem.assistant(phloem.gen("y", max_tokens=9))


async def test_every_program_of_a_batch_ends(url: str) -> None:
    proxy = FaultProxy(url, seed=5, rate=0.1)
    async with proxy.running() as proxied:
        backend = HttpBackend(proxied, **LIMITS)
        items = [{"i": i} for i in range(150)]
        states = await asyncio.to_thread(several.run_batch, items, backend=backend, concurrency=16)
        await backend.aclose()
    ended = 0
    causes = []
    for i, state in enumerate(states):
        try:
            values = (state["x"], state["y"])
        except phloem.GenerationError as error:
            causes.append(error.cause)
        else:
            assert values == ([f"<{i}>"] * 2, "<last>")
            ended += 1
    assert all(isinstance(cause, phloem.BackendError) for cause in causes)
    assert 30 < ended < 150
    assert proxy.most_open <= LINGERING
    assert len(asyncio.all_tasks(background.loop)) <= CONNECTIONS  # keep-alive, nothing else


def test_nobody_waits_for_a_dead_server(free_port: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "_FIRST_S", 0.001)
    backend = HttpBackend(f"http://127.0.0.1:{free_port()}", model="m")
    states = several.run_batch([{"i": i} for i in range(40)], backend=backend)
    for state in states:
        with pytest.raises(phloem.GenerationError, match="BackendUnavailable"):
            state["x"]
    backend.close()

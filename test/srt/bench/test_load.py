"""The client against a scripted server: streaming, order, concurrency, and what goes wrong."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from phloem.srt.bench.load import ChatClient, Run, run_workload
from phloem.srt.bench.prefix import CannotTokenize, server_tokenizer
from phloem.srt.bench.report import summarise
from phloem.srt.bench.workloads import ORDER_SCHEMA, Turn, Workload


@dataclass
class ScriptedServer:
    """Answers every chat with `pieces`; keeps the bodies and the peak of requests at a time."""

    pieces: list[str] = field(default_factory=lambda: ["one", " two"])
    usage: bool = True
    done: bool = True
    status: int = 200
    stream_error: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    peak: int = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        if self.status != 200:
            return web.Response(status=self.status, text="no")
        self.running += 1
        self.peak = max(self.peak, self.running)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in self._events():
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
            await asyncio.sleep(0)
        if self.done:
            await response.write(b": a comment\n\ndata: [DONE]\n\n")
        self.running -= 1
        return response

    def _events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = [{"choices": [{"delta": {"role": "assistant"}}]}]
        events += [{"choices": [{"delta": {"content": piece}}]} for piece in self.pieces]
        if self.stream_error:
            return [*events, {"error": {"message": "died"}}]
        events.append({"choices": [{"delta": {}, "finish_reason": "length"}]})
        if self.usage:
            usage: dict[str, Any] = {"prompt_tokens": 12, "completion_tokens": len(self.pieces)}
            usage["prompt_tokens_details"] = {"cached_tokens": 5}
            events.append({"choices": [], "usage": usage})
        return events

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "messages" not in body:
            return web.Response(status=400)
        text = "".join(message["content"] for message in body["messages"])
        return web.json_response({"tokens": [ord(c) for c in text]})


@asynccontextmanager
async def serving(
    scripted: ScriptedServer, *, with_tokenize: bool = True
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", scripted.chat)
    if with_tokenize:
        app.router.add_post("/tokenize", scripted.tokenize)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        yield session, str(server.make_url("/"))


def make_workload(*turns: Turn, concurrency: int = 4) -> Workload:
    return Workload(name="w", title="", concurrency=concurrency, turns=turns)


async def run(scripted: ScriptedServer, workload: Workload, *, ignore_eos: bool = True) -> Run:
    async with serving(scripted) as (session, url):
        return await run_workload(ChatClient(session, url, "m", ignore_eos=ignore_eos), workload)


async def test_a_call_keeps_text_times_and_usage() -> None:
    result = await run(ScriptedServer(), make_workload(Turn(user="hello", max_tokens=2)))
    (call,) = result.calls
    assert call.error is None
    assert (call.text, call.finish_reason) == ("one two", "length")
    assert (call.prompt_tokens, call.completion_tokens, call.cached_tokens) == (12, 2, 5)
    assert len(call.pieces) == 2
    assert call.start <= call.pieces[0] <= call.pieces[1] <= call.end
    assert summarise(result, server="s").computed_tokens == 7


async def test_what_is_asked() -> None:
    scripted = ScriptedServer()
    free = Turn(user="free", system="be kind", max_tokens=7)
    bound = Turn(user="bound", max_tokens=8, schema=ORDER_SCHEMA)
    await run(scripted, make_workload(free, bound, concurrency=1))
    first, second = scripted.bodies
    assert first["messages"] == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "free"},
    ]
    assert (first["max_tokens"], first["ignore_eos"], first["temperature"]) == (7, True, 0)
    assert first["stream_options"] == {"include_usage": True}
    assert second["response_format"]["json_schema"]["schema"] == ORDER_SCHEMA
    assert "ignore_eos" not in second


async def test_ignore_eos_can_be_left_out() -> None:
    scripted = ScriptedServer()
    await run(scripted, make_workload(Turn(user="a", max_tokens=1)), ignore_eos=False)
    assert "ignore_eos" not in scripted.bodies[0]


async def test_later_turns_have_the_answers_before_them() -> None:
    scripted = ScriptedServer()
    branches = tuple(Turn(user=f"branch {i}", max_tokens=1) for i in range(3))
    await run(scripted, make_workload(Turn(user="root", max_tokens=1, then=branches)))
    assert [len(body["messages"]) for body in scripted.bodies] == [1, 3, 3, 3]
    assert scripted.bodies[1]["messages"][:2] == [
        {"role": "user", "content": "root"},
        {"role": "assistant", "content": "one two"},
    ]


async def test_concurrency_is_a_bound() -> None:
    scripted = ScriptedServer()
    turns = [Turn(user=str(i), max_tokens=1) for i in range(20)]
    result = await run(scripted, make_workload(*turns, concurrency=3))
    assert scripted.peak == 3
    assert len(result.calls) == 20


@pytest.mark.parametrize(
    ("scripted", "reason"),
    [
        (ScriptedServer(status=429), "HTTP 429: no"),
        (ScriptedServer(stream_error=True), "error in the stream"),
        (ScriptedServer(done=False), "without [DONE]"),
        (ScriptedServer(usage=False), "no usage"),
    ],
)
async def test_failures_are_told(scripted: ScriptedServer, reason: str) -> None:
    following = Turn(user="then", max_tokens=1)
    turn = Turn(user="a", max_tokens=1, then=(following,))
    result = await run(scripted, make_workload(turn))
    assert reason in (result.calls[0].error or "")
    assert result.calls[1].error == "the call before it failed"
    assert len(scripted.bodies) == 1


async def test_a_server_that_is_not_there() -> None:
    async with aiohttp.ClientSession() as session:
        client = ChatClient(session, "http://127.0.0.1:9", "m")
        result = await run_workload(client, make_workload(Turn(user="a", max_tokens=1)))
    assert "ClientConnectorError" in (result.calls[0].error or "")


async def test_the_servers_tokenizer() -> None:
    messages = [{"role": "user", "content": "ab"}]
    async with serving(ScriptedServer()) as (session, url):
        assert await server_tokenizer(session, url, "m")(messages, True) == [97, 98]
    async with serving(ScriptedServer(), with_tokenize=False) as (session, url):
        with pytest.raises(CannotTokenize, match="HTTP 404"):
            await server_tokenizer(session, url, "m")(messages, True)

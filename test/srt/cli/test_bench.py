"""`phloem bench` against a scripted server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from phloem.srt.bench import WORKLOADS
from phloem.srt.cli.bench import WORKLOAD_NAMES


@dataclass
class FakeServer:
    """An OpenAI-compatible server whose every answer is `text`."""

    text: str = "some words"
    status: int = 200
    url: str = ""
    keys: set[str | None] = field(default_factory=set)

    async def models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization"))
        return web.json_response({"data": [{"id": "scripted"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        assert (await request.json())["model"] == "scripted"
        response = web.StreamResponse(status=self.status)
        await response.prepare(request)
        usage = {"prompt_tokens": 30, "completion_tokens": 2, "prompt_tokens_details": None}
        for event in (
            {"choices": [{"index": 0, "delta": {"content": self.text}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ):
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    app = web.Application()
    app.add_routes(
        [web.get("/v1/models", fake.models), web.post("/v1/chat/completions", fake.chat)]
    )
    runner = web.AppRunner(app)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield fake
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_names_in_the_help_are_the_workloads() -> None:
    assert set(WORKLOAD_NAMES) == set(WORKLOADS)


def test_table_and_file_have_the_figures(phloem: Any, server: FakeServer, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    result = phloem(
        "bench", "single", "--base-url", server.url, "--json", str(path), "--api-key", "k"
    )
    assert result.code == 0
    assert "single" in result.out
    assert "scripted" in result.out
    (run,) = json.loads(path.read_text())["runs"]
    assert (run["requests"], run["errors"], run["output_tokens"]) == (4, 0, 8)
    assert run["minimum_tokens"] is None  # this server does not tokenise
    assert server.keys == {"Bearer k"}


def test_failed_requests_end_with_1_and_their_reason(phloem: Any, server: FakeServer) -> None:
    server.status = 500
    result = phloem("bench", "single", "--base-url", server.url)
    assert result.code == 1
    assert "single: HTTP 500" in result.err


def test_answer_that_breaks_its_schema_ends_with_1(phloem: Any, server: FakeServer) -> None:
    server.text = "{}"
    assert phloem("bench", "json", "--base-url", server.url).code == 1


def test_unknown_workload_is_a_usage_error(phloem: Any) -> None:
    result = phloem("bench", "singel")
    assert result.code == 2
    assert "batch16" in result.err


def test_server_that_is_not_there_is_named(phloem: Any) -> None:
    result = phloem("bench", "single", "--base-url", "http://127.0.0.1:9")
    assert result.code == 1
    assert "http://127.0.0.1:9/v1/models cannot be reached" in result.err

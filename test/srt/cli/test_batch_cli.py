"""`phloem batch` against a server that is a script: lines, results, retries, going on."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from phloem.srt.cli import batch_run

CHAT = "/v1/chat/completions"


@dataclass
class Scripted:
    """Answers with what `reply` makes of a path and a body."""

    url: str = ""
    reply: Callable[[str, dict[str, Any]], tuple[int, Any]] = lambda path, body: (200, {"ok": body})
    asked: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)
    running: int = 0
    most: int = 0

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.path, body))
        self.keys.add(request.headers.get("Authorization", ""))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.002)
        self.running -= 1
        status, said = self.reply(request.path, body)
        text = said if isinstance(said, str) else json.dumps(said, indent=2)
        return web.Response(status=status, text=text, headers={"X-Request-Id": "req-1"})


@pytest.fixture
def server() -> Iterator[Scripted]:
    scripted = Scripted()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_route("POST", "/{path:.*}", scripted.handle)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        scripted.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    yield scripted
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_run, "PAUSES_S", (0.001,))


def line(name: str, **given: Any) -> dict[str, Any]:
    body = {"messages": [], "n": name}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body, **given}


@dataclass
class Files:
    lines: Path
    output: Path

    def write(self, *lines: Any) -> None:
        texts = (one if isinstance(one, str) else json.dumps(one) for one in lines)
        self.lines.write_text("\n".join(texts), encoding="utf-8")

    def results(self) -> dict[str, dict[str, Any]]:
        found = [json.loads(one) for one in self.output.read_text().splitlines()]
        assert max(Counter(one["custom_id"] for one in found).values(), default=1) == 1
        return {one["custom_id"]: one for one in found}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


@pytest.fixture
def batch(phloem: Any, files: Files, server: Scripted) -> Callable[..., Any]:
    def call(*flags: str) -> Any:
        return phloem(
            "batch", str(files.lines), "-o", str(files.output), "--base-url", server.url, *flags
        )

    return call


def test_results_are_those_of_openai(batch: Any, files: Files, server: Scripted) -> None:
    files.write(*(line(f"r{i}") for i in range(50)))
    result = batch("--concurrency", "4", "--api-key", "secret")
    assert (result.code, result.out) == (0, "")
    assert f"phloem: 50 requests: 50 answered, 0 failed; see {files.output}" in result.err
    found = files.results()
    assert found["r7"].pop("id").startswith("batch_req_")
    assert found["r7"] == {
        "custom_id": "r7",
        "response": {
            "status_code": 200,
            "request_id": "req-1",
            "body": {"ok": {"messages": [], "n": "r7"}},
        },
        "error": None,
    }
    assert len(found) == 50
    assert 1 < server.most <= 4
    assert server.keys == {"Bearer secret"}


def test_bare_bodies_find_their_route(batch: Any, files: Files, server: Scripted) -> None:
    files.write({"messages": []}, "", {"prompt": "p"}, {"input": "i", "custom_id": "mine"})
    assert batch().code == 0
    assert dict(server.asked) == {
        CHAT: {"messages": []},
        "/v1/completions": {"prompt": "p"},
        "/v1/responses": {"input": "i"},
    }
    assert set(files.results()) == {"line-1", "line-3", "mine"}
    server.asked.clear()
    files.output.unlink()
    assert batch("--endpoint", "/v1/embeddings").code == 0
    assert {path for path, _ in server.asked} == {"/v1/embeddings"}


def test_every_fault_is_in_the_results(batch: Any, files: Files, server: Scripted) -> None:
    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("n") == "refused":
            return 400, {"error": {"message": "no such thing", "code": "x"}}
        return (500, "<html>") if body.get("n") == "page" else (200, {})

    server.reply = reply
    faults = {
        "nonsense": "invalid_json_line",
        "[1]": "invalid_json_line",
        '{"other": 1}': "invalid_request",
        json.dumps(line("m", method="GET")): "invalid_request",
        json.dumps(line("u", url="v1")): "invalid_request",
        json.dumps(line("s", body={"stream": True})): "invalid_request",
        json.dumps(line("")): "invalid_request",
        '{"url": "/x", "body": {}}': "invalid_request",
        '{"custom_id": 3, "url": "/x", "body": {}}': "invalid_request",
    }
    files.write(*faults, line("good"), line("refused"), line("page"))
    result = batch()
    assert result.code == 1
    assert "12 requests: 1 answered, 11 failed" in result.err
    found = files.results()
    codes = [one["error"]["code"] for one in found.values() if one["error"]]
    assert Counter(codes) == Counter([*faults.values(), "invalid_reply"])
    refused = found["refused"]["response"]
    assert (refused["status_code"], refused["body"]["error"]["code"]) == (400, "x")
    assert len(server.asked) == 3


def test_a_second_run_makes_only_what_is_left(batch: Any, files: Files, server: Scripted) -> None:
    files.write(*(line(f"r{i}") for i in range(10)))
    assert batch().code == 0
    with files.output.open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_id":"r1')
    server.asked.clear()
    files.write(*(line(f"r{i}") for i in reversed(range(12))))  # in another order, and more
    result = batch()
    assert "12 requests (10 of them before): 12 answered" in result.err
    assert {body["n"] for _, body in server.asked} == {"r10", "r11"}
    assert len(files.results()) == 12


def test_failed_ones_again(batch: Any, files: Files, server: Scripted) -> None:
    files.write(*(line(f"r{i}") for i in range(6)))
    server.reply = lambda path, body: (400 if body["n"] in ("r1", "r4") else 200, {})
    result = batch()
    assert result.code == 1
    assert "--retry-failed" in result.err
    server.asked.clear()
    server.reply = lambda path, body: (200, {})
    assert batch().code == 1  # they have results, which are errors
    assert server.asked == []
    assert batch("--retry-failed").code == 0
    assert {body["n"] for _, body in server.asked} == {"r1", "r4"}
    assert len(files.results()) == 6


def test_a_full_server_is_asked_again(batch: Any, files: Files, server: Scripted) -> None:
    times: Counter[str] = Counter()

    def reply(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        times[body["n"]] += 1
        busy = body["n"] == "never" or times[body["n"]] < 3
        return (429 if busy else 200), {"error": {"message": "full"}} if busy else {}

    server.reply = reply
    files.write(line("r1"), line("never"))
    result = batch("--tries", "4")
    assert result.code == 1
    assert "never: full" in result.err
    assert times == {"r1": 3, "never": 4}
    assert files.results()["never"]["response"]["status_code"] == 429


def test_a_server_that_is_gone_ends_the_batch(phloem: Any, files: Files, free_port: Any) -> None:
    files.write(line("r1"), line("r2"))
    url = f"http://127.0.0.1:{free_port()}"
    result = phloem(
        "batch", str(files.lines), "-o", str(files.output), "--base-url", url, "--tries", "2"
    )
    assert result.code == 1
    assert "cannot be reached" in result.err and "run this again" in result.err
    assert files.results() == {}  # nothing is told of requests that were never made


def test_a_custom_id_twice(batch: Any, files: Files, server: Scripted) -> None:
    files.write(line("a"), line("b"), line("a"))
    result = batch()
    assert result.code == 1
    assert "line 3: 'a' stands before it too" in result.err
    assert len(server.asked) == 2


def test_usage_errors(batch: Any, phloem: Any, files: Files, tmp_path: Path) -> None:
    assert batch().code == 2  # no input
    files.write(line("a"))
    files.output.write_text("my notes\n")
    result = batch()
    assert result.code == 2
    assert "no result of such a run" in result.err
    assert files.output.read_text() == "my notes\n"
    out = str(tmp_path / "o")
    assert phloem("batch", str(files.lines), "-o", out, "--base-url", "localhost").code == 2
    assert phloem("batch", str(files.lines)).code == 2
    assert phloem("batch", str(files.lines), "-o", out, "--concurrency", "0").code == 2

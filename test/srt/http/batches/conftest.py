"""A client of files and batches over the scripted engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from phloem.srt.config import ServerOptions
from phloem.srt.generation import GenerateRequest
from phloem.srt.http.app import create_app, make_runner

CHAT = "/v1/chat/completions"
OVER = {"completed", "failed", "cancelled", "expired"}


class Client:
    """One server and what a test asks of it."""

    @staticmethod
    def line(name: str, **fields: Any) -> dict[str, Any]:
        """A chat as a request of a batch; its only message is its name."""
        body = {"messages": [{"role": "user", "content": name}], **fields}
        return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}

    @staticmethod
    def names(*lines: list[Any]) -> Counter[str]:
        return Counter(line["custom_id"] for some in lines for line in some)

    @staticmethod
    def asked(request: GenerateRequest) -> str:
        """The name of the chat that became `request`."""
        assert isinstance(request.prompt, list)
        return bytes(request.prompt).decode().removeprefix("<user>")

    def __init__(self, runner: web.AppRunner, base: str, session: aiohttp.ClientSession) -> None:
        self.runner = runner
        self.base = base
        self.session = session

    async def ask(
        self, method: str, path: str, body: object = None, *, key: str = "", form: Any = None
    ) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        sent = {"json": body} if body is not None else {"data": form}
        async with self.session.request(method, self.base + path, headers=headers, **sent) as reply:
            raw = await reply.read()
            is_json = reply.content_type == "application/json"
            return reply.status, json.loads(raw) if is_json else raw

    async def upload(self, content: Any, *, key: str = "", **fields: str) -> tuple[int, Any]:
        form = aiohttp.FormData()
        for name, value in {"purpose": "batch", **fields}.items():
            form.add_field(name, value)
        form.add_field("file", content, filename="in.jsonl")
        return await self.ask("POST", "/v1/files", form=form, key=key)

    async def create(
        self, requests: list[Any], *, key: str = "", endpoint: str = CHAT, **fields: Any
    ) -> dict[str, Any]:
        """A batch of requests, or of lines as they are."""
        lines = [line if isinstance(line, str) else json.dumps(line) for line in requests]
        status, file = await self.upload("\n".join(lines).encode(), key=key)
        assert status == 200, file
        body = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": "24h"}
        status, batch = await self.ask("POST", "/v1/batches", {**body, **fields}, key=key)
        assert (status, batch["status"]) == (200, "validating"), batch
        return dict(batch)

    async def batch(self, batch: dict[str, Any], *, key: str = "") -> dict[str, Any]:
        status, found = await self.ask("GET", f"/v1/batches/{batch['id']}", key=key)
        assert status == 200
        return dict(found)

    async def ended(self, batch: dict[str, Any], *, key: str = "") -> dict[str, Any]:
        """Wait until it is over; the test's own timeout is the limit."""
        while True:
            batch = await self.batch(batch, key=key)
            if batch["status"] in OVER:
                return batch
            await asyncio.sleep(0.02)

    async def completed(self, batch: dict[str, Any], count: int) -> None:
        """Wait until so many of its requests are completed."""
        while True:
            if (await self.batch(batch))["request_counts"]["completed"] >= count:
                return
            await asyncio.sleep(0.01)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        status, content = await self.ask("GET", f"/v1/files/{file_id}/content")
        assert status == 200
        assert content.endswith(b"\n")
        return [json.loads(line) for line in content.splitlines()]

    async def results(self, batch: dict[str, Any]) -> tuple[list[Any], list[Any]]:
        """The lines of its output and of its errors."""
        output = await self.lines(batch["output_file_id"])
        errors = await self.lines(batch["error_file_id"])
        counts = {"total": len(output) + len(errors), "completed": len(output)}
        assert batch["request_counts"] == {**counts, "failed": len(errors)}
        return output, errors


Start = Callable[..., Awaitable[Client]]


@pytest.fixture
async def start(engine: Any) -> AsyncIterator[Start]:
    """Start servers; options as keywords, `data_dir` their folder."""
    clients: list[Client] = []

    async def begin(data_dir: Path | None = None, **options: object) -> Client:
        app = create_app(engine, msgspec.convert(options, ServerOptions), data_dir=data_dir)
        runner = make_runner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        clients.append(Client(runner, f"http://{host}:{port}", aiohttp.ClientSession()))
        return clients[-1]

    yield begin
    for client in clients:
        await client.session.close()
        await client.runner.cleanup()


@pytest.fixture
async def client(start: Start) -> Client:
    return await start()


@pytest.fixture
def tenants(tmp_path: Path) -> str:
    path = tmp_path / "tenants.toml"
    keys = {name: hashlib.sha256(f"k-{name}".encode()).hexdigest() for name in ("acme", "beta")}
    path.write_text(
        f'[tenants.acme]\nkey_sha256 = "{keys["acme"]}"\npriority = 5\n'
        f'[tenants.beta]\nkey_sha256 = "{keys["beta"]}"\n'
    )
    return str(path)

"""Limits of connections: how many, how slowly a request may come, how slowly a stream is read."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from phloem.srt.config import ServerOptions
from phloem.srt.generation import Chunk, GenerateRequest
from phloem.srt.http.app import create_app, listen_on, make_runner

HEAD = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = json.dumps({"prompt": "Hi"}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@dataclass
class Peer:
    """One connection to the server, byte by byte."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def pause(self) -> None:
        """Read nothing more of what the server sends."""
        transport = self.writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()

    async def reply(self) -> tuple[int, dict[str, str], bytes]:
        """The next whole reply."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
        return (
            int(head[0].split()[1]),
            headers,
            await self.reader.readexactly(int(headers["content-length"])),
        )

    async def is_closed(self) -> bool:
        return await self.reader.read() == b""


Connect = Callable[[], Awaitable[Peer]]
Listen = Callable[..., Awaitable[Connect]]


@pytest.fixture
async def listen(engine: Any) -> AsyncIterator[Listen]:
    """Start servers as `phloem serve` does; gives what connects to one."""
    stops: list[Callable[[], Awaitable[None]]] = []
    peers: list[Peer] = []

    async def start(**options: object) -> Connect:
        runner = make_runner(create_app(engine, msgspec.convert(options, ServerOptions)))
        await runner.setup()
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        listener = listen_on(runner, bound)
        await listener.start()
        stops.extend([listener.stop, runner.cleanup])

        async def connect() -> Peer:
            reader, writer = await asyncio.open_connection(*bound.getsockname())
            peers.append(Peer(reader, writer))
            return peers[-1]

        return connect

    yield start
    for peer in peers:
        peer.writer.close()
    for stop in stops:
        await stop()


# ----------------------------------------------------------------------- requests that drip in


@pytest.mark.parametrize("sent", [b"G", b"GET / HTTP/1.1\r\nHost: x\r\n", POST[:-2]])
async def test_a_head_that_does_not_come_is_a_408(listen: Listen, sent: bytes) -> None:
    peer = await (await listen(read_timeout=0.2))()
    peer.writer.write(sent)
    status, headers, body = await peer.reply()
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(body)["error"]["code"] == "request_timeout"
    assert await peer.is_closed()


async def test_dripping_does_not_lengthen_the_time(listen: Listen) -> None:
    peer = await (await listen(read_timeout=0.3))()

    async def drip() -> None:
        peer.writer.write(b"GET / HTTP/1.1\r\n")
        for i in range(1000):
            peer.writer.write(b"X-%d: y\r\n" % i)
            await asyncio.sleep(0.05)

    dripping = asyncio.create_task(drip())
    assert (await peer.reply())[0] == 408
    dripping.cancel()


async def test_a_body_that_does_not_come_is_a_408(listen: Listen, engine: Any) -> None:
    peer = await (await listen(read_timeout=0.2))()
    peer.writer.write(POST + BODY[:-1])
    status, headers, body = await peer.reply()
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert "x-request-id" in headers
    assert not engine.requests


async def test_an_upload_may_be_slow_but_not_stand_still(listen: Listen) -> None:
    peer = await (await listen(read_timeout=0.3))()
    part = (
        b"--x\r\nContent-Disposition: form-data; name=purpose\r\n\r\nbatch\r\n"
        b'--x\r\nContent-Disposition: form-data; name=file; filename="a.jsonl"\r\n\r\n'
    )
    end = b"\r\n--x--\r\n"
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary=x\r\n"
        b"Content-Length: %d\r\n\r\n" % (len(part) + 10 + len(end))
    )
    peer.writer.write(head + part)
    for _ in range(10):
        await asyncio.sleep(0.1)  # longer than the limit, all in all
        peer.writer.write(b"\n")
    peer.writer.write(end)
    assert (await peer.reply())[0] == 200
    peer.writer.write(head + part)
    assert await peer.is_closed()


async def test_a_connection_that_waits_between_requests_is_not_slow(listen: Listen) -> None:
    peer = await (await listen(read_timeout=0.1, keep_alive_timeout=30))()
    for _ in range(3):
        await asyncio.sleep(0.15)
        peer.writer.write(HEAD)
        assert (await peer.reply())[0] == 200


async def test_the_rest_of_an_unwanted_body_is_no_slow_head(listen: Listen) -> None:
    """It is refused before its body is there, which then comes, and the next request later."""
    peer = await (await listen(read_timeout=0.1, api_key="k"))()
    peer.writer.write(POST)
    assert (await peer.reply())[0] == 401
    peer.writer.write(BODY)
    await asyncio.sleep(0.2)
    peer.writer.write(HEAD)
    assert (await peer.reply())[0] == 401


async def test_an_idle_connection_is_closed(listen: Listen) -> None:
    connect = await listen(keep_alive_timeout=0.2)
    silent, served = await connect(), await connect()
    served.writer.write(HEAD)
    assert (await served.reply())[0] == 200
    assert await silent.is_closed()
    assert await served.is_closed()


# ----------------------------------------------------------------------- too many


async def test_one_connection_too_many_is_a_503(listen: Listen) -> None:
    connect = await listen(max_connections=2)
    held = [await connect() for _ in range(2)]
    for peer in held:
        peer.writer.write(HEAD)
        assert (await peer.reply())[0] == 200
    for path, inside in (
        (b"/v1/completions", ["error", "code"]),
        (b"/api/chat?x=1", ["error"]),
        (b"/v1/messages", ["error", "type"]),
    ):
        extra = await connect()
        extra.writer.write(HEAD.replace(b"/version", path))
        status, headers, body = await extra.reply()
        assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
        found = json.loads(body)
        for key in inside:
            found = found[key]
        assert found
        assert await extra.is_closed()
    held[0].writer.write(HEAD)
    assert (await held[0].reply())[0] == 200
    held[1].writer.close()
    await held[1].writer.wait_closed()
    await asyncio.sleep(0.05)
    again = await connect()
    again.writer.write(HEAD)
    assert (await again.reply())[0] == 200


# ----------------------------------------------------------------------- readers that do not read


class Endless:
    """An answer without end, and how much of it was taken."""

    def __init__(self) -> None:
        self.pieces = 0
        self.closed = asyncio.Event()

    async def __call__(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        rid = request.rid or ""
        try:
            yield Chunk(rid=rid, prompt_tokens=2)
            while True:
                self.pieces += 1
                yield Chunk(rid=rid, text="x" * 1000, token_ids=[1], completion_tokens=self.pieces)
                await asyncio.sleep(0)
        finally:
            self.closed.set()


async def settled(count: Callable[[], int]) -> int:
    """`count`, once it does not change any more."""
    last = -1
    while last != count():
        last = count()
        await asyncio.sleep(0.2)
    return last


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_that_nobody_reads_holds_itself_back_and_nobody_else(
    listen: Listen, engine: Any, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    connect = await listen()
    endless, short = Endless(), engine.generate

    def generate(request: GenerateRequest) -> AsyncIterator[Chunk]:
        return endless(request) if request.prompt == "endless" else short(request)

    monkeypatch.setattr(engine, "generate", generate)
    body = json.dumps({"prompt": "endless", "stream": True, "n": n}).encode()
    deaf = await connect()
    deaf.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    deaf.pause()
    deaf.writer.write(POST.replace(b"%d" % len(BODY), b"%d" % len(body)) + body)
    taken = await settled(lambda: endless.pieces)
    assert 0 < taken * 1000 < 16 << 20  # the kernel's buffers and ours; without end otherwise
    other = await connect()
    for _ in range(20):
        other.writer.write(POST + BODY)
        assert (await other.reply())[0] == 200
    assert endless.pieces == taken
    deaf.writer.transport.abort()
    await asyncio.wait_for(endless.closed.wait(), 10)


async def test_a_client_that_takes_nothing_is_cut_off(
    listen: Listen, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = await listen(write_timeout=0.3)
    endless = Endless()
    monkeypatch.setattr(engine, "generate", endless)
    body = json.dumps({"prompt": "endless", "stream": True}).encode()
    deaf = await connect()
    deaf.pause()
    deaf.writer.write(POST.replace(b"%d" % len(BODY), b"%d" % len(body)) + body)
    await asyncio.wait_for(endless.closed.wait(), 30)


async def test_a_slow_reader_is_not_cut_off(listen: Listen, engine: Any, script: Any) -> None:
    """It pauses for less than the limit, again and again, and gets everything."""
    connect = await listen(write_timeout=0.5)
    pieces = ["x" * 20_000] * 400  # more than the kernel's buffers hold
    engine.script = lambda request: script(pieces)
    body = json.dumps({"prompt": "Hi", "stream": True, "max_tokens": 500}).encode()
    slow = await connect()
    slow.writer.write(POST.replace(b"%d" % len(BODY), b"%d" % len(body)) + body)
    await slow.reader.readuntil(b"\r\n\r\n")
    got, tail = 0, b""
    while b"[DONE]" not in tail:
        part = await slow.reader.read(1 << 20)
        got, tail = got + len(part), (tail + part)[-100:]
        assert part
        await asyncio.sleep(0.01)
    assert got > 20_000 * len(pieces)


async def test_a_whole_reply_waits_no_longer_than_a_stream(
    listen: Listen, engine: Any, script: Any
) -> None:
    connect = await listen(write_timeout=0.3, max_connections=1)
    engine.script = lambda request: script(["x" * 1_000_000] * 30)
    body = json.dumps({"prompt": "Hi", "max_tokens": 100}).encode()
    deaf = await connect()
    deaf.pause()
    deaf.writer.write(POST.replace(b"%d" % len(BODY), b"%d" % len(body)) + body)
    status = 503
    while status == 503:
        other = await connect()
        other.writer.write(HEAD)
        status = (await other.reply())[0]
        await asyncio.sleep(0.05)
    assert status == 200


# ----------------------------------------------------------------------- what is not HTTP


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",  # a TLS handshake
        b"GET /version HTTP/9\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"GET /version HTTP/1.1\r\nHost: x\r\nX: " + b"a" * 20_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_an_error_like_all_others(listen: Listen, sent: bytes) -> None:
    connect = await listen()
    peer = await connect()
    peer.writer.write(sent)
    status, headers, body = await peer.reply()
    assert headers["content-type"].startswith("application/json")
    assert (status, json.loads(body)["error"]["code"]) == (400, "bad_http")
    assert await peer.is_closed()
    other = await connect()
    other.writer.write(HEAD)
    assert (await other.reply())[0] == 200


# ----------------------------------------------------------------------- what replies say of it


@pytest.mark.parametrize(
    "sent",
    [
        HEAD,
        POST + BODY,
        POST + b"no" * (len(BODY) // 2) + b"x",
        b"GET /nowhere HTTP/1.1\r\nHost: x\r\n\r\n",
        b"DELETE /version HTTP/1.1\r\nHost: x\r\n\r\n",
        b"no HTTP\r\n\r\n",
        b"G",  # and no more: a 408
    ],
)
async def test_replies_name_no_parts_of_the_server(listen: Listen, sent: bytes) -> None:
    peer = await (await listen(read_timeout=0.2))()
    peer.writer.write(sent)
    _, headers, body = await peer.reply()
    assert headers["server"] == "phloem"
    for part in ("python", "aiohttp"):
        assert part not in (str(headers) + body.decode()).lower()


async def test_nor_does_a_stream(api: Any) -> None:
    reply = await api.chat(stream=True)
    assert reply.headers.getall("Server") == ["phloem"]

"""What the HTTP layer adds when many are connected: idle connections and active streams.

    python benchmark/connections.py --idle 1000 --streams 256 --json connections.json

A process serves the application over an engine that only keeps time: every stream gets a token each
`--interval` seconds, `--rows` streams at once, as the rows of a step do, and the moment when it was
due stands in its text. Another process holds the connections and notes when each piece arrives; the
difference is what the layer added: the event loop's queue, encoding, framing, the sockets. Measure
on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import numpy as np
import orjson
import psutil
from common import write_json

from phloem.srt.config import ServerOptions
from phloem.srt.generation import Chunk, Finish, GenerateRequest, Health, ModelCard
from phloem.srt.http.app import create_app, listen_on, make_runner
from phloem.srt.launch import _allow_files
from phloem.srt.messages import FinishReason, StatsSnapshot

STAMP = re.compile(rb'"content":"(\d{10,}) "')
HEAD = "{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
MARGIN_S = 60.0


class Metronome:
    """An engine whose tokens are moments. It has what the measured routes ask of an engine."""

    card = ModelCard(
        name="metronome",
        path="-",
        format="-",
        architecture="-",
        created=0,
        vocab_size=1,
        context_length=1 << 20,
        kv_slots=1 << 20,
        embedding_length=1,
    )
    stats = StatsSnapshot()

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._interval: float = arguments.interval
        self._rows: int = arguments.rows
        self._groups = max(1, -(-arguments.streams // arguments.rows))
        self._streams = 0

    def health(self) -> Health:
        return Health(live=True, ready=True)

    async def render_chat(self, messages: object, **options: object) -> list[int]:
        return [0]

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        rid = request.rid or ""
        loop = asyncio.get_running_loop()
        group = self._streams // self._rows % self._groups
        self._streams += 1
        yield Chunk(rid=rid, prompt_tokens=1)
        tick = loop.time() // self._interval + 2 + group / self._groups
        for count in range(1, (request.sampling.max_tokens or 1) + 1):
            due = (tick + count) * self._interval  # of the clock that time.monotonic_ns reads
            await asyncio.sleep(due - loop.time())
            last = Finish(FinishReason.LENGTH) if count == request.sampling.max_tokens else None
            yield Chunk(
                rid=rid,
                text=f"{due * 1e9:.0f} ",
                token_ids=[0],
                prompt_tokens=1,
                completion_tokens=count,
                finish=last,
            )


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until standard input ends; the first line of output is the port."""
    engine = Metronome(arguments)
    runner = make_runner(create_app(engine, ServerOptions(max_connections=1 << 16)))  # type: ignore[arg-type]
    await runner.setup()
    bound = socket.create_server(("127.0.0.1", 0))
    listener = listen_on(runner, bound)
    await listener.start()
    print(bound.getsockname()[1], flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await listener.stop()
    await runner.cleanup()


class Client(asyncio.Protocol):
    """One connection: what came, and when."""

    def __init__(self) -> None:
        self.parts: list[tuple[int, bytes]] = []
        self.done = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.parts.append((time.monotonic_ns(), data))
        if (b"[DONE]" in data or b'"version"' in data) and not self.done.done():
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionResetError("the server closed a connection"))

    def ask(self, method: str, path: str, body: bytes = b"") -> None:
        head = HEAD.format(method=method, path=path, length=len(body))
        self.transport.write(head.encode() + body)

    def delays_ms(self) -> list[float]:
        """From each moment in the text to its arrival."""
        return [
            (arrived - int(stamp)) / 1e6
            for arrived, data in self.parts
            for stamp in STAMP.findall(data)
        ]


async def connect(port: int, count: int) -> list[Client]:
    """`count` connections, some at a time so that no backlog overflows."""
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    for _ in range(count):
        _, client = await loop.create_connection(Client, "127.0.0.1", port)
        clients.append(client)
    return clients


async def measure(
    port: int, server: psutil.Process, arguments: argparse.Namespace
) -> dict[str, float]:
    """Idle connections first, each of which was served once; then the streams."""
    before = server.memory_info().rss
    idle = await connect(port, arguments.idle)
    for client in idle:
        client.ask("GET", "/version")
        await client.done
    held = server.memory_info().rss
    streams = await connect(port, arguments.streams)
    tokens = max(1, round(arguments.seconds / arguments.interval))
    body = orjson.dumps(
        {
            "messages": [{"role": "user", "content": "Hi"}],
            "stream": True,
            "max_tokens": tokens,
        }
    )
    busy = sum(server.cpu_times()[:2])
    began = time.monotonic()
    for client in streams:
        client.ask("POST", "/v1/chat/completions", body)
    peak = held
    waiting = asyncio.gather(*(client.done for client in streams))
    while not waiting.done():
        peak = max(peak, server.memory_info().rss)
        await asyncio.wait({waiting}, timeout=0.2)
    await waiting
    wall = time.monotonic() - began
    delays = np.array([delay for client in streams for delay in client.delays_ms()])
    assert len(delays) == tokens * arguments.streams, "pieces are missing"
    assert not any(client.transport.is_closing() for client in idle), "idle connections were closed"
    p50, p99, p999 = np.percentile(delays, (50, 99, 99.9))
    cores = (sum(server.cpu_times()[:2]) - busy) / wall
    return {
        "pieces": len(delays),
        "pieces_per_second": len(delays) / wall,
        "added_p50_ms": p50,
        "added_p99_ms": p99,
        "added_p999_ms": p999,
        "added_max_ms": delays.max(),
        "server_cores": cores,
        "server_us_per_piece": cores * wall / len(delays) * 1e6,
        "rss_start_mib": before / 2**20,
        "rss_idle_mib": held / 2**20,
        "rss_peak_mib": peak / 2**20,
        "kib_per_idle_connection": (held - before) / 1024 / max(1, arguments.idle),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--idle", type=int, default=1000, help="keep-alive connections")
    parser.add_argument("--streams", type=int, default=256, help="active streams")
    parser.add_argument("--interval", type=float, default=0.25, help="seconds between tokens")
    parser.add_argument("--rows", type=int, default=32, help="tokens that come at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long streams last")
    parser.add_argument("--json", type=Path, help="file for the figures, beside standard output")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    _allow_files(arguments.idle + arguments.streams)
    if arguments.serve:
        asyncio.run(serve(arguments))
        return
    command = [sys.executable, __file__, *sys.argv[1:], "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdin is not None
        port = int(child.stdout.readline())
        limit = arguments.seconds + MARGIN_S
        work = measure(port, psutil.Process(child.pid), arguments)
        found = asyncio.run(asyncio.wait_for(work, limit))
        child.stdin.close()
    setting = {
        name: getattr(arguments, name)
        for name in ("idle", "streams", "interval", "rows", "seconds")
    }
    result = {"setting": setting, "found": found}
    print(orjson.dumps(result, option=orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY).decode())
    if arguments.json is not None:
        write_json(arguments.json, **result)


if __name__ == "__main__":
    main()

"""What a call costs its client: CPU seconds of this process, against a server that answers at once.

    python benchmark/dsl_cost.py [--calls N] [--json FILE]

The server is a process of its own and computes nothing, so that what is counted is the client's
work only. Each row takes one part more: `transport` sends requests and reads replies, `backend`
makes and reads their JSON, `program` runs them from programs in a batch; `mock` is the same
programs over a backend without a network. CPU time counts, not time of day, but a machine that is
busy otherwise makes it a little longer, too: the least of several rounds is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from common import machine, write_json

import phloem
from phloem.lang.backend.base import Call, ChatPrompt, Message
from phloem.lang.backend.http import HttpBackend
from phloem.lang.backend.http_transport import Transport
from phloem.lang.sampling import Sampling

ROUNDS = 5
IN_FLIGHT = 32
GENS = 4  # of a program
ANSWER = "An answer of some forty characters, or so."

CHOICE = {"index": 0, "message": {"role": "assistant", "content": ANSWER}, "finish_reason": "stop"}
USAGE = {"prompt_tokens": 20, "completion_tokens": 10, "total_tokens": 30}
REPLY = json.dumps(
    {"id": "chatcmpl-0", "object": "chat.completion", "choices": [CHOICE], "usage": USAGE}
).encode()
MODELS = b'{"object": "list", "data": [{"id": "none", "object": "model", "max_model_len": 4096}]}'


class Answering(asyncio.Protocol):
    """HTTP/1.1 as far as one well-behaved client needs it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.seen = b""

    def data_received(self, data: bytes) -> None:
        self.seen += data
        while (end := self.seen.find(b"\r\n\r\n")) >= 0:
            length = re.search(rb"(?i)content-length: *(\d+)", self.seen[:end])
            size = end + 4 + (int(length[1]) if length else 0)
            if len(self.seen) < size:
                return
            body = MODELS if self.seen.startswith(b"GET") else REPLY
            self.seen = self.seen[size:]
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            )
            self.transport.write(head % len(body) + body)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


MESSAGES = (Message("system", "You are brief."), Message("user", "What is there to say?"))
CALL = Call(ChatPrompt(MESSAGES), Sampling(max_tokens=64, temperature=0.0), name="x")


@phloem.function
def several(s: phloem.State) -> None:
    s += phloem.system("You are brief.")
    for turn in range(GENS):
        s += phloem.user("What is there to say?")
        s += phloem.assistant(phloem.gen(f"x{turn}", max_tokens=64, temperature=0.0))


async def backend_call(backend: HttpBackend) -> None:
    async for _ in backend.generate(CALL):
        pass


async def flood(calls: int, call: Callable[[], Awaitable[object]]) -> None:
    """`calls` calls, `IN_FLIGHT` at a time."""
    left = iter(range(calls))

    async def worker() -> None:
        for _ in left:
            await call()

    await asyncio.gather(*(worker() for _ in range(IN_FLIGHT)))


async def measure_async(url: str, calls: int) -> dict[str, float]:
    transport = Transport(url)
    body = {"model": "none", "messages": [{"role": "user", "content": "What is there to say?"}]}
    rows = {"transport": await least(calls, lambda: transport.post("/v1/chat/completions", body))}
    await transport.aclose()
    backend = HttpBackend(url)
    rows["backend"] = await least(calls, lambda: backend_call(backend))
    await backend.aclose()
    return rows


async def least(calls: int, call: Callable[[], Awaitable[object]]) -> float:
    """The fewest CPU seconds a call took in `ROUNDS` rounds."""
    await flood(IN_FLIGHT, call)  # connections and imports
    found = []
    for _ in range(ROUNDS):
        before = time.process_time()
        await flood(calls, call)
        found.append((time.process_time() - before) / calls)
    return min(found)


def measure_programs(backend: phloem.HttpBackend | phloem.MockBackend, calls: int) -> float:
    found = []
    for _ in range(ROUNDS + 1):
        before = time.process_time()
        states = several.run_batch(
            [{}] * (calls // GENS), backend=backend, concurrency=IN_FLIGHT, progress_bar=False
        )
        found.append((time.process_time() - before) / (len(states) * GENS))
        assert all(state.error() is None for state in states)
    return min(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=2000, help="of each round")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
            rows = asyncio.run(measure_async(url, arguments.calls))
            backend = phloem.connect(url)
            rows["program"] = measure_programs(backend, arguments.calls)
            backend.close()
            mock = phloem.MockBackend(lambda call: ANSWER)
            rows["mock"] = measure_programs(mock, arguments.calls)
        finally:
            server.kill()
    figures = {f"{name}_cpu_ms_per_call": round(value * 1e3, 3) for name, value in rows.items()}
    print(json.dumps({"machine": machine(), "calls": arguments.calls, **figures}, indent=2))
    if arguments.json is not None:
        write_json(arguments.json, calls=arguments.calls, **figures)


if __name__ == "__main__":
    main()

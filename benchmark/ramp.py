"""Throughput of a server that is asked for ever more, up to four times what its KV pool holds.

    python benchmark/ramp.py --kv-tokens 4096 --json ramp.json

Closed loop: each client asks again as soon as it has its answer, with a prompt that nobody asked
before. Clients are doubled from stage to stage. A server that preempts well loses little of its
best throughput and fails nobody; both are the exit status.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from itertools import count
from pathlib import Path

import aiohttp
import msgspec
from common import write_json
from own_server import metric, own_server, words_for
from rich.console import Console
from rich.table import Table

from phloem.srt.bench.load import Call, ChatClient
from phloem.srt.bench.report import percentile
from phloem.srt.bench.workloads import TextSource, Turn

OVER_CAPACITY = 4
GOAL = 0.9
GENERATIONS, SETTLE = 4, 0.4
"""How many answers of each client a stage lasts for at least, and the share of it that passes
before it is measured: at first all clients' prompts come at once."""


class Stage(msgspec.Struct, frozen=True, kw_only=True):
    """One number of clients. `capacity` is what they ask for at once over the KV slots there are;
    `tokens_per_s` counts pieces of text that came."""

    clients: int
    capacity: float
    requests: int
    errors: int
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    preemptions: int
    first_error: str | None


class Ramp:
    """Stages on one server."""

    def __init__(
        self, http: aiohttp.ClientSession, url: str, arguments: argparse.Namespace
    ) -> None:
        self._http = http
        self._url = url
        self._arguments = arguments
        self._client = ChatClient(http, url, "model")
        self._text = TextSource(arguments.seed)
        self._numbers = count()
        self._best = 0.0  # tokens a second, of the stages so far

    async def stage(self, clients: int) -> Stage:
        calls: list[Call] = []
        before = await self._preemptions()
        seconds = self._arguments.seconds
        if self._best:
            seconds = max(seconds, GENERATIONS * clients * self._arguments.output / self._best)
        began = time.perf_counter()
        end = began + seconds
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(self._ask_until(end, calls))
        start = began + SETTLE * seconds
        pieces = sum(start <= at < end for call in calls for at in call.pieces)
        self._best = max(self._best, pieces / (end - start))
        failed = [call.error for call in calls if call.error is not None]
        ttft = [1000 * (call.pieces[0] - call.start) for call in calls if call.pieces]
        each = self._arguments.prompt + self._arguments.output
        return Stage(
            clients=clients,
            capacity=clients * each / self._arguments.kv_tokens,
            requests=len(calls),
            errors=len(failed),
            tokens_per_s=pieces / (end - start),
            ttft_p50_ms=percentile(ttft, 50),
            ttft_p99_ms=percentile(ttft, 99),
            preemptions=int(await self._preemptions() - before),
            first_error=failed[0] if failed else None,
        )

    async def _ask_until(self, end: float, calls: list[Call]) -> None:
        while time.perf_counter() < end:
            words = words_for(self._arguments.prompt)
            prompt = f"{next(self._numbers)}: {self._text.words(words)}"
            turn = Turn(user=prompt, max_tokens=self._arguments.output)
            call = Call(turn=turn, messages=[{"role": "user", "content": prompt}])
            calls.append(call)
            await self._client.ask(call)

    async def _preemptions(self) -> float:
        await asyncio.sleep(1.5)  # the server tells its figures once a second
        async with self._http.get(f"{self._url}/metrics") as reply:
            return metric(await reply.text(), "phloem_preemptions_total")


async def run(url: str, arguments: argparse.Namespace) -> list[Stage]:
    each = arguments.prompt + arguments.output
    most = -(-OVER_CAPACITY * arguments.kv_tokens // each)
    sizes = [1]
    while sizes[-1] < most:
        sizes.append(min(2 * sizes[-1], most))
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        ramp = Ramp(http, url, arguments)
        await ramp.stage(1)  # warm up
        return [await ramp.stage(clients) for clients in sizes]


def show(stages: list[Stage]) -> None:
    table = Table(pad_edge=False)
    for heading in ("clients", "of capacity", "tok/s", "TTFT ms p50 / p99", "preempted", "errors"):
        table.add_column(heading, justify="right")
    for s in stages:
        table.add_row(
            str(s.clients),
            f"{s.capacity:.2f}",
            f"{s.tokens_per_s:.1f}",
            f"{s.ttft_p50_ms or 0:.0f} / {s.ttft_p99_ms or 0:.0f}",
            str(s.preemptions),
            str(s.errors),
        )
    Console().print(table)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file or folder (default: the default one)")
    parser.add_argument("--kv-tokens", type=int, default=4096, help="slots of the server")
    parser.add_argument("--prompt", type=int, default=96, help="tokens of each prompt, about")
    parser.add_argument("--output", type=int, default=160, help="tokens of each answer")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each stage at least")
    parser.add_argument("--max-running", type=int, default=64, help="rows of the server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the stages here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    flags = ["--kv-tokens", str(arguments.kv_tokens), "--max-running", str(arguments.max_running)]
    with own_server(*flags, model=arguments.model) as server:
        stages = asyncio.run(run(server.url, arguments))
    show(stages)
    peak = max(stage.tokens_per_s for stage in stages)
    kept = stages[-1].tokens_per_s / peak
    errors = sum(stage.errors for stage in stages)
    Console().print(f"at {OVER_CAPACITY} × capacity: {kept:.1%} of the peak, {errors} errors")
    if arguments.json is not None:
        write_json(
            arguments.json,
            flags=flags,
            share_of_peak=kept,
            errors=errors,
            stages=[msgspec.structs.asdict(stage) for stage in stages],
        )
    return 0 if kept >= GOAL and not errors else 1


if __name__ == "__main__":
    sys.exit(main())

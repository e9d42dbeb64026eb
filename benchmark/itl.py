"""What running streams notice of a long prompt: inter-token latency with and without one.

    python benchmark/itl.py --streams 4 --prompt 6000 --itl-target-ms 60 --json itl.json

Starts a server of its own, has some streams decode, measures the gaps between their pieces, then
sends a long prompt and measures the gaps until its answer begins. The time to first token of the
long prompt is the price of the others' smoothness. Measure on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import numpy as np
from common import write_json
from own_server import own_server, words_for
from rich.console import Console

from phloem.srt.bench.load import Call, ChatClient
from phloem.srt.bench.report import percentile
from phloem.srt.bench.workloads import TextSource, Turn

WARM_PIECES = 16
"""Pieces that each stream has sent before measuring begins."""
GOAL = 2.0


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One long prompt among the streams. Milliseconds, but for tokens and counts."""

    without_p50_ms: float
    without_p99_ms: float
    without_gaps: int
    with_p50_ms: float
    with_p99_ms: float
    with_max_ms: float
    with_gaps: int
    long_tokens: int
    long_ttft_ms: float


class Failed(Exception):
    """The server did not do what was asked, so there is nothing to measure."""


async def measure(client: ChatClient, arguments: argparse.Namespace, seed: int) -> Round:
    """Streams that outlast the long prompt, and the long prompt after some seconds."""
    text = TextSource(seed)
    streams = [
        Call(turn=turn, messages=[{"role": "user", "content": turn.user}])
        for turn in (
            Turn(user=text.words(24), max_tokens=arguments.stream_tokens)
            for _ in range(arguments.streams)
        )
    ]
    long_turn = Turn(user=text.words(words_for(arguments.prompt)), max_tokens=4)
    long = Call(turn=long_turn, messages=[{"role": "user", "content": long_turn.user}])
    tasks = [asyncio.create_task(client.ask(call)) for call in streams]
    while min(len(call.pieces) for call in streams) < WARM_PIECES:
        if any(task.done() for task in tasks):
            raise Failed(f"a stream ended at once: {streams[0].error}")
        await asyncio.sleep(0.01)
    began = time.perf_counter()
    await asyncio.sleep(arguments.seconds)
    await client.ask(long)
    if long.error is not None or not long.pieces:
        raise Failed(f"the long prompt failed: {long.error}")
    if any(task.done() for task in tasks):
        raise Failed("a stream ended before the long prompt did: give it more --stream-tokens")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    without = gaps(streams, began, long.start)
    during = gaps(streams, long.start, long.pieces[0])
    return Round(
        without_p50_ms=_ms(without, 50),
        without_p99_ms=_ms(without, 99),
        without_gaps=len(without),
        with_p50_ms=_ms(during, 50),
        with_p99_ms=_ms(during, 99),
        with_max_ms=_ms(during, 100),
        with_gaps=len(during),
        long_tokens=long.prompt_tokens,
        long_ttft_ms=1000 * (long.pieces[0] - long.start),
    )


def gaps(calls: Sequence[Call], start: float, end: float) -> list[float]:
    """Seconds between pieces, of gaps that end in [start, end)."""
    found: list[float] = []
    for call in calls:
        times = np.array(call.pieces)
        between, ends = np.diff(times), times[1:]
        found += between[(ends >= start) & (ends < end)].tolist()
    return found


def _ms(seconds: Sequence[float], q: float) -> float:
    value = percentile(seconds, q)
    if value is None:
        raise Failed("no piece came in the time that was measured")
    return 1000 * value


async def run(url: str, model: str, arguments: argparse.Namespace) -> list[Round]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        client = ChatClient(http, url, model)
        # the scheduler learns what a step takes: the first long prompt is not measured
        await measure(client, arguments, arguments.seed - 1)
        return [
            await measure(client, arguments, arguments.seed + i) for i in range(arguments.repeat)
        ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file or folder (default: the default one)")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--stream-tokens", type=int, default=1500, help="of each stream at most")
    parser.add_argument("--prompt", type=int, default=6000, help="tokens of the long prompt, about")
    parser.add_argument("--seconds", type=float, default=5.0, help="measured before it enters")
    parser.add_argument("--itl-target-ms", type=float, help="for the server (default: its own)")
    parser.add_argument("--max-step-tokens", type=int, help="for the server")
    parser.add_argument("--repeat", type=int, default=3, help="rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rounds here")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    flags = ["--kv-tokens", str(4 * arguments.prompt + arguments.streams * 4096)]
    for flag in ("itl_target_ms", "max_step_tokens"):
        value = getattr(arguments, flag)
        if value is not None:
            flags += [f"--{flag.replace('_', '-')}", str(value)]
    with own_server(*flags, model=arguments.model) as server:
        rounds = asyncio.run(run(server.url, server.model, arguments))
    console = Console()
    for one in rounds:
        console.print(
            f"{arguments.streams} streams, ITL p50 / p99 ms: "
            f"{one.without_p50_ms:.1f} / {one.without_p99_ms:.1f} without, "
            f"{one.with_p50_ms:.1f} / {one.with_p99_ms:.1f} with a prompt of "
            f"{one.long_tokens:,} (TTFT {one.long_ttft_ms / 1000:.2f} s)"
        )
    ratio = float(np.median([one.with_p99_ms / one.without_p99_ms for one in rounds]))
    console.print(f"p99 with / without, median of {len(rounds)} rounds: {ratio:.2f}")
    if arguments.json is not None:
        write_json(
            arguments.json,
            flags=flags,
            streams=arguments.streams,
            p99_ratio=ratio,
            rounds=[msgspec.structs.asdict(one) for one in rounds],
        )
    return 0 if ratio <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())

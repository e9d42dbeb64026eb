"""What a streamed token costs outside the model: processor time and added time, beside
llama-server's.

    python benchmark/http_overhead.py --model FILE.gguf --json http_overhead.json

Both servers stream the same chats, `--streams` at once, of `--tokens` tokens each; they take turns,
each alone on the machine. Every prompt was answered once before, so it is in the cache, and steps
are those of single tokens. What is compared:

processor time a token: what the server spends outside the process, or the threads, that compute.
    Of Phloem it is the process that does HTTP, with the chat template, tokens to text, stop strings
    and metrics (the scheduler's process is shown beside it). Of llama-server it is all threads
    but as many as compute, the busiest ones; its loop is one of those, with tokens to text and
    stop strings, so the comparison is to its advantage. What a request costs is spread over its
    tokens.
added time a token: what a client waits from one token to the next (first to last arrival, shared
    evenly) beyond what the engine says of itself. Phloem's engine says what its steps took, from a
    plan sent to its result, so what the scheduler does between steps is in what was added.
    llama-server says `predicted_ms`, the time of its loop from the first token to the last, so
    only HTTP is. The difference is again to its advantage; where HTTP keeps up with the engine it
    is next to nothing. Phloem alone says what the model itself took, too (its forward passes): all
    that is beyond those (sampling, the ways between processes, the scheduler, HTTP) is shown.

Processor time is read in nanoseconds from the kernel (Linux), since a token takes less than a tick.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import msgspec
import orjson
from common import write_json
from connections import Client, connect
from own_server import processes
from peers import Running, running
from rich.table import Table
from turns import add_options, names, report, setting, take_turns

SERVERS = ("phloem", "llama-server")
LIMIT_S = 300.0
WARM_TOKENS = 4
TOPICS = ("the sea", "a garden", "old maps", "winter", "trains", "bread", "the moon", "chess")


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run of `streams` requests. `engine_ms` is what the engine says that a token took, and
    `forward_ms` that the model did, of engines that say so."""

    server: str
    round: int
    streams: int
    tokens: int
    cpu_us: float
    scheduler_us: float | None
    itl_ms: float
    engine_ms: float
    forward_ms: float | None

    @property
    def added_us(self) -> float:
        return 1000 * (self.itl_ms - self.engine_ms)

    @property
    def beyond_forward_us(self) -> float | None:
        return None if self.forward_ms is None else 1000 * (self.itl_ms - self.forward_ms)


class Stream(msgspec.Struct, frozen=True):
    """When the pieces of one answer arrived (ns), and what its end said of timings."""

    pieces: list[int]
    timings: dict[str, Any]


def read_stream(parts: Sequence[tuple[int, bytes]]) -> Stream:
    """A stream of chat chunks in (arrival, bytes). A piece arrives with the end of its frame."""
    pieces: list[int] = []
    timings: dict[str, Any] = {}
    rest = b""
    for arrived, data in parts:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            if not line.startswith(b"data: {"):
                continue
            event = orjson.loads(line[len(b"data: ") :])
            timings = event.get("timings") or timings
            choices = event.get("choices") or [{}]
            if choices[0].get("delta", {}).get("content"):
                pieces.append(arrived)
    return Stream(pieces, timings)


# ----------------------------------------------------------------------- processor time


def process_seconds(pid: int) -> float:
    """CPU seconds of a process so far, by its clock (CPUCLOCK_SCHED of linux/posix-timers.h)."""
    return time.clock_gettime((~pid << 3) | 2)


def thread_seconds(pid: int) -> dict[str, float]:
    """CPU seconds of each thread that a process has, by thread id."""
    found: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            found[task.name] = int((task / "schedstat").read_text().split()[0]) / 1e9
        except (FileNotFoundError, ProcessLookupError):
            continue  # it is just ending
    return found


def busiest(before: dict[str, float], after: dict[str, float], count: int) -> float:
    """CPU seconds of the `count` threads that took most between two readings."""
    spent = (seconds - before.get(thread, 0.0) for thread, seconds in after.items())
    return sum(sorted(spent, reverse=True)[:count])


class Meter:
    """CPU seconds of a server outside the model, between making it and `read`."""

    def __init__(self, name: str, server: Running, threads: int) -> None:
        found = processes(server)
        self._threads = 0 if name == "phloem" else threads
        self._pid = server.pid
        self._scheduler = found["scheduler"].pid if name == "phloem" else None
        self._before = self._now()

    def _now(self) -> tuple[float, dict[str, float], float]:
        scheduler = 0.0 if self._scheduler is None else process_seconds(self._scheduler)
        return process_seconds(self._pid), thread_seconds(self._pid), scheduler

    def read(self) -> tuple[float, float | None]:
        """Of HTTP, and of the scheduler where it is a process of its own."""
        (total, threads, scheduler), before = self._now(), self._before
        outside = total - before[0] - busiest(before[1], threads, self._threads)
        return outside, None if self._scheduler is None else scheduler - before[2]


# ----------------------------------------------------------------------- runs


def scrape(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
        text: str = reply.read().decode()
    return text


class Steps:
    """Phloem's own account of its steps since this was made."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = scrape(url)

    def mean(self, tokens: int) -> tuple[float, float]:
        """Mean seconds of a step, and of its forward pass, once the scheduler has told of so many
        more tokens: it does when it falls idle."""
        deadline = time.monotonic() + 30
        while self._more(text := scrape(self._url), "generation_tokens_total") < tokens:
            if time.monotonic() > deadline:
                raise TimeoutError("the server does not tell of the tokens that it generated")
            time.sleep(0.05)
        steps = self._more(text, "steps_total")
        forward = 'step_phase_seconds_total{phase="forward"}'
        return self._more(text, "step_seconds_total") / steps, self._more(text, forward) / steps

    def _more(self, text: str, name: str) -> float:
        return sample(text, f"phloem_{name}") - sample(self._before, f"phloem_{name}")


def sample(text: str, key: str) -> float:
    """The value of a metric with its labels as they are written. Raises `StopIteration`."""
    return float(next(line for line in text.splitlines() if line.startswith(f"{key} ")).split()[1])


async def stream(server: Running, streams: int, tokens: int) -> list[Stream]:
    """Ask for so many answers at once, and take them in. Raises `AssertionError` for one that is
    not as long as it was to be."""
    port = urlsplit(server.url).port
    assert port is not None
    clients = await connect(port, streams)
    for number, client in enumerate(clients):
        text = f"Write an essay on {TOPICS[number % len(TOPICS)]}, part {number + 1}."
        body = {
            "model": server.model,
            "messages": [{"role": "user", "content": text}],
            "stream": True,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        client.ask("POST", "/v1/chat/completions", orjson.dumps(body))
    try:
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(client.done for client in clients))
    finally:
        for client in clients:
            client.transport.close()
    return [checked(client, tokens) for client in clients]


def checked(client: Client, tokens: int) -> Stream:
    found = read_stream(client.parts)
    said = b"".join(data for _, data in client.parts)
    assert b'"finish_reason":"length"' in said, said[-600:]
    assert len(found.pieces) > tokens // 2, f"{len(found.pieces)} pieces of {tokens} tokens"
    return found


def run(name: str, server: Running, streams: int, tokens: int, threads: int) -> dict[str, Any]:
    """The figures of one cell."""
    steps = Steps(server.url) if name == "phloem" else None
    meter = Meter(name, server, threads)
    found = asyncio.run(stream(server, streams, tokens))
    cpu, scheduler = meter.read()
    all_tokens = streams * tokens
    gaps = [(one.pieces[-1] - one.pieces[0]) / 1e6 / (tokens - 1) for one in found]
    forward: float | None = None
    if steps is not None:
        engine, forward = (1000 * seconds for seconds in steps.mean(all_tokens))
    else:  # of the tokens behind the first, with which its time begins
        engine = median(one.timings["predicted_ms"] / (tokens - 1) for one in found)
    return {
        "cpu_us": cpu / all_tokens * 1e6,
        "scheduler_us": None if scheduler is None else scheduler / all_tokens * 1e6,
        "itl_ms": median(gaps),
        "engine_ms": engine,
        "forward_ms": forward,
    }


def measure(
    arguments: argparse.Namespace, cells: list[Cell], name: str, server: Running, round_: int
) -> None:
    for streams in arguments.streams:
        asyncio.run(stream(server, streams, WARM_TOKENS))
        figures = run(name, server, streams, arguments.tokens, arguments.threads)
        cells.append(
            Cell(server=name, round=round_, streams=streams, tokens=arguments.tokens, **figures)
        )


# ----------------------------------------------------------------------- results


FIGURES = {
    "cpu_us": "CPU µs",
    "scheduler_us": "scheduler's CPU µs",
    "itl_ms": "ITL ms",
    "engine_ms": "engine's own ms",
    "added_us": "added µs",
    "beyond_forward_us": "beyond the forward pass µs",
}
"""What is told of a cell, and its column."""


def medians(cells: Sequence[Cell]) -> Iterator[dict[str, Any]]:
    """One row a server and number of streams, of the medians over rounds."""
    for streams, server in sorted({(cell.streams, cell.server) for cell in cells}):
        some = [cell for cell in cells if (cell.streams, cell.server) == (streams, server)]
        row: dict[str, Any] = {"server": server, "streams": streams, "rounds": len(some)}
        for figure in FIGURES:
            values = [getattr(cell, figure) for cell in some]
            row[figure] = None if None in values else median(values)
        yield row


def table(rows: Sequence[dict[str, Any]]) -> Table:
    shown = Table("streams", "server", title="Outside the model, a streamed token (medians)")
    for head in FIGURES.values():
        shown.add_column(head, justify="right")
    for row in rows:
        values = [
            "" if row[name] is None else f"{row[name]:.{2 if name.endswith('_ms') else 0}f}"
            for name in FIGURES
        ]
        shown.add_row(str(row["streams"]), row["server"], *values)
    return shown


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF file")
    parser.add_argument("--servers", type=names(SERVERS), default=list(SERVERS))
    parser.add_argument(
        "--streams",
        type=lambda text: [int(one) for one in text.split(",")],
        default=[1, 8],
        help="how many at once, with commas between (default: 1,8)",
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    add_options(parser)
    parser.set_defaults(repeat=3)
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    skipped: dict[str, str] = {}
    cells: list[Cell] = []
    take_turns(
        arguments.servers,
        arguments.repeat,
        skipped,
        lambda name, log: running(name, setting(arguments), log),
        functools.partial(measure, arguments, cells),
    )
    rows = list(medians(cells))
    report(skipped).print(table(rows))
    if arguments.json is not None:
        write_json(
            arguments.json, medians=rows, runs=[as_json(cell) for cell in cells], skipped=skipped
        )
    return 0 if cells else 1


def as_json(cell: Cell) -> dict[str, Any]:
    return msgspec.structs.asdict(cell) | {name: getattr(cell, name) for name in FIGURES}


if __name__ == "__main__":
    sys.exit(main())

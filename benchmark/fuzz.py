"""Hostile constraints against a server, and what its other clients notice of them.

    python benchmark/fuzz.py --minutes 30 --json fuzz.json

Starts a server of its own and has four neighbours stream from it all the time: two free, two under
a plain schema, one of which nobody has asked for before. After a quiet phase come clients that send
bombs (`fuzz_bombs.py`) and random constraints (`fuzz_random.py`), whole and streamed; some leave.
It holds against the server: an answer that its constraint does not allow; a refusal that is not a
400 or a 503 with a code, or that echoes the constraint; silence; a neighbour that fails; a process
that dies, but for the grammar process, which may; anything that is held when all are gone.
Between quiet and hostile it compares the neighbours' inter-token latency, and it follows memory.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import psutil
from common import write_json
from fuzz_bombs import Case
from fuzz_hostile import PATIENCE_S, Attack, Target, attack
from fuzz_judge import fault_of
from itl import gaps
from own_server import own_server, processes
from peers import PeerFailed, Running
from rich.console import Console
from soak import stats

from phloem.srt.bench.load import Call, ChatClient
from phloem.srt.bench.report import percentile
from phloem.srt.bench.workloads import ORDER_SCHEMA, TextSource, Turn

ITL_GOAL = 2.0
WARM_SHARE = 0.4
GROWTH_SHARE, GROWTH_MIB = 0.03, 24.0
"""As in `soak.py`: when memory counts, and by how much it may grow from there."""
QUIET_SHARE, MAX_QUIET_S = 0.2, 60.0
SANDBOX = "sandbox"
"""The role of the processes in which a constraint is tried; they are killed at their limits."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`quiet_s` seconds without and `hostile_s` with hostile `clients`."""

    quiet_s: float
    hostile_s: float
    clients: int = 4
    seed: int = 1


@dataclass
class Books:
    """What the neighbours and the watch saw. Times are `time.perf_counter` seconds."""

    attack: Attack = field(default_factory=Attack)
    faults: list[str] = field(default_factory=list)
    neighbours: list[Call] = field(default_factory=list)
    looks: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    deaths: Counter[str] = field(default_factory=Counter)
    hostile_from: float = 0.0
    hostile_to: float = 0.0


# ------------------------------------------------------------------------------ neighbours


class Neighbour:
    """Streams one answer after the other. `kind` is `free`, `plain` (always the same schema) or
    `fresh` (a schema that has to be compiled)."""

    def __init__(self, client: ChatClient, books: Books, kind: str, seed: int) -> None:
        self._client = client
        self._books = books
        self._kind = kind
        self._text = TextSource(seed)
        self._asked = 0

    def _schema(self) -> dict[str, Any] | None:
        if self._kind == "free":
            return None
        if self._kind == "plain":
            return ORDER_SCHEMA
        self._asked += 1
        schema: dict[str, Any] = orjson.loads(orjson.dumps(ORDER_SCHEMA))
        schema["properties"]["quantity"]["maximum"] += self._asked
        return schema

    async def stream_until(self, over: asyncio.Event) -> None:
        while not over.is_set():
            turn = Turn(user=self._text.words(24), max_tokens=250, schema=self._schema())
            call = Call(turn=turn, messages=[{"role": "user", "content": turn.user}])
            self._books.neighbours.append(call)
            await self._client.ask(call)
            if call.error is not None:
                self._books.faults.append(f"a {self._kind} neighbour: {call.error}")
                await asyncio.sleep(0.5)
            elif turn.schema is not None:
                case = Case(name=self._kind, kind="schema", text=json.dumps(turn.schema))
                fault = fault_of(case, call.text)
                if fault is not None:
                    self._books.faults.append(
                        f"a {self._kind} neighbour got {fault}: {call.text!r}"
                    )


# ------------------------------------------------------------------------------ watching


def processes_by_role(server: Running) -> dict[str, list[psutil.Process]]:
    """The server's processes; forks of the grammar process, in which constraints are tried, are
    `SANDBOX`."""
    found = {role: [process] for role, process in processes(server).items()}
    with contextlib.suppress(KeyError, psutil.Error):
        found[SANDBOX] = found["grammar"][0].children(recursive=True)
    return found


class Watch:
    """Follows memory, and which processes have died."""

    def __init__(self, server: Running, books: Books) -> None:
        self._server = server
        self._books = books
        self._pids: dict[str, int] = {}

    async def look_until(self, over: asyncio.Event, every: float) -> None:
        while not over.is_set():
            self.look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), every)
        self.look()

    def look(self) -> None:
        memory: dict[str, float] = {}
        try:
            roles = processes_by_role(self._server)
        except psutil.Error:
            self._books.deaths["frontend"] += 1
            return
        for role, members in roles.items():
            for process in members:
                with contextlib.suppress(psutil.Error):
                    mib = process.memory_info().rss / 2**20
                    memory[role] = memory.get(role, 0.0) + mib
            if role != SANDBOX:
                before = self._pids.setdefault(role, members[0].pid)
                self._books.deaths[role] += before != members[0].pid
                self._pids[role] = members[0].pid
        self._books.looks.append((time.perf_counter(), memory))


async def fuzz(server: Running, settings: Settings) -> Books:
    """The quiet phase, the hostile phase, and the look at what is left of them."""
    books = Books()
    over = asyncio.Event()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        client = ChatClient(http, server.url, server.model, timeout_s=PATIENCE_S * 4)
        async with asyncio.TaskGroup() as group:
            every = min(5.0, settings.hostile_s / 20)
            group.create_task(Watch(server, books).look_until(over, every))
            for i, kind in enumerate(("free", "free", "plain", "fresh")):
                neighbour = Neighbour(client, books, kind, settings.seed * 100 + i)
                group.create_task(neighbour.stream_until(over))
            await asyncio.sleep(settings.quiet_s)
            books.hostile_from = time.perf_counter()
            books.attack = await _elsewhere(server, settings)
            books.hostile_to = time.perf_counter()
            over.set()
        await _look_at_what_is_left(http, server, books)
    return books


async def _elsewhere(server: Running, settings: Settings) -> Attack:
    target = Target(
        url=server.url,
        model=server.model,
        clients=settings.clients,
        seed=settings.seed,
        seconds=settings.hostile_s,
    )
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, attack, target)


async def _look_at_what_is_left(http: aiohttp.ClientSession, server: Running, books: Books) -> None:
    """The server lives, holds nothing, and has given nobody an answer that it knew to be wrong."""
    seen: dict[str, Any] | None = None
    for _ in range(100):
        seen = await stats(http, server.url)
        if seen is not None and not seen["locked"] and not seen["private"]:
            break
        await asyncio.sleep(0.2)
    else:
        books.faults.append(f"still held when all are gone: {seen}")
    asked, ended = books.attack.asked, sum(books.attack.ends.values())
    if asked != ended:
        books.faults.append(f"{asked} requests with {ended} ends")
    with contextlib.suppress(aiohttp.ClientError, ConnectionError):
        async with http.get(f"{server.url}/ready") as reply:
            if reply.status == 200:
                return
    books.faults.append("the server is not ready when all are gone")


# ------------------------------------------------------------------------------ verdict


def verdict(books: Books) -> dict[str, Any]:
    attack = books.attack
    died = {role: count for role, count in books.deaths.items() if count}
    return {
        "requests": attack.asked,
        "ends": dict(attack.ends.most_common()),
        "answers": dict(sorted(attack.answers.items())),
        "slowest": attack.slowest,
        "neighbours": neighbours(books),
        "memory_mib": memory(books),
        "memory_grown": growth(books),
        "died": died,
        "faults": [*({"fault": fault} for fault in books.faults), *attack.faults],
        "fault_count": len(books.faults) + attack.fault_count,
        "sound": not books.faults and not attack.fault_count and died.keys() <= {"grammar"},
    }


def neighbours(books: Books) -> dict[str, Any]:
    """Inter-token latency and time to first token, quiet and hostile, in milliseconds."""
    calls = books.neighbours
    phases = {"quiet": (0.0, books.hostile_from), "hostile": (books.hostile_from, books.hostile_to)}
    found: dict[str, Any] = {"calls": len(calls)}
    for phase, (start, end) in phases.items():
        between = gaps(calls, start, end)
        found[phase] = {
            "gaps": len(between),
            "itl_p50_ms": _ms(between, 50),
            "itl_p99_ms": _ms(between, 99),
            "itl_max_ms": _ms(between, 100),
        }
        for name, schema in (("free", False), ("constrained", True)):
            first = [
                call.pieces[0] - call.start
                for call in calls
                if call.pieces and start <= call.start < end
                if (call.turn.schema is not None) == schema
            ]
            found[phase][f"{name}_ttft_p50_ms"] = _ms(first, 50)
            found[phase][f"{name}_ttft_max_ms"] = _ms(first, 100)
    quiet, hostile = found["quiet"]["itl_p99_ms"], found["hostile"]["itl_p99_ms"]
    found["itl_p99_ratio"] = hostile / quiet if quiet and hostile else None
    found["itl_goal"] = ITL_GOAL
    return found


def _ms(seconds: Sequence[float], q: float) -> float | None:
    value = percentile(seconds, q)
    return None if value is None else round(1000 * value, 2)


def memory(books: Books) -> dict[str, dict[str, float]]:
    """By role: resident memory at the beginning, at the end, and at most."""
    found: dict[str, dict[str, float]] = {}
    for role in sorted({role for _, look in books.looks for role in look}):
        sizes = [round(look[role], 1) for _, look in books.looks if role in look]
        found[role] = {"first": sizes[0], "last": sizes[-1], "max": max(sizes)}
    return found


def growth(books: Books) -> dict[str, Any]:
    """MiB by which the server has grown after its caches had time to fill, by a straight line."""
    looks = [
        (at, sum(mib for role, mib in look.items() if role != SANDBOX)) for at, look in books.looks
    ]
    start = looks[0][0] + WARM_SHARE * (looks[-1][0] - looks[0][0])
    times, sizes = np.array([look for look in looks if look[0] >= start]).T
    slope = float(np.polyfit(times - times[0], sizes, 1)[0]) if len(times) > 1 else 0.0
    grown, allowed = slope * float(times[-1] - times[0]), GROWTH_SHARE * float(sizes.mean())
    return {
        "mib": grown,
        "allowed_mib": max(GROWTH_MIB, allowed),
        "seconds": float(times[-1] - times[0]),
    }


def report(found: dict[str, Any], console: Console) -> None:
    shown = {key: value for key, value in found.items() if key not in ("faults", "slowest")}
    console.print_json(orjson.dumps(shown).decode())
    for one in found["slowest"]:
        console.print(f"{one['seconds']:6.2f} s  {one['case']}: {one['end']}", markup=False)
    for one in found["faults"]:
        console.print(f"FAULT {one['fault']}"[:600], markup=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file or folder (default: the default one)")
    parser.add_argument("--minutes", type=float, default=30.0, help="of the hostile phase")
    parser.add_argument("--clients", type=int, default=4, help="hostile ones")
    parser.add_argument("--kv-tokens", type=int, default=16384, help="slots of the server")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the books here")
    parser.add_argument("--log", type=Path, help="the server's output")
    parser.add_argument("flags", nargs="*", help="more flags for the server, after --")
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    seconds = 60 * arguments.minutes
    settings = Settings(
        quiet_s=min(MAX_QUIET_S, QUIET_SHARE * seconds),
        hostile_s=seconds,
        clients=arguments.clients,
        seed=arguments.seed,
    )
    flags = ["--kv-tokens", str(arguments.kv_tokens), *arguments.flags]
    try:
        with own_server(*flags, model=arguments.model, log=arguments.log) as server:
            books = asyncio.run(fuzz(server, settings))
    except PeerFailed as error:
        Console(stderr=True).print(str(error), markup=False)
        return 2
    found = verdict(books)
    report(found, Console())
    if arguments.json is not None:
        write_json(arguments.json, flags=flags, seed=arguments.seed, verdict=found)
    return 0 if found["sound"] else 1


if __name__ == "__main__":
    sys.exit(main())

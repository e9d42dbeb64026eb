"""Hours in minutes: mixed traffic, clients that leave, processes that are killed; then the books.

    python benchmark/soak.py --minutes 30 --json soak.json
    python benchmark/soak.py --seconds 20 --kill-worker-every 8

Starts a server of its own and asks it in every way at once: chats, streams, conversations, several
answers to one prompt, answers under a schema, long prompts; some clients break off, some requests
are aborted, the grammar process is killed now and then, and the worker if wanted. It holds against
the server: that each request gets exactly one end, that the KV slots always add up and nothing is
held when all is quiet, that nobody fails but by a kill, and that memory and open files do not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import numpy as np
import orjson
import psutil
from common import write_json
from own_server import own_server, processes
from peers import Running
from rich.console import Console

from phloem.srt.bench.workloads import ORDER_SCHEMA, TextSource
from phloem.srt.process import ROLES

WARM_SHARE = 0.4
"""Of the time, before memory counts: caches fill, arenas grow."""
GROWTH_SHARE, GROWTH_MIB = 0.03, 24.0
"""Memory is flat if it grows by less than both allow, over the time that counts."""
PATIENCE_S = 240.0
"""A request that has not ended after so long never will."""
KILL_WINDOW_S = 10.0
"""After the worker was killed, requests may fail for so long."""
POLICIES = ("fair", "lpm", "dfs-weight", "fcfs", "fair")


@dataclass
class Books:
    """What happened so far, and what should not have."""

    began: float = field(default_factory=time.monotonic)
    ends: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    kills: Counter[str] = field(default_factory=Counter)
    worker_killed: float = -1e9
    seconds: list[float] = field(default_factory=list)
    mib: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    by_role: dict[str, list[float]] = field(default_factory=dict)
    unbalanced: int = 0
    looks: int = 0

    def fault(self, what: str) -> None:
        if len(self.faults) < 50:
            self.faults.append(f"{time.monotonic() - self.began:.1f} s: {what[:300]}")

    @property
    def excused(self) -> bool:
        """Whether the worker was killed a moment ago."""
        return time.monotonic() - self.worker_killed < KILL_WINDOW_S


class Client:
    """One who asks in a way drawn each time, until time is up."""

    def __init__(self, http: aiohttp.ClientSession, url: str, books: Books, seed: int) -> None:
        self._http = http
        self._url = url
        self._books = books
        self._random = random.Random(seed)
        self._text = TextSource(seed)
        self._seed = seed
        self._asked = 0
        self._system = TextSource(seed % 3).words(150)  # some share it
        self._talk: list[dict[str, str]] = []
        self._kinds = [
            *[self._chat] * 4,
            *[self._stream] * 4,
            *[self._several] * 2,
            *[self._constrained] * 3,
            *[self._leave] * 3,
            *[self._abort] * 2,
            self._long,
            self._look,
        ]

    async def ask_until(self, end: float) -> None:
        while time.monotonic() < end:
            kind = self._random.choice(self._kinds)
            name = kind.__name__.strip("_")
            try:
                async with asyncio.timeout(PATIENCE_S):
                    ended = await kind()
                self._books.ends[f"{name}: {ended}"] += 1
                if ended == "503":
                    await asyncio.sleep(0.5)
            except TimeoutError:
                self._books.fault(f"{name}: no end after {PATIENCE_S:g} s")
            except (aiohttp.ClientError, ConnectionError) as error:
                self._books.ends[f"{name}: {type(error).__name__}"] += 1
                if not self._books.excused:
                    self._books.fault(f"{name}: {type(error).__name__} {error}")

    def _body(self, words: int = 20, **more: Any) -> dict[str, Any]:
        self._asked += 1
        messages = [
            {"role": "system", "content": self._system},
            *self._talk,
            {"role": "user", "content": self._text.words(words)},
        ]
        body = {
            "model": "model",
            "messages": messages,
            "max_tokens": self._random.choice([1, 8, 30, 60]),
            "temperature": self._random.choice([0, 1]),
            "rid": f"soak-{self._seed}-{self._asked}",
        }
        return body | more

    async def _post(self, body: dict[str, Any]) -> tuple[int, Any]:
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as reply:
            answer = await reply.json(content_type=None)
        if reply.status != 200:
            self._refused(reply.status, answer)
        return reply.status, answer

    def _refused(self, status: int, answer: object) -> None:
        if not (self._books.excused and status in (500, 503)) and status != 429:
            self._books.fault(f"HTTP {status}: {answer}")

    def _ends(self, answer: dict[str, Any], wanted: int) -> str:
        reasons = [choice["finish_reason"] for choice in answer["choices"]]
        if len(reasons) != wanted or not all(reasons):
            self._books.fault(f"{len(reasons)} ends of {wanted}: {reasons}")
        return "+".join(sorted(set(reasons)))

    async def _chat(self) -> str:
        """A turn of a conversation, which goes on or begins anew."""
        body = self._body()
        status, answer = await self._post(body)
        if status != 200:
            return str(status)
        said = answer["choices"][0]["message"]["content"] or ""
        self._talk = [*body["messages"][1:], {"role": "assistant", "content": said}]
        if len(self._talk) > 8:
            self._talk = []
        return self._ends(answer, 1)

    async def _several(self) -> str:
        status, answer = await self._post(self._body(n=3, temperature=1))
        return self._ends(answer, 3) if status == 200 else str(status)

    async def _long(self) -> str:
        status, answer = await self._post(self._body(words=900, max_tokens=8))
        return self._ends(answer, 1) if status == 200 else str(status)

    async def _constrained(self) -> str:
        form = {"name": "order", "strict": True, "schema": ORDER_SCHEMA}
        body = self._body(
            max_tokens=250, response_format={"type": "json_schema", "json_schema": form}
        )
        status, answer = await self._post(body)
        if status != 200:
            return str(status)
        end = self._ends(answer, 1)
        if end == "stop":
            document = orjson.loads(answer["choices"][0]["message"]["content"])
            if not jsonschema_rs.is_valid(ORDER_SCHEMA, document):
                self._books.fault(f"an invalid document: {document}")
        return end

    async def _stream(self) -> str:
        """Exactly one end for each choice, then [DONE]."""
        choices = self._random.choice([1, 1, 2])
        body = self._body(stream=True, n=choices, temperature=1)
        ends: Counter[int] = Counter()
        done = failed = 0
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as reply:
            if reply.status != 200:
                self._refused(reply.status, await reply.text())
                return str(reply.status)
            async for line in reply.content:
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    done += 1
                    continue
                event = orjson.loads(data)
                failed += "error" in event
                for choice in event.get("choices") or ():
                    ends[choice["index"]] += choice.get("finish_reason") is not None
        if failed and not self._books.excused:
            self._books.fault("an error in a stream")
        if done != 1 or (not failed and (len(ends) != choices or set(ends.values()) != {1})):
            self._books.fault(f"a stream of {choices} with ends {dict(ends)} and {done} [DONE]")
        return "error" if failed else "end"

    async def _leave(self) -> str:
        """Break off in the middle: the connection is closed."""
        body = self._body(max_tokens=400, stream=self._random.random() < 0.5, ignore_eos=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._random.random() * 2):
                async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as reply:
                    await reply.read()
        return "left"

    async def _abort(self) -> str:
        body = self._body(max_tokens=400, ignore_eos=True)
        asking = asyncio.create_task(self._post(body))
        await asyncio.sleep(self._random.random())
        try:
            async with self._http.post(f"{self._url}/abort", json={"rid": body["rid"]}) as reply:
                await reply.read()
        finally:
            status, answer = await asking
        return self._ends(answer, 1) if status == 200 else str(status)

    async def _look(self) -> str:
        """What an operator does: look, explain, pin, change the order, flush."""
        rid = f"soak-{self._seed}-{self._asked}"
        pin = {"name": f"p{self._seed}", "prompt": self._system, "ttl_s": 5}
        for path, body in (
            ("/cache/explain", {"prompt": self._system}),
            ("/cache/explain", {"rid": rid}),
            ("/cache/pin", pin),
            ("/scheduler/policy", {"policy": self._random.choice(POLICIES)}),
        ):
            async with self._http.post(self._url + path, json=body) as reply:
                if reply.status >= 500 and not self._books.excused:
                    self._books.fault(f"{path}: HTTP {reply.status} {await reply.text()}")
        if self._random.random() < 0.1:
            async with self._http.post(f"{self._url}/cache/flush", json={}) as reply:
                await reply.read()
        return "seen"


# ------------------------------------------------------------------------------ watching


async def stats(http: aiohttp.ClientSession, url: str) -> dict[str, Any] | None:
    """`/cache/stats`, or None while the server has no backend."""
    with contextlib.suppress(aiohttp.ClientError, ConnectionError):
        async with http.get(f"{url}/cache/stats") as reply:
            if reply.status == 200:
                answer: dict[str, Any] = await reply.json()
                return answer
    return None


async def watch(
    http: aiohttp.ClientSession, server: Running, books: Books, every: float, end: float
) -> None:
    while time.monotonic() < end:
        await asyncio.sleep(every)
        look_at_processes(server, books)
        seen = await stats(http, server.url)
        if seen is not None:
            books.looks += 1
            balance(seen, books)


def balance(seen: dict[str, Any], books: Books) -> None:
    held = seen["free"] + seen["evictable"] + seen["locked"] + seen["private"]
    if held != seen["capacity"]:
        books.unbalanced += 1
        books.fault(f"slots do not add up: {seen}")


def look_at_processes(server: Running, books: Books) -> None:
    """Note memory and open files, unless a process has just been killed."""
    total, files = 0.0, 0
    found = processes(server)
    if len(found) < 1 + len(ROLES):
        return
    try:
        for role, process in found.items():
            mib = process.memory_info().rss / 2**20
            total += mib
            files += process.num_fds()
            books.by_role.setdefault(role, []).append(round(mib, 1))
    except psutil.Error:
        return
    books.seconds.append(time.monotonic() - books.began)
    books.mib.append(total)
    books.files.append(files)


async def kill(server: Running, books: Books, role: str, every: float, end: float) -> None:
    """SIGKILL to the process of this role, again and again, but not while all of them come up
    again: that would take longer than requests are excused for."""
    while time.monotonic() + every < end:
        await asyncio.sleep(every)
        if books.excused:
            continue
        process = processes(server).get(role)
        if process is not None:
            books.kills[role] += 1
            if role == "worker":
                books.worker_killed = time.monotonic()
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)


async def quiet(http: aiohttp.ClientSession, server: Running, books: Books) -> None:
    """When all clients are gone, nothing may be held."""
    seen: dict[str, Any] | None = None
    for _ in range(150):
        await asyncio.sleep(0.2)
        seen = await stats(http, server.url)
        if seen is not None and not seen["locked"] and not seen["private"]:
            balance(seen, books)
            return
    books.fault(f"still held when all is quiet: {seen}")


async def soak(server: Running, arguments: argparse.Namespace) -> Books:
    books = Books()
    end = books.began + arguments.seconds
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout) as http,
        asyncio.TaskGroup() as group,
    ):
        look = min(10.0, arguments.seconds / 40)
        group.create_task(watch(http, server, books, look, end))
        for role in ("grammar", "worker"):
            every = getattr(arguments, f"kill_{role}_every")
            if every:
                group.create_task(kill(server, books, role, every, end))
        clients = [
            group.create_task(
                Client(http, server.url, books, arguments.seed * 100 + i).ask_until(end)
            )
            for i in range(arguments.clients)
        ]
        await asyncio.gather(*clients)
        await quiet(http, server, books)
    return books


# ------------------------------------------------------------------------------ verdict


def growth(books: Books) -> tuple[float, float]:
    """MiB by which memory has grown after the warm-up, by a straight line, and how much may be."""
    start = WARM_SHARE * books.seconds[-1]
    kept = [(at, mib) for at, mib in zip(books.seconds, books.mib, strict=True) if at >= start]
    times, sizes = np.array(kept).T
    slope = float(np.polyfit(times, sizes, 1)[0])
    return slope * float(times[-1] - times[0]), max(GROWTH_MIB, GROWTH_SHARE * float(sizes.mean()))


def verdict(books: Books) -> dict[str, Any]:
    grown, allowed = growth(books)
    third = len(books.files) // 3
    files_grown = max(books.files[-third:]) - max(books.files[third : 2 * third])
    return {
        "requests": sum(books.ends.values()),
        "ends": dict(sorted(books.ends.items())),
        "kills": dict(books.kills),
        "looks": books.looks,
        "unbalanced": books.unbalanced,
        "memory_mib": books.mib[-1],
        "memory_grown_mib": grown,
        "memory_may_grow_mib": allowed,
        "files_grown": files_grown,
        "faults": books.faults,
        "memory_flat": grown <= allowed,
        "accounting_exact": books.looks > 0 and books.unbalanced == 0,
        "every_request_ended_once": not books.faults,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="GGUF file or folder (default: the default one)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, default=30.0)
    length.add_argument("--seconds", type=float)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--kv-tokens", type=int, default=8192, help="slots of the server")
    parser.add_argument("--kill-grammar-every", type=float, default=45.0, help="seconds; 0: never")
    parser.add_argument("--kill-worker-every", type=float, default=0.0, help="seconds; 0: never")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the books here")
    parser.add_argument("--log", type=Path, help="the server's output")
    parser.add_argument("flags", nargs="*", help="more flags for the server, after --")
    parsed = parser.parse_args()
    if parsed.seconds is None:
        parsed.seconds = 60 * parsed.minutes
    return parsed


def main() -> int:
    arguments = parse()
    flags = ["--kv-tokens", str(arguments.kv_tokens), *arguments.flags]
    with own_server(*flags, model=arguments.model, log=arguments.log) as server:
        books = asyncio.run(soak(server, arguments))
    found = verdict(books)
    Console().print_json(orjson.dumps(found).decode())
    if arguments.json is not None:
        write_json(
            arguments.json,
            flags=flags,
            verdict=found,
            seconds=books.seconds,
            mib=books.mib,
            files=books.files,
            by_role=books.by_role,
        )
    good = ("memory_flat", "accounting_exact", "every_request_ended_once")
    return 0 if all(found[name] for name in good) else 1


if __name__ == "__main__":
    sys.exit(main())

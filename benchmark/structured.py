"""Objects a second under a schema, against free text and against other servers.

    python benchmark/structured.py [--model MODEL.gguf] [--json FILE]
    python benchmark/structured.py --peers phloem,llama-server,vllm --model MODEL.gguf \\
        --model-folder DIR

Every server gets the same prompts and schemas, closed loop, at each concurrency, greedy: a system
prompt with the schema, which all requests for it share, and a short question of each's own. For
Phloem there is a row for each way: free text of about the objects' length, masks alone, both ways
of jumping over what the schema forces, and, of another server, jumps with drafts. An object counts
when it is whole and jsonschema-rs finds it valid; a row's ratios are to the masks alone at the same
concurrency. Drafts live on what answers have in common: questions are numbered, and so are the
answers much alike, or each a text of its own (`--questions different`). `--objects N` asks for more
of them, since drafts get better with each.

`--distinct N` asks for N schemas of which no two are equal, and then again for one of them: what a
schema costs that was never seen, and whether memory grows with their number.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import psutil
from common import write_json
from own_server import own_server
from peers import PEERS, NotInstalled, PeerFailed, Running, Setting, running
from rich.console import Console
from rich.table import Table

console = Console(stderr=True)
_numbers = itertools.count()

FREE_TOKENS = 36
MAX_TOKENS = 200
PHLOEM_WAYS: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {
    ("--draft-tokens", "0"): {
        "masks": {"jump_forward": "off"},
        "jump exact": {"jump_forward": "exact"},
        "jump canonical": {"jump_forward": "canonical"},
    },
    (): {"with drafts": {"jump_forward": "canonical"}},
}
"""Flags of a server → what it is asked for."""
QUESTIONS = (
    "What is the weather like in {place} today?",
    "How much are {number} dollars for somebody from {place}?",
    "Plan a birthday party for {name} in {month}, {number} minutes at most.",
    "I am looking for a good book on {place}, or {number} of them.",
    "My name is {name}, I am {number} and live in {place}.",
    "Write about the history of tea in {place}.",
    "{name} found the film a waste of {number} minutes.",
    "Order {number} of {name}, {place}, which is not paid yet.",
    "A hike with {name} in {month}, up a mountain near {place}.",
    "Is it colder in {place} in {month} than it is now?",
)
PLACES = ("Lisbon", "Nairobi", "Oslo", "Lima", "Kyoto", "Perth", "Cairo", "Quebec", "Riga")
NAMES = ("Sarah", "Tom", "Ayesha", "Kofi", "Ingrid", "Wei", "Carlos")
MONTHS = ("January", "March", "May", "June", "August", "October", "December")


def question(index: int, *, different: bool) -> str:
    """One of any number of questions; the different ones say something else each."""
    if not different:
        return f"Item number {index} of the list."
    return QUESTIONS[index % len(QUESTIONS)].format(
        place=PLACES[index % len(PLACES)],
        name=NAMES[index % len(NAMES)],
        month=MONTHS[index // 3 % len(MONTHS)],
        number=7 + index * 37 % 83,
    )


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(most: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": most}


def _one_of(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


TOOLS = [
    _object(
        name=_one_of("get_current_weather"),
        arguments=_object(location=_text(20), unit=_one_of("celsius", "fahrenheit")),
    ),
    _object(
        name=_one_of("convert_currency"),
        arguments=_object(
            amount={"type": "integer", "minimum": 1, "maximum": 9999},
            from_currency=_one_of("USD", "EUR", "GBP", "JPY"),
            to_currency=_one_of("USD", "EUR", "GBP", "JPY"),
        ),
    ),
    _object(
        name=_one_of("create_calendar_event"),
        arguments=_object(
            event_title=_text(24),
            start_date={"type": "string", "format": "date"},
            duration_minutes=_one_of(15, 30, 60),
            send_notification={"type": "boolean"},
        ),
    ),
    _object(
        name=_one_of("search_products"),
        arguments=_object(
            search_query=_text(24),
            category=_one_of("electronics", "clothing", "books"),
            max_results={"type": "integer", "minimum": 1, "maximum": 50},
        ),
    ),
]
RECORDS = [
    _object(name=_text(20), age={"type": "integer", "minimum": 0, "maximum": 120}, city=_text(20)),
    _object(
        title=_text(40),
        summary=_text(80),
        tags={"type": "array", "items": _text(12), "minItems": 1, "maxItems": 4},
    ),
    _object(
        sentiment=_one_of("positive", "negative", "neutral"),
        confidence={"type": "integer", "minimum": 0, "maximum": 100},
        reason=_text(60),
    ),
    _object(
        id={"type": "integer", "minimum": 1},
        customer=_object(first_name=_text(16), email={"type": "string", "format": "email"}),
        paid={"type": "boolean"},
    ),
]
KINDS = {"tool calls": TOOLS, "records": RECORDS}


@dataclass(kw_only=True)
class Row:
    """One way of one server at one concurrency. Rates are per second of the whole run."""

    server: str
    kind: str
    way: str
    concurrency: int
    objects: int
    valid: int
    seconds: float
    tokens: int
    forced: int
    accepted: int
    rejected: int
    p50_s: float
    errors: list[str]

    @property
    def objects_per_s(self) -> float:
        return self.valid / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def body(
    schema: dict[str, Any],
    index: int,
    extra: dict[str, Any],
    *,
    free: bool = False,
    different: bool = False,
) -> dict[str, Any]:
    """A request; `free` for the same prompt and no schema."""
    system = f"You write JSON for {json.dumps(schema)}"
    asked: dict[str, Any] = {
        "model": "model",
        "messages": [
            {"role": "system", "content": system},
            {"role": "user", "content": question(index, different=different)},
        ],
        "temperature": 0,
        "max_tokens": FREE_TOKENS if free else MAX_TOKENS,
    }
    if free:
        return asked | {"ignore_eos": True}
    answer = {"name": "answer", "strict": True, "schema": schema}
    return asked | {"response_format": {"type": "json_schema", "json_schema": answer}} | extra


async def ask(http: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> dict[str, Any]:
    """The reply. Raises `RuntimeError` for a status other than 200."""
    async with http.post(f"{url}/v1/chat/completions", json=request) as response:
        if response.status != 200:
            raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:200]}")
        reply: dict[str, Any] = await response.json()
        return reply


async def measure(
    url: str,
    server: str,
    kind: str,
    way: str,
    extra: dict[str, Any],
    concurrency: int,
    count: int,
    *,
    different: bool = False,
) -> Row:
    """Closed loop of `concurrency` callers until `count` objects are there."""
    first = next(_numbers) * 1_000  # no two rows have a prompt in common
    free, schemas = way == "free text", KINDS[kind]
    validators = [jsonschema_rs.validator_for(s, validate_formats=True) for s in schemas]
    row = Row(
        server=server,
        kind=kind,
        way=way,
        concurrency=concurrency,
        objects=count,
        valid=0,
        seconds=0.0,
        tokens=0,
        forced=0,
        accepted=0,
        rejected=0,
        p50_s=0.0,
        errors=[],
    )
    pending = iter(range(count))
    latencies: list[float] = []

    async def caller(http: aiohttp.ClientSession) -> None:
        for index in pending:
            schema = schemas[index % len(schemas)]
            request = body(schema, first + index, extra, free=free, different=different)
            began = time.perf_counter()
            try:
                reply = await ask(http, url, request)
            except (RuntimeError, aiohttp.ClientError, TimeoutError) as error:
                row.errors.append(str(error))
                continue
            latencies.append(time.perf_counter() - began)
            row.tokens += reply["usage"]["completion_tokens"]
            details = reply["usage"].get("completion_tokens_details") or {}
            row.forced += details.get("forced_tokens") or 0
            row.accepted += details.get("accepted_prediction_tokens") or 0
            row.rejected += details.get("rejected_prediction_tokens") or 0
            row.valid += free or _is_valid(reply, validators[index % len(validators)])

    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:
        for schema in schemas:  # compiled before the clock starts
            await ask(http, url, body(schema, first + 999, extra, free=free))
        began = time.perf_counter()
        await asyncio.gather(*(caller(http) for _ in range(concurrency)))
        row.seconds = time.perf_counter() - began
    row.p50_s = statistics.median(latencies) if latencies else 0.0
    return row


def _is_valid(reply: dict[str, Any], validator: Any) -> bool:
    try:
        return bool(validator.is_valid(json.loads(reply["choices"][0]["message"]["content"])))
    except ValueError:
        return False


def ways_of(name: str) -> dict[tuple[str, ...], dict[str, dict[str, Any]]]:
    """Flags of the servers to start of one program → what each is asked for."""
    if name != "phloem":
        return {(): {"free text": {}, "schema": {}}}
    compact = {"constraint_whitespace": "compact"}
    servers = {
        flags: {way: compact | extra for way, extra in ways.items()}
        for flags, ways in PHLOEM_WAYS.items()
    }
    first = next(iter(servers))
    return servers | {first: {"free text": {}} | servers[first]}


def measure_server(
    server: Running, name: str, ways: dict[str, dict[str, Any]], arguments: argparse.Namespace
) -> list[Row]:
    """All rows of one server that runs."""
    rows: list[Row] = []
    different = arguments.questions == "different"
    for concurrency in arguments.concurrency:
        count = max(12, arguments.objects, 3 * concurrency)
        for kind in KINDS:
            for way, extra in ways.items():
                run = measure(
                    server.url, name, kind, way, extra, concurrency, count, different=different
                )
                row = asyncio.run(run)
                rows.append(row)
                console.print(
                    f"{name} ×{concurrency} {kind}, {way}: {row.objects_per_s:.2f} objects/s, "
                    f"{row.tokens_per_s:.0f} tok/s, {len(row.errors)} errors {row.errors[:1]}"
                )
    return rows


# --------------------------------------------------------------------------- distinct schemas


async def measure_distinct(server: Running, count: int) -> dict[str, Any]:
    """Latency of a first token under schemas never seen, under one seen before, and memory."""

    numbers = itertools.count()  # no prompt is in the cache

    async def first_token(http: aiohttp.ClientSession, schema: dict[str, Any]) -> float:
        question = f"Number {next(numbers)}: write a record of anything at all, as JSON."
        request = body(schema, 0, {}) | {
            "messages": [{"role": "user", "content": question}],
            "stream": True,
        }
        began = time.perf_counter()
        async with http.post(f"{server.url}/v1/chat/completions", json=request) as response:
            response.raise_for_status()
            async for line in response.content:
                if b'"content":"' in line and b'"content":""' not in line:
                    break
        return time.perf_counter() - began

    def resident() -> int:
        root = psutil.Process(server.pid)
        processes = [root, *root.children(recursive=True)]
        return sum(p.memory_info().rss for p in processes) >> 20

    known = RECORDS[0]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as http:
        await first_token(http, known)
        cached, fresh, memory = [], [], [resident()]
        for index in range(count):
            schema = json.loads(json.dumps(RECORDS[index % len(RECORDS)]))
            schema["properties"][f"extra_{index}"] = _text(1 + index % 30)
            fresh.append(await first_token(http, schema))
            if index % 10 == 0:
                cached.append(await first_token(http, known))
            if (index + 1) % max(1, count // 10) == 0:
                memory.append(resident())
    return {
        "schemas": count,
        "fresh_p50_s": statistics.median(fresh),
        "cached_p50_s": statistics.median(cached),
        "ratio": statistics.median(fresh) / statistics.median(cached),
        "resident_mib": memory,
    }


# --------------------------------------------------------------------------- the report


def tabulate(rows: Sequence[Row]) -> Table:
    masks = {(r.server, r.kind, r.concurrency): r for r in rows if r.way in ("masks", "schema")}
    table = Table(
        *("server", "concurrency", "kind", "way", "valid", "objects/s", "× masks"),
        *("tok/s", "tok/object", "forced", "guessed", "in vain", "p50 s"),
    )
    for r in rows:
        base = masks.get((r.server, r.kind, r.concurrency))
        table.add_row(
            r.server,
            str(r.concurrency),
            r.kind,
            r.way,
            f"{r.valid}/{r.objects}",
            f"{r.objects_per_s:.2f}",
            f"{r.objects_per_s / base.objects_per_s:.2f}" if base and base.valid else "",
            f"{r.tokens_per_s:.0f}",
            f"{r.tokens / max(1, r.objects):.1f}",
            f"{r.forced / max(1, r.tokens):.0%}",
            f"{r.accepted / max(1, r.tokens):.0%}",
            f"{r.rejected / max(1, r.tokens):.0%}",
            f"{r.p50_s:.2f}",
        )
    return table


def _started(
    name: str, flags: Sequence[str], logs: Path, arguments: argparse.Namespace
) -> AbstractContextManager[Running]:
    """A server of one program, with the model that was asked for, or the default one."""
    if arguments.model is None:
        return own_server(*flags)
    setting = Setting(
        model=arguments.model.resolve(),
        model_folder=arguments.model_folder,
        threads=arguments.threads,
        dtype=arguments.dtype,
        slots=max(arguments.concurrency),
    )
    return running(name, setting, logs / f"{name}.log", flags)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", default="phloem", help=f"of {','.join(PEERS)}")
    parser.add_argument("--model", type=Path, help="GGUF file (default: the default model)")
    parser.add_argument("--model-folder", type=Path, help="the model for vLLM")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False) or 1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--objects", type=int, default=12, help="of each row, at least")
    parser.add_argument("--questions", choices=["numbered", "different"], default="numbered")
    parser.add_argument("--distinct", type=int, default=0, help="schemas, for Phloem alone")
    parser.add_argument("--json", type=Path, help="write all rows here")
    arguments = parser.parse_args(argv)
    if arguments.distinct:
        with own_server(model=arguments.model) as server:
            found = asyncio.run(measure_distinct(server, arguments.distinct))
        print(json.dumps(found, indent=2))
        if arguments.json is not None:
            write_json(arguments.json, **found)
        return 0
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="phloem-bench-") as logs:
        for name in arguments.peers.split(","):
            try:
                for flags, ways in ways_of(name).items():
                    with _started(name, flags, Path(logs), arguments) as server:
                        rows += measure_server(server, name, ways, arguments)
            except (NotInstalled, PeerFailed) as error:
                console.print(f"[yellow]{name} is skipped: {error}")
    output = Console()
    if not output.is_terminal:
        output.width = 150
    output.print(tabulate(rows))
    if arguments.json is not None:
        write_json(arguments.json, rows=[asdict(r) for r in rows])
    return 0 if rows and not any(r.errors for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Throughput and latency of servers that speak OpenAI's chat protocol.

    python benchmark/serve.py --base-url http://127.0.0.1:30000
    python benchmark/serve.py --peers phloem,llama-server --model MODEL.gguf --repeat 3

With --peers each server is started by itself, in turn, for every round: round i of every peer has
the same prompts, and no two rounds share any. The first peer named is the one whose ratio to the
others is given. A peer that is not installed is skipped, and says so. Measure on a machine that
does nothing else; the last column tells how many cores others kept busy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from urllib.request import urlopen

import aiohttp
import msgspec
from common import Watch, write_json
from peers import PEERS, Running, running
from rich.console import Console
from turns import add_options, names, report, setting, take_turns

from phloem.srt.bench.load import ChatClient, Message, run_workload
from phloem.srt.bench.prefix import (
    CannotTokenize,
    Tokenize,
    minimum_prefill,
    server_tokenizer,
)
from phloem.srt.bench.report import Summary, median_summary, ratios, render_table, summarise
from phloem.srt.bench.workloads import WORKLOADS, Turn, Workload

WARM_UP = Workload(
    name="warm-up",
    title="",
    concurrency=1,
    turns=(Turn(user="Say something to warm up.", max_tokens=8),),
)
console = Console(stderr=True)


@dataclass
class Session:
    """What has been measured, and what was skipped, so far."""

    arguments: argparse.Namespace
    summaries: list[Summary] = field(default_factory=list)
    start_seconds: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def save(self) -> None:
        if self.arguments.json is not None:
            write_json(
                self.arguments.json,
                seed=self.arguments.seed,
                start_seconds=self.start_seconds,
                skipped=self.skipped,
                ratios=ratios(self.summaries, self.summaries[0].server) if self.summaries else {},
                runs=[msgspec.structs.asdict(summary) for summary in self.summaries],
            )


async def measure(
    session: Session, server: Running, name: str, seed: int, *, local: Tokenize | None
) -> None:
    """One round: a warm-up request, then every workload."""
    # a new connection each: a server may close an idle one just as a request goes out on it
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as http:
        client = ChatClient(
            http, server.url, server.model, ignore_eos=not session.arguments.keep_eos
        )
        await run_workload(client, WARM_UP)
        tokenize = local or server_tokenizer(http, server.url, server.model)
        for workload in session.arguments.workloads:
            with Watch(server.pid or None) as watch:
                run = await run_workload(client, WORKLOADS[workload](seed))
            try:
                minimum = await minimum_prefill(run.calls, tokenize)
            except CannotTokenize as error:
                minimum = None
                console.print(f"[yellow]{error}; the least possible prefill is unknown")
            summary = summarise(
                run,
                server=name,
                minimum_tokens=minimum,
                peak_mib=watch.peak_mib,
                other_cores=watch.other_cores,
            )
            session.summaries.append(summary)
            session.save()
            console.print(
                f"{name} {workload}: {summary.output_tokens_per_s:.1f} tok/s, "
                f"{summary.errors} errors"
                + (f" (first: {summary.first_error})" if summary.first_error else "")
            )


@cache
def local_tokenizer(model: Path) -> Tokenize:
    """`Tokenize` from a model file or folder."""
    from phloem.srt.checkpoint import open_checkpoint
    from phloem.srt.generation import ChatMessage
    from phloem.srt.tokenizer import load_chat_template, load_tokenizer

    checkpoint = open_checkpoint(model)
    template = load_chat_template(checkpoint, load_tokenizer(checkpoint))

    async def tokenize(messages: list[Message], opening: bool) -> list[int]:
        chat = [ChatMessage(role=m["role"], content=m["content"]) for m in messages]
        return template.encode_chat(chat, add_generation_prompt=opening)

    return tokenize


def compare_peers(session: Session) -> None:
    arguments = session.arguments
    given = setting(arguments)
    local = local_tokenizer(given.model)

    def start(name: str, log: Path) -> AbstractContextManager[Running]:
        return running(name, given, log)

    def measure_round(name: str, server: Running, round_: int) -> None:
        session.start_seconds.setdefault(name, []).append(server.start_seconds)
        seed = arguments.seed + round_
        asyncio.run(measure(session, server, name, seed, local=local))

    take_turns(arguments.peers, arguments.repeat, session.skipped, start, measure_round)


def first_model(base_url: str) -> str:
    """What a server calls the first model that it serves. Raises `SystemExit` with the reason."""
    try:
        with urlopen(f"{base_url}/v1/models", timeout=10) as reply:
            return str(json.load(reply)["data"][0]["id"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise SystemExit(
            f"{base_url}/v1/models does not name a model ({error!r}): give --served-model-name"
        ) from error


def measure_url(session: Session) -> None:
    arguments = session.arguments
    server = Running(
        url=arguments.base_url,
        pid=arguments.pid or 0,
        model=arguments.served_model_name or first_model(arguments.base_url),
        start_seconds=0.0,
    )
    local = None if arguments.model is None else local_tokenizer(arguments.model)
    for round_ in range(arguments.repeat):
        seed = arguments.seed + round_
        asyncio.run(measure(session, server, arguments.base_url, seed, local=local))


def show(session: Session) -> None:
    """The median run of every workload on every server, the ratios, and who was skipped."""
    output = report(session.skipped)
    if not session.summaries:
        return
    groups: dict[tuple[str, str], list[Summary]] = {}
    for summary in session.summaries:
        groups.setdefault((summary.workload, summary.server), []).append(summary)
    order = {name: i for i, name in enumerate(WORKLOADS)}
    medians = [median_summary(group) for group in groups.values()]
    output.print(render_table(sorted(medians, key=lambda s: order[s.workload])))
    reference = session.summaries[0].server
    for workload, by_server in ratios(session.summaries, reference).items():
        for server, ratio in by_server.items():
            output.print(f"{workload}: {reference} gives {ratio:.2f} × the tokens of {server}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    target = parser.add_mutually_exclusive_group(required=True)
    target.add_argument("--base-url", help="a server that runs")
    target.add_argument("--peers", type=names(list(PEERS)), help=f"of {','.join(PEERS)}")
    parser.add_argument("--model", type=Path, help="GGUF file, or folder, for peers and tokenizer")
    parser.add_argument(
        "--served-model-name", help="with --base-url; by default the first of its /v1/models"
    )
    parser.add_argument("--pid", type=int, help="with --base-url: the server, to see its memory")
    parser.add_argument(
        "--workloads", type=names(list(WORKLOADS)), default=list(WORKLOADS), help="comma-separated"
    )
    parser.add_argument("--keep-eos", action="store_true", help="let answers end early")
    add_options(parser)
    parsed = parser.parse_args(arguments)
    if parsed.peers and parsed.model is None:
        parser.error("--peers needs --model")
    return parsed


def main() -> int:
    session = Session(parse())
    (compare_peers if session.arguments.peers else measure_url)(session)
    session.save()
    show(session)
    return 0 if session.summaries and not any(s.errors for s in session.summaries) else 1


if __name__ == "__main__":
    sys.exit(main())

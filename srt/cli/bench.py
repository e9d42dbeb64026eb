"""`phloem bench`"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from phloem.srt.cli.options import ConfigFile
from phloem.srt.cli.outcome import CommandError, ExitCode
from phloem.srt.cli.settings import OTHER_VARIABLES, PREFIX, set_options, to_toml
from phloem.srt.cli.terminal import TerminalProgress
from phloem.srt.config import ServeConfig

if TYPE_CHECKING:
    import aiohttp

    from phloem.srt.bench import Summary, Workload

WORKLOAD_NAMES = ("single", "batch16", "shared", "multiturn", "fork", "json", "long")

_STOP_SECONDS = 60.0


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured, and where."""

    base_url: str | None = None
    """Server to measure, as in http://127.0.0.1:30000; by default one is started with the options
    below and stopped afterwards."""
    seed: int = 0
    """The texts follow from it. A server has the answers to a seed it saw before in its cache."""
    json: Path | None = None
    """File to write the figures to."""


def bench(
    *workload: Annotated[
        str, Parameter(help=f"Any of: {', '.join(WORKLOAD_NAMES)}. By default all.")
    ],
    bench: BenchOptions | None = None,
    options: ServeConfig | None = None,
    config: ConfigFile = None,
) -> int:
    """Measure a server under workloads of known shape.

    Exit code 1 if a request failed or an answer broke its schema.
    """
    wanted = bench or BenchOptions()
    asked = options or ServeConfig()
    chosen = _choose(workload, wanted.seed)
    if wanted.base_url is not None:
        summaries = asyncio.run(_measure(wanted.base_url, asked.server.api_key, chosen))
    else:
        with _server(asked) as url:
            summaries = asyncio.run(_measure(url, asked.server.api_key, chosen))
    _report(summaries, wanted.json)
    bad = any(summary.errors or summary.invalid for summary in summaries)
    return ExitCode.FAILED if bad else ExitCode.OK


def _choose(names: tuple[str, ...], seed: int) -> list[Workload]:
    from phloem.srt.bench import WORKLOADS

    for name in names:
        if name not in WORKLOADS:
            raise CommandError(
                f"no workload {name}; there are {', '.join(WORKLOADS)}", ExitCode.USAGE
            )
    return [WORKLOADS[name](seed) for name in names or WORKLOADS]


async def _measure(base_url: str, api_key: str | None, workloads: list[Workload]) -> list[Summary]:
    from aiohttp import ClientSession, TCPConnector

    from phloem.srt.bench import ChatClient, run_workload, summarise
    from phloem.srt.bench.prefix import CannotTokenize, minimum_prefill, server_tokenizer

    progress = TerminalProgress()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key is not None else {}
    summaries = []
    async with ClientSession(
        headers=headers, connector=TCPConnector(limit=0, force_close=True)
    ) as session:
        model = await _served_model(session, base_url)
        client = ChatClient(session, base_url, model)
        tokenize = server_tokenizer(session, base_url, model)
        for workload in workloads:
            progress.say(f"{workload.name}: {workload.title}")
            run = await run_workload(client, workload)
            try:
                minimum = await minimum_prefill(run.calls, tokenize)
            except CannotTokenize:
                minimum = None
            summaries.append(summarise(run, server=model, minimum_tokens=minimum))
    return summaries


async def _served_model(session: aiohttp.ClientSession, base_url: str) -> str:
    """The first model that the server names."""
    from aiohttp import ClientError

    url = f"{base_url.rstrip('/')}/v1/models"
    try:
        async with session.get(url) as response:
            if response.status != 200:
                raise CommandError(f"{url} answers with HTTP {response.status}")
            models = await response.json(content_type=None)
        return str(models["data"][0]["id"])
    except (ClientError, TimeoutError) as error:
        raise CommandError(f"{url} cannot be reached: {error}") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise CommandError(f"{url} names no model") from error


@contextmanager
def _server(config: ServeConfig) -> Iterator[str]:
    """A server of its own process, on a free port; its URL. Stopped at the end."""
    quiet = dataclasses.replace(config, server=dataclasses.replace(config.server, port=0))
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(PREFIX) or name in OTHER_VARIABLES
    }
    with tempfile.NamedTemporaryFile("w", prefix="phloem-", suffix=".toml") as file:
        file.write(to_toml(set_options(quiet)))
        file.flush()
        command = [sys.executable, "-m", "phloem.srt.cli", "serve", "--config", file.name]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as server:
            assert server.stdout is not None
            try:
                found = re.search(r" at (http://\S+)$", server.stdout.readline())
                if found is None:
                    raise CommandError("the server did not start; its reason is above")
                yield found[1]
            finally:
                server.terminate()
                try:
                    server.communicate(timeout=_STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    server.kill()


def _report(summaries: list[Summary], path: Path | None) -> None:
    import msgspec
    from rich.console import Console

    from phloem.srt.bench import render_table
    from phloem.srt.resolve import detect_hardware

    width = None if sys.stdout.isatty() else 160
    Console(width=width).print(render_table(summaries))
    for summary in summaries:
        if summary.first_error is not None:
            print(f"phloem: {summary.workload}: {summary.first_error}", file=sys.stderr)
    if path is not None:
        hardware = detect_hardware()
        machine = {"cpu": hardware.cpu, "isa": hardware.isa, "cpus": hardware.usable_cores}
        data = msgspec.json.encode({"machine": machine, "runs": summaries})
        path.write_bytes(msgspec.json.format(data, indent=2) + b"\n")

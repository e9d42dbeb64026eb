"""`phloem batch`"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter
from cyclopts.validators import Number

from phloem.srt.cli.options import ConfigFile, EngineOptions
from phloem.srt.cli.outcome import CommandError, ExitCode, start_errors_told
from phloem.srt.cli.terminal import TerminalProgress, set_up_logging
from phloem.srt.config import ServeConfig, ServerOptions

if TYPE_CHECKING:
    import aiohttp

    from phloem.lang.line_file import LineFile
    from phloem.srt.cli.batch_run import Counts
    from phloem.srt.http.batches.lines import InputFile

MAX_LINE_BYTES = 64 << 20
"""A longer line is an error in the results."""

AtLeastOne = Annotated[int, Parameter(validator=Number(gte=1))]


@Parameter(name="*", group=Group("Batch", sort_key=-1))
@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Where requests go, and how."""

    base_url: str | None = None
    """Server to ask, as in http://127.0.0.1:30000; by default the model runs in this process, with
    the options below."""
    api_key: str | None = None
    """Sent to the server as `Authorization: Bearer KEY`."""
    endpoint: str | None = None
    """URL of lines that are bare bodies; by default /v1/chat/completions for those with `messages`,
    /v1/completions with `prompt`, /v1/responses with `input`."""
    concurrency: Annotated[int | None, Parameter(validator=Number(gte=1))] = None
    """Requests under way at once; by default twice as many as run at once, for a server 64."""
    tries: AtLeastOne = 10
    """How often a request is sent before it counts as failed because the server is full; a server
    that cannot be reached so often ends the batch."""
    request_timeout: Annotated[float, Parameter(validator=Number(gt=0))] = 3600.0
    """Seconds that a server may be silent before the request is sent again."""
    retry_failed: bool = False
    """Make requests again that have an error in the output; its line is taken out."""


def batch(
    file: Annotated[Path, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    output: Annotated[Path, Parameter(alias="-o")],
    batch: BatchOptions | None = None,
    options: EngineOptions | None = None,
    config: ConfigFile = None,
) -> int:
    """Make the requests of a JSONL file, and write each result when it is there.

    A line is a request as OpenAI's batches have it (custom_id, method, url, body) or a bare body;
    the output's lines are OpenAI's, in the order in which the requests end. Killed, and run again
    with the same files, it goes on with the requests that have no result.

    Exit code 0 if every request has an answer, 1 if one has an error, or the batch was ended.

    Parameters
    ----------
    file
        The requests; `-` is stdin.
    output
        File for the results. One that an earlier run wrote is gone on with.
    """
    from phloem.lang.line_file import LineFile, LineFileError
    from phloem.srt.cli.batch_lines import OPENING, custom_id_of, succeeded
    from phloem.srt.http.batches.lines import InputFile

    wanted = batch or BatchOptions()
    asked = (options or EngineOptions()).config()
    set_up_logging(asked.log.log_level)
    source = Path("/dev/stdin") if str(file) == "-" else file
    keep = succeeded if wanted.retry_failed else None
    try:
        lines = InputFile(source, MAX_LINE_BYTES)
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}", ExitCode.USAGE) from error
    try:
        with LineFile(output, opening=OPENING, key_of=custom_id_of, keep=keep) as results:
            total = os.stat(source).st_size or None
            with _progress(total) as show:
                counts = asyncio.run(_run(lines, results, wanted, asked, show))
    except LineFileError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    except OSError as error:
        raise CommandError(f"{error.filename or output}: {error.strerror or error}") from error
    finally:
        lines.close()
    return _told(counts, output)


async def _run(
    lines: InputFile,
    results: LineFile,
    wanted: BatchOptions,
    asked: ServeConfig,
    show: Callable[[Counts], None],
) -> Counts:
    import aiohttp

    from phloem.srt.cli.batch_run import Batch, ServerGone

    headers = {"Content-Type": "application/json"}
    if wanted.api_key is not None:
        headers["Authorization"] = f"Bearer {wanted.api_key}"
    async with _connector(wanted, asked) as (connector, base_url):
        timeout = aiohttp.ClientTimeout(total=None, sock_read=wanted.request_timeout)
        async with aiohttp.ClientSession(
            connector=connector, headers=headers, timeout=timeout
        ) as session:
            batch = Batch(
                session=session,
                base_url=base_url,
                lines=lines,
                results=results,
                endpoint=wanted.endpoint,
                concurrency=wanted.concurrency or _usual_concurrency(wanted, asked),
                tries=wanted.tries,
                on_progress=show,
            )
            try:
                return await batch.run()
            except ServerGone as error:
                raise CommandError(f"{error}; run this again to go on") from error


def _usual_concurrency(wanted: BatchOptions, asked: ServeConfig) -> int:
    return 64 if wanted.base_url is not None else 2 * asked.scheduler.max_running


@asynccontextmanager
async def _connector(
    wanted: BatchOptions, asked: ServeConfig
) -> AsyncIterator[tuple[aiohttp.BaseConnector, str]]:
    """What leads to the server, and its URL: the one asked for, or one in this process, which
    listens in a folder that nobody else can enter."""
    import aiohttp

    if wanted.base_url is not None:
        if not wanted.base_url.startswith(("http://", "https://")):
            raise CommandError("--base-url begins with http:// or https://", ExitCode.USAGE)
        url = wanted.base_url.rstrip("/").removesuffix("/v1")
        yield aiohttp.TCPConnector(limit=0), url
        return
    from aiohttp import web

    from phloem.srt.engine import Engine
    from phloem.srt.http.app import create_app, make_runner

    with start_errors_told():
        engine = Engine(asked, progress=TerminalProgress())
        await engine.start()
    try:
        with tempfile.TemporaryDirectory(prefix="phloem-") as folder:
            own = ServerOptions(max_body_bytes=MAX_LINE_BYTES)
            runner = make_runner(create_app(engine, own, data_dir=Path(folder) / "data"))
            await runner.setup()
            try:
                path = str(Path(folder) / "server")
                await web.UnixSite(runner, path).start()
                yield aiohttp.UnixConnector(path, limit=0), "http://phloem"
            finally:
                await runner.cleanup()
    finally:
        await engine.close()


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[Counts], None]]:
    """A bar on stderr where a terminal shows it: how much of the file (bytes) is done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=total)

        def show(counts: Counts) -> None:
            failed = f", [red]{counts.failed:,} failed[/red]" if counts.failed else ""
            bar.update(task, completed=counts.bytes, description=f"{counts.done:,} done{failed}")

        yield show


def _told(counts: Counts, output: Path) -> int:
    """The summary on stderr, and the exit code."""
    total = counts.done + counts.failed
    before = f" ({counts.found:,} of them before)" if counts.found else ""
    said = f"phloem: {total:,} requests{before}: {counts.done:,} answered, {counts.failed:,} failed"
    print(f"{said}; see {output}", file=sys.stderr)
    for place in counts.duplicates:
        print(f"phloem: {place} stands before it too, and was left out", file=sys.stderr)
    if counts.first_error:
        print(
            f"phloem: the first error: {counts.first_error}\n"
            "phloem: --retry-failed makes such requests again",
            file=sys.stderr,
        )
    return ExitCode.FAILED if counts.failed else ExitCode.OK

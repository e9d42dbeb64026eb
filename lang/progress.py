"""The progress bar of a batch, on stderr."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[bool], None]  # one more is done; whether it failed


@contextmanager
def progress(total: int | None, wanted: bool | None) -> Iterator[Advance]:
    """Show how far a batch is while the block runs. `wanted` None means if stderr is a terminal
    and rich is installed, which a client may be without; `total` None draws a bar without an end.
    """
    if wanted and not _has_rich():
        raise ImportError("progress_bar=True needs rich: install phloem-client[progress]")
    if not (sys.stderr.isatty() and _has_rich() if wanted is None else wanted):
        yield lambda failed: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("programs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bar:
        task = bar.add_task("programs", total=total, note="")
        failures = 0

        def advance(failed: bool) -> None:
            nonlocal failures
            failures += failed
            bar.update(task, advance=1, note=f"[red]{failures} failed" if failures else "")

        yield advance


def _has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None

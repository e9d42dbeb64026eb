"""What commands write for people: progress on stderr, sizes, tables."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager


class TerminalProgress:
    """A `phloem.srt.hub.Progress` on stderr: lines, and bars where a terminal shows them."""

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        if not sys.stderr.isatty():
            yield lambda _done: None
            return
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

        columns = ("{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(label, total=total)
            yield lambda done: progress.update(task, completed=done)


def set_up_logging(level: str) -> None:
    """Log lines of this process on stderr, from `level` up."""
    logging.basicConfig(level=level.upper(), format="%(levelname)s %(message)s")


def megabytes(size: int) -> str:
    """Bytes for people, in decimal units."""
    if size >= 10**9:
        return f"{size / 10**9:.1f} GB"
    return f"{size / 10**6:.1f} MB"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equal length as left-aligned columns, two spaces between."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)

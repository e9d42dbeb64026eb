"""A trace drawn in a terminal: with rich in colour, without it as plain text."""

from __future__ import annotations

import shutil
import sys
from typing import Final, TextIO

from phloem.lang.recording.layout import (
    PHASES,
    Phase,
    Row,
    duration,
    facts,
    phases,
    rows,
    title,
)
from phloem.lang.recording.spans import Span, Trace

MAX_ROWS: Final = 400

_NAME_WIDTH: Final = 28
_FACTS_WIDTH: Final = 34
_LEAST_BAR: Final = 16

_MARKS: Final = {Phase.WAIT: "·", Phase.QUEUE: "░", Phase.PROMPT: "▒", Phase.ANSWER: "█"}
_ASCII: Final = str.maketrans("·░▒█│├└─…×", ".-=#||`-~x")
_STYLES: Final = {
    Phase.WAIT: "dim",
    Phase.QUEUE: "yellow",
    Phase.PROMPT: "cyan",
    Phase.ANSWER: "green",
}

Piece = tuple[str, str]
"""Text and its style in rich's words."""


def show(trace: Trace, file: TextIO | None = None) -> None:
    """Draw `trace` on stdout, or on `file`, as wide as the terminal."""
    out = sys.stdout if file is None else file
    width = max(60, shutil.get_terminal_size((120, 24)).columns)
    drawn = draw(trace, width)
    if not _can_print("█░▒·├", out):
        drawn = [[(text.translate(_ASCII), style) for text, style in line] for line in drawn]
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        for line in drawn:
            print("".join(text for text, _ in line).rstrip(), file=out)
        return
    console = Console(file=out, width=width, highlight=False)
    for line in drawn:
        console.print(Text.assemble(*line), no_wrap=True, overflow="ignore", crop=False)


def draw(trace: Trace, width: int) -> list[list[Piece]]:
    """The lines of the drawing, `width` columns wide."""
    found = rows(trace)
    shown = found[:MAX_ROWS]
    names = min(_NAME_WIDTH, max((len(row.guide + row.label) for row in shown), default=0))
    counts = min(_FACTS_WIDTH, max((len(facts(row.span)) for row in shown if row.span), default=0))
    bar = max(_LEAST_BAR, width - names - counts - 12)
    lines: list[list[Piece]] = [[(title(trace), "bold")]]
    if trace.error is not None:
        lines.append([(trace.error, "red")])
    lines += [_line(trace, row, names, bar, counts) for row in shown]
    if len(found) > len(shown):
        lines.append([(f"… {len(found) - len(shown):,} more rows", "dim")])
    legend: list[Piece] = []
    for phase, words in PHASES.items():
        legend += [(_MARKS[phase], _STYLES[phase]), (f" {words}   ", "dim")]
    lines.append(legend)
    return lines


def _line(trace: Trace, row: Row, names: int, bar: int, counts: int) -> list[Piece]:
    name = _fitted(row.guide + row.label, names)
    if row.span is None:
        return [(name, "bold")]
    span = row.span
    failed = span.error is not None
    line: list[Piece] = [(name, "red" if failed else ""), (" ", "")]
    line += _bar(trace, span, bar)
    took = "…" if span.ended is None else duration(span.ended - span.called)
    line.append((f" {took:>8} ", ""))
    line.append((_fitted(facts(span), counts), "dim"))
    if failed:
        line.append((f" {span.error}", "red"))
    return line


def _bar(trace: Trace, span: Span, width: int) -> list[Piece]:
    """One column is one `width`th of the run; a phase that began has at least one."""
    scale = width / max(trace.seconds, 1e-9)
    cells: list[Phase | None] = [None] * width
    for phase, begun, done in phases(trace, span):
        start = min(int(begun * scale), width - 1)
        for column in range(start, max(start + 1, min(round(done * scale), width))):
            cells[column] = phase
    failed = span.error is not None
    return [
        (" ", "") if cell is None else (_MARKS[cell], "red" if failed else _STYLES[cell])
        for cell in cells
    ]


def _fitted(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"


def _can_print(sample: str, out: TextIO) -> bool:
    try:
        sample.encode(getattr(out, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True

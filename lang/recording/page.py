"""A trace as one HTML page, which asks the network for nothing, and is readable without scripts."""

from __future__ import annotations

import html
import os
import re
import time
from functools import cache
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Final

from phloem.lang.recording.explain import explain
from phloem.lang.recording.layout import (
    PHASES,
    Row,
    duration,
    facts,
    name_of,
    phases,
    rows,
    title,
)
from phloem.lang.recording.spans import Span, Trace

MAX_ROWS: Final = 4000

_TICKS: Final = 5
_ROW_PIXELS: Final = 19
_LINE_PIXELS: Final = 21
_NOTEBOOK_PIXELS: Final = (200, 700)
_CODE: Final = re.compile("`([^`]+)`")


def page(trace: Trace) -> str:
    """The page's text."""
    found = rows(trace)
    shown = [_row(trace, row) for row in found[:MAX_ROWS]]
    if len(found) > MAX_ROWS:
        shown.append(f'<p class="dim">… {len(found) - MAX_ROWS:,} more rows</p>\n')
    error = "" if trace.error is None else f'<p class="bad">{html.escape(trace.error)}</p>\n'
    return _template().substitute(
        title=html.escape(title(trace)),
        about=html.escape(_about(trace)),
        error=error,
        legend="".join(
            f'<span><i class="{phase}"></i>{words}</span>' for phase, words in PHASES.items()
        ),
        axis="".join(_tick(trace.seconds, at / _TICKS) for at in range(_TICKS + 1)),
        names=max((len(row.guide + row.label) for row in found[:MAX_ROWS]), default=1),
        facts=max((len(facts(row.span)) for row in found[:MAX_ROWS] if row.span), default=1),
        rows="".join(shown),
        said=_CODE.sub(r"<code>\1</code>", html.escape(explain(trace))),
    )


def save_page(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write the page to a file. Raises `OSError`."""
    Path(path).write_text(page(trace), encoding="utf-8")


def notebook_html(trace: Trace) -> str:
    """The page in a frame, so that its styles and the notebook's do not meet."""
    low, high = _NOTEBOOK_PIXELS
    lines = explain(trace).count("\n")
    height = min(high, low + _ROW_PIXELS * len(rows(trace)) + _LINE_PIXELS * lines)
    return (
        f'<iframe sandbox="allow-scripts" style="width:100%;height:{height}px;border:0" '
        f'srcdoc="{html.escape(page(trace))}"></iframe>'
    )


@cache
def _template() -> Template:
    return Template((files(__package__) / "page.html").read_text(encoding="utf-8"))


def _tick(seconds: float, share: float) -> str:
    return f'<span style="left:{share:.0%}">{duration(seconds * share)}</span>'


def _row(trace: Trace, row: Row) -> str:
    name = f'<span class="name">{html.escape(row.guide + row.label)}</span>'
    if row.span is None:
        return f'<div class="row">{name}</div>\n'
    span = row.span
    scale = 100 / max(trace.seconds, 1e-9)
    bars = "".join(
        f'<i class="{phase}" style="left:{begun * scale:.3f}%;width:{(done - begun) * scale:.3f}%">'
        "</i>"
        for phase, begun, done in phases(trace, span)
    )
    took = "…" if span.ended is None else duration(span.ended - span.called)
    details = html.escape(_details(trace, span))
    failed = " failed" if span.error is not None else ""
    return (
        f'<div class="row{failed}" tabindex="0" title="{details}" data-tip="{details}">{name}'
        f'<span class="bar">{bars}</span><span class="took">{took}</span>'
        f'<span class="dim facts">{html.escape(facts(span))}</span></div>\n'
    )


def _details(trace: Trace, span: Span) -> str:
    lines = [name_of(span)]
    if counts := facts(span):
        lines.append(counts)
    lines += [
        f"{duration(begun)} – {duration(done)}  {PHASES[phase]} ({duration(done - begun)})"
        for phase, begun, done in phases(trace, span)
    ]
    if span.ended is None:
        lines.append("has not ended")
    if span.error is not None:
        lines.append(span.error)
    elif span.ended is not None and not span.read:
        lines.append("read by nobody so far")
    if span.preview:
        lines.append(f"“{span.preview}”")
    return "\n".join(lines)


def _about(trace: Trace) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(trace.started_at))
    return f"{began} on {trace.backend}" if trace.backend else began

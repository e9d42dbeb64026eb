"""`phloem trace`"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from phloem.srt.cli.outcome import CommandError, ExitCode
from phloem.srt.cli.terminal import columns

if TYPE_CHECKING:
    from collections.abc import Iterator

    from phloem.lang.recording.spans import Trace

LISTED = 1000
"""Runs of a file that are listed; of a larger one, the first."""


def trace(
    file: Path,
    /,
    *,
    run: Annotated[int | None, Parameter(validator=Number(gte=1))] = None,
    html: Path | None = None,
) -> int:
    """Draw what a program did: when each call waited and answered, its tokens, and what to change.

    Of a file with several runs they are listed; choose one with --run.

    Parameters
    ----------
    file
        A trace that `state.save_trace` wrote, or the file that PHLOEM_TRACE names, with one a line.
    run
        Which run of the file, from 1.
    html
        File to write a page to, instead of drawing here. It needs nothing but a browser.
    """
    from phloem.lang.recording.files import TraceError, load

    try:
        return _shown(load(file), file, run, html)
    except (TraceError, OSError) as error:
        raise CommandError(str(error)) from error


def _shown(traces: Iterator[Trace], file: Path, run: int | None, html: Path | None) -> int:
    if run is not None:
        chosen = next(itertools.islice(traces, run - 1, None), None)
        if chosen is None:
            raise CommandError(f"{file} has fewer than {run} runs", ExitCode.USAGE)
        return _draw(chosen, html)
    first = list(itertools.islice(traces, 2))
    if not first:
        raise CommandError(f"{file} has no run")
    if len(first) == 1:
        return _draw(first[0], html)
    if html is not None:
        raise CommandError(f"{file} has several runs: choose one with --run", ExitCode.USAGE)
    return _list(itertools.chain(first, traces))


def _draw(trace: Trace, html: Path | None) -> int:
    if html is not None:
        from phloem.lang.recording.page import save_page

        save_page(trace, html)
        return ExitCode.OK
    from phloem.lang.recording.explain import explain
    from phloem.lang.recording.terminal import show

    show(trace)
    print()
    print(explain(trace))
    return ExitCode.OK


def _list(traces: Iterator[Trace]) -> int:
    from phloem.lang.recording.layout import duration

    heads = ("run", "program", "time", "calls", "prompt", "cached", "answer", "forced", "error")
    rows: list[tuple[str, ...]] = [heads]
    for number, one in enumerate(itertools.islice(traces, LISTED), 1):
        sums = one.totals()
        counts = (
            sums.calls,
            sums.prompt_tokens,
            sums.cached_tokens,
            sums.completion_tokens,
            sums.forced_tokens,
        )
        said = (duration(one.seconds), *(f"{count:,}" for count in counts))
        rows.append((str(number), one.program, *said, one.error or ""))
    print(columns(rows))
    if next(traces, None) is not None:
        print(f"… and more than the {LISTED:,} that are listed; see one with --run")
    return ExitCode.OK

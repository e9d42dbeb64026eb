"""`phloem replay`"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from phloem.srt.cli.outcome import CommandError, ExitCode
from phloem.srt.cli.terminal import columns

if TYPE_CHECKING:
    from phloem.srt.scheduler.replay import Report


def replay(
    file: Path,
    /,
    *,
    check: Annotated[bool, Parameter(negative="--no-check")] = True,
    trace: Path | None = None,
) -> int:
    """Drive the scheduler with a recording that `phloem serve --record` wrote.

    Every step has to be planned as it was. Exit code 1 if one is not, or if an invariant breaks.

    Parameters
    ----------
    file
        The recording.
    check
        Check after each step that every slot has one owner, that the tree is sound, and that rows
        read their own KV.
    trace
        File to write the requests to, for `benchmark/policy.py --trace`.
    """
    from phloem.srt.scheduler.record_file import RecordingError
    from phloem.srt.scheduler.replay import Replay
    from phloem.srt.scheduler.trace import trace_lines

    try:
        report = Replay(file, check=check).run()
    except (RecordingError, OSError) as error:
        raise CommandError(str(error)) from error
    print(columns(_summary(report)))
    if trace is not None:
        try:
            trace.write_bytes(b"".join(trace_lines(report.trace())))
        except OSError as error:
            raise CommandError(str(error)) from error
    problem = report.problem
    if problem is None:
        return ExitCode.OK
    print(
        f"phloem: {file}: after step {problem.step} (call {problem.call}): {problem.what}",
        file=sys.stderr,
    )
    return ExitCode.FAILED


def _summary(report: Report) -> list[tuple[str, str]]:
    header = report.header
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(header.started))
    ended = "stopped in good order" if report.drained else "then it was killed, or still ran"
    hits = report.cached_tokens / report.prompt_tokens if report.prompt_tokens else 0.0
    rows = [
        ("recorded", f"{started}, by Phloem {header.phloem}, {report.seconds:.1f} s; {ended}"),
        ("requests", f"{len(report.requests):,}, {report.failed:,} of them failed"),
        ("steps", f"{report.steps:,}, in {report.calls:,} calls of the scheduler"),
        ("preemptions", f"{report.preemptions:,}"),
        ("hit rate", f"{hits:.1%} of {report.prompt_tokens:,} prompt tokens"),
    ]
    if ttft := report.ttft:
        mean = sum(ttft) / len(ttft)
        median, late = (ttft[max(0, -(-len(ttft) * percent // 100) - 1)] for percent in (50, 99))
        rows.append(("TTFT", f"mean {mean:.3f} s, p50 {median:.3f} s, p99 {late:.3f} s"))
    if report.cut:
        rows.append(("note", "the file ends in the middle of a record, which is left out"))
    if report.slips:
        rows.append(("note", f"{report.slips:,} calls read the clock unlike in the recording"))
    if report.problem is None:
        rows.append(("result", "the same decisions"))
    return rows

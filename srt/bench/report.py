"""Figures of a run, and the table that people read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jsonschema_rs
import msgspec
import numpy as np
import orjson
from rich.table import Table

from phloem.srt.bench.load import Call, Run


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one workload on one server.

    TTFT is from sending to the first piece of text, ITL between pieces. Of the prompt tokens,
    `computed_tokens` were not `cached_tokens`; `minimum_tokens` is the least that any server could
    compute (None where unknown). `invalid` counts finished answers that break their schema, `cut`
    those that reached max_tokens with the document still open. `peak_mib` is the server's memory
    (PSS over its processes), `other_cores` how many cores others kept busy meanwhile.
    """

    workload: str
    server: str
    requests: int
    errors: int
    seconds: float
    requests_per_s: float
    output_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    prompt_tokens: int
    cached_tokens: int | None
    computed_tokens: int | None
    minimum_tokens: int | None
    invalid: int
    cut: int
    peak_mib: float | None = None
    other_cores: float | None = None
    first_error: str | None = None


def percentile(values: Sequence[float], q: float) -> float | None:
    """The `q`-th percentile, linear between neighbours; None of nothing."""
    return float(np.percentile(values, q)) if values else None


def summarise(
    run: Run,
    *,
    server: str,
    minimum_tokens: int | None = None,
    peak_mib: float | None = None,
    other_cores: float | None = None,
) -> Summary:
    """The figures of `run`. Calls that failed count as errors and in nothing else."""
    good = [call for call in run.calls if call.error is None]
    ttft = [1000 * (call.pieces[0] - call.start) for call in good if call.pieces]
    itl = [1000 * gap for call in good for gap in np.diff(call.pieces).tolist()]
    output = sum(call.completion_tokens for call in good)
    prompt = sum(call.prompt_tokens for call in good)
    told = [call.cached_tokens for call in good if call.cached_tokens is not None]
    cached = sum(told) if good and len(told) == len(good) else None
    verdicts = [verdict(call) for call in good]
    return Summary(
        workload=run.workload.name,
        server=server,
        requests=len(run.calls),
        errors=len(run.calls) - len(good),
        seconds=run.seconds,
        requests_per_s=len(good) / run.seconds,
        output_tokens=output,
        output_tokens_per_s=output / run.seconds,
        total_tokens_per_s=(output + prompt) / run.seconds,
        ttft_p50_ms=percentile(ttft, 50),
        ttft_p99_ms=percentile(ttft, 99),
        itl_p50_ms=percentile(itl, 50),
        itl_p99_ms=percentile(itl, 99),
        prompt_tokens=prompt,
        cached_tokens=cached,
        computed_tokens=None if cached is None else prompt - cached,
        minimum_tokens=minimum_tokens,
        invalid=verdicts.count("invalid"),
        cut=verdicts.count("cut"),
        peak_mib=peak_mib,
        other_cores=other_cores,
        first_error=next((call.error for call in run.calls if call.error is not None), None),
    )


def verdict(call: Call) -> str:
    """ "valid", "invalid", or "cut" for a document that max_tokens ended before it was one."""
    if call.turn.schema is None:
        return "valid"
    try:
        document = orjson.loads(call.text)
    except orjson.JSONDecodeError:
        return "cut" if call.finish_reason == "length" else "invalid"
    return "valid" if jsonschema_rs.is_valid(call.turn.schema, document) else "invalid"


def median_summary(summaries: Sequence[Summary]) -> Summary:
    """Of repeated runs, the one with the median throughput (the lower of two)."""
    ordered = sorted(summaries, key=lambda summary: summary.output_tokens_per_s)
    return ordered[(len(ordered) - 1) // 2]


def ratios(summaries: Sequence[Summary], reference: str) -> dict[str, dict[str, float]]:
    """Throughput of server `reference` over each other server's, by workload: the median of the
    ratios of runs that took turns, the i-th of one with the i-th of the other."""
    runs = ((s.workload, s.server, s.output_tokens_per_s) for s in summaries)
    return rate_ratios(runs, reference)


def rate_ratios(
    runs: Iterable[tuple[str, str, float]], reference: str
) -> dict[str, dict[str, float]]:
    """`ratios` of runs of which workload, server and rate are given."""
    rates: dict[str, dict[str, list[float]]] = {}
    for workload, server, rate in runs:
        rates.setdefault(workload, {}).setdefault(server, []).append(rate)
    return {
        workload: {
            server: float(np.median([a / b for a, b in zip(ours, theirs, strict=False) if b]))
            for server, theirs in by_server.items()
            if server != reference and any(theirs)
        }
        for workload, by_server in rates.items()
        if (ours := by_server.get(reference))
    }


def render_table(summaries: Sequence[Summary]) -> Table:
    """One line a run."""
    table = Table(title=None, pad_edge=False)
    table.add_column("workload")
    table.add_column("server")
    for heading in (
        "req/s",
        "out tok/s",
        "TTFT ms\np50 / p99",
        "ITL ms\np50 / p99",
        "prompt\ntokens",
        "computed",
        "least\npossible",
        "invalid\n+ cut",
        "errors",
        "peak\nMiB",
        "other\ncores",
    ):
        table.add_column(heading, justify="right")
    for s in summaries:
        table.add_row(
            s.workload,
            s.server,
            f"{s.requests_per_s:.2f}",
            f"{s.output_tokens_per_s:.1f}",
            f"{_number(s.ttft_p50_ms)} / {_number(s.ttft_p99_ms)}",
            f"{_number(s.itl_p50_ms, 1)} / {_number(s.itl_p99_ms, 1)}",
            f"{s.prompt_tokens:,}",
            _number(s.computed_tokens),
            _number(s.minimum_tokens),
            f"{s.invalid} + {s.cut}",
            str(s.errors),
            _number(s.peak_mib),
            _number(s.other_cores, 2),
        )
    return table


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"

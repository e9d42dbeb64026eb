"""The roofline's figures, and the tables they are shown in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path

from counting import Work

BEGIN, END = "<!-- roofline: begin -->", "<!-- roofline: end -->"
KIB, MIB = 2**10, 2**20
SIZES = (64 * KIB, MIB, 32 * MIB, 128 * MIB, 1024 * MIB)


@dataclass(frozen=True)
class Ceilings:
    """Of one number of threads: bytes a second by size, multiply-adds a second by type."""

    threads: int
    bandwidth: dict[int, float]
    rates: dict[str, float]

    def fitting(self, working_set: int) -> float:
        """The bandwidth of the size nearest to `working_set`, as a ratio."""
        return self.bandwidth[min(SIZES, key=lambda size: abs(log2(size / working_set)))]

    def least_seconds(self, work: Work, working_set: int) -> tuple[float, str]:
        """As `Work.seconds`."""
        return work.seconds(self.fitting(working_set), self.rates)


@dataclass(frozen=True)
class Case:
    """A measurement, placed in a table: its line and column. Times are in milliseconds; `bound`
    says what makes the least possible time, `share` is how much of the best time that was."""

    table: str
    line: str
    column: str
    threads: int
    work: Work
    working_set: int
    floor_ms: float
    bound: str
    min_ms: float
    median_ms: float
    repetitions: int

    @property
    def share(self) -> float:
        return self.floor_ms / self.min_ms


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Markdown that is also readable as it is."""
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]

    def row(cells: Sequence[str]) -> str:
        first = f"{cells[0]:<{widths[0]}}"
        rest = (f"{cell:>{width}}" for cell, width in zip(cells[1:], widths[1:], strict=True))
        return f"| {' | '.join((first, *rest))} |"

    rule = f"|{'-' * (widths[0] + 2)}|" + "".join(f"{'-' * (width + 1)}:|" for width in widths[1:])
    return "\n".join((row(headings), rule, *map(row, lines)))


def ceilings_table(by_threads: Mapping[int, Ceilings]) -> str:
    names = {MIB: "MiB", KIB: "KiB"}

    def named(size: int) -> str:
        unit = MIB if size >= MIB else KIB
        return f"{size // unit:,} {names[unit]}"

    ceilings = by_threads.values()
    headings = ["ceiling", *(_threads(c.threads) for c in ceilings)]
    lines = [
        [f"GB/s from {named(size)}", *(f"{c.bandwidth[size] / 1e9:.0f}" for c in ceilings)]
        for size in SIZES
    ]
    for name in by_threads[1].rates:
        rates = (f"{c.rates[name] / 1e9:.0f}" for c in ceilings)
        lines.append([f"10⁹ {name} multiply-adds/s", *rates])
    return table(headings, lines)


def detailed(cases: Sequence[Case]) -> str:
    """A line a case, with what was counted."""
    headings = ["", "rows", "threads", "MB", "10⁶ mul-adds", "least ms", "set by", "best ms"]
    lines = [
        [
            case.line if case.table == "steps" else f"{case.table}, {case.line}",
            *(case.column, str(case.threads), _figure(case.work.nbytes / 1e6)),
            *(_figure(case.work.operations / 1e6), _figure(case.floor_ms)),
            *(case.bound, _figure(case.min_ms), _figure(case.median_ms), f"{case.share:.0%}"),
        ]
        for case in cases
    ]
    return table([*headings, "median", "of limit"], lines)


def pivoted(cases: Sequence[Case]) -> str:
    """The cases of one table and number of threads: best time and share of the limit."""
    columns = list(dict.fromkeys(case.column for case in cases))
    lines: dict[str, list[str]] = {}
    for case in cases:
        cell = f"{_figure(case.min_ms)} · {case.share:.0%}"
        lines.setdefault(case.line, [case.line]).append(cell)
    headings = ["format", *(f"{column} row{'s' * (column != '1')}" for column in columns)]
    return table(headings, list(lines.values()))


def report(by_threads: Mapping[int, Ceilings], measured: Sequence[Case], *, whole: bool) -> str:
    """All tables, or those for the documentation."""
    most = max(by_threads)
    products: dict[tuple[str, int], list[Case]] = {}
    others = []
    for case in measured:
        if case.table.startswith("products"):
            products.setdefault((case.table, case.threads), []).append(case)
        elif whole or case.threads == most or case.table == "steps":
            others.append(case)
    others.sort(key=lambda case: case.table != "steps")
    parts = [ceilings_table(by_threads), detailed(others)]
    for (name, threads), cases in products.items():
        if whole or (threads == most and name == "products 1024 → 3072"):
            parts.append(f"{name.capitalize()}, {_threads(threads)}: best ms · share of the limit")
            parts.append(pivoted(cases))
    return "\n\n".join(parts)


def _figure(value: float) -> str:
    """Three digits, or all before the point."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1e-4 else "< 0.0001"


def _threads(count: int) -> str:
    return f"{count} thread{'s' * (count != 1)}"


def write_docs(path: Path, text: str) -> None:
    """Replace what is between the markers. Raises `ValueError` if there are none."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")

"""Programs a second, and how long each takes: the programs in `programs/`, side by side.

    python benchmark/programs.py --url http://127.0.0.1:30000
    python benchmark/programs.py --sides phloem,phloem-plain,llama-server,vllm \\
        --model MODEL.gguf --model-folder MODEL_DIR -n 64 --repeat 3 --json out.json

A side is a client and a server (see `sides.py`). Each server is started by itself, in turn, for
every round: round i of every side has the same programs, and no two rounds share any. The first
side named is the one whose ratio to the others is given. A peer that is not installed is skipped,
and says so. With --url the Phloem sides take turns on a server that runs.

`hit` is the share of the prompts' tokens that the server did not compute, by its own count; `best`
is that share if every distinct prefix were computed once. A server that computes a prompt anew for
each choice of a `select` may have less than nothing. Measure on a machine that does nothing else;
the last column tells how many cores others kept busy.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from asked import Tokenize, least_prefill, model_tokenizer, watch
from common import Watch, write_json
from peers import Running, running
from rich.console import Console
from rich.table import Table
from sides import HINTS, SIDES, Client, Side
from turns import add_options, names, report, setting, take_turns

import phloem
from phloem.srt.bench.prefix import TokenTrie
from phloem.srt.bench.report import percentile, rate_ratios
from phloem.srt.config import DEFAULT_MODEL
from phloem.srt.hub import resolve_model

FOLDER = Path(__file__).with_name("programs")
WORKLOADS = (
    "few_shot",
    "extract",
    "react",
    "tree_of_thought",
    "skeleton_of_thought",
    "judge",
    "self_consistency",
    "chat",
    "rag",
    "agent",
)
URL_SIDES = ("phloem", "phloem-plain")
console = Console(stderr=True)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one workload on one side.

    `programs` ended well, `errors` did not, or not with what they should; only the former count in
    anything else. Latency is of a whole program. `usage_…` are what the replies told; of
    `prompt_tokens`, which our own tokenizer counted, the server had to compute `least_tokens` and
    by its own count computed `computed_tokens` (None where it does not tell).
    """

    workload: str
    side: str
    programs: int
    errors: int
    seconds: float
    programs_per_s: float
    latency_mean_s: float | None
    latency_p50_s: float | None
    latency_p99_s: float | None
    calls: int
    output_tokens: int
    forced_tokens: int
    usage_prompt_tokens: int
    usage_cached_tokens: int
    prompt_tokens: int
    computed_tokens: int | None
    least_tokens: int
    hit_rate: float | None
    best_hit_rate: float
    peak_mib: float | None
    other_cores: float
    first_error: str | None


@dataclass(frozen=True)
class Ended:
    """A program that ended: after how long, with what state, or why it did not end well."""

    seconds: float
    state: phloem.State | None = None
    error: str | None = None


def load(workload: str) -> Any:
    """The file of a program; it imports what stands beside it."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(workload)


def run_one(
    workload: Any,
    program: phloem.Program[..., Any],
    item: dict[str, Any],
    backend: Client,
) -> Ended:
    """One program, from its start to the end of all its calls."""
    began = time.perf_counter()
    try:
        state = program.run(**item, backend=backend)
        seconds = time.perf_counter() - began
        workload.check(state)  # reads what the program itself may not have read
    except Exception as error:  # whatever it was, the others go on
        return Ended(time.perf_counter() - began, error=f"{type(error).__name__}: {error}"[:300])
    return Ended(seconds, state)


def measure(
    session: Session, side: str, server: Running, name: str, round_: int, trie: TokenTrie
) -> Figures:
    """All programs of a workload, `--concurrency` at a time; `trie` has what was asked before."""
    arguments = session.arguments
    workload = load(name)
    program, items = workload.programs(arguments.n, arguments.seed + round_)
    backend = SIDES[side].connect(server.url, server.model, frozenset(arguments.hints))
    asked = watch(backend)
    before = computed(SIDES[side], server.url)
    with Watch(server.pid or None) as meanwhile, ThreadPoolExecutor(arguments.concurrency) as pool:
        began = time.perf_counter()
        work = [pool.submit(run_one, workload, program, item, backend) for item in items]
        ended = [future.result() for future in work]
        seconds = time.perf_counter() - began
    after = computed(SIDES[side], server.url)
    backend.close()
    total, least = least_prefill(asked, session.tokenize, trie)
    did = None if before is None or after is None else round(after - before)
    good = [one.state.trace.totals() for one in ended if one.state is not None]
    latencies = [one.seconds for one in ended if one.state is not None]
    return Figures(
        workload=name,
        side=side,
        programs=len(good),
        errors=len(ended) - len(good),
        seconds=seconds,
        programs_per_s=len(good) / seconds,
        latency_mean_s=float(np.mean(latencies)) if latencies else None,
        latency_p50_s=percentile(latencies, 50),
        latency_p99_s=percentile(latencies, 99),
        calls=sum(totals.calls for totals in good),
        output_tokens=sum(totals.completion_tokens for totals in good),
        forced_tokens=sum(totals.forced_tokens for totals in good),
        usage_prompt_tokens=sum(totals.prompt_tokens for totals in good),
        usage_cached_tokens=sum(totals.cached_tokens for totals in good),
        prompt_tokens=total,
        computed_tokens=did,
        least_tokens=least,
        hit_rate=None if did is None or not total else 1 - did / total,
        best_hit_rate=1 - least / total if total else 0.0,
        peak_mib=meanwhile.peak_mib,
        other_cores=meanwhile.other_cores,
        first_error=next((one.error for one in ended if one.error is not None), None),
    )


def computed(side: Side, url: str) -> float | None:
    """Prompt tokens computed so far by the server's own count, None if it does not tell. Waits a
    little until the count is steady: it may come a moment after the reply."""
    found = None
    for _ in range(20):
        last = found
        try:
            with urllib.request.urlopen(f"{url}/metrics", timeout=10) as reply:
                found = side.computed(reply.read().decode())
        except (KeyError, urllib.error.HTTPError):
            return None
        if found == last:
            break
        time.sleep(0.3)
    return found


# ------------------------------------------------------------------------------ rounds


@dataclass
class Session:
    """What has been measured, and which sides were skipped, so far."""

    arguments: argparse.Namespace
    tokenize: Tokenize
    runs: list[Figures] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def round(self, side: str, server: Running, round_: int) -> None:
        """Every workload once, after one call that warms the server up."""
        arguments = self.arguments
        client = SIDES[side].connect(server.url, server.model, frozenset())
        warm_up.run(backend=client, timeout_s=120.0)
        client.close()
        trie = TokenTrie()
        for name in arguments.workloads:
            figures = measure(self, side, server, name, round_, trie)
            self.runs.append(figures)
            self.save()
            console.print(
                f"{side} {name}: {figures.programs_per_s:.2f} programs/s, {figures.errors} errors"
                + (f" (first: {figures.first_error})" if figures.first_error else "")
            )

    def save(self) -> None:
        if self.arguments.json is not None:
            write_json(
                self.arguments.json,
                seed=self.arguments.seed,
                programs=self.arguments.n,
                concurrency=self.arguments.concurrency,
                hints=self.arguments.hints,
                skipped=self.skipped,
                ratios=ratios(self.runs),
                runs=[msgspec.structs.asdict(figures) for figures in self.runs],
            )


@phloem.function
def warm_up(s: phloem.State) -> None:
    s += "Warm up." + phloem.gen("x", max_tokens=8, temperature=0.0)


def compare_sides(session: Session) -> None:
    arguments = session.arguments
    given = setting(arguments)

    def start(name: str, log: Path) -> AbstractContextManager[Running]:
        return running(SIDES[name].peer, given, log, SIDES[name].flags)

    take_turns(arguments.sides, arguments.repeat, session.skipped, start, session.round)


def measure_url(session: Session) -> None:
    arguments = session.arguments
    with urllib.request.urlopen(f"{arguments.url}/v1/models", timeout=30) as reply:
        model = msgspec.json.decode(reply.read())["data"][0]["id"]
    server = Running(url=arguments.url, pid=0, model=model, start_seconds=0.0)
    for round_ in range(arguments.repeat):
        for name in arguments.sides:
            urllib.request.urlopen(
                urllib.request.Request(f"{arguments.url}/flush_cache", method="POST"), timeout=30
            ).close()
            session.round(name, server, round_)


# ------------------------------------------------------------------------------ report


def ratios(runs: Sequence[Figures]) -> dict[str, dict[str, float]]:
    """Programs a second of the first side over each other side's, by workload: the median of the
    ratios of rounds."""
    rates = ((run.workload, run.side, run.programs_per_s) for run in runs)
    return rate_ratios(rates, runs[0].side if runs else "")


def median_run(runs: Sequence[Figures]) -> Figures:
    """Of repeated runs the one with the median rate (the lower of two)."""
    return sorted(runs, key=lambda run: run.programs_per_s)[(len(runs) - 1) // 2]


def render(runs: Sequence[Figures]) -> Table:
    """One line a workload and side."""
    table = Table(pad_edge=False)
    table.add_column("workload")
    table.add_column("side")
    for heading in (
        "programs\na second",
        "latency s\nmean",
        "p50",
        "p99",
        "calls",
        "tokens\nout",
        "forced",
        "prompt\ntokens",
        "hit",
        "best",
        "errors",
        "other\ncores",
    ):
        table.add_column(heading, justify="right")
    for run in runs:
        latencies = (run.latency_mean_s, run.latency_p50_s, run.latency_p99_s)
        table.add_row(
            run.workload,
            run.side,
            f"{run.programs_per_s:.2f}",
            *("-" if value is None else f"{value:.2f}" for value in latencies),
            *map(str, (run.calls, run.output_tokens, run.forced_tokens, run.prompt_tokens)),
            "-" if run.hit_rate is None else f"{run.hit_rate:.1%}",
            f"{run.best_hit_rate:.1%}",
            str(run.errors),
            f"{run.other_cores:.2f}",
        )
    return table


def show(session: Session) -> None:
    """The median run of every workload on every side, the ratios, and who was skipped."""
    output = report(session.skipped)
    groups: dict[tuple[str, str], list[Figures]] = {}
    for run in session.runs:
        groups.setdefault((run.workload, run.side), []).append(run)
    medians = [median_run(group) for group in groups.values()]
    output.print(render(sorted(medians, key=lambda run: WORKLOADS.index(run.workload))))
    for workload, by_side in ratios(session.runs).items():
        for side, ratio in by_side.items():
            first = session.runs[0].side
            output.print(f"{workload}: {first} does {ratio:.2f} × the programs of {side}")


def some_hints(text: str) -> list[str]:
    return names(list(HINTS))(text) if text else []


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sides", type=names(list(SIDES)), help=f"of {','.join(SIDES)}; with --url of the first 2")
    add("--url", help="a Phloem server that runs; its cache is flushed before each side")
    add("--model", type=Path, help="GGUF file, or folder (default: the default model)")
    add("--workloads", type=names(WORKLOADS), default=list(WORKLOADS), help="comma-separated")
    add("--hints", type=some_hints, default=list(HINTS), help=f"on side phloem: {HINTS}")
    add("-n", type=int, default=32, help="programs of a workload")
    add("--concurrency", type=int, default=16, help="programs at a time")
    add_options(parser)
    parsed = parser.parse_args(arguments)
    parsed.sides = parsed.sides or list(URL_SIDES if parsed.url else SIDES)
    if parsed.url and not set(parsed.sides) <= set(URL_SIDES):
        parser.error(f"with --url there are only the sides {', '.join(URL_SIDES)}")
    parsed.model = parsed.model or resolve_model(DEFAULT_MODEL).path
    return parsed


def main() -> int:
    arguments = parse()
    session = Session(arguments, model_tokenizer(arguments.model))
    (measure_url if arguments.url else compare_sides)(session)
    session.save()
    show(session)
    return 0 if session.runs and not any(run.errors for run in session.runs) else 1


if __name__ == "__main__":
    sys.exit(main())

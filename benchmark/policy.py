"""Orders of service and of eviction, compared on traces: the real scheduler, a virtual worker.

    python benchmark/policy.py [KIND ...] [--trace FILE] [--policies fair fcfs ...] [--eviction all]
                               [--online] [--load 0.9] [--kv-slots N] [--seed 0] [--json FILE]
                               [--hints]
    python benchmark/policy.py --fit

Kinds are those of traces.py, by default all; `--trace` takes a file in the format of
phloem/srt/scheduler/trace.py, which `phloem replay --trace` writes. With `--online` the programs of
a kind arrive as a Poisson process at `--load` of what its work takes with ideal sharing, otherwise
(but for heavy-tail) all at once. With `--hints` each policy also runs with programs that announce
their calls left, forks and siblings (docs/programs.md).

    hit %      prompt tokens taken from the tree
    of opt.    that, as a share of the offline optimum: depth first over the whole trace, with a
               pool that holds its longest path
    TTFT       seconds from arrival to the first token (or the end): mean, median, 99th percentile
    slowdown   starvation: the largest TTFT over what the request would take alone and uncached
    program    seconds from the arrival of a program's first call to the end of its last one: mean,
               and 99th percentile
    preempt.   requests that gave their row back
    µs/step    real time the scheduler took, by the step

After several traces a summary follows: the share of the optimum, on average and at worst, and how
mean and 99th percentile of TTFT, and the mean of programs, compare with fcfs (geometric mean of the
ratios, and the worst).

Steps take what the cost model in cost.json says; `--fit` measures the default model on this machine
and writes that file.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from common import write_json
from msgspec.structs import asdict as struct_asdict
from simulator import Outcome, Simulation, Trace
from step_cost import FILE, Cost, fit, store_cost, stored_cost
from traces import KINDS, make, spread

from phloem.radix.evict import POLICIES as EVICTION
from phloem.srt.scheduler.trace import TraceRequest, read_trace

POLICIES = ("fair", "fcfs", "lpm", "dfs-weight", "random")
FILE_SLOTS = 16384

COLUMNS: tuple[tuple[str, str, Callable[[Outcome], float]], ...] = (
    ("hit %", "{:.1f}", lambda o: 100 * o.hit_rate),
    ("of opt.", "{:.1f}", lambda o: 100 * o.of_optimal),
    ("mean", "{:.2f}", lambda o: o.mean_ttft),
    ("p50", "{:.2f}", lambda o: o.p50_ttft),
    ("p99", "{:.2f}", lambda o: o.p99_ttft),
    ("max", "{:.2f}", lambda o: o.max_ttft),
    ("slowdown", "{:.0f}", lambda o: o.max_slowdown),
    ("program", "{:.2f}", lambda o: o.mean_program),
    ("p99", "{:.2f}", lambda o: o.p99_program),
    ("seconds", "{:.1f}", lambda o: o.seconds),
    ("steps", "{:,}", lambda o: o.steps),
    ("preempt.", "{:,}", lambda o: o.preemptions),
    ("µs/step", "{:.0f}", lambda o: o.scheduler_us),
)


@dataclass(frozen=True)
class Case:
    """A trace to run."""

    name: str
    requests: list[TraceRequest]
    kv_slots: int


def cases(options: argparse.Namespace, cost: Cost) -> Iterator[Case]:
    """The traces asked for."""
    if options.trace is not None:
        yield Case(options.trace.name, read_trace(options.trace), options.kv_slots or FILE_SLOTS)
        return
    for name in options.kind or KINDS:
        requests = make(name, options.seed)
        slots = options.kv_slots or KINDS[name].kv_slots
        if options.online or KINDS[name].online:
            seconds = Trace(requests).least_seconds(cost) / options.load
            requests = spread(requests, options.seed, seconds)
            name = f"{name} at {options.load:g}"
        yield Case(name, requests, slots)


def compare(case: Case, options: argparse.Namespace, cost: Cost) -> list[dict[str, Any]]:
    """Run a trace under every pair of policies, printing a line each."""
    trace = Trace(case.requests)
    optimum = 100 * trace.optimal_hits / max(1, trace.prompt_tokens)
    print(
        f"\n{case.name}: {len(trace.calls):,} requests, {trace.prompt_tokens:,} prompt tokens, "
        f"{case.kv_slots:,} slots, optimal hit rate {optimum:.1f} %"
    )
    heads = "".join(f"{head:>10}" for head, _, _ in COLUMNS)
    print(f"{'':<22}{heads}")
    results = []
    hinted = (False, True) if options.hints else (False,)
    for policy, hints in product(options.policies, hinted):
        for eviction in options.eviction:
            limits = {
                "schedule_policy": policy,
                "eviction_policy": eviction,
                "max_running": options.max_running,
                "max_step_tokens": options.max_step_tokens,
                "page_size": options.page_size,
            }
            outcome = Simulation(trace, cost, case.kv_slots, limits, hints=hints).run()
            told = f"{policy} with hints" if hints else policy
            name = told if len(options.eviction) == 1 else f"{told}, {eviction}"
            print(f"{name:<22}" + _cells(outcome), flush=True)
            results.append(
                {"trace": case.name, "policy": told, "eviction": eviction} | asdict(outcome)
            )
    return results


def summarise(results: list[dict[str, Any]]) -> None:
    """Print what the policies come to over all traces."""
    traces = list(dict.fromkeys(row["trace"] for row in results))
    rows = {(row["trace"], row["policy"], row["eviction"]): row for row in results}
    heads = ("of opt.", "worst", "mean TTFT", "worst", "p99 TTFT", "worst", "program", "worst")
    print(f"\n{f'over {len(traces)} traces':<22}" + "".join(f"{head:>10}" for head in heads))
    for policy, eviction in dict.fromkeys((row["policy"], row["eviction"]) for row in results):
        shares = [100 * rows[trace, policy, eviction]["of_optimal"] for trace in traces]
        cells = [f"{fmean(shares):.1f}", f"{min(shares):.1f}"]
        for figure in ("mean_ttft", "p99_ttft", "mean_program"):
            ratios = [
                rows[trace, policy, eviction][figure] / base[figure]
                for trace in traces
                if (base := rows.get((trace, "fcfs", eviction))) is not None
            ]
            if ratios:
                cells += [f"× {geometric_mean(ratios):.2f}", f"× {max(ratios):.2f}"]
        print(f"{f'{policy}, {eviction}':<22}" + "".join(f"{cell:>10}" for cell in cells))


def _cells(outcome: Outcome) -> str:
    return "".join(f"{form.format(value(outcome)):>10}" for _, form, value in COLUMNS)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="compare scheduling and eviction policies")
    parser.add_argument("kind", nargs="*", help=f"any of {', '.join(KINDS)}; by default all")
    parser.add_argument("--trace", type=Path, help="a trace file instead")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--eviction", nargs="+", default=["lru"], choices=[*EVICTION, "all"])
    parser.add_argument("--online", action="store_true", help="programs arrive over time")
    parser.add_argument("--load", type=float, default=0.9, help="of what the work takes ideally")
    parser.add_argument("--hints", action="store_true", help="run with hints of programs as well")
    parser.add_argument("--kv-slots", type=int, help="size of the pool; by default the kind's")
    parser.add_argument("--page-size", type=int, default=1)
    parser.add_argument("--max-running", type=int, default=32)
    parser.add_argument("--max-step-tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--fit", action="store_true", help="measure this machine's cost model")
    options = parser.parse_args(argv)
    unknown = [kind for kind in options.kind if kind not in KINDS]
    if unknown:
        parser.error(f"no kind {unknown[0]}; there are {', '.join(KINDS)}")
    if "all" in options.eviction:
        options.eviction = list(EVICTION)
    return options


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Run what was asked for, print tables, write JSON if asked; returns a row a run."""
    options = parse(argv)
    if options.fit:
        cost = fit()
        store_cost(cost)
        print(f"{FILE.read_text()}written to {FILE}")
        return []
    cost = stored_cost()
    results = []
    for case in cases(options, cost):
        results += compare(case, options, cost)
    if len({row["trace"] for row in results}) > 1:
        summarise(results)
    if options.json is not None:
        write_json(
            options.json,
            benchmark="policy",
            cost=struct_asdict(cost),
            seed=options.seed,
            results=results,
        )
    return results


if __name__ == "__main__":
    main()

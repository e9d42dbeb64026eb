"""What a step costs the scheduler, apart from what it has computed.

    python benchmark/scheduler.py --json step.json
    python benchmark/scheduler.py --profile

The real scheduler with a worker that computes nothing. A step is `next_step` and `apply`. Measured
at several batches while rows decode, and while one request is admitted each step; with few and many
tokens cached, and few and many requests waiting. The last figure is the tree's share of run time
when no prompt has anything in common with another: time in its methods, over the steps' time by
the cost model of this machine (`cost.json`, see `policy.py --fit`).
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgspec
import numpy as np
from common import write_json
from rich.console import Console
from rich.table import Table
from step_cost import Cost, stored_cost

from phloem.radix import RadixTree
from phloem.srt.messages import (
    RowResult,
    SamplingParams,
    StepPlan,
    StepResult,
    Submit,
    WorkerReady,
)
from phloem.srt.scheduler.core import Scheduler, SchedulerLimits
from phloem.srt.wire import pack

VOCABULARY = 49152
BATCHES = (1, 8, 64)
CACHED = (1_000, 1_000_000)
WAITING = (0, 10_000)
PROMPT = 500
GOAL_US, GOAL_ROW_US = 100.0, 10.0
ENDLESS = SamplingParams(max_tokens=1 << 20, ignore_eos=True)
ONE = SamplingParams(max_tokens=1, ignore_eos=True)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of one setting's steps. `goal_us` bounds the median where rows only decode."""

    rows: int
    cached: int
    waiting: int
    admits: bool
    steps: int
    p50_us: float
    p99_us: float
    goal_us: float | None


class Bench:
    """A scheduler and a worker that answers at once."""

    def __init__(self, rows: int, cached: int) -> None:
        self.random = random.Random(1)
        self.rows = rows
        self._rids = count()
        self.work: list[tuple[int, int]] = []
        """Tokens before and new tokens of each row of the last step."""
        limits = SchedulerLimits(
            max_running=rows + 1,
            max_waiting=1 << 20,
            max_step_tokens=8192,
            request_timeout_s=1e9,
            itl_target_s=1e9,
        )
        ready = WorkerReady(
            kv_slots=cached + 200_000,
            context_length=1 << 20,
            vocab_size=VOCABULARY,
            eos_ids=[0],
            startup={},
        )
        self.scheduler = Scheduler(limits, ready, time.monotonic)
        self.roots = [self.tokens(PROMPT) for _ in range(max(2, cached // PROMPT))]
        for root in self.roots[: cached // PROMPT]:
            self.submit(root, SamplingParams(max_tokens=0))
        while self.step() is not None:
            continue

    def tokens(self, length: int) -> array[int]:
        return array("i", [self.random.randrange(1, VOCABULARY) for _ in range(length)])

    def submit(self, prompt: Sequence[int], sampling: SamplingParams, priority: int = 0) -> None:
        rid = f"r{next(self._rids)}"
        self.scheduler.receive(Submit(rid, pack(prompt), sampling, priority=priority))

    def passer_by(self) -> None:
        """A request of one step, with a prefix that is cached."""
        self.submit(self.random.choice(self.roots) + self.tokens(8), ONE)

    def step(self) -> int | None:
        """One step; its nanoseconds."""
        began = time.perf_counter_ns()
        plan = self.scheduler.next_step()
        planned = time.perf_counter_ns()
        if plan is None:
            return None
        flight = self.scheduler.in_flight
        assert flight is not None
        self.work = [(work.start, work.count) for work in flight.work]
        result = answer(plan)
        got = time.perf_counter_ns()
        self.scheduler.apply(result)
        ended = time.perf_counter_ns()
        self.scheduler.to_frontend.clear()
        self.scheduler.grammars.outbox.clear()
        return planned - began + ended - got

    def fill(self, waiting: int, *, admits: bool) -> None:
        """Rows that decode for ever, of a priority that nobody waiting has, and the queue."""
        for _ in range(self.rows if admits else self.rows + 1):
            self.submit(self.tokens(20), ENDLESS, priority=1)
        for _ in range(4):
            self.step()
        for _ in range(waiting):
            self.passer_by()

    def measure(self, steps: int, *, admits: bool) -> list[int]:
        """Each step's nanoseconds; with `admits`, one request comes before each."""
        taken = []
        for _ in range(steps):
            if admits:
                self.passer_by()
            nanoseconds = self.step()
            assert nanoseconds is not None, "rows decode for ever"
            taken.append(nanoseconds)
        return taken


def answer(plan: StepPlan) -> StepResult:
    return StepResult(plan.step_id, [RowResult(r.epoch, 1 if r.sample else -1) for r in plan.rows])


def measured(steps: int) -> Iterator[Figures]:
    for cached in CACHED:
        for rows in BATCHES:
            for waiting in WAITING:
                for admits in (False, True):
                    # without admissions one more row decodes, so that none is free
                    bench = Bench(rows - 1 if not admits else rows, cached)
                    bench.fill(waiting, admits=admits)
                    bench.measure(steps // 10, admits=admits)
                    taken = bench.measure(steps, admits=admits)
                    p50, p99 = np.percentile(taken, [50, 99]) / 1000
                    yield Figures(
                        rows=rows,
                        cached=cached,
                        waiting=waiting,
                        admits=admits,
                        steps=steps,
                        p50_us=float(p50),
                        p99_us=float(p99),
                        goal_us=None if admits else GOAL_US + GOAL_ROW_US * rows,
                    )


# ------------------------------------------------------------------------------ the tree's share


@contextmanager
def timed_tree() -> Iterator[list[int]]:
    """Adds up the nanoseconds spent in a tree's methods; calls of one from another count once."""
    spent, depth = [0], [0]
    names = [name for name, value in vars(RadixTree).items() if callable(value) and name[0] != "_"]
    originals = {name: getattr(RadixTree, name) for name in names}

    def wrap(name: str) -> None:
        inner = originals[name]

        def timed(*arguments: object, **named: object) -> object:
            began = time.perf_counter_ns()
            depth[0] += 1
            try:
                return inner(*arguments, **named)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[0] += time.perf_counter_ns() - began

        setattr(RadixTree, name, timed)

    for name in names:
        wrap(name)
    try:
        yield spent
    finally:
        for name, inner in originals.items():
            setattr(RadixTree, name, inner)


def tree_share(cost: Cost, requests: int = 64, prompt: int = 100, output: int = 64) -> float:
    """Of the time that distinct prompts take, 16 at a time, what is spent in the tree."""
    with timed_tree() as spent:
        bench = Bench(15, 0)
        spent[0] = 0
        for _ in range(requests):
            sampling = SamplingParams(max_tokens=output, ignore_eos=True)
            bench.submit(bench.tokens(prompt), sampling)
        seconds = 0.0
        while bench.step() is not None:
            seconds += cost.seconds(bench.work)
    return spent[0] / 1e9 / seconds


# ------------------------------------------------------------------------------ output


def show(figures: Sequence[Figures], share: float) -> None:
    table = Table(title="A step of the scheduler, µs", pad_edge=False)
    for heading in ("cached", "waiting", "step", "rows", "p50", "p99", "p50 goal"):
        table.add_column(heading, justify="right")
    for f in figures:
        table.add_row(
            f"{f.cached:,}",
            f"{f.waiting:,}",
            "decode + 1 admission" if f.admits else "decode",
            str(f.rows),
            f"{f.p50_us:.0f}",
            f"{f.p99_us:.0f}",
            "" if f.goal_us is None else f"{f.goal_us:.0f}",
        )
    console = Console()
    console.print(table)
    console.print(f"tree without reuse: {share:.2%} of run time")


def profile(rows: int, steps: int, *, admits: bool) -> None:
    bench = Bench(rows, 100_000)
    bench.fill(1000, admits=admits)
    profiler = cProfile.Profile()
    profiler.enable()
    bench.measure(steps, admits=admits)
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="of each setting")
    parser.add_argument("--profile", action="store_true", help="where the time goes, at 64 rows")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    if arguments.profile:
        for admits in (False, True):
            profile(64, arguments.steps, admits=admits)
        return 0
    figures = list(measured(arguments.steps))
    share = tree_share(stored_cost())
    show(figures, share)
    if arguments.json is not None:
        write_json(
            arguments.json,
            steps=[msgspec.structs.asdict(f) for f in figures],
            tree_share_without_reuse=share,
        )
    return 0 if all(f.goal_us is None or f.p50_us <= f.goal_us for f in figures) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Cost of the radix tree's operations against the number of cached tokens.

    python benchmark/radix.py [--sizes 1000 1000000] [--json radix.json]

The tree is filled with prompts of 1,000 tokens that share a system prompt (256 tokens) and one of
two tool lists (64 tokens), so that a prompt's path has 3 nodes at any size; the last case has a
tree of leaves of 8 tokens instead, as many nodes as the size allows. A row that stays flat from
left to right is the claim: cost follows the request, not the cache. Python's garbage collector is
off while timing and the best of the rounds is shown, as in `timeit`.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter_ns

from phloem.radix import RadixTree, SlotPool

SYSTEM, TOOLS, PROMPT = 256, 64, 1000
LEAF = 8
ROUNDS, CALLS = 15, 40

Call = Callable[[], object]


class Filled:
    """A full pool: a tree with `cached` tokens, the prompts in it, and one running request."""

    def __init__(self, cached: int, *, small_leaves: bool = False) -> None:
        self.random = random.Random(cached)
        self.pool = SlotPool(1 + cached + ROUNDS * CALLS)  # one token for each decode step
        self.tree = RadixTree(self.pool)
        system = self.draw(SYSTEM)
        self.heads = [system + self.draw(TOOLS) for _ in range(2)]
        inserted: list[array[int]] = []
        missing = cached
        while missing > 0:
            inserted.append(self.draw(LEAF) if small_leaves else self.fresh())
            self.insert(inserted[-1])
            missing = cached - self.tree.evictable
        self.tree.evict(-missing)
        recent = inserted[-1000:]
        self.prompts = [p for p in recent if self.tree.match(p) == len(p) - 1]
        self.listed = self.prompts[-1].tolist()
        self.running = self.tree.acquire([-1, -1])

    def draw(self, n: int) -> array[int]:
        return array("i", [self.random.randrange(1 << 17) for _ in range(n)])

    def fresh(self) -> array[int]:
        """A prompt not seen before: a known head, a new tail."""
        head = self.random.choice(self.heads)
        return head + self.draw(PROMPT - len(head))

    def insert(self, tokens: array[int]) -> None:
        """What a new request does: lease, make room, compute, give the KV to the tree, finish."""
        lease = self.tree.acquire(tokens)
        rest = tokens[lease.length :]
        self.tree.evict(len(rest) - self.pool.free)
        self.tree.extend(lease, rest, self.pool.allocate(len(rest)))
        self.tree.release(lease)


def _hit(filled: Filled) -> Call:
    return partial(filled.tree.match, filled.random.choice(filled.prompts))


def _hit_list(filled: Filled) -> Call:
    return partial(filled.tree.match, filled.listed)


def _miss(filled: Filled) -> Call:
    return partial(filled.tree.match, filled.fresh())


def _lease(filled: Filled) -> Call:
    tree, prompt = filled.tree, filled.random.choice(filled.prompts)
    return lambda: tree.release(tree.acquire(prompt))


def _decode(filled: Filled) -> Call:
    tree, pool, lease = filled.tree, filled.pool, filled.running
    return lambda: tree.extend(lease, [7], pool.allocate(1))


def _insert(filled: Filled) -> Call:
    return partial(filled.insert, filled.fresh())


def _insert_small(filled: Filled) -> Call:
    return partial(filled.insert, filled.draw(LEAF))


CASES: dict[str, Callable[[Filled], Call]] = {
    "match hit": _hit,
    "match hit (list)": _hit_list,
    "match miss": _miss,
    "acquire, release": _lease,
    "decode step": _decode,
    f"evict, insert {PROMPT - SYSTEM - TOOLS}": _insert,
}


def _time(case: Callable[[Filled], Call], filled: Filled) -> float:
    """Microseconds a call, of the best round; `case` prepares each call, untimed."""
    best = float("inf")
    for _ in range(ROUNDS):
        calls = [case(filled) for _ in range(CALLS)]
        gc.disable()
        start = perf_counter_ns()
        for call in calls:
            call()
        best = min(best, (perf_counter_ns() - start) / CALLS / 1000)
        gc.enable()
    return best


def measure(cached: int) -> dict[str, float]:
    """Case → microseconds an operation, with `cached` tokens in the tree; and its nodes."""
    filled = Filled(cached)
    small = Filled(cached, small_leaves=True)
    nodes = {"nodes": filled.tree.nodes, "nodes (small leaves)": small.tree.nodes}
    times = {name: _time(case, filled) for name, case in CASES.items()}
    times[f"evict, insert {LEAF}"] = _time(_insert_small, small)
    filled.tree.check()
    small.tree.check()
    return times | nodes


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Measure, print a table, write JSON if asked; returns size → case → microseconds."""
    parser = argparse.ArgumentParser(description="cost of radix operations by cached tokens")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--json", type=Path, help="also write the result here")
    options = parser.parse_args(argv)
    if min(options.sizes) < PROMPT:
        parser.error(f"--sizes must be at least {PROMPT}, one prompt")
    results = {str(size): measure(size) for size in options.sizes}
    print(f"{'µs an operation':<22}" + "".join(f"{size:>12,}" for size in options.sizes))
    for name in results[str(options.sizes[0])]:
        cells = (results[str(size)][name] for size in options.sizes)
        form = ",.0f" if name.startswith("nodes") else ",.2f"
        print(f"{name:<22}" + "".join(f"{cell:>12{form}}" for cell in cells))
    if options.json is not None:
        machine = {"python": platform.python_version(), "machine": platform.machine()}
        report = {"benchmark": "radix", "unit": "us", **machine, "results": results}
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return results


if __name__ == "__main__":
    main()

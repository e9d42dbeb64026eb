"""Draws `docs/tree.svg` and `docs/ttft.svg` from real runs.

python docs/pictures.py http://127.0.0.1:30000     (a running `phloem serve`, its cache empty)

The tree is that of a few requests sent to the server. The times are of `benchmark/policy.py`'s
heavy-tailed trace under each policy.
"""

from __future__ import annotations

import io
import json
import re
import sys
import urllib.request
from math import log10
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent / "benchmark"))

from simulator import Simulation, Trace  # noqa: E402
from step_cost import stored_cost  # noqa: E402
from traces import make, spread  # noqa: E402

SYSTEM = "You are a terse assistant for cooks. Answer in one line. "
TOOLS = ("You may use the oven. ", "You may use the stove. ")
QUESTIONS = ("How do I boil an egg?", "How do I bake bread?", "How do I bake a cake?")
COLOURS = {"fair": "#2a7", "fcfs": "#a33", "lpm": "#36c", "random": "#999"}
WIDTH, HEIGHT, MARGIN = 640, 300, 48
LOAD, KV_SLOTS = 0.9, 24_576
TICKS = (0.1, 1, 10, 100)


def post(url: str, body: dict[str, Any]) -> None:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        reply.read()


def draw_tree(url: str) -> None:
    """Ask the server a few things, then show what its cache has become."""
    for tools in TOOLS:
        for question in QUESTIONS:
            prompt = SYSTEM + tools + question
            post(f"{url}/v1/completions", {"prompt": prompt, "max_tokens": 6, "temperature": 0})
    with urllib.request.urlopen(f"{url}/cache/tree?text=true") as reply:
        nodes = json.load(reply)["nodes"]
    branches = {0: Tree(Text("namespace ''", "dim"))}
    for node in nodes:
        label = Text.assemble(
            (f"{node['tokens']:>3} tokens ", "cyan"),
            (f"hit {node['hits']}x  ", "green" if node["hits"] else "dim"),
            (repr(node["text"]), "default"),
        )
        branches[node["node"]] = branches[node["parent"]].add(label)
    console = Console(record=True, width=110, file=io.StringIO(), force_terminal=True)
    console.print(branches[0])
    console.print()  # else the picture cuts off the last line's feet
    picture = console.export_svg(title="GET /cache/tree?text=true")
    # Without the fonts that rich would have it fetch; any monospaced one will do.
    (DOCS / "tree.svg").write_text(re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL))


def times(policy: str) -> list[float]:
    """Sorted seconds to the first token of each request of the trace, under one policy."""
    cost, requests = stored_cost(), make("heavy-tail")
    seconds = Trace(requests).least_seconds(cost) / LOAD
    trace = Trace(spread(requests, 0, seconds))
    simulation = Simulation(trace, cost, KV_SLOTS, {"schedule_policy": policy})
    simulation.run()
    return sorted(simulation.ttft.values())


def draw_times() -> None:
    """Cumulative distributions on a logarithmic axis of seconds."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="#fff"/>'
    ]
    parts += [_grid(f"{tick:g} s", x=_x(tick)) for tick in TICKS]
    parts += [_grid(f"{share} %", y=_y(share)) for share in (0, 50, 100)]
    for place, (policy, colour) in enumerate(COLOURS.items()):
        found = times(policy)
        points = " ".join(
            f"{_x(seconds):.1f},{_y(100 * (i + 1) / len(found)):.1f}"
            for i, seconds in enumerate(found)
            if i % 10 == 0 or i > len(found) - 10
        )
        mean = sum(found) / len(found)
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{MARGIN + 16}" y="{44 + 18 * place}" fill="{colour}">{policy}, mean '
            f"{mean:.1f} s</text>"
        )
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">time to first token, '
        "requests that had it by then</text></svg>"
    )
    (DOCS / "ttft.svg").write_text("\n".join(parts) + "\n")


def _grid(label: str, *, x: float | None = None, y: float | None = None) -> str:
    """A labelled line across the picture: upright at `x`, or level at `y`."""
    bottom, right = HEIGHT - MARGIN, WIDTH - 20
    if x is not None:
        ends = f'x1="{x:.0f}" x2="{x:.0f}" y1="20" y2="{bottom}"'
        place = f'x="{x:.0f}" y="{bottom + 16}" text-anchor="middle"'
    else:
        assert y is not None
        ends = f'x1="{MARGIN}" x2="{right}" y1="{y:.0f}" y2="{y:.0f}"'
        place = f'x="{MARGIN - 6}" y="{y + 4:.0f}" text-anchor="end"'
    return f'<line {ends} stroke="#ddd"/><text {place}>{label}</text>'


def _x(seconds: float) -> float:
    low, high = log10(TICKS[0] / 3), log10(TICKS[-1] * 3)
    where = (log10(max(seconds, TICKS[0] / 3)) - low) / (high - low)
    return MARGIN + where * (WIDTH - MARGIN - 20)


def _y(percent: float) -> float:
    return HEIGHT - MARGIN - percent / 100 * (HEIGHT - MARGIN - 20)


def main() -> None:
    draw_tree(sys.argv[1])
    draw_times()


if __name__ == "__main__":
    main()

"""The command line of every program here: run it on a server, check it, print what it said.

python benchmark/programs/NAME.py --url http://127.0.0.1:30000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import phloem

Workload = tuple[phloem.Program[..., Any], list[dict[str, Any]]]
"""A program, and the arguments of each of its runs."""


def demo(programs: Callable[[int, int], Workload], check: Callable[[phloem.State], None]) -> None:
    """Run the first few `programs` on the server that the command line names."""
    about = (sys.modules["__main__"].__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="a server that runs")
    parser.add_argument("-n", type=int, default=1, help="how many runs")
    parser.add_argument("--seed", type=int, default=0, help="of what they are asked")
    arguments = parser.parse_args()
    program, items = programs(arguments.n, arguments.seed)
    for item in items:
        state = program.run(**item, backend=arguments.url)
        check(state)
        print(state.text())
        print(f"=> {state.returned}\n")

"""Servers that take turns on one machine: the options of such a comparison, its rounds, and who was
skipped."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
from peers import NotInstalled, PeerFailed, Running, Setting
from rich.console import Console

from phloem.srt.resolve import detect_hardware


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """The type of an option that takes some of `known`, with commas between."""

    def split(text: str) -> list[str]:
        chosen = text.split(",")
        unknown = [name for name in chosen if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return chosen

    return split


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `setting` reads, but for `--model`; rounds, seed, and the file for results."""
    parser.add_argument("--model-folder", type=Path, help="the model for vLLM")
    parser.add_argument("--repeat", type=int, default=1, help="rounds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="bfloat16" if detect_hardware().native_bfloat16 else "float32",
        help="for peers that do not compute in the file's own format (default: what suits the CPU)",
    )
    parser.add_argument("--json", type=Path, help="write every run here")


def setting(arguments: argparse.Namespace) -> Setting:
    """What all servers get."""
    return Setting(
        model=arguments.model.resolve(),
        model_folder=arguments.model_folder,
        threads=arguments.threads,
        dtype=arguments.dtype,
    )


def take_turns(
    servers: Sequence[str],
    rounds: int,
    skipped: dict[str, str],
    start: Callable[[str, Path], AbstractContextManager[Running]],
    measure: Callable[[str, Running, int], None],
) -> None:
    """Start each server by itself, in turn, for every round, and measure it; `start` gets the file
    for its output. One that cannot be started is skipped from then on, with the reason."""
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="phloem-bench-") as logs:
        for round_ in range(rounds):
            for name in servers:
                if name in skipped:
                    continue
                try:
                    with start(name, Path(logs) / f"{name}.log") as server:
                        measure(name, server, round_)
                except (NotInstalled, PeerFailed) as error:
                    skipped[name] = str(error)
                    console.print(f"[yellow]{name} is skipped: {error}")


def report(skipped: Mapping[str, str]) -> Console:
    """Where the results go, behind who was skipped."""
    output = Console()
    if not output.is_terminal:
        output.width = max(output.width, 160)
    for name, reason in skipped.items():
        output.print(f"skipped {name}: {reason.splitlines()[0]}")
    return output

"""What a constraint costs the grammar process: compiles, masks and accepted tokens by engine.

    python benchmark/masks.py DATA.jsonl [--engine NAME …] [--model MODEL] [--seconds 60]

Schemas (lines as in `coverage.py`) are taken in a random order that is the same each time, until
`--seconds` of processor time are spent on an engine. Each is compiled, and its valid instances are
walked in the model's own tokens; at every position the mask is filled and the token accepted. All
in one thread. Prints JSON: compiles in milliseconds, masks and accepts in microseconds, all of
processor time, and the schemas with the dearest compile and the dearest mask.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from phloem.constrained.backends import load_backend
from phloem.constrained.base import Backend, CompiledGrammar, ConstraintError, MatcherRejected
from phloem.constrained.bitmask import words
from phloem.constrained.spec import JsonSchema
from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.config import DEFAULT_MODEL
from phloem.srt.hub import resolve_model
from phloem.srt.tokenizer.tokenizer import Tokenizer, load_tokenizer

SEED = 5
MAX_INSTANCES = 2
LAYOUTS: tuple[dict[str, Any], ...] = ({"separators": (",", ":")}, {}, {"indent": 2})


@dataclass
class Costs:
    """Seconds of processor time; each figure with the schema it belongs to."""

    compiles: list[tuple[float, str]] = field(default_factory=list)
    masks: list[tuple[float, str]] = field(default_factory=list)
    accepts: list[tuple[float, str]] = field(default_factory=list)
    engines: dict[str, int] = field(default_factory=dict)
    refused: int = 0
    rejected: int = 0

    def report(self) -> dict[str, Any]:
        return {
            "schemas": len(self.compiles),
            "refused": self.refused,
            "rejected_instances": self.rejected,
            "compiled_by": self.engines,
            "compile_ms": _percentiles(self.compiles, 1e3),
            "mask_us": _percentiles(self.masks, 1e6),
            "accept_us": _percentiles(self.accepts, 1e6),
        }


def _percentiles(figures: list[tuple[float, str]], unit: float) -> dict[str, Any]:
    if not figures:
        return {}
    seconds = np.array([f[0] for f in figures]) * unit
    found = {f"p{p:g}": round(float(np.percentile(seconds, p)), 2) for p in (50, 90, 99, 99.9)}
    return {
        "count": len(figures),
        **found,
        "max": round(float(seconds.max()), 2),
        "dearest": max(figures)[1],
    }


def walk(
    grammar: CompiledGrammar, tokens: list[int], row: np.ndarray[Any, Any], costs: Costs, name: str
) -> None:
    """Fill and accept along `tokens`, noting what each takes."""
    matcher = grammar.matcher()
    clock = time.process_time
    for token in tokens:
        start = clock()
        matcher.fill(row)
        filled = clock()
        try:
            matcher.accept(token)
        except MatcherRejected:
            costs.rejected += 1
            return
        costs.accepts.append((clock() - filled, name))
        costs.masks.append((filled - start, name))


def measure(
    rows: list[dict[str, Any]], backend: Backend, tokenizer: Tokenizer, seconds: float
) -> Costs:
    costs = Costs()
    mask = np.zeros(words(tokenizer.vocab_size), dtype=np.int32)
    spent_before = time.process_time()
    for row in rows:
        start = time.process_time()
        if start - spent_before > seconds:
            break
        try:
            text = json.dumps(row["schema"], ensure_ascii=False)
            grammar = backend.compile(JsonSchema(schema=text))
        except ConstraintError:
            costs.refused += 1
            continue
        costs.compiles.append((time.process_time() - start, str(row["id"])))
        engine = str(getattr(grammar, "engine", backend.name))
        costs.engines[engine] = costs.engines.get(engine, 0) + 1
        for i, value in enumerate(row["valid"][:MAX_INSTANCES]):
            layout = LAYOUTS[i % len(LAYOUTS)]
            text = json.dumps(value, ensure_ascii=False, **layout)
            walk(grammar, tokenizer.encode(text, special=False), mask, costs, str(row["id"]))
    return costs


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--engine", nargs="+", default=["xgrammar", "llguidance", "routed"])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--seconds", type=float, default=60, help="processor time for an engine")
    arguments = parser.parse_args(argv)
    rows = [json.loads(line) for path in arguments.data for line in path.open()]
    random.Random(SEED).shuffle(rows)
    checkpoint = open_checkpoint(resolve_model(arguments.model).path)
    tokenizer, vocabulary = load_tokenizer(checkpoint), checkpoint.vocabulary()
    report: dict[str, Any] = {"vocabulary": vocabulary.size}
    for engine in arguments.engine:
        backend = load_backend(engine, vocabulary)
        report[engine] = measure(rows, backend, tokenizer, arguments.seconds).report()
    json.dump(report, sys.stdout, indent=2)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())

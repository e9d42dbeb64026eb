"""How much of JSON Schema is enforced: schemas with instances to take and instances to refuse.

    python benchmark/coverage.py DATA.jsonl [DATA.jsonl …] [--engine NAME] [--json FILE] [--list]

A line of the data is `{"id", "dataset", "schema", "valid": […], "invalid": […], "why": […]}`, where
`why`, if it is there, names the keyword
that each invalid instance breaks. Each schema is compiled in a process of
its own, within `--seconds` of processor time, and every instance is walked token by token (one byte
a token) in three layouts. A schema is

    exact     all valid instances are taken in every layout, and no invalid one is
    tight     some valid instance is not taken
    leak      some invalid instance is taken, or written: with `--walks N` each grammar is also
              walked N times by a model that likes all legal tokens alike, closed within a
              budget, and what it writes is put to jsonschema-rs, formats included
    refused   it was refused, with a reason
    failed    the compile ran out of time or memory
"""

from __future__ import annotations

import argparse
import collections
import json
import multiprocessing
import os
import random
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
from common import write_json
from coverage_engines import load
from rich.console import Console
from rich.table import Table

from phloem.constrained.base import Backend, CompiledGrammar, ConstraintError, MatcherRejected
from phloem.constrained.bitmask import allowed_tokens, words
from phloem.constrained.closing import Closing, ClosingGrammar, ClosingVocabulary
from phloem.constrained.lowering import lower
from phloem.constrained.spec import JsonSchema
from phloem.constrained.vocab import Vocabulary

OUTCOMES = ("exact", "tight", "leak", "refused", "failed")
BYTES = Vocabulary(
    [*(bytes([b]) for b in range(256)), b"", b""],
    special_ids=frozenset({256, 257}),
    stop_ids=(256,),
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "compact": {"separators": (",", ":")},
    "spaced": {},
    "indented": {"indent": 2},
}
MEMORY_BYTES = 2 << 30
WALK_BYTES = 600
MARKS = frozenset(b'{}[]":,\\-.0123456789eEtfn')
CLOSING = ClosingVocabulary(BYTES)


@dataclass
class Verdict:
    """What became of one schema. `reason` is for a refusal; the lists name layouts or keywords."""

    id: str
    dataset: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    not_taken: list[str] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)


def accepts(grammar: CompiledGrammar, text: str) -> bool:
    """Whether the whole text is in the language, byte by byte."""
    matcher = grammar.matcher()
    try:
        for byte in text.encode("utf-8", "surrogatepass"):
            matcher.accept(byte)
    except MatcherRejected:
        return False
    return matcher.is_complete


def walk(grammar: CompiledGrammar, closing: Closing | None, rng: random.Random) -> str | None:
    """A text of the grammar at random; None if none came to its end."""
    matcher, row = grammar.matcher(), np.zeros(words(BYTES.size), np.int32)
    written = bytearray()
    for left in range(WALK_BYTES, 0, -1):
        if matcher.is_complete and rng.random() < 0.3:
            return written.decode()
        matcher.fill(row)
        if closing is not None:
            closing.narrow(row, left)
        legal = [token for token in allowed_tokens(row, BYTES.size) if token < 256]
        if not legal:
            break
        # Bytes that mean something to JSON come as often as all others together.
        plain = [token for token in legal if token not in MARKS]
        marks = [token for token in legal if token in MARKS]
        token = rng.choice(marks if marks and (not plain or rng.random() < 0.5) else plain)
        matcher.accept(token)
        if closing is not None:
            closing.advance(token)
        written.append(token)
    return written.decode() if matcher.is_complete else None


def written_wrong(row: dict[str, Any], grammar: CompiledGrammar, walks: int) -> list[str]:
    """What walks write that the validator refuses, or that does not end."""
    schema = row["schema"]
    validator = jsonschema_rs.validator_for(schema, validate_formats=True)
    closings = ClosingGrammar(lower(JsonSchema(schema=json.dumps(schema))), CLOSING)
    wrong = []
    for seed in range(walks):
        closing = closings.closing() if (closings.minimum or WALK_BYTES) < WALK_BYTES else None
        text = walk(grammar, closing, random.Random(f"{row['id']} {seed}"))
        if text is None:
            wrong += [] if closing is None else ["a walk did not end"]
        elif not validator.is_valid(json.loads(text)):
            wrong.append(f"written: {text[:200]}")
    return wrong


def judge(row: dict[str, Any], backend: Backend, walks: int) -> Verdict:
    """Compile one schema and walk its instances."""
    verdict = Verdict(str(row["id"]), row["dataset"], "exact")
    start = time.process_time()
    try:
        text = json.dumps(row["schema"], ensure_ascii=False)
        grammar = backend.compile(JsonSchema(schema=text))
    except ConstraintError as error:
        verdict.outcome, verdict.reason = "refused", f"{error.reason}: {error}"
        return verdict
    finally:
        verdict.seconds = time.process_time() - start
    for value in row["valid"]:
        for name, options in LAYOUTS.items():
            if not accepts(grammar, json.dumps(value, ensure_ascii=False, **options)):
                verdict.not_taken.append(f"{name} {json.dumps(value, ensure_ascii=False)[:200]}")
    reasons = row.get("why") or ["?"] * len(row["invalid"])
    for value, why in zip(row["invalid"], reasons, strict=True):
        if accepts(grammar, json.dumps(value, ensure_ascii=False)):
            verdict.taken.append(why)
    if walks:
        verdict.taken += written_wrong(row, grammar, walks)
    if verdict.taken:
        verdict.outcome = "leak"
    elif verdict.not_taken:
        verdict.outcome = "tight"
    return verdict


def _work(
    rows: list[dict[str, Any]], engine: str, seconds: int, walks: int, answers: Connection
) -> None:  # pragma: no cover - runs in a child
    soft = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, soft))
    backend = load(engine, BYTES)
    for row in rows:
        spent = int(time.process_time())
        resource.setrlimit(resource.RLIMIT_CPU, (spent + seconds, resource.RLIM_INFINITY))
        answers.send(judge(row, backend, walks))
    answers.close()


def judge_all(
    rows: list[dict[str, Any]], engine: str, seconds: int, walks: int
) -> Iterator[Verdict]:
    """Verdicts in the order of `rows`. A schema that kills its process is a failed one, and the
    others go on in a new process."""
    context = multiprocessing.get_context("fork")
    while rows:
        receiver, sender = context.Pipe(duplex=False)
        child = context.Process(target=_work, args=(rows, engine, seconds, walks, sender))
        child.start()
        sender.close()
        done = 0
        try:
            for row in rows:
                verdict = receiver.recv()
                assert verdict.id == str(row["id"])
                done += 1
                yield verdict
        except EOFError:
            yield Verdict(str(rows[done]["id"]), rows[done]["dataset"], "failed")
            done += 1
        finally:
            child.join()
            receiver.close()
        rows = rows[done:]


def tabulate(verdicts: Iterable[Verdict], title: str) -> Table:
    """A row for each data set: percentages of its schemas."""
    groups: dict[str, list[Verdict]] = collections.defaultdict(list)
    for verdict in verdicts:
        groups[verdict.dataset].append(verdict)
    everything = [v for group in groups.values() for v in group]
    table = Table("data set", "schemas", *OUTCOMES, "compile p50 / max ms", title=title)
    for name, group in [*sorted(groups.items()), ("all", everything)]:
        counts = collections.Counter(v.outcome for v in group)
        times = sorted(v.seconds for v in group)
        table.add_row(
            name,
            str(len(group)),
            *(f"{100 * counts[o] / len(group):.1f}" for o in OUTCOMES),
            f"{1e3 * times[len(times) // 2]:.0f} / {1e3 * times[-1]:.0f}",
        )
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("data", nargs="+", type=Path)
    parser.add_argument("--engine", default="routed", help="see `coverage_engines.py`")
    parser.add_argument("--only", help="schemas whose id contains this")
    parser.add_argument("--seconds", type=int, default=10, help="processor time for a schema")
    parser.add_argument("--walks", type=int, default=0, help="texts written by each grammar")
    parser.add_argument("--list", action="store_true", help="print every schema that is not exact")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    rows = [json.loads(line) for path in arguments.data for line in path.open()]
    rows = [r for r in rows if not r.get("remote")]
    if arguments.only:
        rows = [r for r in rows if arguments.only in str(r["id"])]
    parts = min(os.cpu_count() or 1, len(rows))
    with ThreadPoolExecutor(parts) as pool:
        shares = pool.map(
            lambda i: list(
                judge_all(rows[i::parts], arguments.engine, arguments.seconds, arguments.walks)
            ),
            range(parts),
        )
        verdicts = [v for share in shares for v in share]
    Console(stderr=True, width=120).print(tabulate(verdicts, arguments.engine))
    if arguments.list:
        for v in verdicts:
            if v.outcome != "exact":
                print(v.outcome, v.id, v.reason, v.taken[:3], v.not_taken[:1], sep="\t")
    if arguments.json:
        write_json(arguments.json, verdicts=[vars(v) for v in verdicts])
    return 0


if __name__ == "__main__":
    sys.exit(main())

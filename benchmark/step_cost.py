"""What a step takes: a linear model, and how it is fitted from the default model on this machine.

    seconds = step + row · rows + token · tokens + pair · pairs + kv · context

A pair is a new token and a token that it attends to; the context is all KV that the rows read, each
its own, which is what decoding at length waits for. `policy.py --fit` writes cost.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter

import msgspec
import numpy as np
import psutil
from common import Watch, machine
from numpy.typing import NDArray

from phloem.srt.attention.batch import AttentionBatch
from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.config import DEFAULT_MODEL, ServeConfig
from phloem.srt.hub import resolve_model
from phloem.srt.models.cpu_model import CpuModel
from phloem.srt.resolve import detect_hardware, resolve

FILE = Path(__file__).with_name("cost.json")
ROUNDS = 5
ROWS, CONTEXT, CHUNK = 16, 2048, 512


class Cost(msgspec.Struct, frozen=True):
    """Seconds, by what a step consists of. `fitted` says of what model and where."""

    step: float
    row: float
    token: float
    pair: float
    kv: float
    fitted: str = ""

    def seconds(self, rows: Sequence[tuple[int, int]]) -> float:
        """Of a step with these (tokens before, new tokens), a pair a row."""
        weights = (self.step, self.row, self.token, self.pair, self.kv)
        return sum(weight * value for weight, value in zip(weights, features(rows), strict=True))


def stored_cost() -> Cost:
    """The model in cost.json."""
    return msgspec.json.decode(FILE.read_bytes(), type=Cost)


def store_cost(cost: Cost) -> None:
    FILE.write_bytes(msgspec.json.format(msgspec.json.encode(cost), indent=2) + b"\n")


def features(rows: Sequence[tuple[int, int]]) -> tuple[int, int, int, int, int]:
    """What the weights are multiplied with: (tokens before, new tokens) of each row, summed up."""
    tokens = sum(count for _, count in rows)
    pairs = sum(count * start + count * (count + 1) // 2 for start, count in rows)
    return 1, len(rows), tokens, pairs, tokens + sum(start for start, _ in rows)


def grid() -> Iterator[list[tuple[int, int]]]:
    """Decoding at several batches and contexts, prefill in chunks at several places, and both."""
    for context in (64, 512, 1024):
        for rows in (1, 4, 8, ROWS):
            yield [(context, 1)] * rows
    for start in (0, 512, 1024):
        for count in (16, 64, 256, CHUNK):
            yield [(start, count)]
    for count in (64, 256):
        yield [(0, count), (512, count)]
        yield [(512, 1)] * 8 + [(0, count)]


def fit() -> Cost:
    """Time the grid's steps with the default model, as many threads as a server takes, and fit
    weights so that the relative errors are least. Takes some twenty seconds."""
    kv_dtype = resolve(ServeConfig(), detect_hardware()).kv_dtype
    threads = psutil.cpu_count(logical=False) or 1
    model = CpuModel(
        open_checkpoint(resolve_model(DEFAULT_MODEL).path),
        kv_slots=1 + ROWS * CONTEXT // 2 + CONTEXT,
        kv_dtype=kv_dtype,
        threads=threads,
        context_length=CONTEXT,
    )
    steps = list(grid())
    with Watch(None) as watch:
        # round by round, so that what disturbs the machine for a while spoils no step altogether
        rounds = np.array([[_time(model, step) for step in steps] for _ in range(1 + ROUNDS)])
    seconds = rounds[1:].min(axis=0)
    sizes = np.array([features(step) for step in steps], float)
    weights = least_squares(sizes / seconds[:, None], np.ones(len(steps)))
    error = float(np.median(np.abs(sizes @ weights / seconds - 1)))
    where = f"{DEFAULT_MODEL}, {kv_dtype} KV, {threads} threads, {machine()['cpu']}"
    step, row, token, pair, kv = (float(f"{weight:.3g}") for weight in weights)
    busy = f"{watch.other_cores:.1f} cores were busy with something else"
    fitted = f"{where}; median error {error:.0%}; {busy}"
    return Cost(step, row, token, pair, kv, fitted=fitted)


def least_squares(sizes: NDArray[np.float64], target: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights of least squared error, none negative: a column whose weight would be is left out,
    the worst one first."""
    weights = np.zeros(sizes.shape[1])
    used = np.arange(sizes.shape[1])
    while used.size:
        found = np.linalg.lstsq(sizes[:, used], target, rcond=None)[0]
        if (found >= 0).all():
            weights[used] = found
            break
        scale = np.abs(sizes[:, used]).mean(axis=0)
        used = np.delete(used, int(np.argmin(found * scale)))
    return weights


def _time(model: CpuModel, step: Sequence[tuple[int, int]]) -> float:
    slots, positions, begin = [], [], 1
    for start, count in step:
        slots.append(np.arange(begin, begin + start + count, dtype=np.int32))
        positions.append(np.arange(start, start + count, dtype=np.int32))
        begin += start + count
    tokens = np.arange(sum(count for _, count in step)) % model.config.vocab_size
    batch = AttentionBatch([count for _, count in step], slots)
    ends = np.cumsum(batch.query_lens) - 1
    began = perf_counter()
    hidden = model.forward(tokens.astype(np.int32), np.concatenate(positions), batch)
    model.logits(np.ascontiguousarray(hidden[ends]))
    return perf_counter() - began

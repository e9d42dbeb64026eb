"""How close the CPU kernels come to what the machine can do.

    python benchmark/roofline.py [--quick] [--threads 2] [--json roofline.json]

First the ceilings, with one thread and with all: bytes read a second, from working sets of several
sizes, and multiply-adds a second in the instructions the kernels use. Then each kernel by itself,
and whole steps of a model: the bytes and multiply-adds it cannot do without (counting.py), the
least time these take under the ceilings, and the time they took. The loops that time are compiled
first, so a compiler is needed (CXX, or c++, g++, clang++).

--write-docs puts the main tables into docs/performance.md.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_void_p
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from common import ROOT, Watch, commit, machine, write_json
from counting import (
    LAYOUTS,
    AttentionShape,
    Row,
    Weight,
    Work,
    head,
    norm_and_quantise,
    step,
)
from roofline_tables import MIB, SIZES, Case, Ceilings, report, write_docs

from phloem.srt.attention.batch import AttentionBatch
from phloem.srt.checkpoint import Checkpoint, open_checkpoint
from phloem.srt.checkpoint.config import KV_ITEM_BYTES
from phloem.srt.config import DEFAULT_MODEL, ServeConfig
from phloem.srt.errors import PhloemError
from phloem.srt.hub import resolve_model
from phloem.srt.kernels.cpu.library import KV_TYPES, Kernels, KernelsUnavailable
from phloem.srt.models.cpu_model import CpuModel
from phloem.srt.resolve import detect_hardware, resolve

DOCS = ROOT / "docs" / "performance.md"
KERNELS = ROOT / "srt" / "kernels" / "cpu"
SOURCES = ("arena", "attention", "formats", "kv_pool", "matrix", "team")

WORKING_SET = 96 * MIB
"""Copies of a weight matrix, or layers of KV, take turns until so much has passed: what a step of
the default model reads, and more than a core's own caches."""
CAPACITY = 20_000
COUNTS = (1, 2, 4, 8, 16, 64, 512)
CONTEXTS = (128, 1024, 4096)
BATCHES = (1, 2, 4, 8, 16)
PROMPTS = (512, 2048)
STEP_CONTEXT = 128


class CannotMeasure(Exception):
    """No compiler, or it failed; no memory."""


def compile_loops(isa: str, folder: Path) -> Any:
    """roofline.cpp for the vectors of `isa`, loaded. Raises `CannotMeasure`."""
    named = (os.environ.get("CXX"), "c++", "g++", "clang++")
    compiler = next((found for name in named if name and (found := shutil.which(name))), None)
    if compiler is None:
        raise CannotMeasure("no C++ compiler: set CXX, or install g++ or clang++")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    flags = project["tool"]["setuptools"]["ext-modules"][0]["extra-compile-args"]
    sources = [KERNELS / f"{name}.cpp" for name in SOURCES]
    running, objects = [], []
    for source in (*sources, ROOT / "benchmark" / "roofline.cpp"):
        objects.append(str(folder / f"{source.stem}.o"))
        command = [compiler, *flags, "-fPIC", f"-I{KERNELS}", f"-DROOFLINE_{isa}", "-c"]
        running.append(subprocess.Popen([*command, str(source), "-o", objects[-1]]))
    target = folder / "roofline.so"
    link = [compiler, "-shared", "-pthread", *objects, "-o", str(target)]
    codes = [process.wait() for process in running]
    if any(codes) or subprocess.run(link).returncode:
        raise CannotMeasure(f"{compiler} failed, see above")
    library = ctypes.CDLL(str(target))
    timing: list[Any] = [c_int, c_double, POINTER(c_double), c_int]
    library.roofline_use.argtypes = [c_void_p]
    library.roofline_use.restype = None
    library.roofline_read.argtypes = [c_int64, *timing]
    library.roofline_multiply.argtypes = [c_char_p, *timing]
    library.roofline_weights_new.argtypes = [c_char_p, c_int, c_int, c_int64]
    library.roofline_weights_new.restype = c_void_p
    library.roofline_weights_delete.argtypes = [c_void_p]
    library.roofline_weights_delete.restype = None
    library.roofline_weights_bytes.argtypes = [c_void_p]
    library.roofline_weights_bytes.restype = c_int64
    library.roofline_product.argtypes = [c_void_p, c_int, *timing]
    library.roofline_attention.argtypes = [*([c_int] * 7), c_int64, *timing]
    library.roofline_norm.argtypes = [c_int, c_int, *timing]
    return library


@dataclass
class Session:
    """The compiled library, how long to time each case, and what came out."""

    library: Any
    seconds: float
    ceilings: dict[int, Ceilings] = field(default_factory=dict)
    cases: list[Case] = field(default_factory=list)

    def times(
        self, function: Callable[..., int], *arguments: object, threads: int, longer: int = 1
    ) -> list[float]:
        """Seconds of each repetition that a function of roofline.cpp timed."""
        buffer = (c_double * CAPACITY)()
        done = function(*arguments, threads, longer * self.seconds, buffer, CAPACITY)
        if done < 0:
            raise CannotMeasure("out of memory")
        return list(buffer[:done])

    def measure_ceilings(self, threads: int) -> None:
        """Longer than a case: all floors depend on it. What fewer threads reached counts, too."""
        before = self.ceilings.values()
        bandwidth, rates = {}, {}
        for size in SIZES:
            times = self.times(self.library.roofline_read, size, threads=threads, longer=5)
            bandwidth[size] = max(size / min(times), *(c.bandwidth[size] for c in before), 0.0)
        for name in ("int8", "float32", "bfloat16"):
            function = self.library.roofline_multiply
            times = self.times(function, name.encode(), threads=threads, longer=5)
            if times:
                rates[name] = max(1 / min(times), *(c.rates[name] for c in before), 0.0)
        self.ceilings[threads] = Ceilings(threads, bandwidth, rates)

    def add(
        self,
        where: tuple[str, str, str],
        work: Work,
        working_set: int,
        measure: Callable[..., list[float]],
        threads: Sequence[int] = (),
    ) -> None:
        """Time `measure(threads=…)` for each of `threads`, by default all that have ceilings."""
        for count in threads or self.ceilings:
            ceilings = self.ceilings[count]
            floor, bound = ceilings.least_seconds(work, working_set)
            times = measure(threads=count)
            self.cases.append(
                Case(
                    *where,
                    threads=count,
                    work=work,
                    working_set=working_set,
                    floor_ms=floor * 1e3,
                    bound=bound,
                    min_ms=min(times) * 1e3,
                    median_ms=median(times) * 1e3,
                    repetitions=len(times),
                )
            )


@contextmanager
def weights(session: Session, weight: Weight) -> Iterator[int]:
    """Copies of a matrix that fill the working set, in the library."""
    library = session.library
    handle = library.roofline_weights_new(
        weight.format.encode(), weight.rows, weight.columns, WORKING_SET
    )
    if not handle:
        raise CannotMeasure(f"no memory for {weight}")
    try:
        counted, kept = weight.product(1).nbytes, library.roofline_weights_bytes(handle)
        if counted != kept:
            raise CannotMeasure(f"{weight} takes {kept} bytes, {counted} were counted")
        yield handle
    finally:
        library.roofline_weights_delete(handle)


def measure_products(
    session: Session, shapes: Sequence[tuple[int, int]], formats: Sequence[str], rows: Sequence[int]
) -> None:
    """Every format at every shape (outputs, columns), where its blocks divide the columns."""
    for outputs, columns in shapes:
        for format in formats:
            if format.endswith("_K") and columns % 256:
                continue
            weight = Weight(format, outputs, columns)
            with weights(session, weight) as handle:
                for count in rows:
                    session.add(
                        (f"products {columns} → {outputs}", format, str(count)),
                        weight.product(count),
                        max(WORKING_SET, weight.product(1).nbytes),
                        partial(session.times, session.library.roofline_product, handle, count),
                    )


def measure_attention(session: Session, shape: AttentionShape) -> None:
    """One layer: rows that decode at several contexts, and prompts as a whole."""
    cases = [(f"decode at {n:,}", [Row(1, n)] * b) for n in CONTEXTS for b in (1, 16)]
    cases += [(f"extend by {n:,}", [Row(n, n)]) for n in PROMPTS]
    for line, rows in cases:
        work = shape.attend(rows)
        arguments = (shape.heads, shape.kv_heads, shape.head_dim, KV_TYPES[shape.kv_dtype])
        session.add(
            (f"attention, {shape.kv_dtype} KV", line, str(len(rows))),
            work,
            max(WORKING_SET, work.nbytes),
            partial(
                session.times,
                session.library.roofline_attention,
                *(*arguments, len(rows), rows[0].count, rows[0].length, WORKING_SET),
            ),
        )


def measure_norm(session: Session, columns: int) -> None:
    for rows in (1, 16, 512):
        work = norm_and_quantise(columns, rows)
        session.add(
            ("norm and quantise", f"{columns} columns", str(rows)),
            work,
            work.nbytes,
            partial(session.times, session.library.roofline_norm, columns, rows),
        )


class Steps:
    """Whole steps of a model, as the worker computes them: forward, then the last token's logits.

    Rows are sequences of their own, in slots that lie one after another.
    """

    def __init__(
        self, session: Session, checkpoint: Checkpoint, kv_dtype: str, *, tiles: bool
    ) -> None:
        self._session, self._checkpoint, self._kv_dtype = session, checkpoint, kv_dtype
        self._tiles = tiles
        self.weights = {
            tensor.name: Weight(tensor.kind if tensor.kind in LAYOUTS else "F32", *tensor.shape)
            for tensor in checkpoint.tensors()
            if len(tensor.shape) == 2
        }

    def measure(self, prompts: Sequence[int]) -> None:
        config = self._checkpoint.config
        length = max(prompts)
        tied = config.tie_embeddings
        last = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        for threads in self._session.ceilings:
            model = CpuModel(
                self._checkpoint,
                kv_slots=1 + max(length, STEP_CONTEXT * max(BATCHES)),
                kv_dtype=self._kv_dtype,
                threads=threads,
                context_length=length,
            )
            for batch in (1, 16):
                hidden = np.ones((batch, config.hidden_size), np.float32)
                work = head(last, batch)
                self._add(("head", last.format, str(batch)), work, threads, model.logits, hidden)
            self._run(model, [Row(STEP_CONTEXT, STEP_CONTEXT)] * max(BATCHES))  # KV to decode with
            for batch in BATCHES:
                rows = [Row(1, STEP_CONTEXT)] * batch
                self._add_step(("decode", str(batch)), rows, threads, model)
            for prompt in prompts:
                self._add_step((f"prefill {prompt:,}", "1"), [Row(prompt, prompt)], threads, model)

    def _add_step(
        self, where: tuple[str, str], rows: list[Row], threads: int, model: CpuModel
    ) -> None:
        work = step(self._checkpoint.config, self.weights, rows, self._kv_dtype, tiles=self._tiles)
        self._add(("steps", *where), work, threads, self._run, model, rows)

    def _add(
        self,
        where: tuple[str, str, str],
        work: Work,
        threads: int,
        call: Callable[..., object],
        *arguments: object,
    ) -> None:
        def measure(*, threads: int) -> list[float]:
            return self._time(partial(call, *arguments))

        self._session.add(where, work, work.nbytes, measure, threads=[threads])

    def _time(self, call: Callable[[], object]) -> list[float]:
        times: list[float] = []
        call()
        deadline = perf_counter() + 2 * self._session.seconds
        while len(times) < 3 or perf_counter() < deadline:
            start = perf_counter()
            call()
            times.append(perf_counter() - start)
        return times

    @staticmethod
    def _run(model: CpuModel, rows: Sequence[Row]) -> None:
        slots, begin = [], 1
        for row in rows:
            slots.append(np.arange(begin, begin + row.length, dtype=np.int32))
            begin += row.length
        positions = [np.arange(row.length - row.count, row.length) for row in rows]
        tokens = np.arange(sum(row.count for row in rows)) % model.config.vocab_size
        batch = AttentionBatch([row.count for row in rows], slots)
        hidden = model.forward(
            tokens.astype(np.int32), np.concatenate(positions).astype(np.int32), batch
        )
        ends = np.cumsum(batch.query_lens) - 1
        model.logits(np.ascontiguousarray(hidden[ends]))


def measure(options: argparse.Namespace, kernels: Kernels, folder: Path) -> Session:
    checkpoint = open_checkpoint(resolve_model(options.model).path)
    config = checkpoint.config
    session = Session(compile_loops(kernels.isa, folder), 0.05 if options.quick else 0.3)
    session.library.roofline_use(kernels.handle)
    for threads in sorted({1, options.threads}):
        session.measure_ceilings(threads)
    tiles = kernels.isa == "amx"
    steps = Steps(session, checkpoint, options.kv_dtype, tiles=tiles)
    steps.measure(PROMPTS[:1] if options.quick else PROMPTS)
    shape = (config.num_heads, config.num_kv_heads, config.head_dim)
    for kv_dtype in [options.kv_dtype] if options.quick else KV_ITEM_BYTES:
        measure_attention(session, AttentionShape(*shape, kv_dtype, tiles))
    measure_norm(session, config.hidden_size)
    shapes = [(3072, 1024)]
    if not options.quick:
        own = {(w.rows, w.columns): None for n, w in steps.weights.items() if ".layers." in n}
        shapes = [*own, *shapes, (8192, 2048)]
    formats = ("Q4_1", "Q8_0", "BF16", "F32") if options.quick else tuple(LAYOUTS)
    measure_products(session, shapes, formats, (1, 16, 512) if options.quick else COUNTS)
    return session


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose steps are measured")
    parser.add_argument("--threads", type=int, default=psutil.cpu_count(logical=False))
    parser.add_argument("--kv-dtype", choices=list(KV_ITEM_BYTES), help="by default the server's")
    parser.add_argument("--quick", action="store_true", help="fewer cases, less time for each")
    parser.add_argument("--json", type=Path, help="write every figure here")
    parser.add_argument("--write-docs", action="store_true", help=f"into {DOCS.relative_to(ROOT)}")
    parsed = parser.parse_args(arguments)
    if parsed.threads < 1:
        parser.error("--threads must be at least 1")
    return parsed


def main() -> int:
    options = parse()
    try:
        kernels = Kernels()
        options.kv_dtype = options.kv_dtype or resolve(ServeConfig(), detect_hardware()).kv_dtype
        with Watch(None) as watch, tempfile.TemporaryDirectory(prefix="phloem-bench-") as folder:
            session = measure(options, kernels, Path(folder))
    except (CannotMeasure, KernelsUnavailable, PhloemError) as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 1
    about = (
        f"{machine()['cpu']}, {kernels.isa} kernels; {watch.other_cores:.1f} cores were busy "
        "with something else"
    )
    print(f"{about}\n\n{report(session.ceilings, session.cases, whole=True)}")
    if options.json is not None:
        write_json(
            options.json,
            isa=kernels.isa,
            kv_dtype=options.kv_dtype,
            other_cores=watch.other_cores,
            ceilings=[
                asdict(c) | {"bandwidth": {str(size): b for size, b in c.bandwidth.items()}}
                for c in session.ceilings.values()
            ],
            cases=[asdict(case) | {"share": case.share} for case in session.cases],
        )
    if options.write_docs:
        quick = " (a quick run)" if options.quick else ""
        heading = f"{about}. Commit {commit()}{quick}."
        write_docs(DOCS, f"{heading}\n\n{report(session.ceilings, session.cases, whole=False)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The disk tier of a worker process, with the default model: KV survives the process, bit for
bit."""

import os
import shutil
import signal
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import zmq

from phloem.constrained.bitmask import MaskBuffer
from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.ipc import Channel, make_run_dir
from phloem.srt.messages import (
    FromWorker,
    RowPlan,
    RowResult,
    RowStart,
    SamplingParams,
    StepPlan,
    StepResult,
    StopWorker,
    ToWorker,
    WorkerReady,
)
from phloem.srt.models.options import ComputeOptions
from phloem.srt.tier.chain import BLOCK_TOKENS, block_keys
from phloem.srt.tier.options import TierOptions
from phloem.srt.tier_messages import (
    FromTier,
    KvLoad,
    KvLoaded,
    KvSave,
    KvSaved,
    StopTier,
    TierReady,
    ToTier,
)
from phloem.srt.wire import pack
from phloem.srt.worker.options import WorkerProcessOptions

pytestmark = [pytest.mark.model, pytest.mark.e2e]

PROMPT = np.random.default_rng(1).integers(5, 40_000, 150).tolist()
CACHED = 2 * BLOCK_TOKENS
Backend = Literal["cpu", "torch"]
PARAMS = SamplingParams(temperature=0.0, logprobs=5)


class Child:
    """A worker process with a tier; the test is its scheduler."""

    def __init__(self, model: Path, folder: Path, backend: Backend, kv_dtype: str) -> None:
        self.run_dir = make_run_dir()
        vocab_size = open_checkpoint(model).config.vocab_size
        MaskBuffer.create(self.run_dir / "masks", 1, vocab_size)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.worker: Channel[ToWorker, FromWorker] = Channel(
            self.context, f"ipc://{self.run_dir}/worker.sock", FromWorker, bind=True
        )
        self.tier: Channel[ToTier, FromTier] = Channel(
            self.context, f"ipc://{self.run_dir}/tier.sock", FromTier, bind=True
        )
        options = WorkerProcessOptions(
            run_dir=str(self.run_dir),
            checkpoint=str(model),
            compute=ComputeOptions(
                backend=backend,
                dtype="float32",
                kv_dtype=kv_dtype,
                quantization=None,
                isa="generic",
                threads=2,
            ),
            max_rows=1,
            mask_rows=1,
            context_length=512,
            kv_slots=600,
            tier=TierOptions(folder=str(folder), limit_bytes=100 << 20),
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phloem.srt.process", "worker"],
            stdin=subprocess.PIPE,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(options) + b"\n")
        self.process.stdin.flush()

    def ready(self) -> TierReady:
        assert isinstance(self.worker.recv(100_000), WorkerReady)
        ready = self.tier.recv(20_000)
        assert isinstance(ready, TierReady)
        return ready

    def step(self, slots: list[int], cached: int) -> RowResult:
        """The token after `PROMPT`, whose KV goes to `slots`; that of the first `cached` tokens is
        there."""
        start = RowStart(len(PROMPT), pack(slots[:cached]), PARAMS, 0, [])
        row = RowPlan(0, cached + 1, pack(PROMPT[cached:]), pack(slots[cached:]), True, start=start)
        self.worker.send(StepPlan(cached + 1, [row]))
        result = self.worker.recv(60_000)
        assert isinstance(result, StepResult)
        assert result.error is None
        assert result.rows[0].error is None
        return result.rows[0]

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self.process.kill()
        else:
            self.tier.send(StopTier())
            self.worker.send(StopWorker())
        assert self.process.wait(30) == (-signal.SIGKILL if kill else 0)

    def close(self) -> None:
        self.process.kill()
        with self.process:  # which closes the pipe and waits
            self.tier.close()
            self.worker.close()
        self.context.term()
        shutil.rmtree(self.run_dir)


@pytest.fixture
def start(default_model: Path, tmp_path: Path) -> Iterator[Callable[[Backend, str], Child]]:
    """Starts workers that have one folder."""
    children: list[Child] = []

    def started(backend: Backend, kv_dtype: str) -> Child:
        children.append(Child(default_model, tmp_path / "kv", backend, kv_dtype))
        return children[-1]

    yield started
    for child in children:
        child.close()


@pytest.mark.parametrize(
    ("backend", "kv_dtype", "kill"),
    [("cpu", "float16", True), ("cpu", "int8", False), ("torch", "float32", False)],
)
def test_kv_survives_the_worker(
    start: Callable[[Backend, str], Child], backend: Backend, kv_dtype: str, kill: bool
) -> None:
    keys = block_keys(array("i", PROMPT), "")
    first = start(backend, kv_dtype)
    assert first.ready().keys == b""
    slots = [1 + (7 * i) % 599 for i in range(len(PROMPT))]
    expected = first.step(slots, 0)
    first.tier.send(KvSave(1, keys, pack(slots[:CACHED])))
    assert first.tier.recv(20_000) == KvSaved(1, 2)
    first.end(kill=kill)

    second = start(backend, kv_dtype)
    assert second.ready().keys == b"".join(keys)
    slots = [599 - i for i in range(len(PROMPT))]
    second.tier.send(KvLoad(1, keys, pack(slots[:CACHED])))
    assert second.tier.recv(20_000) == KvLoaded(1, 2)
    found = second.step(slots, CACHED)
    assert found.logprob is not None
    assert (found.token, found.logprob) == (expected.token, expected.logprob)
    second.end()


def test_other_options_share_nothing(
    start: Callable[[Backend, str], Child], tmp_path: Path
) -> None:
    children = []
    for kv_dtype in ("float16", "bfloat16"):
        child = start("cpu", kv_dtype)
        assert child.ready().keys == b""
        child.tier.send(KvSave(1, [b"k" * 16], pack(range(1, 1 + BLOCK_TOKENS))))
        assert child.tier.recv(20_000) == KvSaved(1, 1)
        children.append(child)
    for child in children:
        child.end()
    assert len([path for path in (tmp_path / "kv").iterdir() if path.is_dir()]) == 2

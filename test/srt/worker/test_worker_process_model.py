"""The worker as a process of its own, with the default model."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest
import zmq

from phloem.constrained.bitmask import MaskBuffer, pack_mask
from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.ipc import Channel, make_run_dir
from phloem.srt.messages import (
    FromWorker,
    RowPlan,
    RowStart,
    SamplingParams,
    StepMasks,
    StepPlan,
    StepResult,
    StopWorker,
    ToWorker,
    WorkerReady,
)
from phloem.srt.models.options import ComputeOptions
from phloem.srt.wire import pack
from phloem.srt.worker.options import WorkerProcessOptions

pytestmark = [pytest.mark.model, pytest.mark.e2e]

PROMPT = [504, 3575, 282, 4649, 314]
MAX_ROWS = 4


class WorkerChild:
    """A running worker process, with the test as its scheduler and its grammar process."""

    def __init__(self, model: Path, backend: Literal["cpu", "torch"]) -> None:
        self.run_dir = make_run_dir()
        vocab_size = open_checkpoint(model).config.vocab_size
        MaskBuffer.create(self.run_dir / "masks", MAX_ROWS, vocab_size)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.channel: Channel[ToWorker, FromWorker] = Channel(
            self.context, f"ipc://{self.run_dir}/worker.sock", FromWorker, bind=True
        )
        self.grammar: Channel[StepMasks, StepMasks] = Channel(
            self.context, f"ipc://{self.run_dir}/masks.sock", StepMasks, kind=zmq.PUSH
        )
        options = WorkerProcessOptions(
            run_dir=str(self.run_dir),
            checkpoint=str(model),
            compute=ComputeOptions(
                backend=backend,
                dtype="float32",
                kv_dtype="float32",
                quantization=None,
                isa="generic",
                threads=2,
            ),
            max_rows=MAX_ROWS,
            mask_rows=MAX_ROWS,
            context_length=256,
            kv_slots=257,
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "phloem.srt.process", "worker"],
            stdin=subprocess.PIPE,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        )
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(options) + b"\n")
        self.process.stdin.flush()
        ready = self.channel.recv(100_000)
        assert isinstance(ready, WorkerReady)
        self.ready = ready
        self._steps = 0
        self._epochs = 0

    def step(self, *rows: RowPlan) -> StepResult:
        self._steps += 1
        self.channel.send(StepPlan(self._steps, list(rows)))
        result = self.channel.recv(60_000)
        assert isinstance(result, StepResult)
        assert result.error is None
        return result

    def generate(
        self, params: SamplingParams, seed: int, count: int, *, row: int = 0, given: int = 0
    ) -> list[int]:
        """`count` tokens; after `given` of them the row is preempted and started anew."""
        tokens: list[int] = []
        self._epochs += 1
        while len(tokens) < count:
            start = None
            new: list[int] = []
            done = len(PROMPT) + len(tokens)
            if not tokens or len(tokens) == given:
                self._epochs += 1
                new = [*PROMPT, *tokens]
                start = RowStart(len(PROMPT), b"", params, seed, self.ready.eos_ids)
            slots = range(1, done + 1) if new else [done]
            plan = RowPlan(row, self._epochs, pack(new), pack(slots), True, start=start)
            tokens.append(self.step(plan).rows[0].token)
        return tokens

    def close(self) -> None:
        self.channel.send(StopWorker())
        assert self.process.wait(30) == 0
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.channel.close()
        self.grammar.close()
        self.context.term()
        shutil.rmtree(self.run_dir)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def child(request: pytest.FixtureRequest, default_model: Path) -> Iterator[WorkerChild]:
    running = WorkerChild(default_model, request.param)
    yield running
    running.close()


def test_it_says_what_it_loaded(child: WorkerChild) -> None:
    assert (child.ready.kv_slots, child.ready.context_length) == (257, 256)
    assert child.ready.vocab_size == 49152
    assert {"import", "open", "load_model"} <= child.ready.startup.keys()
    buffer = MaskBuffer.open(child.run_dir / "masks", MAX_ROWS, child.ready.vocab_size)
    assert buffer.rows == MAX_ROWS


def test_a_seed_gives_the_same_tokens_in_any_row_and_after_preemption(child: WorkerChild) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, repetition_penalty=1.1)
    whole = child.generate(params, 7, 8)
    assert child.generate(params, 7, 8, row=3) == whole
    assert child.generate(params, 7, 8, given=4) == whole
    assert child.generate(params, 8, 8) != whole


def test_a_mask_is_obeyed(child: WorkerChild) -> None:
    buffer = MaskBuffer.open(child.run_dir / "masks", MAX_ROWS, child.ready.vocab_size)
    step = child._steps + 1
    buffer.row(step, 2)[:] = pack_mask([100, 200], child.ready.vocab_size)
    child.grammar.send(StepMasks(step, [2]))
    start = RowStart(len(PROMPT), b"", SamplingParams(temperature=0), 0, child.ready.eos_ids)
    plan = RowPlan(2, 10_000, pack(PROMPT), pack(range(1, 6)), True, masked=True, start=start)
    assert child.step(plan).rows[0].token in (100, 200)

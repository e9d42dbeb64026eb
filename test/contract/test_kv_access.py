"""KV as bytes: what was read from some slots and written to others, there or in another model, is
the same KV to every kernel, in every type that it is kept in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from phloem.srt.attention.batch import AttentionBatch
from phloem.srt.checkpoint.config import ModelConfig, RopeConfig
from phloem.srt.checkpoint.quant_types import F32
from phloem.srt.checkpoint.shapes import expected_tensors
from phloem.srt.checkpoint.tensors import Tensor
from phloem.srt.kernels.cpu.library import KV_TYPES, KernelError, runnable_isas
from phloem.srt.models.base import Model
from phloem.srt.models.cpu_model import CpuModel
from phloem.srt.models.torch_model import TorchModel

Slots = NDArray[np.int32]

SLOTS = 700
PREFIX = 192
TOKENS = 230
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=61,
    hidden_size=48,
    intermediate_size=64,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    context_length=400,
    tie_embeddings=True,
)
CONFIGS = {
    "whole": CONFIG,
    "padded": replace(CONFIG, head_dim=20),
    "window": replace(CONFIG, sliding_window=50),
}
KINDS = [("cpu", kv_dtype, isa) for kv_dtype in KV_TYPES for isa in runnable_isas()]
KINDS += [("torch", "float32", ""), ("torch", "bfloat16", "")]

kinds = pytest.mark.parametrize(("backend", "kv_dtype", "isa"), KINDS)


@dataclass(frozen=True)
class Weights:
    """A checkpoint in memory."""

    config: ModelConfig

    def tensors(self) -> Iterator[Tensor]:
        for name, shape in expected_tensors(self.config).items():
            values = np.random.default_rng(sum(name.encode())).standard_normal(shape) * 0.2
            if "norm" in name:
                values += 1
            data = np.ascontiguousarray(values, np.float32).view(np.uint8)
            yield Tensor(name, shape, F32, data)


def make(backend: str, kv_dtype: str, isa: str, config: ModelConfig = CONFIG) -> Model:
    if backend == "torch":
        return TorchModel.load(
            Weights(config), kv_slots=SLOTS, dtype=getattr(torch, kv_dtype), threads=1
        )
    return CpuModel(Weights(config), kv_slots=SLOTS, kv_dtype=kv_dtype, isa=isa, threads=2)


def extend(model: Model, slots: Slots, begin: int) -> NDArray[np.float32]:
    """Hidden states of the tokens from `begin` on, of one fixed sequence that lies in `slots`."""
    tokens = np.random.default_rng(1).integers(0, 61, len(slots)).astype(np.int32)
    positions = np.arange(begin, len(slots), dtype=np.int32)
    batch = AttentionBatch([len(positions)], [slots])
    return model.forward(tokens[begin:], positions, batch)


def some_slots(seed: int, count: int) -> Slots:
    order = np.random.default_rng(seed).permutation(np.arange(1, SLOTS, dtype=np.int32))
    return np.ascontiguousarray(order[:count])


def read(model: Model, slots: Slots) -> NDArray[np.uint8]:
    out = np.full(len(slots) * model.kv_slot_bytes, 0xAA, np.uint8)
    model.read_kv(slots, out)
    return out


@kinds
@pytest.mark.parametrize("name", CONFIGS)
def test_a_prefix_that_was_brought_back_gives_the_same_bits(
    name: str, backend: str, kv_dtype: str, isa: str
) -> None:
    model = make(backend, kv_dtype, isa, CONFIGS[name])
    first = some_slots(2, TOKENS)
    extend(model, first[:PREFIX], 0)
    expected = extend(model, first, PREFIX)
    blocks = [read(model, first[i : i + 64]) for i in range(0, PREFIX, 64)]
    for other in (model, make(backend, kv_dtype, isa, CONFIGS[name])):
        second = some_slots(3, TOKENS)
        for i, block in enumerate(blocks):
            other.write_kv(second[i * 64 : (i + 1) * 64], block)
        assert np.array_equal(extend(other, second, PREFIX), expected)


@kinds
def test_any_bits_come_back_and_nothing_else_is_touched(
    backend: str, kv_dtype: str, isa: str
) -> None:
    model = make(backend, kv_dtype, isa)
    assert model.kv_slot_bytes == CONFIG.kv_slot_bytes(kv_dtype)
    everything = np.arange(1, SLOTS, dtype=np.int32)
    rng = np.random.default_rng(4)
    before = rng.integers(0, 256, len(everything) * model.kv_slot_bytes, np.uint8)
    model.write_kv(everything, before)
    assert np.array_equal(read(model, everything), before)
    mine = some_slots(5, 100)
    others = np.setdiff1d(everything, mine).astype(np.int32)
    kept = read(model, others)
    data = rng.integers(0, 256, len(mine) * model.kv_slot_bytes, np.uint8)
    model.write_kv(mine, data)
    assert np.array_equal(read(model, mine), data)
    assert np.array_equal(read(model, others), kept)
    one = read(model, mine[:1])
    model.write_kv(others[:1], one)
    assert np.array_equal(read(model, others[:1]), one)


@kinds
def test_it_may_happen_while_other_slots_are_computed_with(
    backend: str, kv_dtype: str, isa: str
) -> None:
    model, alone = make(backend, kv_dtype, isa), make(backend, kv_dtype, isa)
    slots = some_slots(6, SLOTS - 1)
    computed, kept, moved = np.split(slots[: TOKENS + 128], [TOKENS, TOKENS + 64])
    data = np.random.default_rng(7).integers(0, 256, (2, 64 * model.kv_slot_bytes), np.uint8)
    model.write_kv(kept, data[0])
    done, wrong = threading.Event(), 0

    def move() -> None:
        nonlocal wrong
        while True:
            model.write_kv(moved, data[1])
            wrong += not np.array_equal(read(model, kept), data[0])
            wrong += not np.array_equal(read(model, moved), data[1])
            if done.is_set():
                return

    mover = threading.Thread(target=move)
    mover.start()
    try:
        for _ in range(5):
            found = extend(model, computed, 0)
    finally:
        done.set()
        mover.join()
    assert wrong == 0
    assert np.array_equal(found, extend(alone, computed, 0))


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]])
def test_what_is_refused(kind: tuple[str, str, str]) -> None:
    model = make(*kind)
    data = np.zeros(2 * model.kv_slot_bytes, np.uint8)
    for slot in (-1, 0, SLOTS):
        slots = np.array([3, slot], np.int32)
        with pytest.raises((KernelError, IndexError), match=f"slots? .*{slot}"):
            model.read_kv(slots, data)
        with pytest.raises((KernelError, IndexError), match=f"slots? .*{slot}"):
            model.write_kv(slots, data)
    for wrong in (data[:-1], np.zeros((2, model.kv_slot_bytes), np.uint8)):
        with pytest.raises(ValueError, match="2 slots of"):
            model.read_kv(np.array([1, 2], np.int32), wrong)
        with pytest.raises(ValueError, match="2 slots of"):
            model.write_kv(np.array([1, 2], np.int32), wrong)

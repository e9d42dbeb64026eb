"""Arrays in, arrays out, in either type; the numbers themselves are `test_families.py`'s."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from phloem.srt.attention.batch import AttentionBatch, AttentionError
from phloem.srt.checkpoint.config import ModelConfig, RopeConfig
from phloem.srt.checkpoint.shapes import expected_tensors
from phloem.srt.models.torch_model import DTYPES, TorchModel

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=70,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    context_length=64,
    tie_embeddings=True,
)
TOKENS = np.array([5, 69, 0, 33], np.int32)


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...]

    def numpy_float32(self) -> NDArray[np.float32]:
        rng = np.random.default_rng(sum(self.name.encode()))
        return rng.standard_normal(self.shape).astype(np.float32) * np.float32(0.3)


@dataclass(frozen=True)
class RandomCheckpoint:
    config: ModelConfig = CONFIG

    def tensors(self) -> Iterator[Weight]:
        for name, shape in expected_tensors(self.config).items():
            yield Weight(name, shape)


def compute(model: TorchModel) -> NDArray[np.float32]:
    positions = np.arange(4, dtype=np.int32)
    for array in (TOKENS, positions):
        array.setflags(write=False)  # as arrays over a message's bytes are
    return model.forward(TOKENS, positions, AttentionBatch([4], [positions + np.int32(1)]))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_arrays_are_the_callers(dtype: torch.dtype) -> None:
    model = TorchModel.load(RandomCheckpoint(), kv_slots=8, dtype=dtype)
    hidden = compute(model)
    assert hidden.shape == (4, 32)
    assert hidden.dtype == np.float32
    masks = [None, np.zeros(3, np.int32)]
    logits = model.logits(hidden[2:], masks)
    assert logits.shape == (2, 70)
    assert logits.dtype == np.float32
    assert logits.flags.c_contiguous
    before = logits.copy()
    logits[:] = 0
    assert np.array_equal(model.logits(hidden[2:]), before)  # masks are not used


def test_hidden_states_of_bfloat16_come_back_unchanged() -> None:
    """Out as float32 and in again: no rounding, so the logits are the network's own."""
    model = TorchModel.load(RandomCheckpoint(), kv_slots=8, dtype=torch.bfloat16)
    hidden = torch.from_numpy(compute(model))
    assert torch.equal(hidden.to(torch.bfloat16).float(), hidden)
    with torch.inference_mode():
        own = model._network.logits(hidden.to(torch.bfloat16)).numpy()
    assert np.array_equal(model.logits(hidden.numpy()), own)


def test_an_unknown_attention_backend_is_named() -> None:
    with pytest.raises(AttentionError, match="magic"):
        TorchModel.load(RandomCheckpoint(), kv_slots=8, attention_backend="magic")

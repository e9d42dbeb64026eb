"""Tiny random models by the CPU kernels: torch's logits, and the same bits however it is cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from phloem.srt.attention.batch import AttentionBatch
from phloem.srt.checkpoint.config import ModelConfig, RopeConfig
from phloem.srt.checkpoint.quant_types import BLOCK_TYPES, F32
from phloem.srt.checkpoint.shapes import expected_tensors
from phloem.srt.checkpoint.tensors import Tensor
from phloem.srt.kernels.cpu.library import (
    KV_TYPES,
    KernelError,
    KernelsUnavailable,
    Matrix,
    Team,
    runnable_isas,
)
from phloem.srt.models.cpu_model import CpuModel, Quantization
from phloem.srt.models.torch_model import TorchModel

Floats = NDArray[np.float32]
Slots = NDArray[np.int32]

TOLERANCE = 2e-5
"""Largest error of a logit against torch, both in float32; logits have a deviation of about 1."""
QUANTISED: dict[Quantization, float] = {"int8": 0.06, "int4": 0.5}
"""Error of all logits, relative to their norm. Random weights are the worst case: no structure
that survives, and four bits leave some 8 % of each weight."""
ACTIVATIONS = 0.002
"""The same, against the quantised weights in float32: what activations of 15 bits cost."""
KEPT = {"float32": 0.0, "float16": 1e-3, "bfloat16": 1e-2, "int8": 2e-2}
"""The same, of the type that keys and values are kept in."""

LLAMA = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    context_length=500,
    tie_embeddings=True,
)
CONFIGS = {
    "llama": LLAMA,
    # heads that are padded, and no size a multiple of a vector or of a group of 32
    "llama-odd": replace(
        LLAMA, hidden_size=72, head_dim=20, intermediate_size=90, vocab_size=131, num_kv_heads=6
    ),
    "llama-biased": replace(LLAMA, attention_bias=True, attention_out_bias=True),
    "mistral": replace(LLAMA, architecture="mistral", sliding_window=19, tie_embeddings=False),
    "qwen2": replace(LLAMA, architecture="qwen2", attention_bias=True, num_heads=7, num_kv_heads=1),
    # biases of heads that are padded
    "qwen2-odd": replace(LLAMA, architecture="qwen2", attention_bias=True, head_dim=20),
    "qwen3": replace(LLAMA, architecture="qwen3", qk_norm=True, head_dim=24, tie_embeddings=False),
}
SLOTS = 1200
TOKENS = 330
"""Of the long sequence: more than one chunk of keys."""

configs = pytest.mark.parametrize("name", CONFIGS)


def random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    rng = np.random.default_rng(sum(name.encode()))
    values = rng.standard_normal(shape) * 0.15
    if "norm" in name:
        values = values * 2 + 1
    return floats(name, values.astype(np.float32))


def floats(name: str, values: Floats) -> Tensor:
    return Tensor(name, values.shape, F32, np.ascontiguousarray(values).view(np.uint8))


@dataclass(frozen=True)
class Weights:
    """A checkpoint in memory."""

    config: ModelConfig
    changed: dict[str, Tensor] = field(default_factory=dict)

    def tensors(self) -> Iterator[Tensor]:
        for name, shape in expected_tensors(self.config).items():
            yield self.changed.get(name) or random_tensor(name, shape)


@dataclass
class Sequences:
    """Sequences of random tokens with slots anywhere in the pool, and how far each is computed."""

    model: CpuModel
    tokens: list[NDArray[np.int32]]
    slots: list[Slots]
    done: list[int]

    def step(self, *work: tuple[int, int]) -> list[Floats]:
        """Compute (sequence, count) each; their hidden states."""
        tokens, positions, rows = [], [], []
        for i, count in work:
            begin, end = self.done[i], self.done[i] + count
            tokens.append(self.tokens[i][begin:end])
            positions.append(np.arange(begin, end, dtype=np.int32))
            rows.append(self.slots[i][:end])
            self.done[i] = end
        batch = AttentionBatch([count for _, count in work], rows)
        hidden = self.model.forward(np.concatenate(tokens), np.concatenate(positions), batch)
        return np.split(hidden, np.cumsum([count for _, count in work])[:-1])


def sequences(model: CpuModel, lengths: Sequence[int] = (TOKENS, 40, 300)) -> Sequences:
    rng = np.random.default_rng(3)
    free = rng.permutation(np.arange(1, SLOTS, dtype=np.int32))
    tokens = [
        rng.integers(0, model.config.vocab_size, length).astype(np.int32) for length in lengths
    ]
    slots = np.split(free[: sum(lengths)], np.cumsum(lengths)[:-1])
    return Sequences(model, tokens, slots, [0] * len(lengths))


def load(name: str, *, kv_dtype: str = "float32", threads: int = 1, isa: str = "") -> CpuModel:
    return CpuModel(
        Weights(CONFIGS[name]),
        kv_slots=SLOTS,
        kv_dtype=kv_dtype,
        threads=threads,
        isa=isa or None,
    )


@cache
def whole(name: str, kv_dtype: str = "float32", isa: str = "") -> tuple[Floats, Floats]:
    """Hidden states and logits of the long sequence, in one step, one thread, best kernels."""
    model = load(name, kv_dtype=kv_dtype, isa=isa)
    hidden = sequences(model).step((0, TOKENS))[0]
    return hidden, model.logits(hidden)


@cache
def by_torch(name: str, quantization: Quantization | None = None) -> Floats:
    """Logits of the long sequence, by torch, weights perhaps quantised and dequantised."""
    weights = Weights(CONFIGS[name])
    if quantization:
        for tensor in weights.tensors():
            if len(tensor.shape) == 2:
                weights.changed[tensor.name] = requantised(tensor, quantization)
    model = TorchModel.load(weights, kv_slots=SLOTS)
    positions = np.arange(TOKENS, dtype=np.int32)
    tokens = sequences(load(name)).tokens[0]
    batch = AttentionBatch([TOKENS], [positions + np.int32(1)])
    return model.logits(model.forward(tokens, positions, batch))


def requantised(tensor: Tensor, quantization: Quantization) -> Tensor:
    rows, columns = tensor.shape
    matrix = Matrix(quantization, tensor.data, columns, np.arange(rows, dtype=np.int32), Team(1))
    return floats(tensor.name, np.stack([matrix.row(i) for i in range(rows)]))


def relative_error(found: Floats, expected: Floats) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@configs
def test_logits_are_torchs(name: str) -> None:
    expected = by_torch(name)
    assert expected.std() > 0.3
    hidden, logits = whole(name)
    assert hidden.dtype == logits.dtype == np.float32
    assert np.abs(logits - expected).max() < TOLERANCE


@configs
@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8"])
def test_logits_with_narrower_keys_and_values(name: str, kv_dtype: str) -> None:
    error = relative_error(whole(name, kv_dtype)[1], whole(name)[1])
    assert KEPT[kv_dtype] / 50 < error < KEPT[kv_dtype]


@configs
@pytest.mark.parametrize("isa", runnable_isas())
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_same_bits_however_it_is_cut(name: str, isa: str, threads: int) -> None:
    """Other kernels, other threads, in chunks, beside others, behind a shared prefix. AMX tiles
    multiply bfloat16 in their own way; all else is the same everywhere."""
    kv_dtype = list(KV_TYPES)[threads]
    expected, logits = whole(name, kv_dtype, "amx" if isa == "amx" else "generic")
    run = sequences(load(name, kv_dtype=kv_dtype, threads=threads, isa=isa))
    parts = [run.step((0, 1))[0], run.step((1, 17), (0, 4))[1], run.step((0, 2), (2, 5))[0]]
    parts += [run.step((2, 200), (0, 247), (1, 1))[1]]
    parts += [run.step((0, count), (1, 1))[0] for count in (1, 1, 3)]
    run.slots[2][:259] = run.slots[0][:259]  # the third goes on behind the first's beginning
    run.tokens[2][:259] = run.tokens[0][:259]
    run.done[2] = 256
    first, third = run.step((0, 5), (2, 3))
    parts += [first, *(run.step((1, 1), (0, 33))[1:]), run.step((0, 33))[0]]
    assert np.array_equal(np.concatenate(parts), expected)
    assert np.array_equal(third, expected[256:259])
    found = np.concatenate([run.model.logits(expected[a:b]) for a, b in ((0, 1), (1, 4), (4, 60))])
    assert np.array_equal(found, logits[:60])


@configs
@pytest.mark.parametrize("isa", runnable_isas())
def test_masks_spare_work_and_change_no_legal_token(name: str, isa: str) -> None:
    vocab = CONFIGS[name].vocab_size
    model = load(name, threads=2, isa=isa)
    hidden, expected = whole(name)[0][:50], whole(name)[1][:50]
    rng = np.random.default_rng(0)
    masks: list[NDArray[np.int32] | None] = []
    legal = np.zeros((50, vocab), bool)
    for i in range(50):
        count = (0, 1, 2, vocab // 2, vocab)[i % 5]
        legal[i, rng.permutation(vocab)[:count]] = True
        legal[0:5, -1] = True  # the last token of a last, partial block
        padded = np.zeros(-(-vocab // 32) * 32, np.uint8)
        padded[:vocab] = legal[i]
        masks.append(np.packbits(padded, bitorder="little").view(np.int32))
    masks[7], legal[7] = None, True
    found = model.logits(hidden, masks)
    assert np.array_equal(found[legal], expected[legal])
    assert ((found == expected) | (found == -np.inf))[~legal].all()
    assert np.isneginf(found).any() or isa == "amx"  # there, so many rows are computed whole
    few = model.logits(hidden[5:7], masks[5:7])
    assert np.isneginf(few).any()  # something was spared
    assert np.array_equal(few[legal[5:7]], expected[5:7][legal[5:7]])
    assert np.array_equal(model.logits(hidden, [None] * 50), expected)
    assert np.array_equal(model.logits(hidden[:1], masks[:1])[legal[:1]], expected[:1][legal[:1]])
    assert model.logits(hidden[:0]).shape == (0, vocab)


@configs
@pytest.mark.parametrize("quantization", QUANTISED)
def test_quantised_when_loaded(name: str, quantization: Quantization) -> None:
    config = CONFIGS[name]
    made = [
        CpuModel(Weights(config), kv_slots=SLOTS, quantization=quantization, threads=n, isa=isa)
        for n, isa in ((1, runnable_isas()[0]), (2, "generic"))
    ]
    hidden = sequences(made[0]).step((0, 60))[0]
    logits = made[0].logits(hidden)
    assert relative_error(logits, by_torch(name)[:60]) < QUANTISED[quantization]
    assert 1e-6 < relative_error(logits, by_torch(name, quantization)[:60]) < ACTIVATIONS
    run = sequences(made[1])
    parts = [run.step((0, count))[0] for count in (1, 2, 20, 37)]
    assert np.array_equal(np.concatenate(parts), hidden)
    assert np.array_equal(made[1].logits(hidden), logits)
    assert made[0].weight_bytes < load(name).weight_bytes / 2


def stored(name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    """Random bytes in a block format, scales small."""
    block = next(block for block in BLOCK_TYPES.values() if block.name == kind)
    scales = {"Q8_0": [0], "Q4_1": [0, 2], "Q3_K": [108], "Q6_K": [208]}[kind]
    rng = np.random.default_rng(5)
    data = rng.integers(0, 256, (shape[0], shape[1] // block.elements, block.nbytes), np.uint8)
    for at in scales:
        few = rng.uniform(0.2, 1, data.shape[:2]) * {"Q8_0": 2e-3}.get(kind, 4e-3)
        data[:, :, at : at + 2] = few.astype(np.float16)[:, :, None].view(np.uint8)
    return Tensor(name, shape, block, data.reshape(shape[0], -1))


WIDE = replace(
    LLAMA, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=8, head_dim=32
)
"""What K-quants need: rows of whole blocks of 256."""


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q6_K", "Q3_K"])
def test_weights_as_they_are_stored(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """The same numbers as float32 differ by what int8 activations cost; not at all where there are
    no kernels for a format, because then it is float32 that is computed with."""
    shapes = expected_tensors(WIDE)
    kinds = {n: stored(n, shapes[n], kind) for n in shapes if "mlp" in n or "embed" in n}
    plain = {n: floats(n, tensor.numpy_float32()) for n, tensor in kinds.items()}
    logits = []
    for changed in (kinds, plain):
        model = CpuModel(Weights(WIDE, changed), kv_slots=SLOTS)
        hidden = sequences(model).step((0, 50))[0]
        logits.append(model.logits(hidden))
    error = relative_error(*logits)
    if kind == "Q3_K":
        assert error == 0
        assert "no kernel for Q3_K" in caplog.text
    else:
        assert 1e-4 < error < 0.03


@pytest.mark.parametrize("name", ["llama", "llama-odd"])
def test_rows_in_another_order(name: str) -> None:
    """As GGUF files keep q and k."""
    config = CONFIGS[name]
    changed = {}
    for kind in ("q_proj.weight", "k_proj.weight"):
        full = f"model.layers.1.self_attn.{kind}"
        plain = random_tensor(full, expected_tensors(config)[full])
        order = np.random.default_rng(1).permutation(len(plain.data))
        changed[full] = Tensor(full, plain.shape, F32, plain.data[np.argsort(order)], order)
        assert np.array_equal(changed[full].numpy_float32(), plain.numpy_float32())
    model = CpuModel(Weights(config, changed), kv_slots=SLOTS)
    assert np.array_equal(sequences(model).step((0, TOKENS))[0], whole(name)[0])


def test_what_cannot_be_loaded() -> None:
    shapes = expected_tensors(WIDE)
    name = "model.layers.0.mlp.up_proj.weight"
    weights = Weights(WIDE, {name: stored(name, shapes[name], "Q8_0")})
    with pytest.raises(ValueError, match=r"up_proj\.weight is Q8_0 already.*int4"):
        CpuModel(weights, kv_slots=8, quantization="int4")
    values = random_tensor(name, shapes[name]).numpy_float32()
    values[3, 5] = np.nan
    broken = Weights(WIDE, {name: floats(name, values)})
    with pytest.raises(ValueError, match=r"up_proj\.weight has values that are not finite"):
        CpuModel(broken, kv_slots=8, quantization="int8")
    with pytest.raises(KernelsUnavailable, match="called sse9; there are"):
        CpuModel(weights, kv_slots=8, isa="sse9")

    class Lacking(Weights):
        def tensors(self) -> Iterator[Tensor]:
            return (tensor for tensor in super().tensors() if tensor.name != name)

    with pytest.raises(ValueError, match=r"missing: model\.layers\.0\.mlp\.up_proj\.weight"):
        CpuModel(Lacking(WIDE), kv_slots=8)


def test_tokens_and_positions_outside_are_refused() -> None:
    model = CpuModel(Weights(LLAMA), kv_slots=SLOTS, context_length=50)
    run = sequences(model)
    for token in (-1, 97):
        with pytest.raises(KernelError, match=f"token {token} is not in the vocabulary"):
            forward(model, [5, token], [0, 1])
    for position in (-1, 50):
        with pytest.raises(KernelError, match=f"position {position} is not in the context"):
            forward(model, [5, 6], [0, position])
    assert np.array_equal(run.step((0, 50))[0], whole("llama")[0][:50])


def forward(model: CpuModel, tokens: list[int], positions: list[int]) -> Floats:
    slots = np.arange(1, len(tokens) + 1, dtype=np.int32)
    batch = AttentionBatch([len(tokens)], [slots])
    return model.forward(np.array(tokens, np.int32), np.array(positions, np.int32), batch)


def test_a_model_says_what_computes_it() -> None:
    for isa in runnable_isas():
        model = load("llama", isa=isa)
        assert model.isa == isa
        assert model.config == LLAMA
        weights = sum(int(np.prod(s)) for s in expected_tensors(LLAMA).values() if len(s) == 2)
        assert 4 * weights <= model.weight_bytes < 4.5 * weights

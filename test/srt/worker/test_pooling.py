"""Embeddings by the runner: transformers' hidden states pooled, and the same bits however the work
is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from phloem.srt.checkpoint.config import ModelConfig, RopeConfig
from phloem.srt.checkpoint.quant_types import F32
from phloem.srt.checkpoint.shapes import expected_tensors
from phloem.srt.checkpoint.tensors import Tensor
from phloem.srt.messages import Pooling, RowPlan, RowStart, SamplingParams, StepPlan
from phloem.srt.models.base import Model
from phloem.srt.models.cpu_model import CpuModel
from phloem.srt.models.torch_model import TorchModel
from phloem.srt.wire import pack
from phloem.srt.worker.inputs import PlanError
from phloem.srt.worker.pooling import Pool
from phloem.srt.worker.runner import ModelRunner

CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10_000.0),
    context_length=400,
    tie_embeddings=True,
)
SLOTS = 2048
TOLERANCE = 1e-5
"""Largest error against transformers, both in float32; hidden states have a deviation near 1."""

Vector = NDArray[np.float32]


@dataclass(frozen=True)
class RandomCheckpoint:
    config: ModelConfig = CONFIG

    def tensors(self) -> Iterator[Tensor]:
        for name, shape in expected_tensors(self.config).items():
            rng = np.random.default_rng(sum(name.encode()))
            scale = 1.0 if "norm" in name else 0.2
            values = (rng.standard_normal(shape) * scale).astype(np.float32)
            yield Tensor(name, shape, F32, values.view(np.uint8))


@pytest.fixture(scope="module", params=["torch", "cpu"])
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    if request.param == "cpu":
        yield CpuModel(RandomCheckpoint(), kv_slots=SLOTS, threads=2)
        return
    before = torch.get_num_threads()
    yield TorchModel.load(RandomCheckpoint(), kv_slots=SLOTS, threads=1)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def runner(model: Model) -> ModelRunner:
    return ModelRunner(model, kv_slots=SLOTS, max_rows=4)


@dataclass
class Row:
    """A prompt on its way: how far it is, and where its KV lies."""

    tokens: list[int]
    pooling: Pooling
    slots: list[int]
    done: int = 0

    def plan(self, row: int, epoch: int, count: int) -> RowPlan:
        start, end = self.done, min(self.done + count, len(self.tokens))
        first = None
        if self.done == 0 or self.done == self.cached:
            first = RowStart(
                prompt_len=len(self.tokens),
                prefix_slots=pack(self.slots[:start]),
                sampling=SamplingParams(max_tokens=0),
                seed=0,
                stop_ids=[],
                embed=self.pooling,
            )
        self.done = end
        packed, slots = pack(self.tokens[start:end]), pack(self.slots[start:end])
        return RowPlan(row, epoch, packed, slots, sample=False, start=first)

    cached: int = -1


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(CONFIG.vocab_size), k=length)


def alone(runner: ModelRunner, tokens: list[int], pooling: Pooling) -> Vector:
    """In one step, by itself."""
    row = Row(tokens, pooling, list(range(1, len(tokens) + 1)))
    step = runner.forward(StepPlan(0, [row.plan(0, 0, len(tokens))]))
    assert step.rows == [] and set(step.embeddings) == {0}
    return step.embeddings[0]


def test_hidden_states_of_transformers(runner: ModelRunner) -> None:
    transformers = pytest.importorskip("transformers")
    settings = transformers.LlamaConfig(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.hidden_size,
        intermediate_size=CONFIG.intermediate_size,
        num_hidden_layers=CONFIG.num_layers,
        num_attention_heads=CONFIG.num_heads,
        num_key_value_heads=CONFIG.num_kv_heads,
        head_dim=CONFIG.head_dim,
        rms_norm_eps=CONFIG.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
    )
    theirs = transformers.LlamaModel(settings).eval()
    weights = {
        tensor.name.removeprefix("model."): torch.from_numpy(tensor.numpy_float32().copy())
        for tensor in RandomCheckpoint().tensors()
    }
    theirs.load_state_dict(weights)
    for length in (1, 9, 150):
        tokens = prompt_of(length, length)
        with torch.no_grad():
            hidden = theirs(torch.tensor([tokens])).last_hidden_state[0].numpy()
        assert hidden.std() > 0.3
        mean = alone(runner, tokens, Pooling.MEAN)
        np.testing.assert_allclose(mean, hidden.mean(0), rtol=0, atol=TOLERANCE)
        last = alone(runner, tokens, Pooling.LAST)
        np.testing.assert_allclose(last, hidden[-1], rtol=0, atol=TOLERANCE)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_chunks_prefixes_and_neighbours_change_no_bit(runner: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    base = prompt_of(200)
    poolings = [rng.choice(list(Pooling)) for _ in range(rng.randint(1, 4))]
    prompts = [base[: rng.randint(1, 150)] + prompt_of(rng.randint(1, 40), 7) for _ in poolings]
    expected = [alone(runner, *pair) for pair in zip(prompts, poolings, strict=True)]
    free = rng.sample(range(1, SLOTS), SLOTS - 1)
    cached = Row(base, Pooling.LAST, [free.pop() for _ in base])
    runner.forward(StepPlan(0, [cached.plan(3, 1, 200)]))
    rows = []
    for tokens, pooling in zip(prompts, poolings, strict=True):
        row = Row(tokens, pooling, [free.pop() for _ in tokens])
        if pooling is Pooling.LAST:  # what came before may be another's
            same = next((i for i, t in enumerate(base) if tokens[i : i + 1] != [t]), len(base))
            row.done = row.cached = rng.randint(0, min(same, len(tokens) - 1))
            row.slots[: row.done] = cached.slots[: row.done]
        rows.append(row)
    found: dict[int, Vector] = {}
    while unfinished := [i for i, row in enumerate(rows) if row.done < len(row.tokens)]:
        members = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        plans = [rows[i].plan(i, 10 + i, rng.randint(1, 60)) for i in members]
        step = runner.forward(StepPlan(0, plans))
        for index, vector in step.embeddings.items():
            assert rows[members[index]].done == len(rows[members[index]].tokens)
            found[members[index]] = vector
    assert found.keys() == set(range(len(rows)))
    for i, vector in found.items():
        assert np.array_equal(vector, expected[i])


def test_a_mean_is_not_taken_of_cached_tokens(runner: ModelRunner) -> None:
    row = Row(prompt_of(9), Pooling.MEAN, list(range(1, 10)), done=4, cached=4)
    with pytest.raises(PlanError, match="4 are cached"):
        runner.forward(StepPlan(0, [row.plan(0, 5, 9)]))


def test_an_embedding_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no tokens"):
        Pool(Pooling.MEAN).vector()


@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=50), data=st.data())
def test_a_mean_is_the_same_for_any_cut(values: list[float], data: st.DataObject) -> None:
    states = np.array(values, np.float32)[:, None]
    whole, pieces = Pool(Pooling.MEAN), Pool(Pooling.MEAN)
    whole.add(states)
    begin = 0
    while begin < len(states):
        size = data.draw(st.integers(1, len(states) - begin))
        pieces.add(states[begin : begin + size])
        begin += size
    assert np.array_equal(whole.vector(), pieces.vector())
    assert whole.vector()[0] == pytest.approx(float(np.mean(values)), rel=1e-5, abs=1e-3)

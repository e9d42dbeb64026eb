"""Tiny random models of every family: our logits against transformers'."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.checkpoint.hf_config import JsonFile, read_config
from phloem.srt.messages import RowPlan, RowStart, SamplingParams, StepPlan
from phloem.srt.models.registry import MODELS, model_class
from phloem.srt.models.torch_model import TorchModel
from phloem.srt.models.weights import WeightsError, load_model
from phloem.srt.wire import pack
from phloem.srt.worker.runner import ModelRunner

transformers = pytest.importorskip("transformers")

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""float32: largest error of a logit, absolute plus relative; bfloat16: of the norm, relative.
Logits have a standard deviation of about 1."""

BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-tied-one-kv-head": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama-biased": ("Llama", {"attention_bias": True}),
    "llama3-scaling": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-scaling": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "mistral": ("Mistral", {"head_dim": 24, "sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 19}),
    "qwen2": ("Qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "hidden_size": 112}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3-tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
}


@dataclass(frozen=True)
class Weight:
    name: str
    values: torch.Tensor

    def numpy_float32(self) -> NDArray[np.float32]:
        array: NDArray[np.float32] = self.values.float().numpy().copy()
        return array


@dataclass
class Weights:
    """A checkpoint in memory."""

    config: ModelConfig
    values: dict[str, torch.Tensor]

    def tensors(self) -> Iterator[Weight]:
        for name, values in self.values.items():
            yield Weight(name, values)


def build(family: str) -> tuple[Any, Weights]:
    """transformers' model with seeded random weights, and the same as a checkpoint."""
    kind, options = FAMILIES[family]
    torch.manual_seed(1)
    settings = getattr(transformers, f"{kind}Config")(**{**BASE, **options})
    settings.architectures = [f"{kind}ForCausalLM"]
    theirs = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide mistakes
        for name, parameter in theirs.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    config = read_config(
        JsonFile(Path("config.json"), settings.to_dict()),
        JsonFile(Path("generation_config.json"), {}),
        tokenizer_eos=None,
        bos_id=1,
        add_bos=False,
    )
    values = {
        name: value
        for name, value in theirs.state_dict().items()
        if not (config.tie_embeddings and name == "lm_head.weight")
    }
    return theirs, Weights(config, values)


def our_logits(
    weights: Weights, prompts: list[list[int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Logits after every token: prompts together in one step each token, so that every row is
    sampled, alternating with neighbours of other lengths."""
    model = TorchModel.load(weights, kv_slots=600, dtype=dtype)
    runner = ModelRunner(model, kv_slots=600, max_rows=len(prompts))
    logits: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
    free = iter(range(599, 0, -1))
    for at in range(max(map(len, prompts))):
        present = [i for i, prompt in enumerate(prompts) if at < len(prompt)]
        rows = [
            RowPlan(
                i,
                i + 1,
                pack([prompts[i][at]]),
                pack([next(free)]),
                sample=True,
                start=RowStart(len(prompts[i]), b"", SamplingParams(), 0, []) if at == 0 else None,
            )
            for i in present
        ]
        result = runner.logits(runner.forward(StepPlan(at, rows)), {})
        for i, values in zip(present, result, strict=True):
            logits[i].append(values)
    return [torch.from_numpy(np.stack(values)) for values in logits]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits(family: str) -> None:
    theirs, weights = build(family)
    generator = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(0, BASE["vocab_size"], (length,), generator=generator).tolist()
        for length in (1, 7, 90)
    ]
    for prompt, ours in zip(prompts, our_logits(weights, prompts, torch.float32), strict=True):
        with torch.no_grad():
            expected = theirs(torch.tensor([prompt])).logits[0]
        assert expected.std() > 0.3
        tolerance = TOLERANCE[torch.float32]
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("family", ["llama-tied-one-kv-head", "qwen2", "qwen3"])
def test_bfloat16_logits(family: str) -> None:
    theirs, weights = build(family)
    prompt = torch.randint(0, BASE["vocab_size"], (20,)).tolist()
    ours = our_logits(weights, [prompt], torch.bfloat16)[0]
    with torch.no_grad():
        expected = theirs(torch.tensor([prompt])).logits[0]
    error = (ours - expected).norm() / expected.norm()
    assert error < TOLERANCE[torch.bfloat16]


def test_tied_embeddings_share_storage() -> None:
    _, weights = build("qwen2-tied")
    model = model_class("qwen2")(weights.config, torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_missing_and_surplus_tensors_are_named() -> None:
    _, weights = build("qwen3")
    moved = "model.layers.1.self_attn.k_norm.weight"
    weights.values["model.layers.1.self_attn.z_norm.weight"] = weights.values.pop(moved)
    with pytest.raises(WeightsError, match=r"missing: .*1\.self_attn\.k_norm.*; not used.*z_norm"):
        load_model(weights, torch.float32)


def test_a_tensor_of_the_wrong_shape_is_named() -> None:
    _, weights = build("llama")
    name = "model.layers.2.mlp.up_proj.weight"
    weights.values[name] = weights.values[name][:5]
    with pytest.raises(WeightsError, match=r"layers\.2\.mlp\.up_proj\.weight has shape \(5, 64\)"):
        load_model(weights, torch.float32)


def test_an_unknown_architecture_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"mamba.*llama, mistral"):
        model_class("mamba")
    for architecture in MODELS:
        assert model_class(architecture).__name__.endswith("ForCausalLM")

"""A Hugging Face folder as a source: its configuration in GGUF's fields, its tensors under GGUF's
names, with the rows of q and k in the order that llama files keep them."""

from __future__ import annotations

import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

from phloem.srt.checkpoint import Checkpoint, ModelConfig, RopeScaling
from phloem.srt.checkpoint.gguf_names import canonical_name, interleaved_row_order
from phloem.srt.checkpoint.quant_types import F32
from phloem.srt.checkpoint.rope import rope_frequencies, yarn_attention_factor
from phloem.srt.checkpoint.tensors import Tensor
from phloem.srt.quantize.errors import QuantizeError
from phloem.srt.quantize.source import Field, Source, StoredTensor
from phloem.srt.quantize.tokenizer_fields import tokenizer_fields

_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def from_folder(checkpoint: Checkpoint) -> Source:
    """The contents of an open folder.

    Raises:
        CheckpointError: its tokenizer files are damaged.
        QuantizeError: its tokenizer or rotary scaling has no equal in GGUF.
    """
    config = checkpoint.config
    architecture = _ARCHITECTURES[config.architecture]
    fields = [
        _text("general.type", "model"),
        _text("general.name", checkpoint.path.resolve().name),
        *_dimensions(config, architecture),
        *_rope(config, architecture),
        *tokenizer_fields(checkpoint),
    ]
    names = _gguf_names(config)
    tensors = [
        StoredTensor(names[t.name], t.shape, t.block, _stored_rows(t, config, architecture))
        for t in checkpoint.tensors()
    ]
    if config.rope.scaling is RopeScaling.LLAMA3:
        tensors.append(_rope_divisors(config))
    return Source(
        architecture=architecture,
        fields=tuple(fields),
        tensors=tuple(tensors),
        eos_ids=config.eos_ids,
    )


def _dimensions(config: ModelConfig, architecture: str) -> list[Field]:
    counts = {
        "vocab_size": config.vocab_size,
        "context_length": config.context_length,
        "embedding_length": config.hidden_size,
        "block_count": config.num_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.num_kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
    }
    if config.sliding_window is not None:
        counts["attention.sliding_window"] = config.sliding_window
    fields = [_count(f"{architecture}.{key}", value) for key, value in counts.items()]
    epsilon = f"{architecture}.attention.layer_norm_rms_epsilon"
    return [*fields, _number(epsilon, config.rms_norm_eps)]


def _rope(config: ModelConfig, architecture: str) -> list[Field]:
    rope, prefix = config.rope, f"{architecture}.rope"
    fields = [_number(f"{prefix}.freq_base", rope.theta)]
    if rope.scaling not in (RopeScaling.LINEAR, RopeScaling.YARN):
        return fields  # llama3's scaling is a tensor of divisors
    fields += [
        _text(f"{prefix}.scaling.type", rope.scaling.value),
        _number(f"{prefix}.scaling.factor", rope.factor),
    ]
    if rope.scaling is RopeScaling.LINEAR:
        return fields
    if not rope.truncate:
        raise QuantizeError("YaRN with truncate = false has no field in GGUF")
    _, attention_factor = rope_frequencies(config)
    assert rope.original_context is not None
    fields += [
        _count(f"{prefix}.scaling.original_context_length", rope.original_context),
        _number(f"{prefix}.scaling.yarn_beta_fast", rope.beta_fast),
        _number(f"{prefix}.scaling.yarn_beta_slow", rope.beta_slow),
    ]
    # Readers multiply it by the factor that follows from the stretch.
    own = attention_factor / yarn_attention_factor(rope.factor)
    if abs(own - 1) > 1e-6:
        fields.append(_number(f"{prefix}.scaling.attn_factor", own))
    return fields


def _rope_divisors(config: ModelConfig) -> StoredTensor:
    """How GGUF carries llama3's scaling: what each frequency is divided by."""
    scaled, _ = rope_frequencies(config)
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    divisors = (config.rope.theta**-exponents / scaled).astype("<f4")
    return StoredTensor("rope_freqs.weight", divisors.shape, F32, divisors.view(np.uint8))


def _gguf_names(config: ModelConfig) -> dict[str, str]:
    """Canonical name → GGUF name of every tensor the model may have."""
    inside = ["attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm"]
    inside += ["attn_k_norm", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down"]
    known = ["token_embd.weight", "output_norm.weight", "output.weight"]
    known += [
        f"blk.{layer}.{name}.{part}"
        for layer in range(config.num_layers)
        for name in inside
        for part in ("weight", "bias")
    ]
    return {canonical: name for name in known if (canonical := canonical_name(name)) is not None}


def _stored_rows(tensor: Tensor, config: ModelConfig, architecture: str) -> NDArray[np.uint8]:
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    projection = tensor.name.split(".")[-2]
    if architecture != "llama" or projection not in heads:
        return tensor.data
    stored_of_canonical = interleaved_row_order(heads[projection], config.head_dim)
    data = tensor.data.reshape(tensor.shape[0], -1)  # a bias has one element a row
    stored = np.empty_like(data)
    stored[stored_of_canonical] = data
    return stored.reshape(tensor.data.shape)


def _text(key: str, value: str) -> Field:
    return Field(key, value, GGUFValueType.STRING)


def _count(key: str, value: int) -> Field:
    return Field(key, value, GGUFValueType.UINT32)


def _number(key: str, value: float) -> Field:
    return Field(key, value, GGUFValueType.FLOAT32)

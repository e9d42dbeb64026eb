"""Which tensors a model of a given configuration has, by canonical name, and their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.checkpoint.errors import CheckpointError

Shapes = dict[str, tuple[int, ...]]


def expected_tensors(config: ModelConfig) -> Shapes:
    """Canonical name → shape in torch order, of every weight the model needs."""
    hidden = config.hidden_size
    shapes: Shapes = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer = _layer(config)
    for index in range(config.num_layers):
        for name, shape in layer.items():
            shapes[f"model.layers.{index}.{name}"] = shape
    return shapes


def _layer(config: ModelConfig) -> Shapes:
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (config.q_size, hidden),
        "self_attn.k_proj.weight": (config.kv_size, hidden),
        "self_attn.v_proj.weight": (config.kv_size, hidden),
        "self_attn.o_proj.weight": (hidden, config.q_size),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if config.attention_bias:
        shapes["self_attn.q_proj.bias"] = (config.q_size,)
        shapes["self_attn.k_proj.bias"] = (config.kv_size,)
        shapes["self_attn.v_proj.bias"] = (config.kv_size,)
    if config.attention_out_bias:
        shapes["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        shapes["self_attn.q_norm.weight"] = (config.head_dim,)
        shapes["self_attn.k_norm.weight"] = (config.head_dim,)
    return shapes


def check_tensors(path: Path, config: ModelConfig, stored: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `CheckpointError` unless `stored` is exactly what `config` needs."""
    expected = expected_tensors(config)
    for name, shape in expected.items():
        if name not in stored:
            missing = len(expected.keys() - stored.keys())
            raise CheckpointError(path, f"tensor {name!r} is missing ({missing} missing in all)")
        if stored[name] != shape:
            raise CheckpointError(
                path,
                f"tensor {name!r} has shape {list(stored[name])}, "
                f"the configuration says {list(shape)}",
            )
    surplus = sorted(stored.keys() - expected.keys())
    if surplus:
        raise CheckpointError(
            path,
            f"tensor {surplus[0]!r} has no place in a {config.architecture} model "
            f"({len(surplus)} such in all)",
        )

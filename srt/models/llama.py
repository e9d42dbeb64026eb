"""Llama (SmolLM2, Llama 2 and 3, Mistral): the plain decoder that the other files differ from.

- pre-norm with RMSNorm, no biases (unless the config has them), final norm before the head
- rotary position embedding over the whole head, any of the checkpoint's scalings
- grouped-query attention; Mistral may limit it to a sliding window
- gated SiLU MLP
- the head may share the embedding's weight

Sources: Llama arXiv:2302.13971 and arXiv:2407.21783, Mistral arXiv:2310.06825.
Shapes: n tokens of all rows of a step, concatenated; Hq and Hkv heads of size D.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from phloem.srt.attention.base import AttentionPlan
from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.models.layers import Embedding, Linear, RMSNorm, RotaryEmbedding, silu_and_mul

Tables = tuple[torch.Tensor, torch.Tensor]


class LlamaForCausalLM(nn.Module):
    """Token ids → final hidden states → logits."""

    fused: ClassVar[dict[str, tuple[str, ...]]] = {
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.model = self.build_model(config, dtype)
        self.lm_head = Linear(config.hidden_size, [config.vocab_size], bias=False, dtype=dtype)
        if config.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @staticmethod
    def build_model(config: ModelConfig, dtype: torch.dtype) -> LlamaModel:
        return LlamaModel(config, LlamaAttention, dtype)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionPlan
    ) -> torch.Tensor:
        """token_ids, positions [n] → hidden [n, hidden], normed."""
        hidden: torch.Tensor = self.model(token_ids, positions, attention)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[m, hidden] → [m, vocab] float32; pass only the rows that are needed."""
        logits: torch.Tensor = self.lm_head(hidden)
        return logits.float()


class LlamaModel(nn.Module):
    def __init__(
        self, config: ModelConfig, attention: type[LlamaAttention], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nn.ModuleList(
            LlamaBlock(config, attention(config, layer, dtype), dtype)
            for layer in range(config.num_layers)
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.rotary = RotaryEmbedding(config)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionPlan
    ) -> torch.Tensor:
        x = self.embed_tokens(token_ids)  # [n, hidden]
        tables = self.rotary.tables(positions)
        for block in self.layers:
            x = block(x, tables, attention)
        normed: torch.Tensor = self.norm(x)
        return normed


class LlamaBlock(nn.Module):
    def __init__(self, config: ModelConfig, attention: LlamaAttention, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps, dtype=dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden, eps, dtype=dtype)
        self.mlp = LlamaMLP(config, dtype)

    def forward(self, x: torch.Tensor, tables: Tables, attention: AttentionPlan) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), tables, attention)
        mlp: torch.Tensor = self.mlp(self.post_attention_layernorm(x))
        return x + mlp


class LlamaAttention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads = config.num_heads, config.num_kv_heads
        self.dim = config.head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            [config.q_size, config.kv_size, config.kv_size],
            bias=config.attention_bias,
            dtype=dtype,
        )
        self.o_proj = Linear(
            config.q_size, [config.hidden_size], bias=config.attention_out_bias, dtype=dtype
        )

    def forward(self, x: torch.Tensor, tables: Tables, attention: AttentionPlan) -> torch.Tensor:
        qkv = self.qkv_proj(x).view(len(x), -1, self.dim)  # [n, Hq + 2·Hkv, D]
        qk, v = qkv[:, : -self.kv_heads], qkv[:, -self.kv_heads :]
        qk = RotaryEmbedding.rotate(self.normalise(qk), tables)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        attended = attention.run(q, k, v, self.layer)  # [n, Hq, D]
        out: torch.Tensor = self.o_proj(attended.reshape(len(x), -1))
        return out

    def normalise(self, qk: torch.Tensor) -> torch.Tensor:
        """q and k heads, [n, Hq + Hkv, D], before rotation."""
        return qk


class LlamaMLP(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.intermediate_size
        self.gate_up_proj = Linear(hidden, [size, size], bias=False, dtype=dtype)
        self.down_proj = Linear(size, [hidden], bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out

"""Qwen3, dense (arXiv:2505.09388). From Llama it differs in one thing:

- q and k pass an RMSNorm over each head before rotation, one weight for all heads.
"""

from __future__ import annotations

import torch

from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.models.layers import RMSNorm
from phloem.srt.models.llama import LlamaAttention, LlamaForCausalLM, LlamaModel


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Llama with normalised queries and keys."""

    @staticmethod
    def build_model(config: ModelConfig, dtype: torch.dtype) -> LlamaModel:
        return LlamaModel(config, Qwen3Attention, dtype)


class Qwen3Attention(LlamaAttention):
    def __init__(self, config: ModelConfig, layer: int, dtype: torch.dtype) -> None:
        super().__init__(config, layer, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype)

    def normalise(self, qk: torch.Tensor) -> torch.Tensor:
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        return torch.cat((self.q_norm(q), self.k_norm(k)), 1)

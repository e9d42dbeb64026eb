"""The memory that keys and values live in, one slot a token."""

from __future__ import annotations

import torch

from phloem.srt.checkpoint.config import ModelConfig


class KVPool:
    """Keys and values of `slots` tokens in every layer: `[layers, slots, Hkv, D]` each, with equal
    strides. Implements `phloem.srt.attention.base.KVStore`.

    Slot 0 is padding and zero. The rest is not touched before a token is written there, so the
    operating system backs it page by page and a large pool costs nothing at start.
    """

    def __init__(
        self, num_layers: int, slots: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        if slots < 2:
            raise ValueError(f"a KV pool of {slots} slots holds no token: slot 0 is padding")
        shape = (num_layers, slots, num_kv_heads, head_dim)
        self.slots = slots
        self._keys = torch.empty(shape, dtype=dtype)
        self._values = torch.empty(shape, dtype=dtype)
        self._keys[:, 0].zero_()
        self._values[:, 0].zero_()

    @staticmethod
    def for_model(config: ModelConfig, slots: int, dtype: torch.dtype) -> KVPool:
        return KVPool(config.num_layers, slots, config.num_kv_heads, config.head_dim, dtype)

    def keys(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        return self._values[layer]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._keys[layer].index_copy_(0, slots, k)
        self._values[layer].index_copy_(0, slots, v)

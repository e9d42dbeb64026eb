"""The memory that keys and values live in, one slot a token."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

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

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's keys and values in all layers."""
        layers, _, heads, dim = self._keys.shape
        return 2 * layers * heads * dim * self._keys.element_size()

    def read_slots(self, slots: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        """Copy what `slots` [n] hold to `out` [n · slot_bytes]: `[layers, 2, n, Hkv, D]`, keys
        first. Raises `IndexError` for a slot that is no token's."""
        index, pieces = self._index(slots), self._pieces(len(slots), out)
        for layer, (keys, values) in enumerate(pieces):
            keys.copy_(self._keys[layer].index_select(0, index))
            values.copy_(self._values[layer].index_select(0, index))

    def write_slots(self, slots: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Copy to `slots` [n] what `read_slots` gave. Raises `IndexError` as it does."""
        index, pieces = self._index(slots), self._pieces(len(slots), data)
        for layer, (keys, values) in enumerate(pieces):
            self.write(layer, index, keys, values)

    def _index(self, slots: NDArray[np.int32]) -> torch.Tensor:
        if len(slots) and not 1 <= slots.min() <= slots.max() < self.slots:
            raise IndexError(
                f"slots from {slots.min()} to {slots.max()}, the pool's are 1 to {self.slots - 1}"
            )
        return torch.from_numpy(slots.astype(np.int64))

    def _pieces(self, count: int, data: NDArray[np.uint8]) -> torch.Tensor:
        """`data` as `[layers, 2, count, Hkv, D]` of the pool's type."""
        layers, _, heads, dim = self._keys.shape
        memory = torch.from_numpy(data).view(self._keys.dtype)
        return memory.view(layers, 2, count, heads, dim)

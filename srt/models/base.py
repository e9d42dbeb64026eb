"""What the worker runs: a model as arrays in, arrays out. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.srt.attention.batch import AttentionBatch
from phloem.srt.checkpoint.config import ModelConfig


class KvAccess(Protocol):
    """The KV pool as bytes, to be kept elsewhere and brought back. May be used from a thread of its
    own while other slots are computed with."""

    @property
    def kv_slot_bytes(self) -> int:
        """Bytes of one slot's keys and values over all layers, as they are kept."""
        ...

    def read_kv(self, slots: NDArray[np.int32], out: NDArray[np.uint8]) -> None:
        """Copy the KV of `slots` [n ≥ 1] to `out` [n · kv_slot_bytes]. Raises for a slot that is
        padding or not there, and `ValueError` for another size."""
        ...

    def write_kv(self, slots: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
        """Copy to `slots` [n] what `read_kv` gave for as many, here or in an earlier process that
        had the same model, options and kernels. Raises as `read_kv` does."""
        ...


def check_kv_size(kv_slot_bytes: int, slots: NDArray[np.int32], data: NDArray[np.uint8]) -> None:
    """Raise `ValueError` unless `data` is as large as the KV of `slots`."""
    if data.shape != (len(slots) * kv_slot_bytes,):
        raise ValueError(
            f"{len(slots)} slots of {kv_slot_bytes} bytes for data of shape {data.shape}"
        )


class Model(KvAccess, Protocol):
    """A decoder, its weights and its KV pool. Arrays in, arrays out, whatever computes in
    between."""

    @property
    def config(self) -> ModelConfig: ...

    def forward(
        self, token_ids: NDArray[np.int32], positions: NDArray[np.int32], batch: AttentionBatch
    ) -> NDArray[np.float32]:
        """Compute a step's n tokens and write their KV into `batch`'s slots: final hidden states
        after the last norm [n, hidden]."""
        ...

    def logits(
        self,
        hidden: NDArray[np.float32],
        masks: Sequence[NDArray[np.int32] | None] | None = None,
    ) -> NDArray[np.float32]:
        """[m, hidden] → [m, vocab], contiguous, the caller's to change until the next call.

        Row i of `masks` is a packed vocabulary mask [ceil(vocab / 32)]: tokens it forbids may get
        -inf instead of being computed (a model that does not use that computes all).
        """
        ...

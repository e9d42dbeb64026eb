"""What the worker runs: a model as arrays in, arrays out. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from phloem.srt.attention.batch import AttentionBatch
from phloem.srt.checkpoint.config import ModelConfig


class Model(Protocol):
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

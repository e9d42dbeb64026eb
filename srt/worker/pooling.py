"""The embedding of a prompt, from its hidden states as they come."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from phloem.srt.messages import Pooling


class Pool:
    """Hidden states of one prompt, pooled, whatever pieces the prompt is cut into.

    A mean is a sum in float64, one token after the other: the same bits for any cut.
    """

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sum: NDArray[np.float64] | None = None
        self._last: NDArray[np.float32] | None = None
        self._count = 0

    def add(self, hidden: NDArray[np.float32]) -> None:
        """The next tokens' states, [n ≥ 1, hidden]."""
        self._count += len(hidden)
        if self._pooling is Pooling.LAST:
            self._last = hidden[-1].copy()
            return
        if self._sum is None:
            self._sum = np.zeros(hidden.shape[1], np.float64)
        for state in hidden:  # not numpy's sum, whose order is its own
            self._sum += state

    def vector(self) -> NDArray[np.float32]:
        """The embedding [hidden] of all tokens so far. Raises `ValueError` if there are none."""
        if self._last is not None:
            return self._last
        if self._sum is None:
            raise ValueError("an embedding of no tokens")
        return (self._sum / self._count).astype(np.float32)

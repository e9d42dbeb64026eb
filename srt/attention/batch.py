"""What a step asks of attention, whatever computes it: the shape of a model, the rows of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray


class AttentionError(ValueError):
    """A batch or a tensor that does not fit the backend's contract."""


@dataclass(frozen=True, kw_only=True)
class AttentionDims:
    """Shape of attention, the same in every layer.

    Query heads share KV heads in consecutive groups of `num_heads / num_kv_heads`. With a
    `sliding_window` of W a token sees itself and the W - 1 tokens before it. Scores are scaled by
    1 / √head_dim.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise AttentionError(
                f"{self.num_heads} query heads do not divide into {self.num_kv_heads} KV heads"
            )
        if self.sliding_window is not None and self.sliding_window < 1:
            raise AttentionError(f"sliding_window is {self.sliding_window}, must be at least 1")

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class AttentionBatch:
    """The rows of a step, ragged.

    Row i computes `query_lens[i]` ≥ 1 new tokens, the last ones of a sequence whose KV lies in
    `kv_slots[i]` (int32, all tokens in order, the new ones included). Queries of all rows are
    concatenated in order; causality is aligned to the end (bottom right).
    """

    query_lens: Sequence[int]
    kv_slots: Sequence[NDArray[np.int32]]

    def __post_init__(self) -> None:
        if len(self.query_lens) != len(self.kv_slots):
            raise AttentionError(
                f"{len(self.query_lens)} query lengths for {len(self.kv_slots)} slot lists"
            )
        for i, (count, slots) in enumerate(zip(self.query_lens, self.kv_slots, strict=True)):
            if not 1 <= count <= len(slots):
                raise AttentionError(f"row {i}: {count} new tokens in a sequence of {len(slots)}")

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(self.query_lens)

    def new_slots(self) -> NDArray[np.int32]:
        """Slots of the new tokens, [num_tokens]."""
        return np.concatenate(
            [slots[-count:] for count, slots in zip(self.query_lens, self.kv_slots, strict=True)]
        )

    def row_offsets(self) -> list[tuple[int, int]]:
        """[start, end) of each row among the concatenated queries."""
        return list(pairwise(accumulate(self.query_lens, initial=0)))

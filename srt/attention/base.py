"""What a model asks of attention: one plan a step, one run a layer.

    backend = create_backend(name, store, dims)   once
    plan = backend.plan(batch)                    once a step
    out = plan.run(q, k, v, layer)                once a layer

`run` first writes k and v of *all* the step's new tokens into the KV store and only then attends,
so a row may read slots that another row of the same step fills (in-step prefix sharing).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

BACKENDS = {"torch_native": "phloem.srt.attention.torch_native:TorchNativeBackend"}
"""Name → "module:Class", imported on first use."""


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


class KVStore(Protocol):
    """The KV pool as attention sees it. Slot 0 is padding: always finite, never a token's."""

    def keys(self, layer: int) -> torch.Tensor:
        """[slots, num_kv_heads, head_dim], contiguous."""
        ...

    def values(self, layer: int) -> torch.Tensor:
        """[slots, num_kv_heads, head_dim], contiguous."""
        ...

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put k and v [n, num_kv_heads, head_dim] into `slots` [n]."""
        ...


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
        ends = np.cumsum([0, *self.query_lens]).tolist()
        return list(pairwise(ends))


class AttentionPlan(Protocol):
    """One step's attention, ready to run layer by layer."""

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """Write k, v [n, num_kv_heads, head_dim] to the store, then attend with q
        [n, num_heads, head_dim]; the result has q's shape and dtype."""
        ...


class AttentionBackend(Protocol):
    """A way to compute attention over a KV store."""

    def __init__(self, store: KVStore, dims: AttentionDims) -> None: ...

    def plan(self, batch: AttentionBatch) -> AttentionPlan:
        """Everything about a batch that is the same in every layer."""
        ...


def create_backend(name: str, store: KVStore, dims: AttentionDims) -> AttentionBackend:
    """The backend called `name`. Raises `AttentionError`, with the known names, for any other."""
    if name not in BACKENDS:
        raise AttentionError(f"no attention backend {name!r}; there are: {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    cls = cast("type[AttentionBackend]", getattr(importlib.import_module(module), attribute))
    return cls(store, dims)

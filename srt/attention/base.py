"""What a torch model asks of attention: one plan a step, one run a layer.

    backend = create_backend(name, store, dims)   once
    plan = backend.plan(batch)                    once a step
    out = plan.run(q, k, v, layer)                once a layer

`run` first writes k and v of *all* the step's new tokens into the KV store and only then attends,
so a row may read slots that another row of the same step fills (in-step prefix sharing).
"""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch

from phloem.srt.attention.batch import AttentionBatch, AttentionDims, AttentionError

BACKENDS = {"torch_native": "phloem.srt.attention.torch_native:TorchNativeBackend"}
"""Name → "module:Class", imported on first use."""


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

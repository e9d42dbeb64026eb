"""Frozen snapshots: what the tree holds and has done, and what one node looks like."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RadixStats:
    """Gauges of now, and counters (`*_total`) since the tree was made."""

    nodes: int  # roots not counted
    namespaces: int
    leases: int
    evictable: int  # cached tokens that no lease holds
    locked: int  # cached tokens that at least one lease holds
    programs: int  # live ones
    history_tokens: int  # what the eviction history counts for
    lookups_total: int  # calls of `acquire`
    lookup_tokens_total: int  # tokens asked for in them
    hit_tokens_total: int  # tokens found in them
    inserted_total: int  # tokens whose slots the tree took over
    duplicate_total: int  # tokens offered by `extend` that were there already
    evicted_total: int  # tokens freed by `evict` and `flush`

    @property
    def hit_rate(self) -> float:
        """Hit tokens / tokens asked for, 0 before the first lookup."""
        return self.hit_tokens_total / self.lookup_tokens_total if self.lookup_tokens_total else 0.0


@dataclass(frozen=True)
class NodeView:
    """One node as `RadixTree.dump` shows it. `depth` counts nodes from the root (children of the
    root have depth 0), `start` the tokens before this edge."""

    namespace: str
    depth: int
    start: int
    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    lock_ref: int
    hits: int
    last_access: float

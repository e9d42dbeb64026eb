"""Attention in plain torch operations: the reference, and what runs where no kernel is built.

A query token's result is bit for bit the same whichever batch or chunk it comes in. Matrix
multiplication gives no such promise for free, so every product here has a shape whose rows do not
depend on their number, as far as was found on x86 (`test/contract/test_attention_backends.py`):

- queries are padded to a multiple of `ROW_MULTIPLE` rows a product;
- keys are padded to a multiple of `TILE` tokens, counted from the sequence's start; what a query
  may not see scores -inf and adds exact zeros;
- probability times value sums within a tile in one product, and over tiles one after another.

Work is cut into items (a row, or `QUERY_BLOCK` tokens of a long one) and items of a like shape are
batched, up to `GROUP_FLOATS` of gathered keys and scores, so that these stay in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phloem.srt.attention.base import KVStore
from phloem.srt.attention.batch import AttentionBatch, AttentionDims, AttentionError

TILE = 128
QUERY_BLOCK = 64
ROW_MULTIPLE = 4
GROUP_FLOATS = 1 << 20


@dataclass(frozen=True)
class _Item:
    """`count` queries from flat index `query` on, at positions `position`…, over `slots`.

    Keys begin at `first_tile` (later than 0 only with a sliding window).
    """

    query: int
    count: int
    position: int
    slots: NDArray[np.int32]
    first_tile: int

    @property
    def tiles(self) -> int:
        return -(-len(self.slots) // TILE) - self.first_tile


@dataclass(frozen=True)
class _Group:
    """B items of equal query count and a like key count, as tensors.

    `queries` [B·count] indexes q; `gather` [B·Hkv·L] indexes the store's (slot, head) rows;
    `mask` [B, 1, rows, L] is 0 or -inf, where rows is count·group padded.
    """

    size: int
    count: int
    rows: int
    queries: torch.Tensor
    gather: torch.Tensor
    mask: torch.Tensor


class TorchNativeBackend:
    """See `phloem.srt.attention.base.AttentionBackend`."""

    def __init__(self, store: KVStore, dims: AttentionDims) -> None:
        self._store = store
        self._dims = dims

    def plan(self, batch: AttentionBatch) -> TorchNativePlan:
        items = sorted(self._items(batch), key=lambda item: (item.count, item.tiles))
        groups = [self._group(members) for members in self._batches(items)]
        slots = torch.from_numpy(batch.new_slots().astype(np.int64))
        return TorchNativePlan(self._store, self._dims, slots, groups)

    def _items(self, batch: AttentionBatch) -> Iterator[_Item]:
        window = self._dims.sliding_window
        offsets = batch.row_offsets()
        for (begin, end), slots in zip(offsets, batch.kv_slots, strict=True):
            context = len(slots) - (end - begin)
            for query in range(begin, end, QUERY_BLOCK):
                count = min(QUERY_BLOCK, end - query)
                position = context + query - begin
                first_seen = 0 if window is None else max(0, position - window + 1)
                yield _Item(query, count, position, slots[: position + count], first_seen // TILE)

    def _rows(self, count: int) -> int:
        return -(-count * self._dims.group // ROW_MULTIPLE) * ROW_MULTIPLE

    def _batches(self, items: list[_Item]) -> Iterator[list[_Item]]:
        """Consecutive items (sorted by shape) that go well together: padded to the longest one,
        none more than doubles."""
        batch: list[_Item] = []
        for item in items:
            width = item.tiles * TILE * self._dims.num_kv_heads
            floats = width * (self._dims.head_dim + self._rows(item.count)) * (len(batch) + 1)
            if batch and (
                item.count != batch[0].count
                or item.tiles > 2 * batch[0].tiles
                or floats > GROUP_FLOATS
            ):
                yield batch
                batch = []
            batch.append(item)
        if batch:
            yield batch

    def _group(self, items: list[_Item]) -> _Group:
        heads, count = self._dims.num_kv_heads, items[0].count
        length = max(item.tiles for item in items) * TILE
        slots = np.zeros((len(items), 1, length), np.int64)  # slot 0 is padding
        for row, item in zip(slots, items, strict=True):
            seen = item.slots[item.first_tile * TILE :]
            row[0, : len(seen)] = seen
        gather = slots * heads + np.arange(heads)[:, None]  # [B, Hkv, L]
        queries = np.array([item.query for item in items])[:, None] + np.arange(count)
        rows = self._rows(count)
        return _Group(
            size=len(items),
            count=count,
            rows=rows,
            queries=torch.from_numpy(queries.reshape(-1)),
            gather=torch.from_numpy(gather.reshape(-1)),
            mask=torch.from_numpy(self._mask(items, rows, length)),
        )

    def _mask(self, items: list[_Item], rows: int, length: int) -> NDArray[np.float32]:
        """[B, 1, rows, L]; padding rows see what the last query sees."""
        token = np.minimum(np.arange(rows) // self._dims.group, items[0].count - 1)
        at = np.array([item.position for item in items])[:, None, None] + token[:, None]
        first = np.array([item.first_tile * TILE for item in items])[:, None, None]
        key = first + np.arange(length)  # [B, 1, L]
        seen = key <= at
        if self._dims.sliding_window is not None:
            seen &= key > at - self._dims.sliding_window
        return np.where(seen, np.float32(0), np.float32(-np.inf))[:, None]


class TorchNativePlan:
    """See `phloem.srt.attention.base.AttentionPlan`."""

    def __init__(
        self, store: KVStore, dims: AttentionDims, slots: torch.Tensor, groups: list[_Group]
    ) -> None:
        self._store = store
        self._dims = dims
        self._slots = slots
        self._groups = groups

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        dims, tokens = self._dims, len(self._slots)
        if q.shape != (tokens, dims.num_heads, dims.head_dim):
            raise AttentionError(f"q has shape {tuple(q.shape)}, the plan has {tokens} tokens")
        self._store.write(layer, self._slots, k, v)
        keys = self._store.keys(layer).view(-1, dims.head_dim)  # [slots·Hkv, D]
        values = self._store.values(layer).view(-1, dims.head_dim)
        out = torch.empty_like(q)
        for group in self._groups:
            attended = self._attend(group, q, keys, values)
            out.index_copy_(0, group.queries, attended.to(q.dtype))
        return out

    def _attend(
        self, group: _Group, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """[B·count, Hq, D], float32."""
        dims = self._dims
        heads, dim, size, count = dims.num_kv_heads, dims.head_dim, group.size, group.count
        length, used = group.mask.shape[-1], count * dims.group

        grouped = q.index_select(0, group.queries).float().mul_(dim**-0.5)
        grouped = grouped.view(size, count, heads, dims.group, dim).transpose(1, 2)
        queries = grouped.new_zeros(size, heads, group.rows, dim)
        queries[:, :, :used] = grouped.reshape(size, heads, used, dim)

        k = keys.index_select(0, group.gather).float().view(size * heads, length, dim)
        scores = torch.bmm(queries.view(size * heads, group.rows, dim), k.transpose(1, 2))
        scores.view(size, heads, group.rows, length).add_(group.mask)
        weights = torch.softmax(scores, -1)  # [B·Hkv, rows, L]

        v = values.index_select(0, group.gather).float().view(-1, TILE, dim)
        attended = _sum_tiles(weights, v).view(size, heads, group.rows, dim)
        attended = attended[:, :, :used].reshape(size, heads, count, dims.group, dim)
        return attended.transpose(1, 2).reshape(-1, dims.num_heads, dim)


def _sum_tiles(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """weights [N, rows, tiles·TILE] times values [N·tiles, TILE, D], tile after tile: a product
    over the whole length would sum in an order that depends on the length."""
    batch, rows, length = weights.shape
    tiles = length // TILE
    if tiles == 1:
        return torch.bmm(weights, values)
    tiled = weights.view(batch, rows, tiles, TILE).transpose(1, 2)
    parts = torch.bmm(tiled.reshape(-1, rows, TILE), values).view(batch, tiles, rows, -1)
    total = parts[:, 0].clone()
    for tile in range(1, tiles):
        total += parts[:, tile]
    return total

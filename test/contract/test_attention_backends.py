"""Every way to compute attention against a loop over single tokens in float64: the backends of
torch models, and the CPU kernels on each instruction set."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from phloem.srt.attention.base import BACKENDS, AttentionBackend, create_backend
from phloem.srt.attention.batch import AttentionBatch, AttentionDims
from phloem.srt.kernels.cpu.library import Attention, Kernels, Team, runnable_isas

SLOTS = 2048
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
"""Largest absolute error, of values drawn from a unit normal distribution."""

DIMS = [
    AttentionDims(num_heads=4, num_kv_heads=4, head_dim=64),
    AttentionDims(num_heads=9, num_kv_heads=3, head_dim=64),
    AttentionDims(num_heads=7, num_kv_heads=1, head_dim=96),
    AttentionDims(num_heads=14, num_kv_heads=2, head_dim=128),
    AttentionDims(num_heads=4, num_kv_heads=2, head_dim=64, sliding_window=1),
    AttentionDims(num_heads=6, num_kv_heads=2, head_dim=64, sliding_window=37),
    AttentionDims(num_heads=6, num_kv_heads=2, head_dim=64, sliding_window=150),
]
# (new tokens, tokens in all) of each row
SHAPES = [
    [(1, 1)],
    [(1, 128), (1, 129), (1, 127)],
    [(5, 5), (1, 700), (3, 131), (1, 2)],
    [(130, 200), (64, 64), (65, 65), (1, 300), (2, 258)],
]

Shape = list[tuple[int, int]]
NAMES = [*BACKENDS, *(f"cpu-{isa}" for isa in runnable_isas())]
"""Backends of `create`."""


class Store:
    """A KV store whose unwritten slots are NaN: reading one by mistake shows in the result."""

    def __init__(self, dims: AttentionDims, dtype: torch.dtype, layers: int = 2) -> None:
        shape = (layers, SLOTS, dims.num_kv_heads, dims.head_dim)
        self._keys = torch.full(shape, math.nan, dtype=dtype)
        self._values = torch.full(shape, math.nan, dtype=dtype)
        self._keys[:, 0] = 0
        self._values[:, 0] = 0

    def keys(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        return self._values[layer]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        self._keys[layer][slots] = k
        self._values[layer][slots] = v


class KernelBackend:
    """The CPU kernels behind the interface of an `AttentionBackend`. They have a pool of their
    own, which begins as a copy of layer 1 of `store`, not-a-numbers and all."""

    def __init__(self, isa: str, store: Store, dims: AttentionDims) -> None:
        self.store = store
        self.attention = Attention(
            Kernels(isa),
            Team(2),
            heads=dims.num_heads,
            kv_heads=dims.num_kv_heads,
            head_dim=dims.head_dim,
            window=dims.sliding_window or 0,
            slots=SLOTS,
            kv_dtype=str(store.keys(1).dtype).removeprefix("torch."),
        )
        slots = torch.arange(1, SLOTS)
        self.keep(slots, store.keys(1)[1:], store.values(1)[1:])

    def keep(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        kept = (x.float().contiguous().numpy() for x in (k, v))
        self.attention.write(slots.to(torch.int32).numpy(), *kept)

    def plan(self, batch: AttentionBatch) -> KernelPlan:
        return KernelPlan(self, batch)


class KernelPlan:
    def __init__(self, backend: KernelBackend, batch: AttentionBatch) -> None:
        self.backend = backend
        self.batch = batch

    def run(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        slots = torch.from_numpy(self.batch.new_slots())
        self.backend.store.write(layer, slots, k, v)
        self.backend.keep(slots, k, v)
        queries = q.float().contiguous().numpy()
        out = self.backend.attention.run(self.batch.query_lens, self.batch.kv_slots, queries)
        return torch.from_numpy(out).to(q.dtype)


def create(name: str, store: Store, dims: AttentionDims) -> AttentionBackend:
    if name in BACKENDS:
        return create_backend(name, store, dims)
    return KernelBackend(name.removeprefix("cpu-"), store, dims)


class Case:
    """Rows with random content in scattered slots, the cached part of it already stored."""

    def __init__(self, dims: AttentionDims, shape: Shape, dtype: torch.dtype, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        free = np.random.default_rng(seed).permutation(np.arange(1, SLOTS, dtype=np.int32))
        self.dims = dims
        self.store = Store(dims, dtype)
        self.slots: list[NDArray[np.int32]] = []
        self.k: list[torch.Tensor] = []  # of all tokens of a row
        self.v: list[torch.Tensor] = []
        self.q: list[torch.Tensor] = []  # of the new ones
        self.counts = [count for count, _ in shape]
        for count, total in shape:
            own, free = free[:total].copy(), free[total:]
            kv = torch.randn(2, total, dims.num_kv_heads, dims.head_dim, generator=generator)
            q = torch.randn(count, dims.num_heads, dims.head_dim, generator=generator)
            self.slots.append(own)
            self.k.append(kv[0].to(dtype))
            self.v.append(kv[1].to(dtype))
            self.q.append(q.to(dtype))
            cached = torch.from_numpy(own[: total - count].astype(np.int64))
            self.store.write(1, cached, self.k[-1][: total - count], self.v[-1][: total - count])

    def run(self, backend: AttentionBackend) -> list[torch.Tensor]:
        """The result of layer 1, row by row."""
        plan = backend.plan(AttentionBatch(self.counts, self.slots))
        new = list(zip(self.k, self.v, self.counts, strict=True))
        out = plan.run(
            torch.cat(self.q),
            torch.cat([k[-count:] for k, _, count in new]),
            torch.cat([v[-count:] for _, v, count in new]),
            layer=1,
        )
        return list(torch.split(out, self.counts))


def naive(dims: AttentionDims, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [count, Hq, D] are the last tokens of k, v [total, Hkv, D]; float64, one at a time."""
    total, count = len(k), len(q)
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(count):
        end = total - count + i + 1
        begin = 0 if dims.sliding_window is None else max(0, end - dims.sliding_window)
        for head in range(dims.num_heads):
            kv_head = head // dims.group
            keys, values = k[begin:end, kv_head].double(), v[begin:end, kv_head].double()
            scores = keys @ q[i, head].double() / math.sqrt(dims.head_dim)
            out[i, head] = scores.softmax(0) @ values
    return out


@cache
def expected_rows(dims: AttentionDims, shape: tuple[tuple[int, int], ...]) -> list[torch.Tensor]:
    case = Case(dims, list(shape), torch.float32)
    return [naive(dims, *qkv) for qkv in zip(case.q, case.k, case.v, strict=True)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_a_loop_over_tokens(name: str, dims: AttentionDims, shape: Shape) -> None:
    case = Case(dims, shape, torch.float32)
    expected = expected_rows(dims, tuple(shape))
    for i, out in enumerate(case.run(create(name, case.store, dims))):
        assert (out.double() - expected[i]).abs().max() < TOLERANCE[torch.float32], f"row {i}"


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16(name: str) -> None:
    dims = DIMS[1]
    case = Case(dims, SHAPES[2], torch.bfloat16)
    for i, out in enumerate(case.run(create(name, case.store, dims))):
        assert out.dtype == torch.bfloat16
        expected = naive(dims, case.q[i], case.k[i], case.v[i])
        assert (out.double() - expected).abs().max() < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", [DIMS[1], DIMS[2], DIMS[5]], ids=str)
def test_a_row_does_not_depend_on_its_neighbours(name: str, dims: AttentionDims) -> None:
    shape = SHAPES[3]
    case = Case(dims, shape, torch.float32)
    together = case.run(create(name, case.store, dims))
    for i, count in enumerate(case.counts):
        plan = create(name, case.store, dims).plan(AttentionBatch([count], [case.slots[i]]))
        alone = plan.run(case.q[i], case.k[i][-count:], case.v[i][-count:], layer=1)
        assert torch.equal(alone, together[i]), f"row {i}"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dims", [DIMS[1], DIMS[3], DIMS[6]], ids=str)
def test_a_token_does_not_depend_on_its_chunk(name: str, dims: AttentionDims) -> None:
    """Decoded one by one, in chunks of any size, or all at once: the same bits."""
    total = 270
    case = Case(dims, [(total, total)], torch.float32)
    backend = create(name, case.store, dims)
    whole = case.run(backend)[0]
    for chunks in ([1] * 5 + [123, 1, 1, 140], [64, 64, 1, 141], [200] + [1] * 70):
        parts, begin = [], 0
        for count in chunks:
            end = begin + count
            plan = backend.plan(AttentionBatch([count], [case.slots[0][:end]]))
            k, v = case.k[0][begin:end], case.v[0][begin:end]
            parts.append(plan.run(case.q[0][begin:end], k, v, layer=1))
            begin = end
        assert torch.equal(torch.cat(parts), whole), chunks


@pytest.mark.parametrize("name", NAMES)
def test_reads_what_a_neighbour_writes_in_the_same_step(name: str) -> None:
    """Row 1 shares the first 40 slots of row 0, which is only being computed."""
    dims = DIMS[1]
    case = Case(dims, [(60, 60), (20, 60)], torch.float32)
    shared, own = case.slots[0][:40], case.slots[1][40:]
    case.slots[1] = np.concatenate([shared, own])
    case.k[1][:40], case.v[1][:40] = case.k[0][:40], case.v[0][:40]
    out = case.run(create(name, case.store, dims))[1]
    expected = naive(dims, case.q[1], case.k[1], case.v[1])
    assert (out.double() - expected).abs().max() < TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", NAMES)
def test_a_tensor_that_does_not_fit_the_plan(name: str) -> None:
    case = Case(DIMS[1], [(3, 3)], torch.float32)
    case.q = [case.q[0][:2]]
    with pytest.raises(ValueError, match=r"3 (tokens|queries)|3 slots"):
        case.run(create(name, case.store, DIMS[1]))

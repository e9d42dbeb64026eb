"""What model files are built from. Inference only: parameters carry no gradient.

A row of a result is bit for bit the same whatever other rows it is computed with. That rules out
products of any number of rows (libraries choose their kernels by it) and `F.silu` (its last
elements take another path than the rest, and where the last ones are depends on the batch).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.checkpoint.rope import rope_frequencies

ROWS = 16
"""Rows of every product. A library may sum in another order for another number of rows: oneDNN
does, differently on each CPU, and with AMX tiles at nearly every number in bfloat16. Products of
one size all take the same kernel, on any CPU.

What it costs, in all layers of a model of 135M parameters on 2 cores: for one row up to half as
much again, for 512 rows twice as much (float32). Blocks of 32 cost the single row more than they
give the others."""


def _frozen(*shape: int, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)


class Linear(nn.Module):
    """y = x Wᵀ + b. Several outputs of the same input are one product: `parts` are their sizes,
    row ranges of the weight in this order.

    After loading, `pack` puts the weight in oneDNN's blocked layout and drops the plain one.
    """

    def __init__(
        self, in_features: int, parts: Sequence[int], *, bias: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.weight = _frozen(sum(parts), in_features, dtype=dtype)
        self.bias = _frozen(sum(parts), dtype=dtype) if bias else None
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        if not can_pack(self.weight.dtype):
            return
        weight = self.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS)
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[n, in] → [n, out]"""
        if len(x) == ROWS:
            return self._multiply(x)
        padded = F.pad(x, (0, 0, 0, -len(x) % ROWS))
        return torch.cat([self._multiply(block) for block in torch.split(padded, ROWS)])[: len(x)]

    def _multiply(self, x: torch.Tensor) -> torch.Tensor:
        """[ROWS, in] → [ROWS, out]"""
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return y


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies this type natively on this CPU."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


class Embedding(nn.Module):
    """A row of the table per token."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _frozen(vocab_size, hidden_size, dtype=dtype)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[n] → [n, hidden]"""
        return self.weight.index_select(0, token_ids)


class RMSNorm(nn.Module):
    """x / √(mean(x²) + ε) · w over the last dimension, in float32."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = _frozen(size, dtype=dtype)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = (x.shape[-1],)
        return F.rms_norm(x.float(), size, self.weight.float(), self.eps).to(x.dtype)


class RotaryEmbedding(nn.Module):
    """Rotates the pairs (i, i + D/2) of each head by position · frequency i.

    `tables` looks up what a step needs; `rotate` applies it in every layer.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        frequencies, factor = rope_frequencies(config)
        # On the CPU whatever the default device: no checkpoint fills these.
        positions = torch.arange(config.context_length, dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, torch.from_numpy(frequencies))  # [context, D/2]
        self._cos = (angles.cos() * factor).float()
        self._sin = (angles.sin() * factor).float()

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin, [n, 1, D] float32."""
        cos = self._cos.index_select(0, positions)
        sin = self._sin.index_select(0, positions)
        return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)

    @staticmethod
    def rotate(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """[n, heads, D], computed in float32."""
        cos, sin = tables
        wide = x.float()
        turned = wide.roll(x.shape[-1] // 2, -1).mul_(sin)
        return (wide * cos).add_(turned).to(x.dtype)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up of [n, 2·size] = gate | up → [n, size]."""
    gate, up = x.chunk(2, -1)
    denominator = gate.neg().exp_().add_(1)
    return torch.div(gate, denominator, out=denominator).mul_(up)

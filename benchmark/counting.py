"""What a kernel cannot do without: bytes that have to be read, multiply-adds that have to be done.

Counted are the weights as the kernels keep them, once a step; the keys and values that a row's
queries see, once a row; and the logits written. All other activations stay in a core's own caches
and are not counted, nor are norms, rotations and softmaxes, nor the lookup of embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from phloem.srt.checkpoint.config import KV_ITEM_BYTES, KV_SCALE_BYTES, ModelConfig

LANES = 16
"""Outputs that lie side by side."""
STEP = 64
"""Columns that integer weights are filled up to a multiple of."""
SPAN = 768
"""Columns that share a scale, at most."""


@dataclass(frozen=True)
class Layout:
    """How a weight matrix is kept: bits of a weight; integers have, beside them, a scale of 4 bytes
    and a sum of as many for each output and span."""

    bits: int
    floats: bool = False

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix: whole blocks of 16 rows, whole steps of 64 columns."""
        lanes = -(-rows // LANES) * LANES
        if self.floats:
            return lanes * columns * self.bits // 8
        filled = -(-columns // STEP) * STEP
        return lanes * (filled * self.bits // 8 + -(-filled // SPAN) * 8)


LAYOUTS = {
    "F32": Layout(32, floats=True),
    "F16": Layout(16, floats=True),
    "BF16": Layout(16, floats=True),
    **dict.fromkeys(("Q4_0", "Q4_1", "Q4_K", "int4", "IQ4_NL"), Layout(8)),
    **dict.fromkeys(("Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q8_0", "int8"), Layout(8)),
}
"""Formats the kernels read; a checkpoint's other types are kept as F32, and 4 bits as bytes."""


@dataclass(frozen=True)
class Work:
    """Bytes to move, multiply-adds of int8, of float32, and of bfloat16 in tiles."""

    nbytes: int = 0
    int8: int = 0
    float32: int = 0
    bfloat16: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.nbytes + other.nbytes,
            self.int8 + other.int8,
            self.float32 + other.float32,
            self.bfloat16 + other.bfloat16,
        )

    @property
    def operations(self) -> int:
        """Multiply-adds of all types."""
        return self.int8 + self.float32 + self.bfloat16

    def seconds(self, bandwidth: float, rates: Mapping[str, float]) -> tuple[float, str]:
        """The least time it takes, and which of "memory" and "arithmetic" makes it so.

        `bandwidth` is in bytes a second, `rates` in multiply-adds a second, by type.
        """
        moving = self.nbytes / bandwidth
        computing = self.int8 / rates["int8"] + self.float32 / rates["float32"]
        if self.bfloat16:
            computing += self.bfloat16 / rates["bfloat16"]
        return max((moving, "memory"), (computing, "arithmetic"))


@dataclass(frozen=True)
class Weight:
    """A matrix [rows, columns] kept in `format`."""

    format: str
    rows: int
    columns: int

    def product(self, count: int) -> Work:
        """With `count` rows of activations, which integers are multiplied by in two halves."""
        layout = LAYOUTS[self.format]
        operations = self.rows * self.columns * count
        return Work(
            layout.nbytes(self.rows, self.columns),
            int8=0 if layout.floats else 2 * operations,
            float32=operations if layout.floats else 0,
        )


@dataclass(frozen=True)
class Row:
    """A step's row: its last `count` tokens of `length` are new."""

    count: int
    length: int

    @property
    def seen(self) -> int:
        """Keys that its queries see, all together: the new ones see each other causally."""
        before = self.length - self.count
        return self.count * before + self.count * (self.count + 1) // 2


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one layer. Every token sees all before it: windows are not counted.

    With `tiles` bfloat16 keys and values are multiplied in AMX tiles.
    """

    heads: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    tiles: bool = False

    @property
    def token_bytes(self) -> int:
        """A token's keys and values; int8 has a float32 scale a vector."""
        padded = -(-self.head_dim // LANES) * LANES
        scale = KV_SCALE_BYTES.get(self.kv_dtype, 0)
        return 2 * self.kv_heads * (padded * KV_ITEM_BYTES[self.kv_dtype] + scale)

    def attend(self, rows: Iterable[Row]) -> Work:
        """One layer's attention."""
        work = Work()
        for row in rows:
            products = 2 * row.seen * self.heads * self.head_dim
            nbytes = row.length * self.token_bytes
            if self.tiles and self.kv_dtype == "bfloat16" and self.head_dim % 32 == 0:
                work += Work(nbytes, bfloat16=products)
            else:
                work += Work(nbytes, float32=products)
        return work


def norm_and_quantise(columns: int, rows: int) -> Work:
    """RMSNorm, then codes of 15 bits: float32 read, float32 and codes with a scale a row written.

    Some 5 operations an element, of which each counts as a multiply-add.
    """
    values = columns * rows
    return Work(values * (4 + 4 + 2) + 4 * rows, float32=5 * values)


def head(weight: Weight, count: int) -> Work:
    """The logits of `count` rows, written as float32."""
    return weight.product(count) + Work(4 * weight.rows * count)


def step(
    config: ModelConfig,
    weights: Mapping[str, Weight],
    rows: Sequence[Row],
    kv_dtype: str,
    *,
    tiles: bool = False,
) -> Work:
    """A whole step, each row's last token through the head. `weights` are the model's matrices by
    canonical name."""
    count = sum(row.count for row in rows)
    last = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    work = head(weights[last], len(rows))
    for name, weight in weights.items():
        if name.startswith("model.layers."):
            work += weight.product(count)
    heads = (config.num_heads, config.num_kv_heads, config.head_dim)
    shape = AttentionShape(*heads, kv_dtype, tiles)
    for _ in range(config.num_layers):
        work += shape.attend(rows)
    return work

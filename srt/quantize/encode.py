"""float32 rows → the bytes of an element type."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize as gguf_quantize
from numpy.typing import NDArray

from phloem.srt.checkpoint.quant_types import BLOCK_TYPES, BlockType
from phloem.srt.quantize.errors import QuantizeError
from phloem.srt.quantize.k_quants import q4_k, q5_k, q6_k

TYPES: dict[str, BlockType] = {
    block.name: block
    for block in BLOCK_TYPES.values()
    if block.name in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
}
"""Types that can be written, by name."""

_K_QUANTS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.uint8]]] = {
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}

_WIDE = ("F32", "BF16")
"""Types with float32's range. The others hold, or scale by, float16."""
_LARGEST = float(np.finfo(np.float16).max)
_SMALLEST = np.float32(1e-30)
"""Smaller values are zero in every type with float16 scales; the library would divide by them."""


def encode(values: NDArray[np.float32], block: BlockType) -> NDArray[np.uint8]:
    """Rows `[rows, elements]`, a multiple of the block's elements long → `[rows, bytes of a row]`.

    Raises:
        QuantizeError: a value is not finite, or beyond what float16 scales reach.
    """
    if block.name not in _WIDE:
        values = _within_float16(values)
    if block.name in _K_QUANTS:
        packed = _K_QUANTS[block.name](values.reshape(-1))
    else:
        packed = gguf_quantize(values, GGMLQuantizationType[block.name])
    return np.ascontiguousarray(packed).view(np.uint8).reshape(len(values), -1)


def _within_float16(values: NDArray[np.float32]) -> NDArray[np.float32]:
    magnitudes = np.abs(values)
    furthest = magnitudes.max()
    if not furthest <= _LARGEST:  # false for NaN, too
        what = f"a value of {furthest:g}" if np.isfinite(furthest) else "values that are not finite"
        raise QuantizeError(f"{what}: only BF16 and F32 can hold that")
    return np.where(magnitudes < _SMALLEST, np.float32(0), values)

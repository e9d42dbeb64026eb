"""A stored tensor: a view of the file's bytes, and its values as float32 on demand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from phloem.srt.checkpoint.quant_types import BlockType

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `shape` in torch order, `nbytes` from byte `offset` of the file."""

    name: str
    shape: tuple[int, ...]
    block: BlockType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Tensor:
    """A weight as it lies in the file.

    `name` is the canonical name (`model.layers.0.self_attn.q_proj.weight`), `shape` is in torch
    order `[out, in]`, `block` tells how elements are packed. `data` is a read-only uint8 view of
    the file, `[*shape[:-1], bytes of a row]`.

    `row_order` is None when rows are in canonical order. Otherwise canonical row `i` is stored row
    `row_order[i]`: GGUF files of the llama architecture keep the rows of q and k interleaved for
    the other layout of rotary embedding.
    """

    name: str
    shape: tuple[int, ...]
    block: BlockType
    data: NDArray[np.uint8]
    row_order: NDArray[np.intp] | None = None

    @property
    def kind(self) -> str:
        """Name of the element type, as in "F32", "BF16", "Q4_1"."""
        return self.block.name

    def numpy_float32(self) -> NDArray[np.float32]:
        """The values, `shape` float32, rows in canonical order; a fresh array."""
        values = dequantize(self.data, self.block).reshape(self.shape)
        return values if self.row_order is None else values[self.row_order]


def dequantize(data: NDArray[np.uint8], block: BlockType) -> NDArray[np.float32]:
    """Bytes of whole rows → flat float32 values (a fresh array)."""
    import numpy as np

    flat = np.ascontiguousarray(data).reshape(-1)
    match block.name:
        case "F32":
            return flat.view("<f4").astype(np.float32, copy=True)
        case "F16":
            return flat.view("<f2").astype(np.float32)
        case "BF16":
            return (flat.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case "Q8_0":
            return _q8_0(flat)
        case "Q4_1":
            return _q4_1(flat)
    # Imported here: it takes 0.1 s, and not every process that opens a checkpoint reads weights.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize as gguf_dequantize

    values: NDArray[np.float32] = gguf_dequantize(data, GGMLQuantizationType[block.name])
    return values.reshape(-1)


# The default model's two formats, written out: twice as fast as the library's general code, which
# tests compare with bit for bit, and start-up waits for it.


def _q8_0(flat: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Blocks of 32: scale f16, then 32 int8."""
    import numpy as np

    blocks = flat.view(np.dtype([("d", "<f2"), ("q", "i1", 32)]))
    return (blocks["q"] * blocks["d"].astype(np.float32)[:, None]).reshape(-1)


def _q4_1(flat: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Blocks of 32: scale and minimum f16, then 16 bytes whose low halves come first."""
    import numpy as np

    blocks = flat.view(np.dtype([("d", "<f2"), ("m", "<f2"), ("q", "u1", 16)]))
    scale = blocks["d"].astype(np.float32)[:, None]
    minimum = blocks["m"].astype(np.float32)[:, None]
    values = np.empty((len(blocks), 32), np.float32)
    np.multiply(blocks["q"] & 15, scale, out=values[:, :16])
    np.multiply(blocks["q"] >> 4, scale, out=values[:, 16:])
    values += minimum
    return values.reshape(-1)

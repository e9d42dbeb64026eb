"""Reads the header of a safetensors file from a memory map.

The `safetensors` package hands out bfloat16 only through torch, which this package does without;
the format is eight bytes of length and a JSON object (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import msgspec

from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.quant_types import BF16, F16, F32
from phloem.srt.checkpoint.tensors import TensorInfo

MAX_HEADER_BYTES = 100_000_000  # the reference implementation's bound

_DTYPES = {"F32": F32, "F16": F16, "BF16": BF16}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors(path: Path) -> tuple[mmap.mmap, dict[str, TensorInfo]]:
    """The mapped file and its tensors by name.

    Raises:
        CheckpointError: missing, truncated or damaged file, or an element type not supported.
    """
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(path, "the file is empty") from None
    except OSError as error:
        raise CheckpointError(path, error.strerror or "cannot be read") from None
    length = int.from_bytes(buffer[:8], "little")
    if len(buffer) < 8 or length > min(MAX_HEADER_BYTES, len(buffer) - 8):
        raise CheckpointError(path, f"truncated or damaged: a header of {length} bytes")
    try:
        header = msgspec.json.decode(buffer[8 : 8 + length], type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except msgspec.DecodeError as error:
        raise CheckpointError(path, f"damaged header: {error}") from None
    start = 8 + length
    return buffer, {name: _place(path, buffer, name, e, start) for name, e in entries.items()}


def _place(path: Path, buffer: mmap.mmap, name: str, entry: _Entry, start: int) -> TensorInfo:
    block = _DTYPES.get(entry.dtype)
    if block is None:
        raise CheckpointError(
            path,
            f"tensor {name!r} has the unsupported type {entry.dtype} "
            f"(supported: {', '.join(_DTYPES)})",
        )
    begin, end = entry.data_offsets
    nbytes = math.prod(entry.shape) * block.nbytes
    if not 0 <= begin <= end or end - begin != nbytes or any(size < 1 for size in entry.shape):
        raise CheckpointError(path, f"damaged header: tensor {name!r} is misplaced")
    if start + end > len(buffer):
        raise CheckpointError(
            path,
            f"truncated: tensor {name!r} ends at byte {start + end}, the file has {len(buffer)}",
        )
    return TensorInfo(name, tuple(entry.shape), block, start + begin, nbytes)

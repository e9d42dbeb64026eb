"""Reads the header of a GGUF file (versions 2 and 3, little-endian) from a memory map.

Why not `gguf.GGUFReader`: it wraps every string of the token and merge tables in numpy arrays,
about 5 s for a vocabulary of 49,152, and several processes open the checkpoint at each start.
This reader walks over those tables in milliseconds and decodes an array only when asked. It also
checks each count, length and offset against the file's size, so a damaged file is an error at
once and never an allocation.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.quant_types import BLOCK_TYPES, TYPE_NAMES
from phloem.srt.checkpoint.tensors import TensorInfo

MAX_NAME_BYTES = 1 << 16  # of keys and tensor names, as the format says
MAX_STRINGS = 1 << 22  # of one array: bounds the walk over a damaged table
MAX_STRING_BYTES = 1 << 26
MAX_DIMENSIONS = 4
DEFAULT_ALIGNMENT = 32
ALIGNMENTS = [1 << power for power in range(3, 21)]

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


@dataclass(frozen=True)
class GgufArray:
    """An array of the metadata, still in the file: `count` elements of `element` from `offset`."""

    path: Path
    buffer: mmap.mmap
    element: int
    count: int
    offset: int

    def strings(self) -> list[str]:
        """Decode an array of strings."""
        if self.element != _STRING:
            raise CheckpointError(self.path, "damaged header: an array of strings was expected")
        buffer, length_at, at = self.buffer, _U64.unpack_from, self.offset
        out = []
        try:
            for _ in range(self.count):
                start = at + 8
                at = start + length_at(buffer, at)[0]
                out.append(buffer[start:at].decode())
        except UnicodeDecodeError:
            raise CheckpointError(self.path, "damaged header: a string is not UTF-8") from None
        return out

    def numbers(self) -> tuple[float, ...]:
        """Decode an array of integers or floats."""
        if self.element == _STRING:
            raise CheckpointError(self.path, "damaged header: an array of numbers was expected")
        code = _SCALARS[self.element].format[1:]
        return struct.unpack_from(f"<{self.count}{code}", self.buffer, self.offset)


Value = int | float | bool | str | GgufArray


@dataclass(frozen=True)
class GgufHeader:
    """What the file says of itself: metadata by key, tensors by name, and the map they lie in."""

    path: Path
    buffer: mmap.mmap
    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> GgufHeader:
    """Parse the header of `path`.

    Raises:
        CheckpointError: the file is missing, truncated, damaged or of an unsupported version.
    """
    try:
        with path.open("rb") as file:
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:
        raise CheckpointError(path, "the file is empty") from None
    except OSError as error:
        raise CheckpointError(path, error.strerror or "cannot be read") from None
    return _Reader(path, buffer).header()


class _Reader:
    """A cursor over the map; every read is checked against the file's end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self.path = path
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(self.path, f"{reason} (at byte {self.at} of {self.size})")

    def header(self) -> GgufHeader:
        if self.buffer[:4] != b"GGUF":
            raise CheckpointError(self.path, "not a GGUF file (its magic bytes are missing)")
        self.at = 4
        self._check_version(self._scalar(_U32))
        # A tensor entry takes at least 33 bytes, a metadata entry 14: counts beyond are damage.
        tensor_count = self._count(33, "tensors")
        metadata_count = self._count(14, "metadata entries")
        metadata: dict[str, Value] = {}
        for _ in range(metadata_count):
            key = self._name("metadata key")
            if key in metadata:
                raise self.fail(f"damaged header: key {key!r} occurs twice")
            metadata[key] = self._value(self._scalar(_U32))
        entries = [self._tensor_entry() for _ in range(tensor_count)]
        tensors = self._place(entries, self._alignment(metadata))
        return GgufHeader(self.path, self.buffer, metadata, tensors)

    def _check_version(self, version: int) -> None:
        if version in (2, 3):
            return
        if version and not version & 0xFFFF:
            raise CheckpointError(self.path, "big-endian GGUF files are not supported")
        raise CheckpointError(
            self.path, f"GGUF version {version} is not supported (supported: 2, 3)"
        )

    def _scalar(self, kind: struct.Struct) -> int:
        if self.at + kind.size > self.size:
            raise self.fail("the file is truncated inside its header")
        (value,) = kind.unpack_from(self.buffer, self.at)
        self.at += kind.size
        return value  # type: ignore[no-any-return]

    def _count(self, least_bytes: int, what: str) -> int:
        count = self._scalar(_U64)
        if count > (self.size - self.at) // least_bytes:
            raise self.fail(f"truncated or damaged: {count} {what} cannot fit into the file")
        return count

    def _string(self, limit: int) -> str:
        length = self._scalar(_U64)
        if length > min(limit, self.size - self.at):
            raise self.fail(f"truncated or damaged: a string of {length} bytes")
        self.at += length
        try:
            return self.buffer[self.at - length : self.at].decode()
        except UnicodeDecodeError:
            raise self.fail("damaged header: a string is not UTF-8") from None

    def _name(self, what: str) -> str:
        name = self._string(MAX_NAME_BYTES)
        if not name:
            raise self.fail(f"damaged header: an empty {what}")
        return name

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string(MAX_STRING_BYTES)
        if kind == _ARRAY:
            return self._array()
        if kind not in _SCALARS:
            raise self.fail(f"damaged header: value type {kind} does not exist")
        return self._scalar(_SCALARS[kind])

    def _array(self) -> GgufArray:
        element = self._scalar(_U32)
        if element == _STRING:
            count = self._count(8, "strings")
            if count > MAX_STRINGS:
                raise self.fail(f"an array of {count} strings is not supported")
            array = GgufArray(self.path, self.buffer, element, count, self.at)
            self._skip_strings(count)
            return array
        if element not in _SCALARS:
            raise self.fail(f"arrays of value type {element} are not supported")
        count = self._count(_SCALARS[element].size, "array elements")
        array = GgufArray(self.path, self.buffer, element, count, self.at)
        self.at += count * _SCALARS[element].size
        return array

    def _skip_strings(self, count: int) -> None:
        buffer, length_at, at, last = self.buffer, _U64.unpack_from, self.at, self.size - 8
        for _ in range(count):
            if at > last:
                break
            at += 8 + length_at(buffer, at)[0]
        else:
            if at <= self.size:
                self.at = at
                return
        raise self.fail("truncated or damaged: a string array runs past the end of the file")

    def _tensor_entry(self) -> TensorInfo:
        """One entry of the tensor table, its offset still relative to the data's start."""
        name = self._name("tensor name")
        rank = self._scalar(_U32)
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self.fail(f"tensor {name!r} has {rank} dimensions")
        shape = tuple(self._scalar(_U64) for _ in range(rank))[::-1]
        kind = self._scalar(_U32)
        block = BLOCK_TYPES.get(kind)
        if block is None:
            supported = ", ".join(block.name for block in BLOCK_TYPES.values())
            raise CheckpointError(
                self.path,
                f"tensor {name!r} has the unsupported type {TYPE_NAMES.get(kind, kind)} "
                f"(supported: {supported})",
            )
        elements = math.prod(shape)
        if elements == 0 or elements >= 1 << 48 or shape[-1] % block.elements:
            raise self.fail(f"tensor {name!r} has the impossible shape {list(shape)}")
        nbytes = elements // block.elements * block.nbytes
        return TensorInfo(name, shape, block, self._scalar(_U64), nbytes)

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment not in ALIGNMENTS:
            raise self.fail(f"damaged header: general.alignment is {alignment}")
        return alignment

    def _place(self, entries: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Make offsets absolute; refuse data past the end of the file, and shared bytes."""
        start = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        end = 0
        for entry in sorted(entries, key=lambda entry: entry.offset):
            if entry.name in tensors:
                raise CheckpointError(self.path, f"damaged header: two tensors {entry.name!r}")
            if entry.offset % alignment or entry.offset < end:
                raise CheckpointError(self.path, f"tensor {entry.name!r} is misplaced")
            end = entry.offset + entry.nbytes
            if start + end > self.size:
                raise CheckpointError(
                    self.path,
                    f"truncated: tensor {entry.name!r} ends at byte {start + end}, "
                    f"the file has {self.size}",
                )
            tensors[entry.name] = TensorInfo(
                entry.name, entry.shape, entry.block, start + entry.offset, entry.nbytes
            )
        return tensors

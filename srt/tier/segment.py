"""A segment: a file that records are appended to, all of one size, so that whatever happened to one
of them the others are still found.

    file    magic, version, block_bytes, fingerprint
    record  magic, key, length, crc32 of the data, crc32 of this header; data

A kill may leave part of a record at the end; it is cut off when the segment is opened. What is
damaged otherwise is found out when it is read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from zlib import crc32

from phloem.srt.tier.errors import DamagedBlock

Data: TypeAlias = bytes | bytearray | memoryview

_FILE = struct.Struct("<8sIQ16s28x")
_FILE_MAGIC = b"PHLOEMKV"
_VERSION = 1
_RECORD = struct.Struct("<4s16sIII")
_RECORD_MAGIC = b"KVB1"
_SUM = struct.Struct("<I")

FILE_BYTES = _FILE.size
"""What a segment takes beside its records."""


class ForeignSegment(Exception):
    """A file that is not a segment of this store; it was not touched."""


@dataclass(frozen=True)
class BlockFormat:
    """What a store holds: blocks of `block_bytes`, whose bits depend on what `fingerprint`
    (16 bytes) stands for."""

    fingerprint: bytes
    block_bytes: int

    @property
    def record_bytes(self) -> int:
        return _RECORD.size + self.block_bytes

    def file_header(self) -> bytes:
        return _FILE.pack(_FILE_MAGIC, _VERSION, self.block_bytes, self.fingerprint)

    def record_header(self, key: bytes, data: Data) -> bytes:
        start = _RECORD.pack(_RECORD_MAGIC, key, self.block_bytes, crc32(data), 0)[: -_SUM.size]
        return start + _SUM.pack(crc32(start))


class Segment:
    """One file. `used` is a number that is larger the later a block was written or read; the
    segment with the smallest goes first. `keys` are the blocks that may be read, with their
    offsets, in the order of writing."""

    def __init__(self, path: Path, number: int, form: BlockFormat, handle: int) -> None:
        self.path = path
        self.number = number
        self.used = 0
        self.keys: dict[bytes, int] = {}
        self.damage_told = False
        self._form = form
        self._handle = handle
        self.size = FILE_BYTES + self._whole_records() * form.record_bytes

    @classmethod
    def create(cls, path: Path, number: int, form: BlockFormat) -> Segment:
        """A new, empty one. Raises `OSError`, and then leaves no file."""
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            _write(handle, [form.file_header()], 0)
        except BaseException:
            os.close(handle)
            path.unlink()
            raise
        return cls(path, number, form, handle)

    @classmethod
    def open(cls, path: Path, number: int, form: BlockFormat) -> Segment:
        """One that is there, less what a kill left half written at its end; it has no `keys` yet.
        Raises `ForeignSegment` and `OSError`."""
        handle = os.open(path, os.O_RDWR)
        try:
            header = os.pread(handle, FILE_BYTES, 0)
            if not form.file_header().startswith(header):
                raise ForeignSegment(path)
            if len(header) < FILE_BYTES:
                _write(handle, [form.file_header()], 0)
            segment = cls(path, number, form, handle)
            if segment.size < os.fstat(handle).st_size:
                os.ftruncate(handle, segment.size)
        except BaseException:
            os.close(handle)
            raise
        return segment

    def _whole_records(self) -> int:
        return (os.fstat(self._handle).st_size - FILE_BYTES) // self._form.record_bytes

    def fits(self, offset: int) -> bool:
        """Whether a record can be at `offset`."""
        beyond = offset - FILE_BYTES
        return 0 <= beyond < self.size - FILE_BYTES and beyond % self._form.record_bytes == 0

    def records(self, since: int = FILE_BYTES) -> Iterator[tuple[int, bytes]]:
        """Offset and key of every record from offset `since` on whose header is whole. Raises
        `OSError`."""
        for offset in range(since, self.size, self._form.record_bytes):
            key = self.key_at(offset)
            if key is not None:
                yield offset, key

    def key_at(self, offset: int) -> bytes | None:
        """Key of the record at `offset`; None if its header is damaged. Raises `OSError`."""
        header = self._parsed(os.pread(self._handle, _RECORD.size, offset))
        return None if header is None else header[0]

    def _parsed(self, header: bytes) -> tuple[bytes, int] | None:
        """Key and checksum that a header tells."""
        if len(header) < _RECORD.size:
            return None
        magic, key, length, checksum, own = _RECORD.unpack(header)
        good = magic == _RECORD_MAGIC and length == self._form.block_bytes
        if not good or own != crc32(header[: -_SUM.size]):
            return None
        return key, checksum

    def append(self, key: bytes, data: Data) -> int:
        """Write a record; its offset. Raises `OSError`, and then the segment is as before."""
        offset = self.size
        try:
            _write(self._handle, [self._form.record_header(key, data), data], offset)
        except OSError:
            os.ftruncate(self._handle, offset)
            raise
        self.keys[key] = offset
        self.size += self._form.record_bytes
        return offset

    def read(self, key: bytes, out: Data) -> None:
        """Fill `out` with the block of `key`, one of `keys`. Raises `DamagedBlock` (`out` may then
        be anything)."""
        header = bytearray(_RECORD.size)
        try:
            count = os.preadv(self._handle, [header, out], self.keys[key])
        except OSError as error:
            raise DamagedBlock(str(error)) from error
        if count < self._form.record_bytes:
            raise DamagedBlock("the file ends before it")
        parsed = self._parsed(bytes(header))
        if parsed is None:
            raise DamagedBlock("its header is damaged")
        if parsed[0] != key:
            raise DamagedBlock("another block is in its place")
        if parsed[1] != crc32(out):
            raise DamagedBlock("its checksum is wrong")

    def spoil(self, key: bytes) -> None:
        """Make the record of `key`, one of `keys`, one that no scan will find."""
        with suppress(OSError):
            os.pwrite(self._handle, bytes(_RECORD.size), self.keys[key])

    def expect(self, key: bytes) -> None:
        """Have the system read the block of `key`, one of `keys`, ahead."""
        if hasattr(os, "posix_fadvise"):
            length = self._form.record_bytes
            os.posix_fadvise(self._handle, self.keys[key], length, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        os.close(self._handle)


def _write(handle: int, pieces: Sequence[Data], offset: int) -> None:
    """Write all of `pieces`, one after another. Raises `OSError`."""
    left = [memoryview(piece).cast("B") for piece in pieces]
    while left:
        count = os.pwritev(handle, left, offset)
        offset += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]

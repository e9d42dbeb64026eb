"""The base of every message, and how token ids travel in one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from phloem.radix import events


def pack(values: Sequence[int]) -> bytes:
    """Token ids or slots → packed little-endian int32."""
    return events.pack(array("i", values))


def unpack_array(data: bytes) -> array[int]:
    """Inverse of `pack`, as the tree takes it."""
    return events.unpack(data)


def unpack(data: bytes) -> list[int]:
    """Inverse of `pack`."""
    return unpack_array(data).tolist()


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of wire structs: positional, immutable, untracked by the garbage collector."""

"""The base of every message, and how token ids travel in one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec


def pack(values: Sequence[int]) -> bytes:
    """Token ids or slots → packed little-endian int32."""
    return array("i", values).tobytes()


def unpack(data: bytes) -> list[int]:
    """Inverse of `pack`."""
    values = array("i")
    values.frombytes(data)
    return values.tolist()


class Wire(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of wire structs: positional, immutable, untracked by the garbage collector."""

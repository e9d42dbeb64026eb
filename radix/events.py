"""Changes of the radix tree, as a router reads them: who applies them in order has its mirror."""

from __future__ import annotations

import sys
from array import array

import msgspec


class _Event(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Positional, immutable, untracked by the garbage collector."""


class NodeStored(_Event, frozen=True, tag="stored"):
    """`tokens` (packed) are in the tree, at the end of node `parent` (0: the root of `namespace`).
    A `node` that is known already has grown by them."""

    node: int
    parent: int
    namespace: str
    tokens: bytes


class NodeSplit(_Event, frozen=True, tag="split"):
    """`node`'s first `at` tokens are now `upper`, its parent."""

    node: int
    upper: int
    at: int


class NodeRemoved(_Event, frozen=True, tag="removed"):
    """`node` has only its first `keep` tokens left; with 0 it is gone."""

    node: int
    keep: int


class Cleared(_Event, frozen=True, tag="cleared"):
    """Everything known so far is void: what follows is the whole tree."""


KvEvent = NodeStored | NodeSplit | NodeRemoved | Cleared


def pack(tokens: array[int]) -> bytes:
    """Token ids → packed little-endian int32."""
    if sys.byteorder == "big":
        tokens = array("i", tokens)
        tokens.byteswap()
    return tokens.tobytes()


def unpack(data: bytes) -> array[int]:
    """Inverse of `pack`."""
    tokens = array("i")
    tokens.frombytes(data)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens

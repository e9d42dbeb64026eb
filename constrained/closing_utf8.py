"""Sets of code points as tries of UTF-8 byte ranges.

Unlike `phloem.constrained.charset`, code points include surrogates, as they do for engines: a
negated class of a grammar takes them in.
"""

from __future__ import annotations

import functools

LAST = 0x10FFFF
_ENDS = (0x7F, 0x7FF, 0xFFFF, LAST)
_LEADS = (0, 0, 0xC0, 0xE0, 0xF0)

Ranges = tuple[tuple[int, int], ...]
Trie = tuple[tuple[tuple[int, int, int], ...], ...]
"""Nodes, the root first and parents before children. An edge is (low, high, child): bytes low to
high lead to the child, or end the character when it is -1."""

_PREFERRED = b"abcdefghijklmnopqrstuvwxyz0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_ORDER = dict.fromkeys([*_PREFERRED, *range(32, 256), *range(32)])
RANK = [rank for _, rank in sorted((byte, rank) for rank, byte in enumerate(_ORDER))] + [256]
"""Which byte to take among equals, by byte: letters and digits make longer tokens and better
texts. The last entry, which index -1 reads, is worse than any."""


def merge(ranges: list[tuple[int, int]]) -> Ranges:
    """Sorted and disjoint."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return tuple(merged)


def negate(ranges: Ranges) -> Ranges:
    """All other code points."""
    out: list[tuple[int, int]] = []
    start = 0
    for low, high in ranges:
        if low > start:
            out.append((start, low - 1))
        start = high + 1
    if start <= LAST:
        out.append((start, LAST))
    return tuple(out)


@functools.lru_cache(maxsize=4096)
def byte_trie(ranges: Ranges) -> Trie:
    """The trie of a set of code points."""
    nodes: list[dict[tuple[int, int], int]] = [{}]
    for low, high in ranges:
        for length, end in enumerate(_ENDS, 1):
            start = _ENDS[length - 2] + 1 if length > 1 else 0
            first, last = max(low, start), min(high, end)
            if first <= last:
                _insert(nodes, 0, _encode(first, length), _encode(last, length))
    return tuple(tuple((*edge, child) for edge, child in sorted(n.items())) for n in nodes)


def _encode(code: int, length: int) -> bytes:
    if length == 1:
        return bytes([code])
    tail = [0x80 | code >> 6 * i & 0x3F for i in reversed(range(length - 1))]
    return bytes([_LEADS[length] | code >> 6 * (length - 1), *tail])


def _insert(nodes: list[dict[tuple[int, int], int]], node: int, low: bytes, high: bytes) -> None:
    """Add the sequences from `low` to `high`, which have one length."""
    if len(low) == 1:
        nodes[node][low[0], high[0]] = -1
        return
    least, most = b"\x80" * (len(low) - 1), b"\xbf" * (len(low) - 1)
    first, last = low[0], high[0]
    if first == last:
        _insert(nodes, _child(nodes, node, first, last), low[1:], high[1:])
        return
    if low[1:] != least:
        _insert(nodes, _child(nodes, node, first, first), low[1:], most)
        first += 1
    if high[1:] != most:
        _insert(nodes, _child(nodes, node, last, last), least, high[1:])
        last -= 1
    if first <= last:
        _insert(nodes, _child(nodes, node, first, last), least, most)


def _child(nodes: list[dict[tuple[int, int], int]], node: int, low: int, high: int) -> int:
    child = nodes[node].get((low, high))
    if child is None:
        child = len(nodes)
        nodes.append({})
        nodes[node][low, high] = child
    return child

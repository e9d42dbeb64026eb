"""Which cached leaf goes first: policies as key functions, and the queue they order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from phloem.radix.errors import IntegrityError
from phloem.radix.node import Node

Key = tuple[float, ...]


@dataclass(frozen=True)
class EvictionPolicy:
    """The unlocked leaf with the smallest `key` is evicted first.

    The key of a node must not decrease while the node is in the tree, since the queue notices that
    only when it is told. It is told when a node's edge grows and when the program of a node ends.
    """

    name: str
    key: Callable[[Node], Key]


def _lru(node: Node) -> Key:
    return (node.last_access,)


def _lfu(node: Node) -> Key:
    return (node.hits, node.last_access)


def _fifo(node: Node) -> Key:
    return (node.inserted,)


def _slru(node: Node) -> Key:
    if node.hits < 2:
        return (node.last_access,)
    return (2 * node.last_access - node.inserted,)


def _priority(node: Node) -> Key:
    return (node.priority, node.last_access)


def _program(node: Node) -> Key:
    return (node.program is not None, node.last_access)


CHUNK = 64
"""Tokens whose computation costs about as much as beginning one more prefill chunk."""
CRUMB = 16
"""Tokens below which a shorter edge is not worth more: it holds its ancestors too."""


def _size(node: Node) -> Key:
    value = (1 + node.hits) * (1 + CHUNK / max(len(node.tokens), CRUMB))
    return (node.floor + value, node.last_access)


LRU = EvictionPolicy("lru", _lru)
"""Least recently used."""
LFU = EvictionPolicy("lfu", _lfu)
"""Least often hit; among equals, least recently used."""
FIFO = EvictionPolicy("fifo", _fifo)
"""Inserted first, whether used since or not."""
SLRU = EvictionPolicy("slru", _slru)
"""Segmented LRU: what was hit at least twice since it was inserted is protected, all else goes in
LRU order, so a scan of prompts that come once does not wash out the ones that come often.

A key sees one node, so the protected segment is bounded by age, not by size: a protected node ranks
as if its last use were later, by as long as it had been in use until then. So it does not keep new
ones out for ever: idle for as long as it was of use, it goes like any other."""
PRIORITY = EvictionPolicy("priority", _priority)
"""Lowest priority first, where a node has the highest of those who used it; then LRU."""
PROGRAM = EvictionPolicy("program", _program)
"""What no live program used goes first, then what live programs used last; LRU in both."""
SIZE = EvictionPolicy("size", _size)
"""GreedyDual-Size with frequency (Cherkasova, HP Labs HPL-98-69, 1998): evict the smallest
`floor + (1 + hits) * cost / size`, where `floor` is the value of the last victim when the node was
last left, so that what is not used any more is overtaken. `size` is the edge's tokens n, `cost`
the tokens n + 64 that it takes to compute them again, the beginning of a chunk counted in. Long
outputs that nobody hit have the smallest value, a short or a hit edge the larger one."""

POLICIES: dict[str, EvictionPolicy] = {
    policy.name: policy for policy in (LRU, LFU, FIFO, SLRU, PRIORITY, PROGRAM, SIZE)
}


def policy_by_name(name: str) -> EvictionPolicy:
    """The policy called `name`. Raises `ValueError` that lists the names."""
    try:
        return POLICIES[name]
    except KeyError:
        raise ValueError(
            f"unknown eviction policy {name!r}; there are {', '.join(POLICIES)}"
        ) from None


class EvictionQueue:
    """A heap of eviction candidates, maintained and never rebuilt on the way.

    A node has at most one valid entry: the one whose serial number it carries in `queued`. Entries
    are put right only when they surface: one whose node is locked or has children by now is
    dropped (`offer` brings the node back once it is an unlocked leaf again), one whose node was
    used since sinks to its new key, which can only be larger. Where a key may have fallen
    (`renew`) or a node left (`forget`), the entry becomes void and waits to surface; when void ones
    outnumber the valid ones by more than `SLACK` they are swept out. So the heap has at most
    twice the tree's nodes and `SLACK` entries, and each correction is paid for by the use that
    made it necessary: every operation costs O(log nodes), amortised.
    """

    SLACK = 64

    def __init__(self, policy: EvictionPolicy) -> None:
        self._key = policy.key
        self._heap: list[tuple[Key, int, Node]] = []
        self._serial = 0  # breaks ties, oldest entry first; nodes are never compared
        self._valid = 0
        self._floor = 0.0  # the first part of the last victim's key

    def __len__(self) -> int:
        """Nodes in the queue."""
        return self._valid

    @property
    def entries(self) -> int:
        """Entries of the heap, void ones included."""
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """`node` has become an unlocked leaf."""
        node.floor = self._floor
        if not node.queued:
            self._push(node)

    def renew(self, node: Node) -> None:
        """The key of `node` may have fallen."""
        if node.queued:
            self.forget(node)
            self._push(node)

    def forget(self, node: Node) -> None:
        """Take `node` out of the queue if it is there."""
        if node.queued:
            node.queued = 0
            self._valid -= 1
            self._sweep()

    def best(self) -> Node | None:
        """The leaf to evict next (it stays in the queue), or None when there is none."""
        heap = self._heap
        while heap:
            key, serial, node = heap[0]
            if serial != node.queued:
                heappop(heap)
                continue
            if node.lock_ref or node.children:
                heappop(heap)
                node.queued = 0
                self._valid -= 1
                self._sweep()
                continue
            current = self._key(node)
            if current == key:
                return node
            heapreplace(heap, (current, serial, node))
        return None

    def drop_best(self) -> None:
        """Take the node that `best` just returned out of the queue: it is the victim."""
        key, _, node = heappop(self._heap)
        self._floor = key[0]
        node.queued = 0
        self._valid -= 1
        self._sweep()

    def purge(self) -> None:
        """Sweep out all void entries. Costs O(queue)."""
        self._heap[:] = [entry for entry in self._heap if entry[1] == entry[2].queued]
        heapify(self._heap)

    def nodes(self) -> list[Node]:
        """The queued nodes, in no order; for `check`."""
        return [node for _, serial, node in self._heap if serial == node.queued]

    def check(self) -> None:
        """Raise `IntegrityError` unless entries are counted, few, and not too large to surface."""
        valid = len(self.nodes())
        if valid != self._valid:
            raise IntegrityError(f"{self._valid} queued nodes are counted but {valid} found")
        if len(self._heap) > 2 * valid + self.SLACK:
            raise IntegrityError(f"{len(self._heap)} queue entries for {valid} nodes")
        for key, serial, node in self._heap:
            if serial == node.queued and key > self._key(node):
                raise IntegrityError(f"a node's key fell to {self._key(node)} from {key}")

    def _push(self, node: Node) -> None:
        self._serial += 1
        node.queued = self._serial
        self._valid += 1
        heappush(self._heap, (self._key(node), self._serial, node))

    def _sweep(self) -> None:
        if len(self._heap) > 2 * self._valid + self.SLACK:
            self.purge()

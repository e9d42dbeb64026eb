"""Which cached leaf goes first: policies as key functions, and the queue they order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush, heapreplace

from phloem.radix.node import Node

Key = tuple[float, ...]


@dataclass(frozen=True)
class EvictionPolicy:
    """The unlocked leaf with the smallest `key` is evicted first.

    The key of a node must never decrease while the node is in the tree: the queue relies on it.
    """

    name: str
    key: Callable[[Node], Key]


def _lru(node: Node) -> Key:
    return (node.last_access,)


def _lfu(node: Node) -> Key:
    return (node.hits, node.last_access)


def _fifo(node: Node) -> Key:
    return (node.inserted,)


LRU = EvictionPolicy("lru", _lru)
"""Least recently used."""
LFU = EvictionPolicy("lfu", _lfu)
"""Least often hit; among equals, least recently used."""
FIFO = EvictionPolicy("fifo", _fifo)
"""Inserted first, whether used since or not."""

POLICIES: dict[str, EvictionPolicy] = {policy.name: policy for policy in (LRU, LFU, FIFO)}


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

    A node has at most one entry, so the heap is never larger than the tree, whatever happened
    before. Entries are put right only when they surface: one whose node is locked or has children
    by now is dropped (`offer` brings the node back once it is an unlocked leaf again), one whose
    node was used since sinks to its new key, which can only be larger. Each such correction is
    paid for by the use that made the entry stale: every operation costs O(log nodes), amortised.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._key = policy.key
        self._heap: list[tuple[Key, int, Node]] = []
        self._serial = 0  # breaks ties, oldest entry first; nodes are never compared

    def __len__(self) -> int:
        return len(self._heap)

    def offer(self, node: Node) -> None:
        """`node` has become an unlocked leaf."""
        if not node.queued:
            node.queued = True
            self._serial += 1
            heappush(self._heap, (self._key(node), self._serial, node))

    def best(self) -> Node | None:
        """The leaf to evict next (it stays in the queue), or None when there is none."""
        heap = self._heap
        while heap:
            key, serial, node = heap[0]
            if node.lock_ref or node.children:
                heappop(heap)
                node.queued = False
                continue
            current = self._key(node)
            if current == key:
                return node
            heapreplace(heap, (current, serial, node))
        return None

    def drop_best(self) -> None:
        """Take the node that `best` just returned out of the queue."""
        heappop(self._heap)[2].queued = False

    def purge(self) -> None:
        """Forget nodes that were cut out of the tree (their parent is None). Costs O(queue)."""
        self._heap = [entry for entry in self._heap if entry[2].parent is not None]
        heapify(self._heap)

    def nodes(self) -> list[Node]:
        """The queued nodes, in no order; for `check`."""
        return [node for _, _, node in self._heap]

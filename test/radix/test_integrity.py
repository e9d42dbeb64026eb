"""`check` finds what it says it finds: each corruption is made by hand and must be named."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phloem.radix import IntegrityError, Lease, RadixTree, SlotPool
from phloem.radix.node import Node, Root


def example() -> tuple[RadixTree, Node, Node, Lease]:
    """Two branches below [1, 2]; a lease holds the one of [3, 4]."""
    pool = SlotPool(32)
    tree = RadixTree(pool)
    for tokens in ([1, 2, 3, 4], [1, 2, 5]):
        lease = tree.acquire(tokens)
        rest = tokens[lease.length :]
        tree.extend(lease, rest, pool.allocate(len(rest)))
        tree.release(lease)
    lease = tree.acquire([1, 2, 3, 4, 0])
    tree.check()
    held = lease.node
    assert held.parent is not None
    return tree, held, held.parent.children[5], lease


def _lock(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    held.lock_ref += 1


def _child_lock(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    idle.lock_ref += 1


def _slot_twice(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    idle.slots[0] = held.slots[0]


def _slot_free(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    idle.slots[0] = 30


def _edge(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    held.tokens.pop()


def _empty(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    del idle.tokens[:]


def _filed(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    idle.tokens[0] = 9


def _parent(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    idle.parent = held


def _unqueued(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._queue.best()
    tree._queue.drop_best()


def _flag(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    idle.queued = 0


def _outside(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._queue.offer(Node(idle, idle.tokens, idle.slots, 0))


def _nodes(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._nodes += 1


def _locked(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._locked -= 1


def _tokens(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._tokens += 1


def _length(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    lease.moved(held, 7)


def _lost_lease(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._leases.clear()


def _lease_outside(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._leases.add(Lease(Root("", 0), 0, ""))


def _idle_root(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._roots["x"] = Root("x", 0)


def _misfiled_root(tree: RadixTree, held: Node, idle: Node, lease: Lease) -> None:
    tree._roots["x"] = Root("y", 0)


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_lock, "lock_ref 1, but 2 leases"),
        (_child_lock, "lock_ref"),
        (_slot_twice, "twice"),
        (_slot_free, "slot 30 is not the tree's"),
        (_edge, "but 2 slots|its path has"),
        (_empty, "edge is empty"),
        (_filed, "filed under token 5"),
        (_parent, "its parent is another node"),
        (_unqueued, "missing from the eviction queue"),
        (_flag, "queued nodes are counted but"),
        (_outside, "1 queued nodes are outside"),
        (_nodes, "4 nodes are counted but 3 found"),
        (_locked, "3 locked tokens are counted but 4 found"),
        (_tokens, "6 tokens are counted but 5 found"),
        (_length, "its path has 4 tokens"),
        (_lost_lease, "lock_ref 1, but 0 leases"),
        (_lease_outside, "its root is not in the tree"),
        (_idle_root, "idle namespace"),
        (_misfiled_root, "filed under 'x'"),
    ],
)
def test_corruption_is_named(
    corrupt: Callable[[RadixTree, Node, Node, Lease], None], message: str
) -> None:
    parts = example()
    corrupt(*parts)
    with pytest.raises(IntegrityError, match=message):
        parts[0].check()

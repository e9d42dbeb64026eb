"""The tree's changes as events, and the mirror that follows them (random histories: test_model)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec
import pytest

from phloem.radix import (
    Cleared,
    KvEvent,
    NodeRemoved,
    NodeSplit,
    NodeStored,
    RadixTree,
    SlotPool,
    TreeMirror,
)


def make(size: int = 256, page: int = 1) -> tuple[SlotPool, RadixTree]:
    pool = SlotPool(size, page)
    return pool, RadixTree(pool)


def insert(pool: SlotPool, tree: RadixTree, tokens: Sequence[int], namespace: str = "") -> None:
    lease = tree.acquire(tokens, namespace)
    rest = tokens[lease.length :]
    slots = pool.allocate(len(rest))
    pool.release(slots[: tree.extend(lease, rest, slots)])
    tree.release(lease)


def taken(tree: RadixTree) -> list[KvEvent]:
    events, tree.events = tree.events, []
    return events


def test_each_change_is_one_event() -> None:
    pool, tree = make()
    insert(pool, tree, [9])
    assert tree.events == []
    tree.watch(True)
    assert taken(tree) == [Cleared(), NodeStored(1, 0, "", b"\t\0\0\0")]

    lease = tree.acquire([1, 2], "ns")
    tree.extend(lease, [1, 2, 3], pool.allocate(3))
    assert taken(tree) == [NodeStored(2, 0, "ns", b"\1\0\0\0\2\0\0\0\3\0\0\0")]
    tree.extend(lease, [-1], pool.allocate(1))
    assert taken(tree) == [NodeStored(2, 0, "ns", b"\xff\xff\xff\xff")]

    other = tree.acquire([1, 2, 8, 8], "ns")
    assert taken(tree) == [NodeSplit(2, 3, 2)]
    tree.extend(other, [8], pool.allocate(1))
    assert taken(tree) == [NodeStored(4, 3, "ns", b"\x08\0\0\0")]

    tree.release(other)
    tree.release(lease)
    tree.match([1, 2, 3], "ns")
    tree.explain([1, 2, 3], "ns")
    assert taken(tree) == []
    tree.evict(3)  # 9, then 8, then the tail of [3, -1]
    assert taken(tree) == [NodeRemoved(1, 0), NodeRemoved(4, 0), NodeRemoved(2, 1)]
    tree.flush()
    assert taken(tree) == [NodeRemoved(2, 0), NodeRemoved(3, 0)]


def test_watching_begins_with_the_whole_tree_and_ends_with_nothing() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 2, 3])
    insert(pool, tree, [1, 2, 4])
    insert(pool, tree, [5], "b")
    for _ in range(2):  # a second time too: somebody new may be listening
        tree.watch(True)
        events = taken(tree)
        assert events[0] == Cleared()
        stored = [event for event in events[1:] if isinstance(event, NodeStored)]
        assert len(stored) == len(events) - 1 == tree.nodes
        known = {0}
        for event in stored:
            assert event.parent in known
            known.add(event.node)
    insert(pool, tree, [6])
    assert len(tree.events) == 1
    tree.watch(False)
    assert tree.events == []
    insert(pool, tree, [7])
    tree.evict(100)
    assert tree.events == []


def test_events_travel() -> None:
    events: list[KvEvent] = [
        NodeStored(3, 1, "ns", b"\1\0\0\0"),
        NodeSplit(3, 4, 2),
        NodeRemoved(3, 0),
        Cleared(),
    ]
    packed = msgspec.msgpack.encode(events)
    assert msgspec.msgpack.decode(packed, type=list[KvEvent]) == events
    assert msgspec.msgpack.decode(packed) == [
        ["stored", 3, 1, "ns", b"\1\0\0\0"],
        ["split", 3, 4, 2],
        ["removed", 3, 0],
        ["cleared"],
    ]


@pytest.mark.parametrize("page", [1, 4])
def test_a_mirror_matches_as_the_tree_does(page: int) -> None:
    pool, tree = make(page=page)
    tree.watch(True)
    first = [*range(10), 1, 1]
    insert(pool, tree, first)
    insert(pool, tree, [*range(7), 9, 9, 9, 9, 9], "b")
    insert(pool, tree, [*range(7), 9, 9, 9, 9, 9])
    tree.evict(page)
    mirror = TreeMirror(page)
    assert mirror.match(first) == 0
    mirror.apply(taken(tree))
    assert sorted(mirror.namespaces) == ["", "b"]
    assert mirror.nodes == tree.nodes
    for namespace in ("", "b", "c"):
        for query in (first, [*first, 0], [*range(7), 9, 9, 9, 9, 9, 9], [5, 5], []):
            assert mirror.match(query, namespace) == tree.match(query, namespace)
    assert mirror.match(array("i", [*first, 0])) == tree.match([*first, 0])
    tree.flush()
    mirror.apply(taken(tree))
    assert (mirror.nodes, mirror.namespaces) == (0, [])


def test_a_mirror_that_starts_again_forgets_what_it_knew() -> None:
    pool, tree = make()
    tree.watch(True)
    insert(pool, tree, [1, 2, 3])
    mirror = TreeMirror()
    mirror.apply(taken(tree))
    insert(pool, tree, [1, 2, 4])
    tree.evict(100)
    insert(pool, tree, [5, 6], "b")
    lost = taken(tree)
    assert lost
    tree.watch(True)
    mirror.apply(taken(tree))
    assert (mirror.nodes, mirror.namespaces) == (1, ["b"])
    assert mirror.match([1, 2, 3, 4]) == 0


@pytest.mark.parametrize(
    "event", [NodeStored(9, 8, "", b"\1\0\0\0"), NodeSplit(9, 10, 1), NodeRemoved(9, 0)]
)
def test_a_mirror_notices_a_gap(event: KvEvent) -> None:
    mirror = TreeMirror()
    mirror.apply([NodeStored(1, 0, "", b"\1\0\0\0\2\0\0\0")])
    with pytest.raises(ValueError, match=r"events were lost: node [89] "):
        mirror.apply([event])
    with pytest.raises(ValueError, match="events were lost"):
        mirror.apply([NodeSplit(1, 2, 2)])
    assert mirror.match([1, 2, 3]) == 2

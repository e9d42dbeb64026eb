"""Looking at the tree: what is shown, in which order, and how much work that may be."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from phloem.radix import NamespaceSummary, NodeSummary, RadixTree, SlotPool, survey


def make(size: int = 4096, page: int = 1) -> tuple[SlotPool, RadixTree]:
    pool = SlotPool(size, page)
    return pool, RadixTree(pool)


def insert(pool: SlotPool, tree: RadixTree, tokens: Sequence[int], namespace: str = "") -> None:
    lease = tree.acquire(tokens, namespace)
    rest = tokens[lease.length :]
    slots = pool.allocate(len(rest))
    pool.release(slots[: tree.extend(lease, rest, slots)])
    tree.release(lease)


def example() -> RadixTree:
    pool, tree = make()
    insert(pool, tree, [1, 2, 3, 4], "a")
    insert(pool, tree, [1, 2, 5], "a")
    insert(pool, tree, [1, 2, 3, 4, 6, 6, 6], "a")
    insert(pool, tree, [7] * 9, "a")
    insert(pool, tree, [8] * 50, "b")
    tree.acquire([1, 2, 5, 0], "a")
    return tree


def test_a_node_is_shown_with_what_hangs_below_it() -> None:
    nodes, more = example().survey("a", preview=2)
    assert not more
    edges = [(node.preview, node.tokens, node.total, node.depth, node.start) for node in nodes]
    assert edges == [
        ((7, 7), 9, 9, 0, 0),
        ((1, 2), 2, 8, 0, 0),
        ((3, 4), 2, 5, 1, 2),
        ((6, 6), 3, 3, 2, 4),
        ((5,), 1, 1, 1, 2),
    ]
    assert [node.leases for node in nodes] == [0, 1, 0, 0, 1]
    assert [node.children for node in nodes] == [0, 2, 1, 0, 0]
    assert [node.parent for node in nodes] == [0, 0, nodes[1].node, nodes[2].node, nodes[1].node]
    assert len({node.node for node in nodes}) == 5
    assert nodes[2].hits == 1
    assert {node.namespace for node in nodes} == {"a"}


def test_all_namespaces_largest_first() -> None:
    tree = example()
    nodes, _ = tree.survey()
    assert [node.namespace for node in nodes] == ["b"] + ["a"] * 5
    assert nodes[0].preview == ()
    assert tree.namespaces(5) == [
        NamespaceSummary(namespace="b", tokens=50, nodes=1),
        NamespaceSummary(namespace="a", tokens=17, nodes=5),
    ]
    assert tree.namespaces(1) == tree.namespaces(5)[:1]
    tree.flush()
    assert tree.namespaces(5) == [NamespaceSummary(namespace="a", tokens=3, nodes=2)]


@pytest.mark.parametrize(("limit", "shown"), [(0, 0), (1, 1), (4, 4), (5, 5), (6, 5)])
def test_the_limit(limit: int, shown: int) -> None:
    tree = example()
    nodes, more = tree.survey("a", limit=limit)
    assert len(nodes) == shown
    assert more == (limit < 5)
    assert nodes == tree.survey("a")[0][:shown]


def test_small_branches_are_left_out() -> None:
    tree = example()
    nodes, more = tree.survey("a", min_tokens=5)
    assert [node.total for node in nodes] == [9, 8, 5]
    assert not more
    assert tree.survey("a", min_tokens=10) == ([], False)
    assert tree.survey("nowhere") == ([], False)


@pytest.mark.parametrize(
    ("prefix", "shown"),
    [
        ([1], [(1, 2), (3, 4), (6, 6), (5,)]),
        ([1, 2], [(1, 2), (3, 4), (6, 6), (5,)]),
        ([1, 2, 3], [(3, 4), (6, 6)]),
        ([1, 2, 3, 4, 6, 6], [(6, 6)]),
        ([1, 2, 9], []),
        ([1, 2, 3, 4, 6, 6, 6, 6], []),
        ([9], []),
    ],
)
def test_only_what_is_below_a_prefix(prefix: list[int], shown: list[tuple[int, ...]]) -> None:
    nodes, more = example().survey(prefix=prefix, preview=2)
    assert [node.preview for node in nodes] == shown
    assert not more
    whole = {node.node: node for node in example().survey("a", preview=2)[0]}
    assert all(whole[node.node] == node for node in nodes)


def test_a_prefix_may_end_inside_a_page() -> None:
    pool, tree = make(page=4)
    insert(pool, tree, [1, 1, 1, 1, 2, 2, 2, 2])
    insert(pool, tree, [1, 1, 1, 1, 2, 2, 3, 3])
    insert(pool, tree, [1, 1, 5, 5])

    def found(prefix: list[int]) -> list[tuple[int, ...]]:
        return sorted(node.preview for node in tree.survey(prefix=prefix, preview=4)[0])

    assert len(found([])) == len(found([1])) == len(found([1, 1])) == 4
    assert found([1, 1, 5]) == [(1, 1, 5, 5)]
    assert found([1, 1, 1, 1, 2]) == [(2, 2, 2, 2), (2, 2, 3, 3)]
    assert found([1, 1, 1, 1, 2, 2, 3]) == [(2, 2, 3, 3)]
    assert found([1, 1, 1, 1, 3]) == found([1, 2]) == []


@pytest.mark.parametrize("page", [1, 16])
def test_totals_of_random_trees(page: int) -> None:
    """Against the plain definition, on what `dump` shows."""
    pool, tree = make(4096 * page, page)
    rng = random.Random(page)
    for _ in range(200):
        tokens = [token for _ in range(rng.randrange(9)) for token in [rng.randrange(2)] * page]
        insert(pool, tree, tokens, rng.choice("ab"))
    tree.evict(20 * page)
    nodes, more = tree.survey(limit=10_000)
    assert not more and len(nodes) == tree.nodes
    by_id = {node.node: node for node in nodes}
    below: dict[int, int] = dict.fromkeys(by_id, 0)
    for node in nodes:
        above: NodeSummary | None = node
        while above is not None:
            below[above.node] += node.tokens
            above = by_id.get(above.parent)
    assert {node.node: node.total for node in nodes} == below
    assert sum(node.tokens for node in nodes) == tree.evictable
    assert sorted((node.start, node.tokens, node.depth) for node in nodes) == sorted(
        (view.start, len(view.tokens), view.depth) for view in tree.dump()
    )
    for first, second in pairwise(nodes):
        if first.parent == second.parent and first.namespace == second.namespace:
            assert first.total >= second.total
    for summary in tree.namespaces(2):
        tops = [n for n in nodes if n.namespace == summary.namespace and not n.parent]
        assert summary.tokens == sum(node.total for node in tops)


def test_a_large_tree_is_counted_in_part_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "VISITS", 50)
    pool, tree = make()
    for first in range(30):
        for second in range(3):
            insert(pool, tree, [first, first, second])
    assert tree.nodes == 120
    nodes, more = tree.survey(limit=1000)
    assert more and len(nodes) == 50
    (top, *below), more = tree.survey(prefix=[5])
    assert (top.total, len(below), more) == (5, 3, False)
    for first in range(30, 90):
        insert(pool, tree, [first])
    nodes, more = tree.survey(limit=1000)
    assert more and len(nodes) == 50

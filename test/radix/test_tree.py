"""The tree, operation by operation."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from phloem.radix import LeaseError, NodeView, RadixTree, SlotError, SlotPool
from phloem.radix.node import Node, Root


def make(size: int = 1024) -> tuple[SlotPool, RadixTree]:
    pool = SlotPool(size)
    return pool, RadixTree(pool)


def insert(
    pool: SlotPool, tree: RadixTree, tokens: Sequence[int], namespace: str = ""
) -> list[int]:
    """Cache `tokens` as a finished request would; returns the path's slots."""
    lease = tree.acquire(tokens, namespace)
    rest = tokens[lease.length :]
    slots = pool.allocate(len(rest))
    pool.release(slots[: tree.extend(lease, rest, slots)])
    path = lease.slots()
    tree.release(lease)
    tree.check()
    return path


def edges(tree: RadixTree) -> list[tuple[int, ...]]:
    return [view.tokens for view in tree.dump()]


def views(tree: RadixTree) -> dict[tuple[int, ...], NodeView]:
    return {view.tokens: view for view in tree.dump()}


# -------------------------------------------------------------------------------------- matching


def test_an_empty_tree_matches_nothing_and_makes_nothing() -> None:
    _, tree = make()
    assert tree.match([1, 2, 3]) == 0
    assert tree.match([]) == 0
    assert tree.stats().namespaces == 0


def test_the_last_token_is_never_matched() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 2, 3])
    assert tree.match([1]) == 0
    assert tree.match([1, 2]) == 1
    assert tree.match([1, 2, 3]) == 2
    assert tree.match([1, 2, 3, 4]) == 3
    lease = tree.acquire([1, 2, 3])
    assert lease.length == 2


def test_match_ends_where_the_tokens_diverge() -> None:
    pool, tree = make()
    insert(pool, tree, list(range(100)))
    for diverged in range(1, 100):
        query = list(range(100))
        query[diverged] = -1
        assert tree.match([*query, 0]) == diverged


def test_match_changes_nothing() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 2, 3, 4])
    before = list(tree.dump()), tree.stats()
    assert tree.match([1, 2, 9]) == 2
    assert (list(tree.dump()), tree.stats()) == before


@pytest.mark.parametrize("kind", [list, tuple, lambda x: array("i", x), lambda x: array("q", x)])
def test_any_sequence_of_ints_is_a_key(kind: type[list[int]]) -> None:
    pool, tree = make()
    insert(pool, tree, kind(range(10)))
    assert tree.match(kind(range(10))) == 9
    assert tree.match(list(range(10))) == 9


def test_keys_that_are_not_token_ids_are_refused() -> None:
    _, tree = make()
    lease = tree.acquire([1, 2])
    with pytest.raises(TypeError, match="packed bytes"):
        tree.acquire(b"\1\0\0\0")
    with pytest.raises(ValueError, match="int32"):
        tree.acquire([1, 1 << 40])
    with pytest.raises(ValueError, match="int32"):
        tree.extend(lease, [1 << 31], [1])


def test_the_tree_keeps_its_own_copy_of_the_tokens() -> None:
    pool, tree = make()
    tokens = array("i", [1, 2, 3])
    insert(pool, tree, tokens)
    tokens[0] = 9
    assert tree.match([1, 2, 3, 4]) == 3


def test_namespaces_share_nothing() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 2, 3], "a")
    assert tree.match([1, 2, 3, 4]) == 0
    assert tree.match([1, 2, 3, 4], "a") == 3
    insert(pool, tree, [1, 2, 3], "b")
    assert tree.evictable == 6
    assert tree.flush("a") == 3
    assert tree.match([1, 2, 3, 4], "b") == 3


# -------------------------------------------------------------------------------------- acquiring


def test_a_partial_match_splits_and_keeps_lock_and_slots() -> None:
    pool, tree = make()
    first = tree.acquire([1, 2, 3, 4, 5])
    slots = pool.allocate(5)
    tree.extend(first, [1, 2, 3, 4, 5], slots)
    second = tree.acquire([1, 2, 3, 9, 9])
    tree.check()
    assert second.length == 3
    assert second.slots() == slots[:3]
    assert first.slots() == slots
    assert first.tokens().tolist() == [1, 2, 3, 4, 5]
    nodes = views(tree)
    assert nodes[1, 2, 3].lock_ref == 2
    assert nodes[4, 5].lock_ref == 1
    tree.release(first)
    assert (tree.locked, tree.evictable) == (3, 2)
    tree.release(second)
    assert (tree.locked, tree.evictable) == (0, 5)
    tree.check()


@pytest.mark.parametrize("at", [1, 2, 3])
def test_split_leaves_the_lower_part_in_place_and_copies_lock_and_usage(at: int) -> None:
    root = Root("", 0)
    node = Node(root, array("i", [5, 6, 7, 8]), array("i", [1, 2, 3, 4]), 10)
    root.children[5] = node
    node.lock_ref, node.hits, node.last_access = 3, 2, 20
    upper = node.split(at)
    assert root.children == {5: upper}
    assert upper.children == {5 + at: node}
    assert (upper.parent, node.parent) == (root, upper)
    assert upper.tokens + node.tokens == array("i", [5, 6, 7, 8])
    assert upper.slots + node.slots == array("i", [1, 2, 3, 4])
    for part in (upper, node):
        assert len(part.tokens) == len(part.slots)
        assert (part.lock_ref, part.hits) == (3, 2)
        assert (part.inserted, part.last_access) == (10, 20)


def test_limit_caps_the_match() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 2, 3, 4])
    assert tree.acquire([1, 2, 3, 4], limit=2).length == 2
    assert tree.acquire([1, 2, 3, 4], limit=0).length == 0
    assert tree.acquire([1, 2, 3, 4], limit=100).length == 3
    with pytest.raises(ValueError, match="limit"):
        tree.acquire([1, 2], limit=-1)


def test_a_lease_of_nothing_holds_its_namespace() -> None:
    _, tree = make()
    lease = tree.acquire([1, 2], "ns")
    assert (lease.length, lease.slots(), lease.namespace) == (0, [], "ns")
    tree.check()
    assert tree.flush() == 0
    assert tree.stats().namespaces == 1
    tree.release(lease)
    assert tree.stats().namespaces == 0


def test_slots_of_a_range() -> None:
    pool, tree = make()
    path = insert(pool, tree, list(range(12)))
    tree.acquire([0, 1, 2, 3, 99])
    tree.acquire([0, 1, 2, 3, 4, 5, 6, 99])
    lease = tree.acquire(list(range(13)))
    assert len(edges(tree)) == 3
    for start in range(13):
        for stop in range(start, 13):
            assert lease.slots(start, stop) == path[start:stop]
            assert lease.tokens(start, stop).tolist() == list(range(start, stop))
    for start, stop in [(-1, 3), (2, 1), (0, 13)]:
        with pytest.raises(ValueError, match="outside the path"):
            lease.slots(start, stop)


# -------------------------------------------------------------------------------------- extending


def test_a_request_that_adds_token_by_token_makes_one_node() -> None:
    pool, tree = make()
    lease = tree.acquire([7, 8])
    for token in range(100):
        assert tree.extend(lease, [token], pool.allocate(1)) == 0
    tree.check()
    assert tree.nodes == 1
    assert lease.length == 100
    assert tree.locked == 100


def test_a_node_that_was_hit_is_not_grown() -> None:
    pool, tree = make()
    insert(pool, tree, [1, 2, 3])
    lease = tree.acquire([1, 2, 3, 4])
    tree.extend(lease, [4], pool.allocate(1))
    tree.extend(lease, [5], pool.allocate(1))
    assert edges(tree) == [(1, 2, 3), (4, 5)]
    nodes = views(tree)
    assert (nodes[1, 2, 3].hits, nodes[4, 5].hits) == (1, 0)


def test_another_lease_at_the_same_end_keeps_its_end() -> None:
    pool, tree = make()
    first = tree.acquire([1, 2, 3])
    tree.extend(first, [1, 2], pool.allocate(2))
    second = tree.acquire([1, 2, 3])
    tree.extend(first, [3, 4], pool.allocate(2))
    tree.check()
    assert second.tokens().tolist() == [1, 2]
    assert first.tokens().tolist() == [1, 2, 3, 4]
    tree.release(first)
    assert (tree.locked, tree.evictable) == (2, 2)


@pytest.mark.parametrize("common", [0, 1, 2, 3])
def test_duplicates_stay_the_callers(common: int) -> None:
    """Two requests compute the same tokens at once; the second to insert keeps its own slots."""
    pool, tree = make()
    first, second = tree.acquire([1, 2]), tree.acquire([1, 2])
    winner = [1, 2, 3]
    loser = winner[:common] + [9] * (3 - common)
    tree_slots = pool.allocate(3)
    assert tree.extend(first, winner, tree_slots) == 0
    own = pool.allocate(len(loser))
    assert tree.extend(second, loser, own) == common
    tree.check()
    assert pool.private == common
    assert second.length == len(loser)
    assert second.tokens().tolist() == loser
    assert second.slots() == tree_slots[:common] + own[common:]
    pool.release(own[:common])
    with pytest.raises(SlotError):
        pool.release(own[common:] or tree_slots)
    tree.release(first)
    assert tree.locked == second.length
    tree.release(second)
    tree.check()
    assert tree.evictable == 3 + len(loser) - common
    assert tree.stats().duplicate_total == common


def test_duplicates_may_run_through_several_nodes() -> None:
    pool, tree = make()
    lease = tree.acquire([0, 0])
    insert(pool, tree, [1, 2, 3, 4, 5, 6])
    insert(pool, tree, [1, 2, 7])
    insert(pool, tree, [1, 2, 3, 4, 8])
    own = pool.allocate(6)
    assert tree.extend(lease, [1, 2, 3, 4, 5, 9], own) == 5
    tree.check()
    assert tree.locked == 6
    assert lease.slots()[5:] == own[5:]
    assert pool.private == 5


def test_extending_by_nothing_is_nothing() -> None:
    _, tree = make()
    lease = tree.acquire([1, 2])
    assert tree.extend(lease, [], []) == 0
    assert (lease.length, tree.nodes) == (0, 0)


@pytest.mark.parametrize("bad", ["free", "twice", "tree", "padding", "outside"])
def test_slots_that_are_not_a_requests_are_refused_and_nothing_changes(bad: str) -> None:
    pool, tree = make(64)
    cached = insert(pool, tree, [1, 2, 3, 4])
    lease = tree.acquire([1, 9, 9])
    own = pool.allocate(2)
    slot = {"free": own[1] + 1, "twice": own[0], "tree": cached[0], "padding": 0, "outside": 64}
    before = list(tree.dump()), tree.stats(), pool.private
    with pytest.raises(SlotError):
        tree.extend(lease, [2, 5, 6], [own[1], own[0], slot[bad]])
    with pytest.raises(ValueError, match="3 tokens but 2 slots"):
        tree.extend(lease, [2, 5, 6], own)
    tree.check()
    assert (list(tree.dump()), tree.stats(), pool.private) == before
    assert lease.length == 1


# -------------------------------------------------------------------------------------- releasing


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_release_in_any_order_unlocks_everything(order: tuple[int, ...]) -> None:
    pool, tree = make()
    insert(pool, tree, list(range(9)))
    leases = [tree.acquire(list(range(end + 1))) for end in (3, 6, 9)]
    assert tree.locked == 9
    for index in order:
        tree.release(leases[index])
        tree.check()
        held = [lease.length for lease in leases if not lease.released]
        assert tree.locked == max(held, default=0)
    assert tree.evictable == 9


def test_a_released_lease_is_of_no_use() -> None:
    pool, tree = make()
    lease = tree.acquire([1, 2])
    slots = pool.allocate(1)
    tree.release(lease)
    assert lease.released
    for use in (
        lambda: tree.release(lease),
        lambda: tree.extend(lease, [1], slots),
        lambda: lease.slots(),
        lambda: lease.tokens(),
    ):
        with pytest.raises(LeaseError, match="after its release"):
            use()
    assert pool.private == 1
    tree.check()


def test_a_lease_belongs_to_one_tree() -> None:
    _, tree = make()
    _, other = make()
    lease = other.acquire([1, 2])
    with pytest.raises(LeaseError, match="another tree"):
        tree.release(lease)
    with pytest.raises(LeaseError, match="another tree"):
        tree.extend(lease, [1], [1])
    assert not lease.released


def test_what_is_held_survives_eviction_and_flush() -> None:
    pool, tree = make()
    path = insert(pool, tree, [1, 2, 3, 4])
    insert(pool, tree, [1, 2, 5])
    lease = tree.acquire([1, 2, 3, 9])
    assert tree.evict(100) == 2
    tree.check()
    assert lease.slots() == path[:3]
    insert(pool, tree, [8, 8], "other")
    assert tree.flush() == 2
    tree.check()
    assert lease.slots() == path[:3]
    assert tree.stats().namespaces == 1
    tree.release(lease)
    assert tree.flush("nowhere") == 0
    assert tree.flush("") == 3
    tree.check()
    assert (tree.nodes, tree.evictable, pool.free) == (0, 0, pool.capacity)
    assert tree.stats().namespaces == 0


# ------------------------------------------------------------------------------------------ pages


def paged(page: int, pages: int = 32) -> tuple[SlotPool, RadixTree]:
    pool = SlotPool(pages * page, page)
    return pool, RadixTree(pool)


def test_a_match_is_rounded_down_to_whole_pages() -> None:
    pool, tree = paged(4)
    assert tree.page_size == 4
    path = insert(pool, tree, list(range(12)))
    assert path == list(range(4, 16))
    for length in range(14):
        query = list(range(length))
        assert tree.match(query) == max(length - 1, 0) // 4 * 4
        lease = tree.acquire(query)
        assert lease.slots() == path[: lease.length]
        assert lease.length == max(length - 1, 0) // 4 * 4
        tree.release(lease)
        tree.check()
    assert tree.acquire(list(range(13)), limit=11).length == 8
    assert tree.probe(list(range(12)), "", 11) == (8, 0)
    assert tree.probe(list(range(12)), "", 12) == (12, 4)


def test_branches_may_part_inside_a_page() -> None:
    pool, tree = paged(4)
    for tail in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 9, 9, 9]):
        insert(pool, tree, [7, 7, 7, 7, *tail])
    assert edges(tree) == [(7, 7, 7, 7), (1, 2, 3, 4), (1, 2, 3, 5), (1, 9, 9, 9)]
    assert tree.match([7, 7, 7, 7, 1, 2, 3, 5, 0]) == 8
    assert tree.match([7, 7, 7, 7, 1, 2, 3, 6, 0]) == 4
    assert tree.evictable == 16


def test_a_split_is_at_a_page_s_border() -> None:
    pool, tree = paged(4)
    insert(pool, tree, [1] * 12)
    lease = tree.acquire([1] * 7 + [2] * 5)
    assert lease.length == 4
    assert edges(tree) == [(1,) * 4, (1,) * 8]
    tree.extend(lease, [1, 1, 1, 2, 2, 2, 2, 2], pool.allocate(8))
    tree.check()
    assert edges(tree) == [(1,) * 4, (1,) * 8, (1, 1, 1, 2, 2, 2, 2, 2)]


@pytest.mark.parametrize("length", [1, 3, 5])
def test_a_part_of_a_page_is_refused_and_nothing_changes(length: int) -> None:
    pool, tree = paged(4)
    lease = tree.acquire([1, 2])
    slots = pool.allocate(8)
    with pytest.raises(ValueError, match=f"{length} tokens are not whole pages of 4"):
        tree.extend(lease, [1] * length, slots[:length])
    with pytest.raises(SlotError, match="whole pages"):
        tree.extend(lease, [1] * 4, slots[2:6])
    tree.check()
    assert (lease.length, tree.nodes, pool.private) == (0, 0, 8)


def test_duplicates_come_in_whole_pages() -> None:
    pool, tree = paged(4)
    lease = tree.acquire([1, 1])
    insert(pool, tree, [1] * 8)
    slots = pool.allocate(12)
    assert tree.extend(lease, [1] * 7 + [2] * 5, slots) == 4
    pool.release(slots[:4])
    assert lease.slots()[4:] == slots[4:]
    tree.check()


def test_eviction_takes_whole_pages() -> None:
    pool, tree = paged(4)
    insert(pool, tree, [1] * 16)
    assert tree.evict(0) == tree.evict(-3) == 0
    for asked, freed, left in ((1, 4, 12), (4, 4, 8), (5, 8, 0), (1, 0, 0)):
        assert tree.evict(asked) == freed
        assert tree.evictable == left
        tree.check()


# --------------------------------------------------------------------------------- looking inside


def test_sole_is_what_a_release_would_unlock() -> None:
    pool, tree = make()
    rng = random.Random(11)
    leases = []
    for _ in range(60):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 9))]
        lease = tree.acquire(tokens)
        rest = tokens[lease.length :]
        slots = pool.allocate(len(rest))
        pool.release(slots[: tree.extend(lease, rest, slots)])
        leases.append(lease)
    for _ in range(20):
        rng.shuffle(leases)
        some = leases[: rng.randrange(4)]
        del leases[: len(some)]
        alone = [tree.sole(lease) for lease in some]
        together = tree.sole_of(some)
        assert together >= sum(alone)
        before = tree.evictable
        for number, lease in enumerate(some):
            tree.release(lease)
            assert number or tree.evictable == before + alone[0]
        assert tree.evictable == before + together
    with pytest.raises(LeaseError):
        tree.sole_of(some or [lease])


def test_stats_are_a_snapshot_of_what_happened() -> None:
    pool, tree = make()
    assert tree.stats().hit_rate == 0.0
    insert(pool, tree, [1, 2, 3, 4])
    lease = tree.acquire([1, 2, 3, 4])
    tree.evict(1)
    stats = tree.stats()
    assert (stats.lookups_total, stats.lookup_tokens_total, stats.hit_tokens_total) == (2, 8, 3)
    assert stats.hit_rate == 3 / 8
    assert (stats.inserted_total, stats.evicted_total, stats.duplicate_total) == (4, 1, 0)
    assert (stats.nodes, stats.locked, stats.evictable, stats.leases) == (1, 3, 0, 1)
    tree.release(lease)
    assert stats.leases == 1
    assert tree.stats().leases == 0


def test_dump_shows_parents_first_up_to_the_limit() -> None:
    pool, tree = make()
    path = insert(pool, tree, [1, 2, 3], "a")
    insert(pool, tree, [1, 2, 4], "a")
    insert(pool, tree, [5, 6], "b")
    shown = list(tree.dump())
    assert [(view.namespace, view.depth, view.start, view.tokens) for view in shown] == [
        ("a", 0, 0, (1, 2)),
        ("a", 1, 2, (3,)),
        ("a", 1, 2, (4,)),
        ("b", 0, 0, (5, 6)),
    ]
    assert shown[1].slots == tuple(path[2:])
    assert list(tree.dump(limit=2)) == shown[:2]
    assert list(tree.dump(limit=0)) == []

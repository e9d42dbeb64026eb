"""Eviction: a contract every policy keeps, each policy's order, and a queue that stays small."""

from __future__ import annotations

import random
from array import array

import pytest

from phloem.radix import FIFO, LFU, LRU, POLICIES, EvictionPolicy, RadixTree, SlotPool
from phloem.radix import policy_by_name as by_name


@pytest.fixture(params=list(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return POLICIES[request.param]


def make(policy: EvictionPolicy, size: int = 4096) -> tuple[SlotPool, RadixTree]:
    pool = SlotPool(size)
    return pool, RadixTree(pool, policy=policy)


def insert(pool: SlotPool, tree: RadixTree, tokens: list[int], namespace: str = "") -> None:
    lease = tree.acquire(tokens, namespace)
    rest = tokens[lease.length :]
    slots = pool.allocate(len(rest))
    pool.release(slots[: tree.extend(lease, rest, slots)])
    tree.release(lease)


def use(tree: RadixTree, tokens: list[int]) -> None:
    tree.release(tree.acquire([*tokens, -1]))


def gone(tree: RadixTree, firsts: list[int]) -> list[int]:
    """Which of these one-node prefixes (10 tokens each, by first token) are not cached whole."""
    return [first for first in firsts if tree.match([first] * 11) < 10]


# --------------------------------------------------------------------------------------- contract


def test_names(policy: EvictionPolicy) -> None:
    assert by_name(policy.name) is policy


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'mru'; there are lru, lfu, fifo"):
        by_name("mru")


def test_exactly_what_was_asked_is_freed(policy: EvictionPolicy) -> None:
    pool, tree = make(policy)
    for first in range(5):
        insert(pool, tree, [first] * 10)
    assert tree.evict(0) == tree.evict(-1) == 0
    free = pool.free
    for want in (1, 9, 13, 7):
        assert tree.evict(want) == want
        tree.check()
    assert pool.free == free + 30
    assert tree.evict(1000) == 20
    assert (tree.nodes, tree.evictable, pool.free) == (0, 0, pool.capacity)
    assert tree.evict(1) == 0
    assert tree.stats().evicted_total == 50


def test_locked_paths_stay(policy: EvictionPolicy) -> None:
    pool, tree = make(policy)
    insert(pool, tree, [1, 2, 3, 4])
    insert(pool, tree, [1, 2, 5, 6])
    lease = tree.acquire([1, 2, 3, 0])
    assert tree.evict(1000) == 3
    tree.check()
    assert lease.tokens().tolist() == [1, 2, 3]
    tree.release(lease)
    assert tree.evict(1000) == 3


def test_a_parent_goes_after_its_children(policy: EvictionPolicy) -> None:
    pool, tree = make(policy)
    insert(pool, tree, [1, 2, 3, 4])
    insert(pool, tree, [1, 2, 5, 6])
    for left in range(5, -1, -1):
        tree.evict(1)
        tree.check()
        assert tree.evictable == left
        cached = [view.start + len(view.tokens) for view in tree.dump()]
        assert (max(cached, default=0) > 2) == (left > 2)


def test_keys_never_decrease(policy: EvictionPolicy) -> None:
    """The queue's promise rests on this; any new policy must keep it."""
    pool, tree = make(policy, 256)
    rng = random.Random(3)
    keys: dict[int, tuple[object, tuple[float, ...]]] = {}
    for _ in range(1500):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 9))]
        tree.evict(max(0, len(tokens) - pool.free))
        insert(pool, tree, tokens)
        for root in tree._roots.values():
            stack = list(root.children.values())
            while stack:
                node = stack.pop()
                stack.extend(node.children.values())
                key = policy.key(node)
                seen = keys.get(id(node))
                assert seen is None or seen[0] is not node or seen[1] <= key
                keys[id(node)] = (node, key)


def test_the_queue_is_never_larger_than_the_tree(policy: EvictionPolicy) -> None:
    pool, tree = make(policy)
    for first in range(20):
        insert(pool, tree, [first] * 10)
    rng = random.Random(5)
    for round_ in range(3000):
        first = rng.randrange(20)
        lease = tree.acquire([first] * rng.randrange(2, 12))
        if round_ % 10 == 0:
            tree.evict(1)
            insert(pool, tree, [first] * 10)
        tree.release(lease)
        assert len(tree._queue) <= tree.nodes
    tree.check()
    tree.flush()
    assert len(tree._queue) == 0


def test_a_full_pool_serves_new_prompts_for_ever(policy: EvictionPolicy) -> None:
    pool, tree = make(policy, 201)
    for number in range(400):
        tokens = [number * 100 + index for index in range(50)]
        tree.evict(max(0, 50 - pool.free))
        insert(pool, tree, tokens)
        assert tree.nodes <= 5
    tree.check()
    assert tree.evictable == 200


# ------------------------------------------------------------------------------------------ order


def test_lru_order_follows_use() -> None:
    pool, tree = make(LRU)
    for first in range(4):
        insert(pool, tree, [first] * 10)
    use(tree, [0] * 10)
    use(tree, [2] * 10)
    order = []
    for _ in range(4):
        tree.evict(10)
        order.append(gone(tree, [0, 1, 2, 3]))
    assert order == [[1], [1, 3], [0, 1, 3], [0, 1, 2, 3]]


def test_lru_counts_the_release_not_only_the_start() -> None:
    pool, tree = make(LRU)
    insert(pool, tree, [0] * 10)
    long_running = tree.acquire([0] * 11)
    insert(pool, tree, [1] * 10)
    tree.release(long_running)
    tree.evict(10)
    assert gone(tree, [0, 1]) == [1]


def test_match_does_not_refresh() -> None:
    pool, tree = make(LRU)
    insert(pool, tree, [0] * 10)
    insert(pool, tree, [1] * 10)
    assert tree.match([0] * 11) == 10
    tree.evict(10)
    assert gone(tree, [0, 1]) == [0]


def test_lru_keeps_the_used_part_of_a_prefix() -> None:
    pool, tree = make(LRU)
    insert(pool, tree, list(range(100, 120)))
    insert(pool, tree, [1] * 10)
    use(tree, list(range(100, 110)))
    assert tree.evict(15) == 15
    assert tree.match([*range(100, 120), 0]) == 10
    assert tree.match([1] * 11) == 5


def test_lfu_order_follows_hits_then_recency() -> None:
    pool, tree = make(LFU)
    for first in range(4):
        insert(pool, tree, [first] * 10)
    for first, times in ((0, 3), (1, 1), (2, 2), (3, 1)):
        for _ in range(times):
            use(tree, [first] * 10)
    order = []
    for _ in range(4):
        tree.evict(10)
        order.append(gone(tree, [0, 1, 2, 3]))
    assert order == [[1], [1, 3], [1, 2, 3], [0, 1, 2, 3]]


def test_fifo_order_ignores_use() -> None:
    pool, tree = make(FIFO)
    for first in range(4):
        insert(pool, tree, [first] * 10)
    for first in (1, 0, 0, 1):
        use(tree, [first] * 10)
    order = []
    for _ in range(4):
        tree.evict(10)
        order.append(gone(tree, [0, 1, 2, 3]))
    assert order == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_the_callers_clock_is_used() -> None:
    times = iter([5.0, 6.0, 7.0, 10.0, 11.0, 12.0, 20.0, 21.0])
    pool = SlotPool(64)
    tree = RadixTree(pool, clock=lambda: next(times))
    insert(pool, tree, [0] * 10)
    insert(pool, tree, [1] * 10)
    use(tree, [0] * 10)
    assert [view.last_access for view in tree.dump()] == [21.0, 12.0]


def test_a_policy_of_ones_own() -> None:
    longest_first = EvictionPolicy("longest", lambda node: (-float(len(node.tokens)),))
    pool, tree = make(longest_first)
    insert(pool, tree, [1] * 5)
    insert(pool, tree, [2] * 9)
    assert tree.evict(9) == 9
    assert tree.match(array("i", [1] * 6)) == 5

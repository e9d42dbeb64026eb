"""Eviction: a contract every policy keeps, each policy's order, and a queue that stays small."""

from __future__ import annotations

import random
from array import array

import pytest

from phloem.radix import (
    FIFO,
    LFU,
    LRU,
    POLICIES,
    PRIORITY,
    PROGRAM,
    SIZE,
    SLRU,
    EvictionPolicy,
    RadixTree,
    SlotPool,
)
from phloem.radix import policy_by_name as by_name


@pytest.fixture(params=list(POLICIES))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return POLICIES[request.param]


def make(policy: EvictionPolicy, size: int = 4096) -> tuple[SlotPool, RadixTree]:
    pool = SlotPool(size)
    return pool, RadixTree(pool, policy=policy)


def insert(
    pool: SlotPool, tree: RadixTree, tokens: list[int], *, priority: int = 0, program: str = ""
) -> None:
    lease = tree.acquire(tokens, priority=priority, program=program)
    rest = tokens[lease.length :]
    slots = pool.allocate(len(rest))
    pool.release(slots[: tree.extend(lease, rest, slots)])
    tree.release(lease)


def use(tree: RadixTree, tokens: list[int], *, priority: int = 0, program: str = "") -> None:
    tree.release(tree.acquire([*tokens, -1], priority=priority, program=program))


def gone(tree: RadixTree, firsts: list[int]) -> list[int]:
    """Which of these one-node prefixes (10 tokens each, by first token) are not cached whole."""
    return [first for first in firsts if tree.match([first] * 11) < 10]


def order(tree: RadixTree, firsts: list[int]) -> list[int]:
    """In which order these one-node prefixes go."""
    went: list[int] = []
    for _ in firsts:
        tree.evict(10)
        tree.check()
        went += [first for first in gone(tree, firsts) if first not in went]
    return went


# --------------------------------------------------------------------------------------- contract


def test_names(policy: EvictionPolicy) -> None:
    assert by_name(policy.name) is policy


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match="'mru'; there are lru, lfu, fifo, slru, priority, program, size"
    ):
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
        insert(
            pool, tree, tokens, priority=rng.randrange(-1, 2), program=rng.choice(["", "p", "q"])
        )
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
        assert tree._queue.entries <= 2 * tree.nodes + tree._queue.SLACK
    tree.check()
    tree.flush()
    assert len(tree._queue) == tree._queue.entries == 0


def test_programs_that_end_all_the_time_do_not_fill_the_queue(policy: EvictionPolicy) -> None:
    pool, tree = make(policy)
    rng = random.Random(6)
    largest = 0
    for round_ in range(3000):
        insert(pool, tree, [rng.randrange(20)] * 10, program=f"p{round_}")
        tree.end_program(f"p{round_ - rng.randrange(5)}")
        largest = max(largest, tree._queue.entries - len(tree._queue))
        assert tree._queue.entries <= 2 * len(tree._queue) + tree._queue.SLACK
    assert largest > tree._queue.SLACK  # it did come to sweeping
    assert len(tree._queue) == 20
    tree.check()


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


def test_slru_protects_what_was_hit_twice_from_a_scan() -> None:
    pool, tree = make(SLRU, 51)
    for first in (0, 1):
        insert(pool, tree, [first] * 10)
    for _ in range(10):
        use(tree, [0] * 10)
        use(tree, [1] * 10)
    for first in range(2, 7):  # prompts that come once
        tree.evict(max(0, 10 - pool.free))
        insert(pool, tree, [first] * 10)
    assert gone(tree, list(range(7))) == [2, 3]
    assert order(tree, [4, 5, 6, 0, 1]) == [4, 5, 6, 0, 1]


def test_slru_lets_go_of_what_was_hot_once() -> None:
    """The protection lasts as long as the node was in use, counted from its last use."""
    now = [0.0]
    pool = SlotPool(51)
    tree = RadixTree(pool, policy=SLRU, clock=lambda: now[0])
    insert(pool, tree, [0] * 10)
    for now[0] in (10.0, 42.0):
        use(tree, [0] * 10)
    for number in range(1, 8):
        now[0] = 40.0 + 10 * number
        tree.evict(max(0, 10 - pool.free))
        insert(pool, tree, [number] * 10)
    # Used for 42 until 42: it counts as used at 84, between the prompts of 80 and 90.
    assert order(tree, [0, 4, 5, 6, 7]) == [4, 0, 5, 6, 7]


def test_slru_does_not_protect_after_one_hit() -> None:
    pool, tree = make(SLRU)
    insert(pool, tree, [0] * 10)
    use(tree, [0] * 10)
    insert(pool, tree, [1] * 10)
    assert order(tree, [0, 1]) == [0, 1]


def test_priority_is_the_highest_of_the_users() -> None:
    pool, tree = make(PRIORITY)
    for first, priority in ((0, 1), (1, 0), (2, -3), (3, 1), (4, 0), (5, -3)):
        insert(pool, tree, [first] * 10, priority=priority)
    use(tree, [0] * 10, priority=-7)
    use(tree, [1] * 10, priority=5)
    use(tree, [5] * 10)
    assert order(tree, [0, 1, 2, 3, 4, 5]) == [2, 4, 5, 3, 0, 1]


def test_what_a_request_adds_has_its_priority_not_its_prefix_s() -> None:
    pool, tree = make(PRIORITY)
    insert(pool, tree, [0] * 10, priority=9)
    insert(pool, tree, [0] * 10 + [1] * 10, priority=1)
    insert(pool, tree, [2] * 10, priority=2)
    tree.evict(10)
    assert tree.match([0] * 10 + [1] * 11) == 10
    tree.evict(10)
    assert gone(tree, [0, 2]) == [2]


def test_a_live_program_s_path_outlives_all_others() -> None:
    pool, tree = make(PROGRAM)
    insert(pool, tree, [0] * 10, program="a")
    insert(pool, tree, [1] * 10, program="b")
    for first in (2, 3):
        insert(pool, tree, [first] * 10)
    use(tree, [2] * 10, program="b")
    use(tree, [0] * 10)  # by none: still a's
    tree.end_program("nobody")
    assert order(tree, [0, 1, 2, 3]) == [3, 1, 2, 0]


def test_a_program_s_end_makes_its_path_like_others() -> None:
    pool, tree = make(PROGRAM)
    insert(pool, tree, [0] * 10, program="a")
    insert(pool, tree, [1] * 10, program="b")
    insert(pool, tree, [2] * 10)
    assert tree.stats().programs == 2
    tree.end_program("a")
    tree.check()
    assert tree.stats().programs == 1
    assert order(tree, [0, 1, 2]) == [0, 2, 1]


def test_a_program_that_returns_lives_again() -> None:
    pool, tree = make(PROGRAM)
    lease = tree.acquire([0] * 11, program="a")
    tree.end_program("a")
    tree.extend(lease, [0] * 10, pool.allocate(10))  # by a program that is dead by now
    tree.release(lease)
    insert(pool, tree, [1] * 10, program="a")
    insert(pool, tree, [2] * 10)
    assert lease.program == "a"
    assert order(tree, [0, 1, 2]) == [0, 2, 1]


def test_both_parts_of_a_split_path_are_the_program_s() -> None:
    pool, tree = make(PROGRAM)
    insert(pool, tree, [0] * 10, program="a")
    use(tree, [0] * 5)
    for left, first in ((10, 1), (5, 2)):
        insert(pool, tree, [first] * 10)
        tree.evict(10)
        assert tree.match([first] * 11) == 0
        assert tree.evictable == tree.match([0] * 11) == left
        tree.evict(5)
        tree.check()
    assert tree.evictable == 0


def test_what_another_adds_to_a_program_s_path_is_not_the_program_s() -> None:
    pool, tree = make(PROGRAM)
    other = tree.acquire([0] * 11)
    insert(pool, tree, [0] * 10, program="a")
    slots = pool.allocate(15)
    assert tree.extend(other, [0] * 10, slots[:10]) == 10
    tree.extend(other, [0] * 5, slots[10:])
    tree.release(other)
    insert(pool, tree, [1] * 10)
    tree.evict(5)
    assert gone(tree, [0, 1]) == []
    tree.evict(10)
    assert gone(tree, [0, 1]) == [1]


def test_a_program_dies_when_enough_others_were_used_after_it() -> None:
    pool = SlotPool(4096)
    tree = RadixTree(pool, policy=PROGRAM, program_limit=2)
    for first, program in enumerate("abc"):
        insert(pool, tree, [first] * 10, program=program)
    use(tree, [1] * 10, program="b")
    insert(pool, tree, [3] * 10, program="d")  # a went for c, c goes for d
    tree.check()
    assert tree.stats().programs == 2
    assert order(tree, [0, 1, 2, 3]) == [0, 2, 1, 3]
    with pytest.raises(ValueError, match="program_limit"):
        RadixTree(pool, program_limit=0)


def test_size_lets_long_outputs_that_nobody_hit_go_first() -> None:
    pool, tree = make(SIZE)
    insert(pool, tree, [0] * 200)
    use(tree, [0] * 200)
    insert(pool, tree, [1] * 20)
    insert(pool, tree, [2] * 500)
    insert(pool, tree, [3] * 900)
    went = []
    for freed in (900, 500, 200, 20):
        assert tree.evict(freed) == freed
        went.append([first for first in range(4) if not tree.match([first] * 1000)])
    assert went == [[3], [2, 3], [0, 2, 3], [0, 1, 2, 3]]


def test_size_forgets_old_hits() -> None:
    """Each victim's value is what the next ones begin from, so new ones overtake."""
    pool, tree = make(SIZE, 301)
    insert(pool, tree, [0] * 100)
    for _ in range(5):
        use(tree, [0] * 100)
    rounds = 0
    while not gone(tree, [0]):
        rounds += 1
        tree.evict(max(0, 100 - pool.free))
        insert(pool, tree, [rounds] * 100)
    assert 5 < rounds < 30


def test_size_counts_an_edge_that_grew_by_its_new_length() -> None:
    """A leaf that was queued, then locked and grown, is worth less than before."""
    pool, tree = make(SIZE)
    first = tree.acquire([1, 1])
    second = tree.acquire([1, 1])
    tree.extend(first, [1] * 10, pool.allocate(10))
    tree.release(first)
    duplicates = pool.allocate(10)
    assert tree.extend(second, [1] * 10, duplicates) == 10
    pool.release(duplicates)
    tree.extend(second, [1] * 490, pool.allocate(490))
    assert tree.nodes == 1
    tree.release(second)
    tree.check()
    insert(pool, tree, [2] * 30)
    tree.evict(300)
    assert gone(tree, [2]) == []


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

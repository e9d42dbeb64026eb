"""The eviction history: what it tells, where it hangs, and that it stays small."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence

import pytest

from phloem.radix import Divergence, IntegrityError, MissReason, RadixTree, SlotPool
from phloem.radix.ghost import Fork, Ghost
from phloem.radix.history import SMALLEST


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(
    size: int = 1024, *, history_tokens: int | None = None, program_limit: int = 4096
) -> tuple[SlotPool, RadixTree, Clock]:
    pool, clock = SlotPool(size), Clock()
    tree = RadixTree(pool, clock=clock, history_tokens=history_tokens, program_limit=program_limit)
    return pool, tree, clock


def insert(pool: SlotPool, tree: RadixTree, tokens: Sequence[int], namespace: str = "") -> None:
    lease = tree.acquire(tokens, namespace)
    rest = tokens[lease.length :]
    slots = pool.allocate(len(rest))
    pool.release(slots[: tree.extend(lease, rest, slots)])
    tree.release(lease)
    tree.check()


def reason(tree: RadixTree, tokens: Sequence[int], namespace: str = "") -> tuple[MissReason, int]:
    told = tree.explain(tokens, namespace)
    return told.reason, told.evicted_tokens


# ----------------------------------------------------------------------------------- explanations


def test_nothing_was_ever_there() -> None:
    pool, tree, _ = make()
    nothing = Divergence(matched=0, reason=MissReason.NEVER_SEEN, branches=0, cached=())
    assert tree.explain([1, 2, 3]) == nothing
    insert(pool, tree, [1, 2, 3], "other")
    assert tree.explain([1, 2, 3]) == nothing
    assert tree.stats().namespaces == 1


def test_another_token_follows() -> None:
    pool, tree, _ = make()
    insert(pool, tree, [1, 2, 3, 4, 5])
    told = tree.explain([1, 2, 9, 4, 5])
    assert (told.matched, told.reason, told.branches) == (2, MissReason.OTHER_TOKEN, 1)
    assert [tokens.tolist() for tokens in told.cached] == [[3, 4, 5]]
    assert tree.explain([1, 2, 3, 4, 5, 6, 7]).reason is MissReason.NEVER_SEEN


def test_the_most_hit_branches_are_shown_first() -> None:
    pool, tree, _ = make()
    for first, hits in ((1, 1), (2, 5), (3, 0), (4, 3)):
        tokens = [0, first, *range(100, 140)]
        insert(pool, tree, tokens)
        for _ in range(hits):
            tree.release(tree.acquire([*tokens, 0]))
    told = tree.explain([0, 9, 9])
    assert (told.matched, told.reason, told.branches) == (1, MissReason.OTHER_TOKEN, 4)
    assert [tokens.tolist() for tokens in told.cached] == [
        [first, *range(100, 131)] for first in (2, 4, 1)
    ]


def test_all_that_may_be_given_is_given() -> None:
    pool, tree, _ = make()
    insert(pool, tree, [1, 2, 3])
    assert tree.explain([1, 2, 3]).reason is MissReason.WHOLE
    assert tree.explain([]).reason is MissReason.WHOLE
    assert tree.explain([7]).reason is MissReason.WHOLE
    limited = tree.explain([1, 2, 3, 4], limit=2)
    assert (limited.matched, limited.reason) == (2, MissReason.LIMITED)
    assert [tokens.tolist() for tokens in limited.cached] == [[3]]
    assert tree.explain([1, 2, 3, 4], limit=3).reason is MissReason.WHOLE
    with pytest.raises(ValueError, match="limit"):
        tree.explain([1, 2], limit=-1)


def test_what_was_evicted_says_when_and_for_whom() -> None:
    pool, tree, clock = make()
    insert(pool, tree, [1, 2, 3, 4, 5, 6])
    insert(pool, tree, [1, 2, 7])
    clock.now = 10.0
    assert tree.evict(2, by="r1") == 2  # the older branch's tail
    told = tree.explain([1, 2, 3, 4, 5, 6, 0])
    assert told.matched == 4
    assert (told.reason, told.evicted_tokens) == (MissReason.EVICTED, 2)
    assert (told.evicted_at, told.evicted_by) == (10.0, "r1")
    clock.now = 11.0
    tree.evict(3, by="r2")
    told = tree.explain([1, 2, 3, 4, 5, 6, 0])
    assert (told.matched, told.evicted_tokens) == (2, 4)
    assert (told.evicted_at, told.evicted_by) == (11.0, "r2")
    assert reason(tree, [1, 2, 7, 0]) == (MissReason.EVICTED, 1)
    assert reason(tree, [1, 2, 3, 4, 9, 9]) == (MissReason.EVICTED, 2)
    assert reason(tree, [1, 2, 9, 9]) == (MissReason.NEVER_SEEN, 0)


def test_what_was_flushed_says_so() -> None:
    pool, tree, clock = make()
    insert(pool, tree, [1, 2, 3, 4], "a")
    insert(pool, tree, [1, 2, 5], "a")
    clock.now = 3.0
    tree.flush("a")
    tree.check()
    told = tree.explain([1, 2, 5, 6], "a")
    assert (told.matched, told.reason, told.evicted_tokens) == (0, MissReason.FLUSHED, 3)
    assert (told.evicted_at, told.evicted_by) == (3.0, "")
    assert reason(tree, [1, 2, 5, 6]) == (MissReason.NEVER_SEEN, 0)


def test_an_eviction_before_a_flush_is_still_told() -> None:
    pool, tree, _ = make()
    insert(pool, tree, [1, 2, 3, 4])
    tree.evict(2)
    insert(pool, tree, [1, 2, 5])
    tree.flush()
    assert reason(tree, [1, 2, 3, 4, 0]) == (MissReason.FLUSHED, 4)
    insert(pool, tree, [1, 2])
    assert reason(tree, [1, 2, 3, 4, 0]) == (MissReason.EVICTED, 2)
    assert reason(tree, [1, 2, 5, 0]) == (MissReason.FLUSHED, 1)


def test_a_flush_before_an_eviction_is_still_told() -> None:
    pool, tree, _ = make()
    insert(pool, tree, [1, 2, 3, 4])
    lease = tree.acquire([1, 2, 3, 4], limit=2)
    assert tree.flush() == 2
    tree.release(lease)
    tree.evict(1)
    assert reason(tree, [1, 2, 3, 4, 0]) == (MissReason.EVICTED, 3)
    insert(pool, tree, [1, 2])
    assert reason(tree, [1, 2, 3, 4, 0]) == (MissReason.FLUSHED, 2)


def test_what_is_cached_again_is_no_longer_gone() -> None:
    pool, tree, _ = make()
    insert(pool, tree, [1, 2, 3, 4, 5, 6])
    tree.evict(6)
    assert tree.stats().history_tokens == SMALLEST
    insert(pool, tree, [1, 2, 3])
    assert reason(tree, [1, 2, 3, 4, 5, 6, 0]) == (MissReason.EVICTED, 3)
    insert(pool, tree, [1, 2, 3, 4, 9])
    assert reason(tree, [1, 2, 3, 4, 5, 6, 0]) == (MissReason.EVICTED, 2)
    assert tree.explain([1, 2, 3, 4, 5, 6, 0]).branches == 1
    insert(pool, tree, [1, 2, 3, 4, 5, 6])
    assert reason(tree, [1, 2, 3, 4, 5, 6, 0]) == (MissReason.WHOLE, 0)
    assert tree.stats().history_tokens == 0


def test_growing_in_place_takes_ghosts_back() -> None:
    pool, tree, _ = make()
    insert(pool, tree, [1, 2, 3, 4, 5])
    tree.evict(5)
    lease = tree.acquire([1, 1])
    for token in (1, 2, 3):
        tree.extend(lease, [token], pool.allocate(1))
        tree.check()
    assert tree.nodes == 1
    assert reason(tree, [1, 2, 3, 4, 5, 0]) == (MissReason.EVICTED, 2)
    tree.extend(lease, [9], pool.allocate(1))
    tree.check()
    assert reason(tree, [1, 2, 3, 4, 5, 0]) == (MissReason.EVICTED, 2)
    assert tree.explain([1, 2, 3, 4, 5, 0]).matched == 3


def test_a_split_keeps_ghosts_at_their_place() -> None:
    pool, tree, _ = make()
    insert(pool, tree, [1, 2, 3, 4, 5, 6, 7, 8])
    for at in (2, 4, 6):  # ghosts along the edge, and one at its end
        insert(pool, tree, [*range(1, at + 1), 90 + at])
    lease = tree.acquire([*range(1, 9), 0])
    tree.evict(3)
    tree.release(lease)
    tree.evict(1)
    for at in (2, 4, 6):
        assert reason(tree, [*range(1, at + 1), 90 + at, 0]) == (MissReason.EVICTED, 1)
    for cut in (5, 3, 1):
        tree.release(tree.acquire([*range(1, cut + 1), 0]))
        tree.check()
        for at in (2, 4, 6):
            assert reason(tree, [*range(1, at + 1), 90 + at, 0]) == (MissReason.EVICTED, 1)
    assert reason(tree, [*range(1, 9), 0]) == (MissReason.EVICTED, 1)


def test_pages_are_remembered_whole() -> None:
    pool = SlotPool(256, 4)
    tree = RadixTree(pool)
    insert(pool, tree, [1] * 4 + [2] * 4 + [3] * 4)
    tree.evict(5)
    assert reason(tree, [1] * 4 + [2] * 4 + [3] * 4 + [0]) == (MissReason.EVICTED, 8)
    assert reason(tree, [1] * 4 + [2] * 4 + [3] * 4) == (MissReason.EVICTED, 4)
    assert reason(tree, [1] * 4 + [2, 2, 2, 0, 0]) == (MissReason.NEVER_SEEN, 0)
    assert reason(tree, [1] * 4 + [2, 2, 2, 2]) == (MissReason.WHOLE, 0)


def test_explaining_changes_nothing() -> None:
    pool, tree, _ = make()
    insert(pool, tree, [1, 2, 3, 4])
    insert(pool, tree, [5, 6], "b")
    tree.evict(1)
    tree.flush("b")
    before = list(tree.dump()), tree.stats()
    for namespace in ("", "b", "c"):
        for tokens in ([1, 2, 3, 4, 5], [1, 9, 9], [5, 6, 7]):
            told = tree.explain(tokens, namespace)
            assert told == tree.explain(tokens, namespace)
            lease = tree.acquire(tokens, namespace)
            assert lease.length == told.matched
            tree.release(lease)
    tree.check()
    assert [view.tokens for view in before[0]] == [(1, 2, 3)]
    assert tree.stats().history_tokens == before[1].history_tokens


# ------------------------------------------------------------------------------------------ bounds


@pytest.mark.parametrize("limit", [0, 1, 15, 16, 40, 100])
def test_the_oldest_goes_first(limit: int) -> None:
    pool, tree, _ = make(history_tokens=limit)
    for number in range(50):
        insert(pool, tree, [number] * 10)
        tree.evict(10)
        tree.check()
        assert tree.stats().history_tokens <= limit
    kept = [number for number in range(50) if reason(tree, [number] * 11)[1]]
    assert kept == list(range(50 - limit // SMALLEST, 50))


def test_a_piece_longer_than_the_history_keeps_its_head() -> None:
    pool, tree, _ = make(history_tokens=100)
    insert(pool, tree, [7] * 20)
    insert(pool, tree, [1] * 500)
    tree.evict(20)
    tree.evict(500)
    tree.check()
    assert reason(tree, [1] * 501) == (MissReason.EVICTED, 100)
    assert reason(tree, [7] * 21) == (MissReason.NEVER_SEEN, 0)


def test_what_hangs_below_a_piece_that_is_cut_short_goes_too() -> None:
    pool, tree, _ = make(history_tokens=100)
    insert(pool, tree, [1] * 200 + [2] * 20)
    insert(pool, tree, [1] * 200 + [3] * 20)
    tree.evict(20)
    tree.evict(400)
    tree.check()
    assert reason(tree, [1] * 200 + [2] * 21) == (MissReason.EVICTED, 100)
    assert tree.stats().history_tokens == 100


def test_a_leaf_that_goes_token_by_token_is_one_piece() -> None:
    pool, tree, clock = make(history_tokens=1000)
    insert(pool, tree, list(range(600)))
    for number in range(600):
        clock.now = float(number)
        tree.evict(1, by=f"r{number}")
    tree.check()
    told = tree.explain(list(range(601)))
    assert (told.evicted_tokens, told.evicted_at, told.evicted_by) == (600, 599.0, "r599")
    assert tree.stats().history_tokens == 600


def test_idle_namespaces_are_remembered_as_long_as_their_tokens() -> None:
    pool, tree, _ = make(history_tokens=10 * SMALLEST)
    for salt in range(300):
        insert(pool, tree, [1, 2, 3], f"tenant-{salt}")
        tree.evict(3)
        tree.check()
        assert len(tree._history._idle) == min(salt + 1, 10)
    assert tree.stats().namespaces == 0
    assert reason(tree, [1, 2, 3, 4], "tenant-299") == (MissReason.EVICTED, 3)
    assert reason(tree, [1, 2, 3, 4], "tenant-289") == (MissReason.NEVER_SEEN, 0)
    lease = tree.acquire([1, 2, 3], "tenant-299")  # wakes it
    tree.check()
    tree.release(lease)
    assert reason(tree, [1, 2, 3, 4], "tenant-299") == (MissReason.EVICTED, 3)


def test_nothing_grows_with_uptime() -> None:
    """Ever new prompts in ever new namespaces and programs: ghosts, their places and namespaces
    stay within the limit."""
    pool, tree, _ = make(300, history_tokens=500, program_limit=5)
    rng = random.Random(8)
    shared = list(range(40))
    for number in range(1500):
        tokens = shared[: rng.randrange(40)] + [number + 1000] * rng.randrange(1, 20)
        namespace = rng.choice(["", f"n{number}"])
        lease = tree.acquire(tokens, namespace, program=f"p{number}")
        tree.evict(max(0, len(tokens) - pool.free))
        rest = tokens[lease.length :]
        tree.extend(lease, rest, pool.allocate(len(rest)))
        tree.release(lease)
        if number % 50 == 0:
            tree.check()
    history = tree._history
    assert len(history._ghosts) <= 500 // SMALLEST
    assert len(history._idle) <= 500 // SMALLEST
    assert tree.stats().programs == 5
    roots = [*tree._roots.values()]
    forks = [node.forks for root in roots for node in [root, *root.children.values()]]
    assert sum(len(each.at) for each in forks if each is not None) <= 500 // SMALLEST


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="history_tokens"):
        make(history_tokens=-1)


# --------------------------------------------------------------------------------------- integrity


def _unhooked(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    fork.branches.clear()


def _moved(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    fork.owner.at[99] = fork.owner.at.pop(fork.position)


def _beyond(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    del fork.owner.at[fork.position]
    fork.position = 99
    fork.owner.at[99] = fork


def _filed(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    ghost.tokens[0] = 77


def _cached(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    ghost.tokens[0] = 3
    fork.branches = {3: ghost}


def _counted(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    tree._history._weight += 1


def _forgotten(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    del tree._history._ghosts[ghost]


def _too_many(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    tree._history._limit = 1


def _stray(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    ghost.fork = Fork(fork.owner, 2)


def _alive(tree: RadixTree, ghost: Ghost, fork: Fork) -> None:
    tree._history._idle[""] = fork.owner


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (_unhooked, "there are none"),
        (_moved, "misfiled"),
        (_beyond, "off the edge"),
        (_filed, "one is misfiled"),
        (_cached, "one is cached"),
        (_counted, "count for"),
        (_forgotten, "too young|1 ghosts are counted"),
        (_too_many, "more than 1"),
        (_stray, "hangs from elsewhere"),
        (_alive, "live and idle"),
    ],
)
def test_corruption_is_named(
    corrupt: Callable[[RadixTree, Ghost, Fork], None], message: str
) -> None:
    pool, tree, clock = make()
    insert(pool, tree, [1, 2, 3, 4])
    insert(pool, tree, [1, 2, 5])
    clock.now = 1.0
    tree.release(tree.acquire([1, 2, 3, 4, 0]))
    tree.evict(1)
    tree.check()
    root = tree._roots[""]
    forks = root.children[1].forks
    assert forks is not None
    (fork,) = forks.at.values()
    (ghost,) = fork.branches.values()
    assert ghost.tokens == array("i", [5])
    corrupt(tree, ghost, fork)
    with pytest.raises(IntegrityError, match=message):
        tree.check()

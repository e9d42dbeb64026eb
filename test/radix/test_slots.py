"""The slot pool: counts, owners, and refusals that change nothing."""

from __future__ import annotations

import random

import pytest

from phloem.radix import IntegrityError, OutOfSlots, SlotError, SlotPool


def test_slot_0_is_never_handed_out() -> None:
    pool = SlotPool(5)
    assert pool.capacity == 4
    assert sorted(pool.allocate(4)) == [1, 2, 3, 4]
    assert pool.free == 0


def test_low_slots_come_first_and_freed_ones_come_back_in_order() -> None:
    pool = SlotPool(10)
    assert pool.allocate(3) == [1, 2, 3]
    taken = pool.allocate(4)
    pool.release(taken[1:3])
    assert pool.allocate(2) == taken[1:3]


def test_too_many_takes_nothing() -> None:
    pool = SlotPool(5)
    pool.allocate(2)
    with pytest.raises(OutOfSlots, match="3 asked for, 2 free") as caught:
        pool.allocate(3)
    assert (caught.value.asked, caught.value.free) == (3, 2)
    assert pool.free == 2
    assert pool.allocate(0) == []
    pool.check()


@pytest.mark.parametrize("size", [0, -3])
def test_a_pool_needs_its_padding_slot(size: int) -> None:
    with pytest.raises(ValueError, match="padding"):
        SlotPool(size)


def test_negative_allocation_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        SlotPool(4).allocate(-1)


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([1, 2, 1], "listed twice"),
        ([1, 5], "is free"),
        ([1, 3], "is the tree's"),
        ([1, 0], "padding slot"),
        ([1, 99], "outside the pool"),
        ([1, -1], "outside the pool"),
    ],
)
def test_release_of_what_is_not_the_callers_changes_nothing(wrong: list[int], reason: str) -> None:
    pool = SlotPool(8)
    assert pool.allocate(4) == [1, 2, 3, 4]
    pool.adopt([3])
    with pytest.raises(SlotError, match=reason):
        pool.release(wrong)
    pool.check()
    assert (pool.free, pool.private, pool.in_tree) == (3, 3, 1)
    pool.release([1, 2, 4])
    with pytest.raises(ValueError, match="slot 2 should be a request's but is free"):
        pool.release([2])


def test_adopted_slots_come_back_by_reclaim_only() -> None:
    pool = SlotPool(4)
    slots = pool.allocate(3)
    pool.adopt(slots)
    with pytest.raises(SlotError):
        pool.release(slots)
    with pytest.raises(SlotError):
        pool.adopt(slots)
    assert pool.owned_by_tree(slots[0])
    pool.reclaim(slots)
    assert not pool.owned_by_tree(slots[0])
    with pytest.raises(SlotError):
        pool.reclaim(slots)
    assert pool.free == 3


def test_random_histories_keep_one_owner_a_slot() -> None:
    rng = random.Random(7)
    pool = SlotPool(33)
    private: list[int] = []
    cached: list[int] = []
    for _ in range(3000):
        match rng.randrange(4):
            case 0:
                want = rng.randrange(8)
                if want <= pool.free:
                    private += pool.allocate(want)
                else:
                    with pytest.raises(OutOfSlots):
                        pool.allocate(want)
            case 1:
                rng.shuffle(private)
                cut = rng.randrange(len(private) + 1)
                pool.release(private[cut:])
                del private[cut:]
            case 2:
                cut = rng.randrange(len(private) + 1)
                pool.adopt(private[cut:])
                cached += private[cut:]
                del private[cut:]
            case _:
                cut = rng.randrange(len(cached) + 1)
                pool.reclaim(cached[cut:])
                del cached[cut:]
        pool.check()
        assert (pool.private, pool.in_tree) == (len(private), len(cached))
        assert pool.free + pool.private + pool.in_tree == pool.capacity
        assert len(set(private + cached)) == len(private) + len(cached)


def test_check_sees_a_free_list_that_disagrees() -> None:
    pool = SlotPool(4)
    pool._free.append(3)
    with pytest.raises(IntegrityError, match="twice"):
        pool.check()
    pool._free.pop()
    pool._free.remove(3)
    with pytest.raises(IntegrityError, match=r"\[3\]"):
        pool.check()
    pool = SlotPool(4)
    pool._in_tree = 1
    with pytest.raises(IntegrityError, match="counted"):
        pool.check()
    pool = SlotPool(4)
    pool._owner[0] = 1
    with pytest.raises(IntegrityError, match="padding"):
        pool.check()

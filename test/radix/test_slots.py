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


@pytest.mark.parametrize(
    ("size", "page"), [(0, 16), (8, 16), (40, 16), (-16, 16), (16, 0), (16, -1)]
)
def test_a_pool_has_whole_pages(size: int, page: int) -> None:
    with pytest.raises(ValueError, match="page"):
        SlotPool(size, page)


def test_pages_are_aligned_runs_of_slots() -> None:
    pool = SlotPool(16, 4)
    assert (pool.page_size, pool.capacity, pool.free) == (4, 12, 12)
    assert pool.allocate(8) == [4, 5, 6, 7, 8, 9, 10, 11]
    with pytest.raises(ValueError, match="6 slots in pages of 4"):
        pool.allocate(6)
    with pytest.raises(OutOfSlots, match="8 asked for, 4 free"):
        pool.allocate(8)
    pool.adopt([8, 9, 10, 11])
    assert (pool.free, pool.private, pool.in_tree) == (4, 4, 4)
    assert [pool.owned_by_tree(slot) for slot in (3, 7, 8, 11, 12, 16)] == [False] * 2 + [
        True
    ] * 2 + [False] * 2
    pool.release([4, 5, 6, 7])
    pool.reclaim([8, 9, 10, 11])
    pool.check()
    assert pool.free == 12


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([4, 5, 6], "whole pages"),
        ([5, 6, 7, 8], "whole pages"),
        ([4, 6, 5, 7], "whole pages"),
        ([4, 5, 6, 7, 8], "whole pages"),
        ([0, 1, 2, 3], "slot 0 should be a request's but is the padding slot"),
        ([4, 5, 6, 7, 8, 9, 10, 11], "slot 8 should be a request's but is the tree's"),
        ([4, 5, 6, 7, 12, 13, 14, 15], "slot 12 should be a request's but is free"),
        ([4, 5, 6, 7, 4, 5, 6, 7], "listed twice"),
        ([4, 5, 6, 7, 16, 17, 18, 19], "outside the pool"),
    ],
)
def test_slots_that_are_not_ones_own_whole_pages_are_refused(wrong: list[int], reason: str) -> None:
    pool = SlotPool(16, 4)
    pool.adopt(pool.allocate(8)[4:])
    for move in (pool.release, pool.adopt):
        with pytest.raises(SlotError, match=reason):
            move(wrong)
        pool.check()
        assert (pool.free, pool.private, pool.in_tree) == (4, 4, 4)


@pytest.mark.parametrize("page", [1, 4, 16])
def test_random_histories_keep_one_owner_a_slot(page: int) -> None:
    rng = random.Random(7)
    pool = SlotPool(33 * page, page)
    private: list[list[int]] = []  # pages
    cached: list[list[int]] = []

    def cut(pages: list[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Some pages off the end, and their slots."""
        at = rng.randrange(len(pages) + 1)
        taken = pages[at:]
        del pages[at:]
        return taken, [slot for slots in taken for slot in slots]

    for _ in range(3000):
        match rng.randrange(4):
            case 0:
                want = rng.randrange(8) * page
                if want <= pool.free:
                    slots = pool.allocate(want)
                    private += [slots[at : at + page] for at in range(0, want, page)]
                else:
                    with pytest.raises(OutOfSlots):
                        pool.allocate(want)
            case 1:
                rng.shuffle(private)
                pool.release(cut(private)[1])
            case 2:
                pages, slots = cut(private)
                pool.adopt(slots)
                cached += pages
            case _:
                pool.reclaim(cut(cached)[1])
        pool.check()
        assert (pool.private, pool.in_tree) == (len(private) * page, len(cached) * page)
        assert pool.free + pool.private + pool.in_tree == pool.capacity
        owned = [slot for slots in private + cached for slot in slots]
        assert len(set(owned)) == len(owned)


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

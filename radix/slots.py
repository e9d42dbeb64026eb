"""The free list of KV slots, and who owns each slot."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from phloem.radix.errors import IntegrityError, OutOfSlots, SlotError

_FREE, _PRIVATE, _TREE, _PADDING = range(4)
_OWNERS = ("free", "a request's", "the tree's", "the padding slot")


class SlotPool:
    """`size` slots of a KV pool in pages of `page_size`: page p is the slots from p * page_size to
    (p + 1) * page_size. Page 0 is reserved for padding rows and never handed out.

    Slots change hands in whole pages, each listed in order. A page has exactly one owner: it is
    free, or private to a request (`allocate`), or the tree's (`adopt`). One byte a page records
    which, so that a double free, a free of a cached slot and a slot inserted twice are refused on
    the spot (`SlotError`) instead of corrupting an answer later. Every method either does all of
    what it says or raises and changes nothing.
    """

    def __init__(self, size: int, page_size: int = 1) -> None:
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, not {page_size}")
        if size < page_size or size % page_size:
            what = "the padding slot" if page_size == 1 else f"the padding page, of {page_size}"
            rule = "at least 1" if page_size == 1 else "whole pages, at least one"
            raise ValueError(f"size must be {rule} ({what}), not {size}")
        pages = size // page_size
        self._page_size = page_size
        self._pages = pages
        self._owner = bytearray(pages)
        self._owner[0] = _PADDING
        # A stack: low and recently freed pages first. Packed, so a million slots are 4 MB.
        self._free = array("i", range(pages - 1, 0, -1))
        self._in_tree = 0  # pages

    @property
    def page_size(self) -> int:
        return self._page_size

    @property
    def capacity(self) -> int:
        """Usable slots, whoever owns them."""
        return (self._pages - 1) * self._page_size

    @property
    def free(self) -> int:
        return len(self._free) * self._page_size

    @property
    def in_tree(self) -> int:
        """Slots the tree owns."""
        return self._in_tree * self._page_size

    @property
    def private(self) -> int:
        """Slots handed out by `allocate` and neither released nor adopted by the tree yet."""
        return (self._pages - 1 - len(self._free) - self._in_tree) * self._page_size

    def allocate(self, n: int) -> list[int]:
        """Take `n` free slots, whole pages. Raises `OutOfSlots` when there are fewer, `ValueError`
        for a part of a page."""
        size = self._page_size
        if n < 0 or n % size:
            raise ValueError(f"cannot allocate {n} slots in pages of {size}")
        if n == 1 and self._free:  # what each decoding row takes
            page = self._free.pop()
            self._owner[page] = _PRIVATE
            return [page]
        keep = len(self._free) - n // size
        if keep < 0:
            raise OutOfSlots(n, self.free)
        taken = self._free[keep:]
        del self._free[keep:]
        taken.reverse()
        owner = self._owner
        for page in taken:
            owner[page] = _PRIVATE
        return taken.tolist() if size == 1 else _slots_of(taken, size).tolist()

    def release(self, slots: Sequence[int]) -> None:
        """Give back slots from `allocate`. Raises `SlotError` for any that are not the caller's."""
        pages = self._move(slots, _PRIVATE, _FREE)
        self._free.extend(reversed(pages))

    def adopt(self, slots: Sequence[int]) -> None:
        """The tree takes over a request's slots. Raises `SlotError` unless all are private."""
        self._in_tree += len(self._move(slots, _PRIVATE, _TREE))

    def reclaim(self, slots: Sequence[int]) -> None:
        """Free slots that the tree evicted. Raises `SlotError` unless all are the tree's."""
        pages = self._move(slots, _TREE, _FREE)
        self._in_tree -= len(pages)
        self._free.extend(reversed(pages))

    def _move(self, slots: Sequence[int], source: int, target: int) -> Sequence[int]:
        """Change the owner of whole pages; returns their numbers."""
        pages = slots if self._page_size == 1 else self._whole_pages(slots)
        owner, count = self._owner, self._pages
        for index, page in enumerate(pages):
            if not 0 <= page < count or owner[page] != source:
                found = _OWNERS[owner[page]] if 0 <= page < count else "outside the pool"
                if page in pages[:index]:
                    found = "listed twice"
                for moved in pages[:index]:
                    owner[moved] = source
                slot = page * self._page_size
                raise SlotError(f"slot {slot} should be {_OWNERS[source]} but is {found}")
            owner[page] = target
        return pages

    def _whole_pages(self, slots: Sequence[int]) -> array[int]:
        """The pages that `slots` are. Raises `SlotError` unless they are whole pages in order."""
        size = self._page_size
        pages = array("i", [slot // size for slot in slots[::size]])
        if _slots_of(pages, size) != array("i", slots):
            raise SlotError(f"{len(slots)} slots are not whole pages of {size} in order")
        return pages

    def check(self) -> None:
        """Raise `IntegrityError` unless the free list and the owners agree."""
        listed = set(self._free)
        if len(listed) != len(self._free):
            raise IntegrityError("a slot is in the free list twice")
        flagged = {page for page, owner in enumerate(self._owner) if owner == _FREE}
        if listed != flagged:
            slots = [page * self._page_size for page in sorted(listed ^ flagged)]
            raise IntegrityError(f"free list and owners differ in slots {slots}")
        if self._owner.count(_TREE) != self._in_tree:
            raise IntegrityError(
                f"{self._owner.count(_TREE)} slots are the tree's but {self._in_tree} are counted"
            )
        if self._owner[0] != _PADDING:
            raise IntegrityError("the padding slot has an owner")

    def owned_by_tree(self, slot: int) -> bool:
        return 0 < slot < self._pages * self._page_size and (
            self._owner[slot // self._page_size] == _TREE
        )


def _slots_of(pages: array[int], size: int) -> array[int]:
    """The slots of `pages`, in order."""
    slots = array("i")
    for page in pages:
        slots.extend(range(page * size, (page + 1) * size))
    return slots

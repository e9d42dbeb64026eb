"""The free list of KV slots, and who owns each slot."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from phloem.radix.errors import IntegrityError, OutOfSlots, SlotError

_FREE, _PRIVATE, _TREE, _PADDING = range(4)
_OWNERS = ("free", "a request's", "the tree's", "the padding slot")


class SlotPool:
    """Slots 1..size-1 of a KV pool; slot 0 is reserved for padding rows and never handed out.

    A slot has exactly one owner: it is free, or private to a request (`allocate`), or the tree's
    (`adopt`). One byte a slot records which, so that a double free, a free of a cached slot and a
    slot inserted twice are refused on the spot (`SlotError`) instead of corrupting an answer later.
    Every method either does all of what it says or raises and changes nothing.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size must be at least 1 (the padding slot), not {size}")
        self._size = size
        self._owner = bytearray(size)
        self._owner[0] = _PADDING
        # A stack: low and recently freed slots first. Packed, so a million slots are 4 MB.
        self._free = array("i", range(size - 1, 0, -1))
        self._in_tree = 0

    @property
    def capacity(self) -> int:
        """Usable slots, whoever owns them."""
        return self._size - 1

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def in_tree(self) -> int:
        """Slots the tree owns."""
        return self._in_tree

    @property
    def private(self) -> int:
        """Slots handed out by `allocate` and neither released nor adopted by the tree yet."""
        return self._size - 1 - len(self._free) - self._in_tree

    def allocate(self, n: int) -> list[int]:
        """Take `n` free slots. Raises `OutOfSlots` when there are fewer."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} slots")
        keep = len(self._free) - n
        if keep < 0:
            raise OutOfSlots(n, len(self._free))
        taken = self._free[keep:]
        del self._free[keep:]
        taken.reverse()
        owner = self._owner
        for slot in taken:
            owner[slot] = _PRIVATE
        return taken.tolist()

    def release(self, slots: Sequence[int]) -> None:
        """Give back slots from `allocate`. Raises `SlotError` for any that are not the caller's."""
        self._move(slots, _PRIVATE, _FREE)
        self._free.extend(reversed(slots))

    def adopt(self, slots: Sequence[int]) -> None:
        """The tree takes over a request's slots. Raises `SlotError` unless all are private."""
        self._move(slots, _PRIVATE, _TREE)
        self._in_tree += len(slots)

    def reclaim(self, slots: Sequence[int]) -> None:
        """Free slots that the tree evicted. Raises `SlotError` unless all are the tree's."""
        self._move(slots, _TREE, _FREE)
        self._in_tree -= len(slots)
        self._free.extend(reversed(slots))

    def _move(self, slots: Sequence[int], source: int, target: int) -> None:
        owner, size = self._owner, self._size
        for index, slot in enumerate(slots):
            if not 0 <= slot < size or owner[slot] != source:
                found = _OWNERS[owner[slot]] if 0 <= slot < size else "outside the pool"
                if slot in slots[:index]:
                    found = "listed twice"
                for moved in slots[:index]:
                    owner[moved] = source
                raise SlotError(f"slot {slot} should be {_OWNERS[source]} but is {found}")
            owner[slot] = target

    def check(self) -> None:
        """Raise `IntegrityError` unless the free list and the owners agree."""
        listed = set(self._free)
        if len(listed) != len(self._free):
            raise IntegrityError("a slot is in the free list twice")
        flagged = {slot for slot, owner in enumerate(self._owner) if owner == _FREE}
        if listed != flagged:
            raise IntegrityError(f"free list and owners differ in slots {sorted(listed ^ flagged)}")
        if self._owner.count(_TREE) != self._in_tree:
            raise IntegrityError(
                f"{self._owner.count(_TREE)} slots are the tree's but {self._in_tree} are counted"
            )
        if self._owner[0] != _PADDING:
            raise IntegrityError("the padding slot has an owner")

    def owned_by_tree(self, slot: int) -> bool:
        return 0 < slot < self._size and self._owner[slot] == _TREE

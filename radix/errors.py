"""Errors of the radix tree. All of them mean a bug or a full pool, never a client's fault.

RadixError
├── OutOfSlots      the pool has fewer free slots than asked for; evict or preempt first
├── SlotError       a slot was freed twice, is not the caller's, or does not exist (ValueError)
├── LeaseError      a lease was used after its release, or with another tree
└── IntegrityError  an invariant is broken (AssertionError); only `check` raises it
"""

from __future__ import annotations


class RadixError(Exception):
    """Base of everything this package raises on its own account."""


class OutOfSlots(RadixError):
    """`asked` slots were wanted and only `free` are free. Nothing was taken."""

    def __init__(self, asked: int, free: int) -> None:
        super().__init__(f"out of KV slots: {asked} asked for, {free} free")
        self.asked = asked
        self.free = free


class SlotError(RadixError, ValueError):
    """A slot is not owned by whom the caller thinks. Nothing was changed."""


class LeaseError(RadixError):
    """The lease is released already, or belongs to another tree."""


class IntegrityError(RadixError, AssertionError):
    """The tree or the pool contradicts itself; the message says where."""

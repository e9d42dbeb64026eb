"""Messages between the scheduler and a tier: a thread of the worker's process that moves KV blocks
between the pool and a disk, off the step path."""

from __future__ import annotations

from phloem.srt.wire import Wire


class KvSave(Wire, frozen=True, tag="save"):
    """Write these blocks of KV. Block i is that of `keys[i]`: the slots (packed) from
    `i * block_tokens` on. The slots stay as they are until `KvSaved`. Blocks the tier has already
    are left out by the sender."""

    order: int
    keys: list[bytes]
    slots: bytes


class KvLoad(Wire, frozen=True, tag="load"):
    """Read the blocks of `keys` into `slots` (packed), which are the sender's for this alone.
    Answered with `KvLoaded`."""

    order: int
    keys: list[bytes]
    slots: bytes


class StopTier(Wire, frozen=True, tag="stop"):
    """Write what was ordered, then leave."""


ToTier = KvSave | KvLoad | StopTier


class TierReady(Wire, frozen=True, tag="tier_ready"):
    """`keys` of the blocks that are there, oldest first, joined. A tier says so once, first."""

    block_tokens: int
    block_bytes: int
    limit_bytes: int
    key_bytes: int
    keys: bytes


class TierOff(Wire, frozen=True, tag="tier_off"):
    """There is no tier, or none any more, and why. Nothing that was ordered is answered."""

    reason: str


class KvSaved(Wire, frozen=True, tag="saved"):
    """`error` set: nothing of the order is stored from block `stored` on."""

    order: int
    stored: int
    error: str | None = None


class KvLoaded(Wire, frozen=True, tag="loaded"):
    """The first `good` blocks are in their slots; `corrupt` blocks were found damaged and are
    forgotten."""

    order: int
    good: int
    corrupt: list[bytes] = []


class KvDropped(Wire, frozen=True, tag="dropped"):
    """These blocks gave way to newer ones, or turned out to be damaged."""

    keys: list[bytes]


FromTier = TierReady | TierOff | KvSaved | KvLoaded | KvDropped

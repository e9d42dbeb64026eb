"""What the scheduler knows of the tier below the pool, and what it asks of it.

    tree ──keep──▶ KvSave ──▶ tier       a request left: its blocks are written, under its lease
    tree ◀─extend── KvLoaded ◀── tier    a waiting request's blocks come into slots of their own

The tier is a thread of the worker's process. All it has is named by content
(`phloem.srt.tier.chain`), so knowing the set of keys is knowing what a prompt can get back.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phloem.radix import Lease, OutOfSlots, RadixTree, SlotPool
from phloem.srt.questions import TierUse
from phloem.srt.scheduler.request import Request
from phloem.srt.tier.chain import block_keys
from phloem.srt.tier_messages import (
    FromTier,
    KvDropped,
    KvLoad,
    KvLoaded,
    KvSave,
    KvSaved,
    TierOff,
    TierReady,
    ToTier,
)
from phloem.srt.wire import pack

log = logging.getLogger(__name__)

MAX_RESTORES = 2
"""Times that blocks are fetched for one request: what is evicted again at once is computed."""

SAVING_SHARE = 8
"""One in so many slots may be held for being written; what is beyond that is not kept."""


@dataclass
class _Load:
    request: Request
    lease: Lease
    tokens: array[int]  # of the blocks
    slots: list[int]
    skip: int  # leading tokens of the first block that the lease covers already
    keys: list[bytes]


@dataclass
class _Save:
    lease: Lease
    keys: list[bytes]


class LowerTier:
    """One tier. `allocate` gives slots, evicting if need be; the rest goes through `tree`."""

    def __init__(
        self,
        tree: RadixTree,
        pool: SlotPool,
        allocate: Callable[[int, str], list[int]],
    ) -> None:
        self.outbox: list[ToTier] = []
        self._tree = tree
        self._pool = pool
        self._allocate = allocate
        self._ready: TierReady | None = None
        self._stored: dict[bytes, None] = {}
        self._loads: dict[int, _Load] = {}
        self._loading: set[bytes] = set()
        self._saves: dict[int, _Save] = {}
        self._saving: set[bytes] = set()
        self._next_order = 0
        self._saved = self._loaded = self._dropped = self._corrupt = 0

    @property
    def loading_slots(self) -> int:
        """Slots that wait for blocks on their way up."""
        return sum(len(load.slots) for load in self._loads.values())

    @property
    def _saving_tokens(self) -> int:
        """Tokens held while they are written."""
        return sum(save.lease.length for save in self._saves.values())

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return not self._loads and not self._saves

    def receive(self, message: FromTier) -> None:
        match message:
            case TierReady():
                self._ready = message
                size = message.key_bytes
                self._stored = dict.fromkeys(
                    message.keys[i : i + size] for i in range(0, len(message.keys), size)
                )
            case KvSaved():
                self._is_saved(message)
            case KvLoaded():
                self._is_loaded(message)
            case KvDropped(keys):
                for key in keys:
                    self._stored.pop(key, None)
            case TierOff(reason):
                self._is_off(reason)

    def _is_off(self, reason: str) -> None:
        """There is no tier any more: what was ordered has failed."""
        log.warning("KV is kept in memory only: %s", reason)
        for order in list(self._loads):
            self._is_loaded(KvLoaded(order, 0))
        for order in list(self._saves):
            self._is_saved(KvSaved(order, 0))
        self._ready = None
        self._stored.clear()

    def use(self) -> TierUse | None:
        if self._ready is None:
            return None
        return TierUse(
            tier="disk",
            block_tokens=self._ready.block_tokens,
            blocks=len(self._stored),
            bytes=len(self._stored) * self._ready.block_bytes,
            limit_bytes=self._ready.limit_bytes,
            saved_tokens_total=self._saved,
            loaded_tokens_total=self._loaded,
            dropped_tokens_total=self._dropped,
            corrupt_blocks_total=self._corrupt,
        )

    # ------------------------------------------------------------------ up

    def restorable(self, request: Request, cached: int) -> int | None:
        """Tokens that the tier has after the first `cached`; None while some are on their way."""
        if request.restoring:
            return None
        if self._ready is None or not self._stored or request.restores >= MAX_RESTORES:
            return 0
        size = self._ready.block_tokens
        if request.block_keys is None:
            limit = request.match_limit // size
            request.block_keys = block_keys(request.tokens, request.namespace, size, limit)
        last = self._last_stored(request.block_keys, cached // size)
        if any(key in self._loading for key in request.block_keys[cached // size : last + 1]):
            return None
        return max(0, last * size - cached)

    def _last_stored(self, keys: Sequence[bytes], first: int) -> int:
        """The end of the blocks from `first` on that the tier has without a gap."""
        while first < len(keys) and keys[first] in self._stored:
            first += 1
        return first

    def peek(self, tokens: array[int], namespace: str, cached: int) -> int:
        """As `restorable`, for any prompt, whatever is on its way."""
        if self._ready is None:
            return 0
        size = self._ready.block_tokens
        last = self._last_stored(block_keys(tokens, namespace, size), cached // size)
        return max(0, min(last * size, len(tokens) - 1) - cached)

    def restore(self, request: Request) -> None:
        """Fetch what `restorable` counted. Does nothing when the pool has no room after all."""
        assert self._ready is not None
        size = self._ready.block_tokens
        lease = self._tree.acquire(request.tokens, request.namespace, request.match_limit)
        count = self.restorable(request, lease.length)
        if not count:
            self._tree.release(lease)
            return
        first = lease.length // size
        last = (lease.length + count) // size
        try:
            slots = self._allocate((last - first) * size, request.rid)
        except OutOfSlots:
            self._tree.release(lease)
            return
        assert request.block_keys is not None
        keys = request.block_keys[first:last]
        request.restoring = True
        request.restores += 1
        self._loading.update(keys)
        self._loads[self._next_order] = _Load(
            request,
            lease,
            request.tokens[first * size : last * size],
            slots,
            lease.length - first * size,
            keys,
        )
        self._order(KvLoad(self._next_order, keys, pack(slots)))

    def _is_loaded(self, message: KvLoaded) -> None:
        load = self._loads.pop(message.order)
        assert self._ready is not None
        load.request.restoring = False
        self._loading.difference_update(load.keys)
        for key in message.corrupt:
            self._stored.pop(key, None)
        self._corrupt += len(message.corrupt)
        end = message.good * self._ready.block_tokens
        start = min(load.skip, end)
        tokens, slots = load.tokens[start:end], load.slots[start:end]
        duplicates = self._tree.extend(load.lease, tokens, slots)
        self._loaded += len(tokens) - duplicates
        self._pool.release(load.slots[:start] + slots[:duplicates] + load.slots[end:])
        self._tree.release(load.lease)

    # ------------------------------------------------------------------ down

    def keep(self, lease: Lease) -> None:
        """Take over the lease of a request that left: blocks of its path that the tier lacks are
        written while a lease holds them, as many from the front as may be held at once."""
        if self._ready is None:
            self._tree.release(lease)
            return
        size = self._ready.block_tokens
        tokens = lease.tokens()
        keys = block_keys(tokens, lease.namespace, size)
        missing = [i for i, k in enumerate(keys) if k not in self._stored and k not in self._saving]
        room = (self._pool.capacity // SAVING_SHARE - self._saving_tokens) // size
        chosen = [i for i in missing if i < room]
        self._dropped += (len(missing) - len(chosen)) * size
        if not chosen:
            self._tree.release(lease)
            return
        end = (chosen[-1] + 1) * size
        if end < lease.length:
            shorter = self._tree.acquire(tokens, lease.namespace, end)
            self._tree.release(lease)
            lease = shorter
        path = lease.slots()
        slots = [slot for i in chosen for slot in path[i * size : (i + 1) * size]]
        names = [keys[i] for i in chosen]
        self._saving.update(names)
        self._saves[self._next_order] = _Save(lease, names)
        self._order(KvSave(self._next_order, names, pack(slots)))

    def _is_saved(self, message: KvSaved) -> None:
        save = self._saves.pop(message.order)
        assert self._ready is not None
        self._saving.difference_update(save.keys)
        self._stored.update(dict.fromkeys(save.keys[: message.stored]))
        self._saved += message.stored * self._ready.block_tokens
        self._dropped += (len(save.keys) - message.stored) * self._ready.block_tokens
        self._tree.release(save.lease)

    def _order(self, message: KvSave | KvLoad) -> None:
        self._next_order += 1
        self.outbox.append(message)

"""Carries out the scheduler's orders: KV of whole blocks from the pool to the store and back.

Requests wait for loads, nobody waits for saves. So loads go first, held up by one block's writing
at most, and between a block that was saved and the next one there is a rest, which leaves the cores
to the threads that compute. Every order gets its one answer, whatever fails.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phloem.srt.models.base import KvAccess
from phloem.srt.tier.chain import BLOCK_TOKENS
from phloem.srt.tier.errors import DamagedBlock
from phloem.srt.tier.store import DiskStore
from phloem.srt.tier_messages import FromTier, KvDropped, KvLoad, KvLoaded, KvSave, KvSaved

log = logging.getLogger(__name__)

COMMIT_BLOCKS = 64
"""Blocks saved, without a pause in between, before the index is written."""

REST = 4.0
"""How long to rest after a block that was saved, in times of what that took."""
MOST_REST_SECONDS = 0.05

WARNING_SECONDS = 60.0
"""Shortest time between two warnings that saving fails."""


@dataclass
class _Save:
    order: KvSave
    done: int = 0


class Mover:
    """Between `store` and `kv`; answers go to `send`. `clock` counts seconds."""

    def __init__(
        self,
        store: DiskStore,
        kv: KvAccess,
        send: Callable[[FromTier], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._kv = kv
        self._send = send
        self._clock = clock
        self._block = np.empty(BLOCK_TOKENS * kv.kv_slot_bytes, np.uint8)
        self._bytes = self._block.data
        self._loads: deque[KvLoad] = deque()
        self._saves: deque[_Save] = deque()
        self._warned: float | None = None
        self._rested_at = 0.0

    @property
    def idle(self) -> bool:
        """Nothing is ordered that was not done."""
        return not self._loads and not self._saves

    def take(self, order: KvLoad | KvSave) -> None:
        """Have an order done by later steps."""
        if isinstance(order, KvLoad):
            self._loads.append(order)
        else:
            self._saves.append(_Save(order))

    def wait_seconds(self) -> float:
        """When the next step has something to do, if there is something ordered."""
        return 0.0 if self._loads else max(0.0, self._rested_at - self._clock())

    def step(self, *, hurry: bool = False) -> None:
        """Do one load, or else, when it is time or there is a `hurry`, one block of a save. Never
        raises."""
        if self._loads:
            self._load(self._loads.popleft())
        elif self._saves and (hurry or not self.wait_seconds()):
            began = self._clock()
            self._save(self._saves[0])
            now = self._clock()
            self._rested_at = now + min(REST * (now - began), MOST_REST_SECONDS)

    def _load(self, order: KvLoad) -> None:
        good, corrupt = 0, []
        try:
            slots = _by_block(order)
            for key in order.keys:
                self._store.expect(key)
            for key, own in zip(order.keys, slots, strict=True):
                if not self._store.get(key, self._bytes):
                    break
                self._kv.write_kv(own, self._block)
                good += 1
        except DamagedBlock:
            corrupt.append(order.keys[good])
        except Exception:
            log.exception("KV that was wanted from the disk is computed instead")
        self._send(KvLoaded(order.order, good, corrupt))
        self._after_order()

    def _save(self, save: _Save) -> None:
        order = save.order
        try:
            if save.done < len(order.keys):
                self._save_block(order, save.done)
                save.done += 1
            if save.done < len(order.keys):
                return
            error = None
        except Exception as problem:
            error = str(problem) or type(problem).__name__
            self._warn(f"KV cannot be written to the disk: {error}")
        self._saves.popleft()
        self._send(KvSaved(order.order, save.done, error))
        self._after_order()

    def _save_block(self, order: KvSave, index: int) -> None:
        key = order.keys[index]
        if key not in self._store:
            self._kv.read_kv(_by_block(order)[index], self._block)
        self._store.put(key, self._bytes)

    def _after_order(self) -> None:
        """Write the index when there is time or much to write, and tell which blocks went. Not
        while a save is half done: its own blocks may be among them, and must not be told gone
        before they are told stored."""
        if self.idle or self._store.uncommitted >= COMMIT_BLOCKS:
            try:
                self._store.commit()
            except OSError as error:
                self._warn(str(error))
        if not self._saves or not self._saves[0].done:
            gone = self._store.take_gone()
            if gone:
                self._send(KvDropped(gone))

    def _warn(self, message: str) -> None:
        now = self._clock()
        if self._warned is None or now - self._warned >= WARNING_SECONDS:
            self._warned = now
            log.warning("%s", message)


def _by_block(order: KvLoad | KvSave) -> NDArray[np.int32]:
    """Slots [blocks, BLOCK_TOKENS]. Raises `ValueError` for another number."""
    return np.frombuffer(order.slots, np.int32).reshape(len(order.keys), BLOCK_TOKENS)

"""A worker's KV, as far as a replay can check it: which token, at which place, lies in which slot.

A label stands for the whole sequence up to it, so a slot that holds another's label holds another's
KV: freed too early, shared wrongly, or never computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phloem.srt.messages import RowPlan, StepPlan, StepResult
from phloem.srt.scheduler.plan import Work
from phloem.srt.tier.chain import block_keys
from phloem.srt.tier_messages import (
    FromTier,
    KvLoad,
    KvLoaded,
    KvSave,
    KvSaved,
    TierOff,
    TierReady,
    ToTier,
)

Entries = NDArray[np.int64]
_NOTHING = -1


class KvViolation(AssertionError):
    """A real worker would have read or kept wrong KV."""


@dataclass
class _Row:
    """`drafted` are slots of a draft in the step under way."""

    epoch: int
    slots: NDArray[np.int32]
    drafted: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))


def _slots(packed: bytes) -> NDArray[np.int32]:
    return np.frombuffer(packed, np.int32)


def _entries(tokens: array[int], start: int, end: int) -> Entries:
    """What the slots of tokens [start, end) hold."""
    places = np.arange(start, end, dtype=np.int64) << 32
    return places | np.frombuffer(tokens[start:end], np.int32)


class KvCheck:
    """The slots of a pool of `size`, whose first `page_size` are padding, and of a lower tier."""

    def __init__(self, size: int, page_size: int) -> None:
        self._held: Entries = np.full(size, _NOTHING, np.int64)
        self._page_size = page_size
        self._rows: dict[int, _Row] = {}
        self._written: NDArray[np.int32] = np.zeros(0, np.int32)
        self._block_tokens = 0
        self._blocks: dict[bytes, Entries] = {}
        self._orders: dict[int, KvSave | KvLoad] = {}

    # ------------------------------------------------------------------ steps

    def step(self, plan: StepPlan, works: Sequence[Work]) -> None:
        """Compute a step: all rows write, then all read. Raises `KvViolation`."""
        rows = [self._write(row, work) for row, work in zip(plan.rows, works, strict=True)]
        self._written = np.concatenate([_slots(row.slots) for row in plan.rows])
        if len(np.unique(self._written)) != len(self._written):
            raise KvViolation("a slot is written twice in one step")
        for row, work in zip(rows, works, strict=True):
            wrong = self._held[row.slots] != _entries(work.request.tokens, 0, work.end)
            if wrong.any():
                place = int(np.argmax(wrong))
                raise KvViolation(
                    f"slot {row.slots[place]} does not hold token {place} of request "
                    f"{work.request.rid}"
                )

    def _write(self, plan: RowPlan, work: Work) -> _Row:
        if plan.start is not None:
            self._rows[plan.row] = _Row(plan.epoch, _slots(plan.start.prefix_slots))
        row = self._rows.get(plan.row)
        if row is None or row.epoch != plan.epoch or len(row.slots) != work.start:
            raise KvViolation(f"row {plan.row} is not at token {work.start} of epoch {plan.epoch}")
        slots, tokens = _slots(plan.slots), work.request.tokens[work.start : work.end]
        self._in_pool(slots)
        slots, row.drafted = np.split(slots, [len(slots) - plan.drafted])
        self._held[row.drafted] = _NOTHING  # what is guessed is nobody's
        if len(slots) != work.count or (
            (plan.tokens or work.count != 1) and (plan.tokens != tokens.tobytes())
        ):
            raise KvViolation(f"row {plan.row} has other tokens than its request")
        self._held[slots] = _entries(work.request.tokens, work.start, work.end)
        row.slots = np.concatenate([row.slots, slots])
        return row

    def _in_pool(self, slots: NDArray[np.int32]) -> None:
        if len(slots) and not self._page_size <= slots.min() <= slots.max() < len(self._held):
            raise KvViolation("a slot is outside the pool")

    def drew(self, plan: StepPlan, works: Sequence[Work], result: StepResult) -> None:
        """The step has come back: of each draft, what was accepted is the row's."""
        for row_plan, work, row_result in zip(plan.rows, works, result.rows, strict=False):
            row = self._rows[row_plan.row]
            kept = row.drafted[: row_result.accepted]
            tokens = work.request.tokens
            if len(kept) and work.end + len(kept) <= len(tokens):  # not of one that was aborted
                self._held[kept] = _entries(tokens, work.end, work.end + len(kept))
                row.slots = np.concatenate([row.slots, kept])
            row.drafted = row.drafted[:0]

    def failed(self) -> None:
        """The step computed nothing."""
        self._held[self._written] = _NOTHING

    # ------------------------------------------------------------------ the lower tier

    def ordered(self, order: ToTier, alive: Iterable[tuple[array[int], str]]) -> None:
        """The scheduler orders blocks to be written or read. `alive` are the tokens of its
        requests, and their namespaces."""
        if isinstance(order, KvSave):
            self._orders[order.order] = order
            for key, entries in self._blocks_of(order):
                self._blocks[key] = entries
        elif isinstance(order, KvLoad):
            self._orders[order.order] = order
            self._in_pool(_slots(order.slots))
            if any(key not in self._blocks for key in order.keys):
                self._remember(alive)  # blocks of an earlier run

    def _blocks_of(self, order: KvSave) -> list[tuple[bytes, Entries]]:
        slots = _slots(order.slots).reshape(len(order.keys), self._block_tokens)
        return [(key, self._held[block]) for key, block in zip(order.keys, slots, strict=True)]

    def _remember(self, alive: Iterable[tuple[array[int], str]]) -> None:
        size = self._block_tokens
        for tokens, namespace in alive:
            for index, key in enumerate(block_keys(tokens, namespace, size)):
                entries = _entries(tokens, index * size, (index + 1) * size)
                self._blocks.setdefault(key, entries)

    def tier(self, message: FromTier) -> None:
        """Do what the tier says it did. Raises `KvViolation`."""
        match message:
            case TierReady():
                self._block_tokens = message.block_tokens
            case KvSaved(order):
                save = self._orders.pop(order, None)
                if isinstance(save, KvSave):
                    for key, entries in self._blocks_of(save):
                        if (entries != self._blocks[key]).any():
                            raise KvViolation("slots changed while they were being written")
            case KvLoaded(order, good):
                load = self._orders.pop(order, None)
                if isinstance(load, KvLoad):
                    slots = _slots(load.slots).reshape(len(load.keys), self._block_tokens)
                    self._held[slots] = _NOTHING
                    for key, block in zip(load.keys[:good], slots[:good], strict=True):
                        self._held[block] = self._blocks.get(key, _NOTHING)
            case TierOff():
                self._orders.clear()
                self._blocks.clear()
            case _:
                return

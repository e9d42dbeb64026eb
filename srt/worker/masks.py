"""Vocabulary masks at the worker: waiting until a step's masks are there, and applying one."""

from __future__ import annotations

import time
from collections.abc import Set
from typing import NamedTuple, Never

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.bitmask import unpack_mask
from phloem.srt.ipc import Channel
from phloem.srt.messages import StepMasks


def _byte_penalties() -> NDArray[np.float32]:
    """[256, 8]: for each byte of a mask, what to add to the logits of its eight tokens."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return np.where(bits == 1, np.float32(0), np.float32(-np.inf))


FEW_WORDS = 64
"""Of a mask, with legal tokens, up to which these are looked at one by one."""
_PENALTIES = _byte_penalties()


def apply_mask(logits: NDArray[np.float32], mask: NDArray[np.int32]) -> NDArray[np.float32]:
    """A copy of `logits` [vocab] with -inf where `mask` [ceil(vocab / 32)] has no bit: token t is
    legal when bit t % 32 of word t // 32 is set. A table of bytes is seven times faster than
    unpacking to booleans."""
    data = np.ascontiguousarray(mask, dtype="<i4").view(np.uint8)
    masked: NDArray[np.float32] = _PENALTIES.take(data, axis=0).ravel()[: len(logits)]
    masked += logits
    return masked


def is_legal(mask: NDArray[np.int32], token: int) -> bool:
    """Whether `mask` [ceil(vocab / 32)] has the bit of `token`."""
    return bool(int(mask[token >> 5]) >> (token & 31) & 1)


def best_of_few(logits: NDArray[np.float32], mask: NDArray[np.int32]) -> int | None:
    """The legal token with the best logit, the lowest among equals; None if there are none, or so
    many that `apply_mask` is as fast."""
    words = np.flatnonzero(mask)
    if len(words) > FEW_WORDS:
        return None
    found, bit = np.nonzero(unpack_mask(mask[words], 32 * len(words)).reshape(-1, 32))
    ids = words[found] * 32 + bit
    ids = ids[ids < len(logits)]
    return int(ids[logits[ids].argmax()]) if len(ids) else None


class NoMask(NamedTuple):
    """Why a row has no mask; `fault` is the code of what its constraint is at fault for."""

    reason: str
    fault: str = ""


class Masks(NamedTuple):
    """Mask rows of one step: the ready ones, and for every other one why it has no mask. Masks of
    the ready ones in `closing` lack tokens for which the budget is too short."""

    ready: frozenset[int]
    failed: dict[int, NoMask]
    closing: frozenset[int]


def _failed(message: StepMasks) -> dict[int, NoMask]:
    return {
        row: NoMask(reason, message.faults.get(row, "")) for row, reason in message.failed.items()
    }


class MaskInbox:
    """Takes the grammar process's `StepMasks` and gives, for one step, the rows it speaks of.

    The masks of a step may come in several messages. Those of steps gone by are dropped, those of
    a later step are kept: the grammar process may be ahead of the forward pass.
    """

    def __init__(self, channel: Channel[Never, StepMasks]) -> None:
        self._channel = channel
        self._early: dict[int, list[StepMasks]] = {}

    def wait(self, step_id: int, rows: Set[int], timeout_s: float) -> Masks:
        """Block until each of `rows` (mask rows of step `step_id`) is ready or has failed."""
        ready: set[int] = set()
        failed: dict[int, NoMask] = {}
        closing: set[int] = set()
        deadline = time.monotonic() + timeout_s
        for early in self._early.pop(step_id, ()):
            ready.update(early.rows)
            failed |= _failed(early)
            closing.update(early.closing)
        while not rows <= ready | failed.keys():
            message = self._channel.recv(max(0, int((deadline - time.monotonic()) * 1000)))
            if message is None:
                break
            if message.step_id == step_id:
                ready.update(message.rows)
                failed |= _failed(message)
                closing.update(message.closing)
            elif message.step_id > step_id:
                self._early.setdefault(message.step_id, []).append(message)
        self._early = {step: kept for step, kept in self._early.items() if step > step_id}
        ready -= failed.keys()
        late = NoMask(f"no mask came from the grammar process within {timeout_s:g} s")
        lacking = {row: failed.get(row, late) for row in rows - ready}
        return Masks(frozenset(ready & rows), lacking, frozenset(closing & rows))

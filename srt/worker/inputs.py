"""A step plan's rows → what the model computes on.

The plan carries only what is new; `RowTable` remembers the rest: each row's KV slots, its length,
its last sampled token. A step of many rows that decode one token each is the common case, so
whatever can be done for all rows in one operation is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phloem.srt.attention.batch import AttentionBatch
from phloem.srt.messages import RowPlan, RowStart, StepPlan
from phloem.srt.wire import pack
from phloem.srt.worker.pooling import Pool

INT32 = np.dtype("<i4")
INT32_BYTES = 4


class PlanError(ValueError):
    """A plan that contradicts itself or what the worker knows; the message names the row."""


@dataclass
class RowState:
    """One admission of one request.

    `length` counts tokens that have a KV slot here. `carry` [1, hidden] is the hidden state of the
    last token computed, kept while the next prompt token's logprob is to be read from it.
    `top_logprobs` and `logprob_token_ids` are reported with each of these. `pool` gathers what the
    prompt's embedding is made of.
    """

    epoch: int
    length: int
    prompt_len: int
    prompt_logprobs_from: int | None
    top_logprobs: int
    logprob_token_ids: tuple[int, ...] = ()
    last_token: int | None = None
    carry: NDArray[np.float32] | None = None
    pool: Pool | None = None

    @staticmethod
    def of(epoch: int, start: RowStart) -> RowState:
        sampling = start.sampling
        top = sampling.logprobs if sampling.prompt_logprobs is None else sampling.prompt_logprobs
        return RowState(
            epoch=epoch,
            length=len(start.prefix_slots) // INT32_BYTES,
            prompt_len=start.prompt_len,
            prompt_logprobs_from=start.prompt_logprobs_from,
            top_logprobs=top or 0,
            logprob_token_ids=sampling.logprob_token_ids,
            pool=None if start.embed is None else Pool(start.embed),
        )


class Span(NamedTuple):
    """`row`'s part of a step: `size` tokens at positions `start`… of its sequence, and at
    `offset`… among the step's tokens."""

    row: int
    state: RowState
    start: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        """Length of the sequence after the step."""
        return self.start + self.size

    @property
    def stop(self) -> int:
        """End among the step's tokens."""
        return self.offset + self.size


@dataclass(frozen=True)
class StepInputs:
    """Rows of a plan, in its order: token_ids and positions [n]."""

    spans: list[Span]
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int32]
    batch: AttentionBatch


class RowTable:
    """What the worker knows of every row: a slot table `[max_rows, context_length]`, and states."""

    def __init__(
        self, max_rows: int, context_length: int, *, kv_slots: int, vocab_size: int
    ) -> None:
        self._slots = np.zeros((max_rows, context_length), np.int32)
        self._states: list[RowState | None] = [None] * max_rows
        self._kv_slots = kv_slots
        self._vocab_size = vocab_size

    def state(self, row: int) -> RowState:
        state = self._states[row]
        if state is None:
            raise PlanError(f"row {row} was never started")
        return state

    def take(self, plan: StepPlan) -> StepInputs:
        """Enter the plan's new tokens into the table and gather what is to be computed.

        Raises `PlanError`, before anything changed, when the plan does not fit.
        """
        if not plan.rows:
            raise PlanError("the plan has no rows")
        spans: list[Span] = []
        tokens: list[bytes] = []
        seen: set[int] = set()
        offset = 0
        for row in plan.rows:
            if row.row in seen:
                raise PlanError(f"row {row.row} is in the plan twice")
            seen.add(row.row)
            state = self._state_of(row)
            tokens.append(_tokens(row, state) + _drafted(row))
            spans.append(self._span(row, state, offset, tokens[-1]))
            offset = spans[-1].stop
        # of a bytearray, so that the array can be written to
        token_ids = np.frombuffer(bytearray().join(tokens), INT32)
        slots = np.frombuffer(b"".join([row.slots for row in plan.rows]), INT32)
        self._check_tokens(spans, token_ids)
        self._check_slots(spans, slots)
        return StepInputs(
            spans=spans,
            token_ids=token_ids,
            positions=self._enter(plan, spans, slots),
            batch=AttentionBatch(
                [span.size for span in spans],
                [self._slots[span.row, : span.end] for span in spans],
            ),
        )

    def _state_of(self, row: RowPlan) -> RowState:
        """The row's state before the step, fresh if it starts."""
        if not 0 <= row.row < len(self._states):
            raise PlanError(f"row {row.row} is not one of the {len(self._states)} rows")
        if row.start is not None:
            state = RowState.of(row.epoch, row.start)
            prefix = np.frombuffer(row.start.prefix_slots, INT32)
            self._check_slots([Span(row.row, state, 0, 0, state.length)], prefix)
            return state
        state = self.state(row.row)
        if state.epoch != row.epoch:
            raise PlanError(f"row {row.row} is in epoch {state.epoch}, the plan says {row.epoch}")
        return state

    def _span(self, row: RowPlan, state: RowState, offset: int, tokens: bytes) -> Span:
        size, context = len(tokens) // INT32_BYTES, self._slots.shape[1]
        if len(tokens) != len(row.slots) or len(tokens) % INT32_BYTES:
            raise PlanError(
                f"row {row.row} has {len(tokens) / INT32_BYTES:g} tokens "
                f"for {len(row.slots) / INT32_BYTES:g} slots"
            )
        if state.length + size > context:
            raise PlanError(
                f"row {row.row} would be {state.length + size} tokens long, "
                f"the context has {context}"
            )
        return Span(row.row, state, state.length, offset, size)

    def _check_tokens(self, spans: list[Span], token_ids: NDArray[np.int32]) -> None:
        if token_ids.min() >= 0 and token_ids.max() < self._vocab_size:
            return
        for span in spans:
            own = token_ids[span.offset : span.stop]
            if own.min() < 0 or own.max() >= self._vocab_size:
                raise PlanError(f"row {span.row} has a token id outside [0, {self._vocab_size})")

    def _check_slots(self, spans: list[Span], slots: NDArray[np.int32]) -> None:
        if not len(slots) or (slots.min() > 0 and slots.max() < self._kv_slots):
            return
        for span in spans:
            own = slots[span.offset : span.stop]
            if own.min() <= 0 or own.max() >= self._kv_slots:
                raise PlanError(
                    f"row {span.row} has slots in [{own.min()}, {own.max()}], "
                    f"the pool's are 1 to {self._kv_slots - 1}"
                )

    def _enter(
        self, plan: StepPlan, spans: list[Span], slots: NDArray[np.int32]
    ) -> NDArray[np.int32]:
        """Change the table and the states to what they are after the step. Positions [n]."""
        for row, span in zip(plan.rows, spans, strict=True):
            if row.start is not None:
                self._slots[span.row, : span.start] = np.frombuffer(row.start.prefix_slots, INT32)
                self._states[span.row] = span.state
            span.state.length = span.end
        rows = np.array([span.row for span in spans])
        shift = np.array([span.start - span.offset for span in spans], np.int32)
        if len(slots) > len(spans):
            sizes = [span.size for span in spans]
            rows, shift = rows.repeat(sizes), shift.repeat(sizes)
        positions = np.arange(len(slots), dtype=np.int32)
        positions += shift
        self._slots[rows, positions] = slots
        return positions


def _drafted(row: RowPlan) -> bytes:
    """The tokens of its draft that the row computes, packed."""
    return pack(row.draft.tokens[: row.drafted]) if row.draft is not None else b""


def _tokens(row: RowPlan, state: RowState) -> bytes:
    """The tokens that the row computes, packed, without its draft's."""
    if row.tokens:
        return row.tokens
    if state.last_token is None:
        raise PlanError(f"row {row.row} has sampled no token to go on from")
    return state.last_token.to_bytes(INT32_BYTES, "little")

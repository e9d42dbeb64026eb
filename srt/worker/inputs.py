"""A step plan's rows → what the model computes on.

The plan carries only what is new; `RowTable` remembers the rest: each row's KV slots, its length,
its last sampled token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phloem.srt.attention.base import AttentionBatch
from phloem.srt.messages import RowPlan, RowStart, StepPlan

INT32_BYTES = 4


class PlanError(ValueError):
    """A plan that contradicts itself or what the worker knows; the message names the row."""


@dataclass
class RowState:
    """One admission of one request.

    `length` counts tokens that have a KV slot here. `carry` is the hidden state of the last token
    computed, kept while the next prompt token's logprob is to be read from it.
    """

    epoch: int
    length: int
    prompt_len: int
    prompt_logprobs_from: int | None
    top_logprobs: int
    last_token: int | None = None
    carry: torch.Tensor | None = None

    @staticmethod
    def of(epoch: int, start: RowStart) -> RowState:
        return RowState(
            epoch=epoch,
            length=len(start.prefix_slots) // INT32_BYTES,
            prompt_len=start.prompt_len,
            prompt_logprobs_from=start.prompt_logprobs_from,
            top_logprobs=start.sampling.logprobs or 0,
        )


@dataclass(frozen=True)
class Span:
    """A row's part of a step: `tokens` [count] at positions `start`… of its sequence, and at
    `offset`… among the step's tokens. `slots` [start + count] hold its whole sequence."""

    state: RowState
    start: int
    offset: int
    tokens: NDArray[np.int32]
    slots: NDArray[np.int32]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


@dataclass(frozen=True)
class StepInputs:
    """Rows of a plan, in its order, as tensors: token_ids and positions [n] int64."""

    spans: list[Span]
    token_ids: torch.Tensor
    positions: torch.Tensor
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
        checked: dict[int, tuple[RowState, NDArray[np.int32], NDArray[np.int32]]] = {}
        for row in plan.rows:
            if row.row in checked:
                raise PlanError(f"row {row.row} is in the plan twice")
            checked[row.row] = self._check(row)
        spans: list[Span] = []
        offset = 0
        for row in plan.rows:
            state, tokens, slots = checked[row.row]
            spans.append(self._enter(row, state, offset, tokens, slots))
            offset += len(tokens)
        token_ids = np.concatenate([span.tokens for span in spans])
        positions = np.concatenate([np.arange(span.start, span.end) for span in spans])
        return StepInputs(
            spans=spans,
            token_ids=torch.from_numpy(token_ids.astype(np.int64)),
            positions=torch.from_numpy(positions),
            batch=AttentionBatch(
                [len(span.tokens) for span in spans], [span.slots for span in spans]
            ),
        )

    def _check(self, row: RowPlan) -> tuple[RowState, NDArray[np.int32], NDArray[np.int32]]:
        """The row's state, the tokens it computes and their slots."""
        rows, context = self._slots.shape
        if not 0 <= row.row < rows:
            raise PlanError(f"row {row.row} is not one of the {rows} rows")
        if row.start is not None:
            state = RowState.of(row.epoch, row.start)
            self._check_slots(row, np.frombuffer(row.start.prefix_slots, "<i4"))
        else:
            state = self.state(row.row)
        if state.epoch != row.epoch:
            raise PlanError(f"row {row.row} is in epoch {state.epoch}, the plan says {row.epoch}")
        slots = np.frombuffer(row.slots, "<i4")
        self._check_slots(row, slots)
        if row.tokens:
            tokens = np.frombuffer(row.tokens, "<i4")
            if tokens.min() < 0 or tokens.max() >= self._vocab_size:
                raise PlanError(f"row {row.row} has a token id outside [0, {self._vocab_size})")
        elif state.last_token is not None:
            tokens = np.array([state.last_token], np.int32)
        else:
            raise PlanError(f"row {row.row} has sampled no token to go on from")
        if len(tokens) != len(slots):
            raise PlanError(f"row {row.row} has {len(tokens)} tokens for {len(slots)} slots")
        if state.length + len(tokens) > context:
            raise PlanError(
                f"row {row.row} would be {state.length + len(tokens)} tokens long, "
                f"the context has {context}"
            )
        return state, tokens, slots

    def _check_slots(self, row: RowPlan, slots: NDArray[np.int32]) -> None:
        if len(slots) and not (slots.min() > 0 and slots.max() < self._kv_slots):
            raise PlanError(
                f"row {row.row} has slots in [{slots.min()}, {slots.max()}], "
                f"the pool's are 1 to {self._kv_slots - 1}"
            )

    def _enter(
        self,
        row: RowPlan,
        state: RowState,
        offset: int,
        tokens: NDArray[np.int32],
        slots: NDArray[np.int32],
    ) -> Span:
        table = self._slots[row.row]
        if row.start is not None:
            table[: state.length] = np.frombuffer(row.start.prefix_slots, "<i4")
            self._states[row.row] = state
        start, end = state.length, state.length + len(tokens)
        table[start:end] = slots
        state.length = end
        return Span(state, start, offset, tokens, table[:end])

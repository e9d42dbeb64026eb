"""Runs the model over one step: plan in, hidden states out, then logits of the rows that sample.

Two phases, so that the vocabulary masks may still be in the making while the network computes, and
are there when the logits are: a model may leave out what they forbid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phloem.srt.messages import StepPlan, TokenLogprob
from phloem.srt.models.base import Model
from phloem.srt.worker.inputs import INT32_BYTES, PlanError, RowTable, Span, StepInputs
from phloem.srt.worker.logprobs import token_logprob

LOGITS_CHUNK = 64
"""Prompt positions whose logits exist at the same time."""


@dataclass(frozen=True)
class StepHidden:
    """What a step's first phase leaves.

    `rows` are the indices in the plan of the rows with `sample`, ascending; `hidden`
    [len(rows), hidden] is that of their last tokens. `prompt_logprobs` has, by index in the plan,
    an entry for every prompt token among this step's tokens that was asked for.
    """

    rows: list[int]
    hidden: NDArray[np.float32]
    prompt_logprobs: dict[int, list[TokenLogprob]]


class ModelRunner:
    """A model and the table of rows.

    `kv_slots` is the model's number of KV slots (slot 0, padding, included); `max_rows` bounds the
    rows, `context_length` (by default the model's) a row's length.
    """

    def __init__(
        self, model: Model, *, kv_slots: int, max_rows: int, context_length: int | None = None
    ) -> None:
        config = model.config
        if context_length is None:
            context_length = config.context_length
        if not 1 <= context_length <= config.context_length:
            raise ValueError(
                f"context_length is {context_length}, the model was made for 1 to "
                f"{config.context_length}"
            )
        self.context_length = context_length
        self._model = model
        self._vocab_size = config.vocab_size
        self._table = RowTable(
            max_rows, context_length, kv_slots=kv_slots, vocab_size=config.vocab_size
        )

    def forward(self, plan: StepPlan) -> StepHidden:
        """Compute the plan's tokens: their KV, and the hidden states that logits are needed of.

        Raises `PlanError` for a plan that does not fit what the worker knows.
        """
        _check_prompt_logprobs(plan)
        inputs = self._table.take(plan)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.batch)
        rows = [index for index, row in enumerate(plan.rows) if row.sample]
        last = np.array([inputs.spans[index].stop - 1 for index in rows], np.intp)
        return StepHidden(
            rows=rows,
            hidden=hidden[last],
            prompt_logprobs=self._prompt_logprobs(inputs, hidden),
        )

    def logits(
        self, step: StepHidden, masks: Mapping[int, NDArray[np.int32]]
    ) -> NDArray[np.float32]:
        """[len(step.rows), vocab], contiguous, the caller's to change until the next call.

        `masks` has packed vocabulary masks [ceil(vocab / 32)] by index into the plan's rows: what
        a row's mask forbids may be -inf, a row without one has all its logits.
        """
        if not step.rows:
            return np.empty((0, self._vocab_size), np.float32)
        return self._model.logits(step.hidden, [masks.get(i) for i in step.rows] if masks else None)

    def commit(self, row: int, token: int) -> None:
        """`token` was sampled for `row`: what an empty `tokens` in a later plan refers to."""
        self._table.state(row).last_token = token

    def _prompt_logprobs(
        self, inputs: StepInputs, hidden: NDArray[np.float32]
    ) -> dict[int, list[TokenLogprob]]:
        found: dict[int, list[TokenLogprob]] = {}
        for index, span in enumerate(inputs.spans):
            wanted = span.state.prompt_logprobs_from
            if wanted is None or span.start >= span.state.prompt_len:
                continue
            own = slice(span.offset, span.stop)
            found[index] = list(
                self._span_logprobs(span, inputs.token_ids[own], hidden[own], max(wanted, 1))
            )
        return found

    def _span_logprobs(
        self, span: Span, tokens: NDArray[np.int32], hidden: NDArray[np.float32], wanted: int
    ) -> Iterator[TokenLogprob]:
        """Logprobs of the span's prompt tokens from position `wanted` on; `tokens` [size] and
        `hidden` [size, hidden] are its own. A token's comes from the hidden state one position
        before: for the first one that is the previous step's last."""
        state = span.state
        first, end = max(span.start, wanted), min(span.end, state.prompt_len)
        before = hidden if state.carry is None else np.concatenate((state.carry, hidden))
        lag = span.start - (0 if state.carry is None else 1)  # position of before[0]
        for begin in range(first, end, LOGITS_CHUNK):
            stop = min(begin + LOGITS_CHUNK, end)
            logits = self._model.logits(before[begin - 1 - lag : stop - 1 - lag])
            targets = tokens[begin - span.start : stop - span.start].tolist()
            for values, token in zip(logits, targets, strict=True):
                yield token_logprob(values, token, state.top_logprobs)
        state.carry = hidden[-1:].copy() if span.end < state.prompt_len else None


def _check_prompt_logprobs(plan: StepPlan) -> None:
    """The token before the first one asked for has to be computed here, not cached."""
    for row in plan.rows:
        start = row.start
        if start is None or start.prompt_logprobs_from is None:
            continue
        cached = len(start.prefix_slots) // INT32_BYTES
        if cached > max(start.prompt_logprobs_from - 1, 0) and cached < start.prompt_len:
            raise PlanError(
                f"row {row.row} wants prompt logprobs from {start.prompt_logprobs_from} on, "
                f"but its first {cached} tokens are cached"
            )

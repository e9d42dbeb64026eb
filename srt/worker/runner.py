"""Runs the model over one step: plan in, hidden states out, then logits of the rows that sample.

Two phases, so that the vocabulary masks may still be in the making while the network computes, and
are there when the logits are: a model may leave out what they forbid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from phloem.srt.messages import Pooling, StepPlan, TokenLogprob
from phloem.srt.models.base import Model
from phloem.srt.worker.inputs import INT32_BYTES, PlanError, RowTable, Span, StepInputs
from phloem.srt.worker.logprobs import token_logprob

LOGITS_CHUNK = 64
"""Prompt positions whose logits exist at the same time."""


@dataclass(frozen=True)
class StepHidden:
    """What a step's first phase leaves.

    `rows` are the indices in the plan of the rows with `sample`, ascending, each as often as the
    row may draw: once, or for each draw of its draft; `hidden` [len(rows), hidden] is that of the
    token before each draw. `prompt_logprobs` has, by index in the plan,
    an entry for every prompt token among this step's tokens that was asked for; `embeddings`
    [hidden] those of the prompts that were to be embedded and are complete.
    """

    rows: list[int]
    hidden: NDArray[np.float32]
    prompt_logprobs: dict[int, list[TokenLogprob]]
    embeddings: dict[int, NDArray[np.float32]] = field(default_factory=dict)


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
        _check_prefixes(plan)
        inputs = self._table.take(plan)
        hidden = self._model.forward(inputs.token_ids, inputs.positions, inputs.batch)
        rows: list[int] = []
        before: list[int] = []
        for index, row in enumerate(plan.rows):
            if row.sample:
                draws = [0] if row.draft is None else row.draft.draws
                last = inputs.spans[index].stop - 1 - row.drafted
                rows += [index] * len(draws)
                before += [last + drafted for drafted in draws]
        return StepHidden(
            rows=rows,
            hidden=hidden[np.array(before, np.intp)],
            prompt_logprobs=self._prompt_logprobs(inputs, hidden),
            embeddings=dict(_embeddings(inputs, hidden)),
        )

    def logits(
        self, step: StepHidden, masks: Mapping[int, NDArray[np.int32]]
    ) -> NDArray[np.float32]:
        """[len(step.rows), vocab], contiguous, the caller's to change until the next call.

        `masks` has packed vocabulary masks [ceil(vocab / 32)] by index into `step.rows`: what a
        draw's mask forbids may be -inf, one without a mask has all its logits.
        """
        count = len(step.rows)
        if not count:
            return np.empty((0, self._vocab_size), np.float32)
        return self._model.logits(
            step.hidden, [masks.get(i) for i in range(count)] if masks else None
        )

    def commit(self, row: int, token: int, rejected: int = 0) -> None:
        """`token` was sampled for `row`: what an empty `tokens` in a later plan refers to. The last
        `rejected` tokens that were computed for it are not of its sequence."""
        state = self._table.state(row)
        state.last_token = token
        state.length -= rejected

    def _prompt_logprobs(
        self, inputs: StepInputs, hidden: NDArray[np.float32]
    ) -> dict[int, list[TokenLogprob]]:
        """Of all rows at once: the head's weights are read once for many of them, not for each."""
        found: dict[int, list[TokenLogprob]] = {}
        before: list[NDArray[np.float32]] = []
        targets: list[tuple[int, int]] = []  # index in the plan, token
        for index, span in enumerate(inputs.spans):
            wanted = span.state.prompt_logprobs_from
            if wanted is None or span.start >= span.state.prompt_len:
                continue
            found[index] = []
            first = max(span.start, wanted, 1)
            before.append(_before(span, first, hidden[span.offset : span.stop]))
            tokens = inputs.token_ids[span.offset + first - span.start :][: len(before[-1])]
            targets += [(index, token) for token in tokens.tolist()]
        rows = np.concatenate(before) if before else hidden[:0]
        for begin in range(0, len(targets), LOGITS_CHUNK):
            chunk = targets[begin : begin + LOGITS_CHUNK]
            logits = self._model.logits(rows[begin : begin + LOGITS_CHUNK])
            for values, (index, token) in zip(logits, chunk, strict=True):
                state = inputs.spans[index].state
                found[index].append(
                    token_logprob(values, token, state.top_logprobs, state.logprob_token_ids)
                )
        return found


def _before(span: Span, first: int, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
    """The hidden states that the logprobs of the span's prompt tokens from position `first` on are
    read from, one position before each: for the span's first token that is the previous step's
    last. `hidden` [size, hidden] are the span's own."""
    state, end = span.state, min(span.end, span.state.prompt_len)
    states = hidden if state.carry is None else np.concatenate((state.carry, hidden))
    lag = span.start - (0 if state.carry is None else 1)  # position of states[0]
    state.carry = hidden[-1:].copy() if span.end < state.prompt_len else None
    return states[first - 1 - lag : end - 1 - lag] if first < end else hidden[:0]


def _embeddings(
    inputs: StepInputs, hidden: NDArray[np.float32]
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Gather what embeddings are made of; those that are complete, by index in the plan."""
    for index, span in enumerate(inputs.spans):
        if span.state.pool is None:
            continue
        span.state.pool.add(hidden[span.offset : span.stop])
        if span.end == span.state.prompt_len:
            yield index, span.state.pool.vector()


def _check_prefixes(plan: StepPlan) -> None:
    """Hidden states are not cached: what is read from them has to be computed here. That is the
    token before the first one whose logprob is asked for, and for a mean every token."""
    for row in plan.rows:
        start = row.start
        if start is None:
            continue
        cached = len(start.prefix_slots) // INT32_BYTES
        if start.embed is Pooling.MEAN and cached:
            raise PlanError(
                f"row {row.row} wants the mean over its tokens, but {cached} are cached"
            )
        if start.prompt_logprobs_from is None:
            continue
        if cached > max(start.prompt_logprobs_from - 1, 0) and cached < start.prompt_len:
            raise PlanError(
                f"row {row.row} wants prompt logprobs from {start.prompt_logprobs_from} on, "
                f"but its first {cached} tokens are cached"
            )

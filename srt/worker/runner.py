"""Runs the model over one step: plan in, logits out."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from phloem.srt.attention.base import AttentionDims, create_backend
from phloem.srt.messages import StepPlan, TokenLogprob
from phloem.srt.models.weights import Source, load_model
from phloem.srt.worker.inputs import PlanError, RowTable, Span, StepInputs
from phloem.srt.worker.kv_pool import KVPool
from phloem.srt.worker.logprobs import token_logprob

LOGITS_CHUNK = 64
"""Prompt positions whose logits exist at the same time."""


@dataclass(frozen=True)
class StepLogits:
    """What a step gives to sampling.

    `rows` are the indices in the plan of the rows with `sample`; `logits` [len(rows), vocab]
    float32, contiguous and the caller's to change, are theirs. `prompt_logprobs` has, by index in
    the plan, an entry for every prompt token among this step's tokens that was asked for.
    """

    rows: list[int]
    logits: NDArray[np.float32]
    prompt_logprobs: dict[int, list[TokenLogprob]]


class ModelRunner:
    """A model, its KV pool and the table of rows.

    `context_length` (by default the model's) bounds a row, `max_rows` their number, `kv_slots`
    (slot 0, padding, included) the pool. `threads` sets torch's for the whole process; the
    environment should say OMP_WAIT_POLICY=PASSIVE before torch is imported. `startup` holds the
    seconds each phase took.
    """

    def __init__(
        self,
        checkpoint: Source,
        *,
        kv_slots: int,
        max_rows: int,
        dtype: torch.dtype = torch.float32,
        context_length: int | None = None,
        attention_backend: str = "torch_native",
        threads: int | None = None,
    ) -> None:
        config = checkpoint.config
        if threads is not None:
            torch.set_num_threads(threads)
        if context_length is None:
            context_length = config.context_length
        if not 1 <= context_length <= config.context_length:
            raise ValueError(
                f"context_length is {context_length}, the model was made for 1 to "
                f"{config.context_length}"
            )
        self.config = config
        self.context_length = context_length
        self.kv_slots = kv_slots
        began = time.perf_counter()
        self._model = load_model(checkpoint, dtype)
        self.startup = {"load_model": time.perf_counter() - began}
        self._attention = create_backend(
            attention_backend,
            KVPool.for_model(config, kv_slots, dtype),
            AttentionDims(
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                sliding_window=config.sliding_window,
            ),
        )
        self._table = RowTable(
            max_rows, context_length, kv_slots=kv_slots, vocab_size=config.vocab_size
        )

    def forward(self, plan: StepPlan) -> StepLogits:
        """Compute the plan's tokens: their KV, and the logits that are needed.

        Raises `PlanError` for a plan that does not fit what the worker knows.
        """
        _check_prompt_logprobs(plan)
        with torch.inference_mode():
            inputs = self._table.take(plan)
            hidden = self._model(
                inputs.token_ids, inputs.positions, self._attention.plan(inputs.batch)
            )
            rows = [index for index, row in enumerate(plan.rows) if row.sample]
            last = [
                inputs.spans[index].offset + len(inputs.spans[index].tokens) - 1 for index in rows
            ]
            return StepLogits(
                rows=rows,
                logits=self._logits(hidden[last]),
                prompt_logprobs=self._prompt_logprobs(inputs, hidden),
            )

    def commit(self, row: int, token: int) -> None:
        """`token` was sampled for `row`: what an empty `tokens` in a later plan refers to."""
        self._table.state(row).last_token = token

    def _logits(self, hidden: torch.Tensor) -> NDArray[np.float32]:
        if not len(hidden):
            return np.empty((0, self.config.vocab_size), np.float32)
        logits: NDArray[np.float32] = self._model.logits(hidden).contiguous().numpy()
        return logits

    def _prompt_logprobs(
        self, inputs: StepInputs, hidden: torch.Tensor
    ) -> dict[int, list[TokenLogprob]]:
        found: dict[int, list[TokenLogprob]] = {}
        for index, span in enumerate(inputs.spans):
            wanted = span.state.prompt_logprobs_from
            if wanted is None or span.start >= span.state.prompt_len:
                continue
            found[index] = list(self._span_logprobs(span, hidden, max(wanted, 1)))
        return found

    def _span_logprobs(
        self, span: Span, hidden: torch.Tensor, wanted: int
    ) -> Iterator[TokenLogprob]:
        """Logprobs of the span's prompt tokens from position `wanted` on. A token's comes from the
        hidden state one position before: for the first one that is the previous step's last."""
        state = span.state
        own = hidden[span.offset : span.offset + len(span.tokens)]
        first, end = max(span.start, wanted), min(span.end, state.prompt_len)
        before = own if state.carry is None else torch.cat((state.carry, own))
        lag = span.start - (0 if state.carry is None else 1)  # position of before[0]
        for begin in range(first, end, LOGITS_CHUNK):
            stop = min(begin + LOGITS_CHUNK, end)
            logits = self._logits(before[begin - 1 - lag : stop - 1 - lag])
            targets = span.tokens[begin - span.start : stop - span.start].tolist()
            for values, token in zip(logits, targets, strict=True):
                yield token_logprob(values, token, state.top_logprobs)
        state.carry = own[-1:].clone() if span.end < state.prompt_len else None


def _check_prompt_logprobs(plan: StepPlan) -> None:
    """The token before the first one asked for has to be computed here, not cached."""
    for row in plan.rows:
        start = row.start
        if start is None or start.prompt_logprobs_from is None:
            continue
        cached = len(start.prefix_slots) // 4
        if cached > max(start.prompt_logprobs_from - 1, 0) and cached < start.prompt_len:
            raise PlanError(
                f"row {row.row} wants prompt logprobs from {start.prompt_logprobs_from} on, "
                f"but its first {cached} tokens are cached"
            )

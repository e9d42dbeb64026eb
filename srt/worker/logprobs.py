"""Logprobs of tokens, and the best alternatives, from one row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from phloem.srt.messages import TokenLogprob
from phloem.srt.worker.ranking import top_ids


def log_normaliser(values: NDArray[np.float32]) -> float:
    """log Σ exp(`values`) [vocab], natural logarithm; at least one value must be finite."""
    peak = values.max()
    return float(peak) + float(np.log(np.exp(values - peak).sum(dtype=np.float64)))


def token_logprob(
    values: NDArray[np.float32], token: int, top: int, chosen: Sequence[int] = ()
) -> TokenLogprob:
    """Logprob (nats) of `token` under softmax(`values`) [vocab], with the `top` best alternatives,
    sorted by logprob, then id, and those of the ids `chosen`."""
    normaliser = log_normaliser(values)
    ids = top_ids(values, top) if top else np.empty(0, np.int64)
    return TokenLogprob(
        token=token,
        logprob=float(values[token]) - normaliser,
        top_tokens=ids.tolist(),
        top_logprobs=(values[ids].astype(np.float64) - normaliser).tolist(),
        chosen=[float(values[one]) - normaliser for one in chosen],
    )

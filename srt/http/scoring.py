"""Which of several texts a model would rather say: how a choice is made of logprobs, and from which
token on choices are judged. Pure functions, no model.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from phloem.radix import common_prefix
from phloem.srt.errors import InvalidRequest

_TIE = 1e-5
"""Logprobs of equal tokens after equal prefixes may differ so far, by rounding."""


class Normalization(StrEnum):
    """What choices are compared by; the highest wins, of equals the first.

    `NONE` is the logprob of the whole text, `TOKEN` the mean over its tokens, `UNCONDITIONAL` that
    mean less the one that the choice has without the prompt, so that none is preferred for being
    common. `GREEDY` goes token by token, as greedy decoding that may only say a choice would: those
    that are behind drop out, and one that has ended stands with its mean.
    """

    NONE = "none"
    TOKEN = "token"
    GREEDY = "greedy"
    UNCONDITIONAL = "unconditional"


@dataclass(frozen=True)
class Decision:
    """The winner's index, and by what each choice was judged (`GREEDY` eliminates; its values are
    the means, for information)."""

    index: int
    values: list[float]


def decide(
    normalization: Normalization,
    scores: Sequence[Sequence[float]],
    unconditional: Sequence[Sequence[float]] = (),
) -> Decision:
    """Pick one of `scores`, each the logprobs of a choice's tokens (at least one); `unconditional`
    are those without the prompt."""
    means = [fmean(logprobs) for logprobs in scores]
    match normalization:
        case Normalization.NONE:
            values = [math.fsum(logprobs) for logprobs in scores]
        case Normalization.TOKEN:
            values = means
        case Normalization.GREEDY:
            return Decision(_greedy(scores, means), means)
        case Normalization.UNCONDITIONAL:
            alone = [fmean(logprobs) for logprobs in unconditional]
            values = [mean - other for mean, other in zip(means, alone, strict=True)]
    return Decision(max(range(len(values)), key=values.__getitem__), values)


def _greedy(scores: Sequence[Sequence[float]], means: Sequence[float]) -> int:
    left = list(range(len(scores)))
    for place in range(max(map(len, scores))):
        at = {i: scores[i][place] if place < len(scores[i]) else means[i] for i in left}
        best = max(at.values())
        left = [i for i in left if at[i] >= best - _TIE]
        if len(left) == 1:
            break
    return left[0]


def boundary(prompt: Sequence[int], sequences: Sequence[Sequence[int]], param: str) -> int:
    """From which token on choices are judged: as far as the prompt's own tokens and those of every
    sequence (prompt and choice as one text) are the same.

    Where a choice's first characters merge with the prompt's last token, that token is judged with
    all of them: each choice is judged on the same text, in the tokenizer's own split.

    Raises:
        InvalidRequest: nothing stands before the choices (`param` is the prompt's field), or one
            adds no token.
    """
    tokens = array("i", prompt)
    start = min(common_prefix(tokens, sequence, len(tokens)) for sequence in sequences)
    if start == 0:
        raise InvalidRequest(
            "A choice is judged after something: the first token of all has no logprob.",
            param=param,
            code="invalid_value",
        )
    for i, sequence in enumerate(sequences):
        if len(sequence) <= start:
            raise InvalidRequest(
                "The choice adds no token to the prompt.",
                param=f"choices[{i}]",
                code="invalid_value",
            )
    return start


def label_scores(logprobs: Sequence[float], *, softmax: bool) -> list[float]:
    """Probabilities of labels; with `softmax` among themselves."""
    if not softmax:
        return [math.exp(value) for value in logprobs]
    best = max(logprobs)
    weights = [math.exp(value - best) for value in logprobs]
    total = math.fsum(weights)
    return [weight / total for weight in weights]

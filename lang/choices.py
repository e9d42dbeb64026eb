"""`select`: how a choice is made from logprobs. Pure functions, no model.

Each method maps the scores of all choices to the index of the winner; ties go to the earlier one.

- `token_length_normalized`: highest mean logprob a token.
- `greedy_token_selection`: token by token, as greedy decoding restricted to the choices would. A
  choice that has ended stands with its mean, so that a prefix of another choice can win or lose.
- `unconditional_likelihood_normalized`: highest mean logprob after subtracting the mean logprob
  that the choice has without the prompt, so that a choice is not preferred for being common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean
from typing import Final, assert_never

# Equal tokens after equal prefixes may differ by rounding when a backend batches them differently.
_TIE = 1e-5


class ChoicesMethod(StrEnum):
    """How `select` decides."""

    TOKEN_LENGTH_NORMALIZED = "token_length_normalized"
    GREEDY_TOKEN_SELECTION = "greedy_token_selection"
    UNCONDITIONAL_LIKELIHOOD_NORMALIZED = "unconditional_likelihood_normalized"


token_length_normalized: Final = ChoicesMethod.TOKEN_LENGTH_NORMALIZED
"""The highest mean logprob a token."""
greedy_token_selection: Final = ChoicesMethod.GREEDY_TOKEN_SELECTION
"""Token by token, as greedy decoding would that can only say one of the choices."""
unconditional_likelihood_normalized: Final = ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED
"""The highest mean logprob less what the choice has without the prompt, so that none is preferred
for being common."""


@dataclass(frozen=True, slots=True)
class ChoiceScore:
    """The tokens of one choice after the prompt, and the natural logprob of each."""

    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.logprobs or len(self.tokens) != len(self.logprobs):
            raise ValueError(
                f"a choice needs one logprob a token and at least one token, not "
                f"{len(self.tokens)} tokens and {len(self.logprobs)} logprobs"
            )

    @property
    def mean(self) -> float:
        return fmean(self.logprobs)


@dataclass(frozen=True, slots=True)
class Decision:
    """The winner's index, and the value by which each choice was judged (higher is better).

    The greedy method ranks by elimination; its `values` are the means, for information only.
    """

    index: int
    values: tuple[float, ...]


def decide(
    method: ChoicesMethod,
    scores: Sequence[ChoiceScore],
    unconditional: Sequence[ChoiceScore] | None = None,
) -> Decision:
    """Pick a choice. `unconditional` is needed by the method of that name, one score a choice."""
    if not scores:
        raise ValueError("nothing to choose from")
    means = tuple(score.mean for score in scores)
    match method:
        case ChoicesMethod.TOKEN_LENGTH_NORMALIZED:
            return Decision(_argmax(means), means)
        case ChoicesMethod.GREEDY_TOKEN_SELECTION:
            return Decision(_greedy([score.logprobs for score in scores], means), means)
        case ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED:
            if unconditional is None or len(unconditional) != len(scores):
                raise ValueError(f"{method} needs one unconditional score a choice")
            gains = tuple(m - u.mean for m, u in zip(means, unconditional, strict=True))
            return Decision(_argmax(gains), gains)
        case never:
            assert_never(never)


def common_prefix_len(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading token ids two sequences share."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))


def boundary(prompt: Sequence[int], full: Sequence[Sequence[int]]) -> int:
    """Where the choices begin: the longest token prefix that the prompt shares with every sequence.

    `full` holds the ids of prompt + choice. Where a choice merges with the prompt's last token, all
    choices are judged from before that token on, so that each is judged on the same text. Raises
    `ValueError` when that leaves a choice no token, or no token before it.
    """
    start = min(common_prefix_len(prompt, ids) for ids in full)
    if start == 0:
        raise ValueError(
            "select needs text before the choices: a sequence's first token has no logprob"
        )
    for i, ids in enumerate(full):
        if len(ids) == start:
            raise ValueError(f"choices[{i}] adds no token to the prompt")
    return start


def _greedy(logprobs: Sequence[Sequence[float]], means: Sequence[float]) -> int:
    left = list(range(len(logprobs)))
    for column in range(max(map(len, logprobs))):
        at = [logprobs[i][column] if column < len(logprobs[i]) else means[i] for i in left]
        best = max(at)
        left = [i for i, value in zip(left, at, strict=True) if value >= best - _TIE]
        if len(left) == 1:
            break
    return left[0]


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)

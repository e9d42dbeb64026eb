"""What a step takes, learnt from the steps that were: the model that prompt chunks are sized with.

    seconds = a + b * rows + c * tokens + d * pairs

where `pairs` sums, over all rows, new tokens times the tokens they attend to. The four weights are
followed by recursive least squares with exponential forgetting (Haykin, Adaptive Filter Theory,
ch. 10), so that they keep up with a machine whose speed changes; what they start from is a slow
machine's, and a few steps outweigh it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

FORGETTING = 0.995
"""Weight that a step keeps with each further one: the last two hundred count."""

FIRST_STEPS, DECODE_SAMPLE = 64, 16
"""After so many steps only one in so many of those that just decode is learnt from: they are alike,
and what the rare steps with a prompt taught would be forgotten over them."""

SURPRISE, SURPRISE_SECONDS = 3.0, 0.02
"""A step is believed to have taken at most so many times what was expected, and so much: one that
met a page fault or another process should not outweigh those that did not."""

SMALL_STEP = 16
"""Tokens that a step may have before anything is known."""

_UNITS = (1.0, 1e-1, 1e-2, 1e-5)
"""Scale of each feature, so that all are about one in a step that counts."""

_INITIAL_MS = (2.0, 2.0, 50.0, 20.0)
"""Milliseconds a unit before anything was seen: 0.5 ms a token of a prompt."""

_DOUBT = 1e2
"""Variance of the initial weights, in units of that of a step: ten times as uncertain."""

_LARGEST = 1e3
"""Bound of the covariance, so that forgetting does not blow up what the steps never excite."""


@dataclass(frozen=True)
class StepSize:
    """What a step consists of."""

    rows: int
    tokens: int
    pairs: int

    @staticmethod
    def chunk(start: int, count: int) -> int:
        """Pairs of `count` tokens that follow `start` others."""
        return count * start + count * (count + 1) // 2


class StepCost:
    """Predicts seconds, and learns from each step's."""

    def __init__(self) -> None:
        self._weights = [value / 1000 for value in _INITIAL_MS]
        self._covariance = [[_DOUBT * (i == j) for j in range(4)] for i in range(4)]
        self._seen = 0
        self._largest = 0

    @property
    def token_seconds(self) -> float:
        """What one more token of a prompt takes, attention to others not counted; never zero."""
        return max(self._weights[2] * _UNITS[2], 1e-7)

    def seconds(self, size: StepSize) -> float:
        """Time a step of this size is expected to take."""
        return max(0.0, self._sum(_features(size)))

    def _sum(self, features: Sequence[float]) -> float:
        # Weights that always appear together (a constant, and as many rows in each step) are known
        # only together: one may be negative, and none is clipped before the sum is taken.
        return sum(w * x for w, x in zip(self._weights, features, strict=True))

    def learn(self, size: StepSize, seconds: float) -> None:
        """A step of this size took `seconds`."""
        self._seen += 1
        self._largest = max(self._largest, size.tokens)
        if size.tokens == size.rows and self._seen > FIRST_STEPS and self._seen % DECODE_SAMPLE:
            return
        x = _features(size)
        p = self._covariance
        gained = [sum(row[j] * x[j] for j in range(4)) for row in p]
        scale = FORGETTING + sum(x[i] * gained[i] for i in range(4))
        expected = self._sum(x)
        error = min(seconds, SURPRISE * max(0.0, expected) + SURPRISE_SECONDS) - expected
        gain = [g / scale for g in gained]
        self._weights = [w + g * error for w, g in zip(self._weights, gain, strict=True)]
        grow = 1 / FORGETTING if max(p[i][i] for i in range(4)) < _LARGEST else 1.0
        self._covariance = [
            [(p[i][j] - gain[i] * gained[j]) * grow for j in range(4)] for i in range(4)
        ]

    def chunk_within(self, seconds: float, base: StepSize, start: int, largest: int) -> int:
        """The most tokens (at most `largest`) of a prompt, `start` of which are there already, that
        a step of `base` may take on top and still be done in `seconds`; 0 when there is none.
        Never more than twice what a step had before, so that a wrong guess is found out in time."""
        largest = min(largest, 2 * max(self._largest, SMALL_STEP))
        per_token, per_pair = (max(0.0, self._weights[i]) * _UNITS[i] for i in (2, 3))
        left = seconds - self.seconds(StepSize(base.rows + 1, base.tokens, base.pairs))
        if left <= 0:
            return 0
        if left == float("inf"):
            return largest
        # half * n^2 + line * n = left
        half, line = per_pair / 2, per_token + per_pair * (start + 0.5)
        if line <= 0:
            return largest
        if half <= 0 or half * left < 1e-12 * line * line:
            count = left / line
        else:
            count = ((line * line + 4 * half * left) ** 0.5 - line) / (2 * half)
        return int(min(largest, count))


def _features(size: StepSize) -> tuple[float, float, float, float]:
    return (
        1.0,
        size.rows * _UNITS[1],
        size.tokens * _UNITS[2],
        size.pairs * _UNITS[3],
    )

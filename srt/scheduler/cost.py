"""What a step takes, learnt from the steps that were: the model that prompt chunks are sized with.

    seconds = a + b * rows + c * tokens + d * pairs

where `pairs` sums, over all rows, new tokens times the tokens they attend to. The four weights are
followed by recursive least squares with exponential forgetting (Haykin, Adaptive Filter Theory,
ch. 10), so that they keep up with a machine whose speed changes; what they start from is a slow
machine's, and a few steps outweigh it.
"""

from __future__ import annotations

from dataclasses import dataclass

FORGETTING = 0.995
"""Weight that a step keeps with each further one: the last two hundred count."""

_UNITS = (1.0, 1e-1, 1e-2, 1e-5)
"""Scale of each feature, so that all are about one in a step that counts."""

_INITIAL_MS = (2.0, 2.0, 50.0, 20.0)
"""Milliseconds a unit before anything was seen: 0.5 ms a token of a prompt."""

_DOUBT = 1e4
"""Variance of the initial weights."""

_LARGEST = 1e6
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
        self.steps = 0
        """Steps learnt from."""

    @property
    def token_seconds(self) -> float:
        """What one more token of a prompt takes, attention to others not counted; never zero."""
        return max(self._weights[2] * _UNITS[2], 1e-7)

    def seconds(self, size: StepSize) -> float:
        """Time a step of this size is expected to take."""
        # Not clipped while learning, which would make the error of a weight the others' for good.
        used = zip(self._weights, _features(size), strict=True)
        return sum(max(0.0, weight) * feature for weight, feature in used)

    def learn(self, size: StepSize, seconds: float) -> None:
        """A step of this size took `seconds`."""
        x = _features(size)
        p = self._covariance
        gained = [sum(row[j] * x[j] for j in range(4)) for row in p]
        scale = FORGETTING + sum(x[i] * gained[i] for i in range(4))
        error = seconds - sum(w * v for w, v in zip(self._weights, x, strict=True))
        gain = [g / scale for g in gained]
        self._weights = [w + g * error for w, g in zip(self._weights, gain, strict=True)]
        grow = 1 / FORGETTING if max(p[i][i] for i in range(4)) < _LARGEST else 1.0
        self._covariance = [
            [(p[i][j] - gain[i] * gained[j]) * grow for j in range(4)] for i in range(4)
        ]
        self.steps += 1

    def chunk_within(self, seconds: float, base: StepSize, start: int, largest: int) -> int:
        """The most tokens (at most `largest`) of a prompt, `start` of which are there already, that
        a step of `base` may take on top and still be done in `seconds`; 0 when there is none."""
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

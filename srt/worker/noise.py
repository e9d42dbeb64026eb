"""Sampling noise as a pure function of (seed, position, token).

A token is drawn by the exponential race: token t with probability p_t arrives at time E_t / p_t,
where the E_t are independent and exponential, and the first one wins. In logarithms that is
argmax(log p_t + G_t) with the Gumbel variable G_t = -log E_t (the Gumbel-max trick). Each E_t is
hashed from (seed, position, token), so a seeded answer depends neither on the batch around it, nor
on how often it was preempted, nor on how many other tokens were legal.

To draw from a vocabulary without touching every token, the noise is built top down, in blocks of
`BLOCK` tokens: the earliest of n unit exponentials is exponential with rate n and equally likely
to be any of them, and the others, being memoryless, come a fresh unit exponential later. So the
best noise of a block costs one hash, and a token is looked at only if it could win with that. The
variables are exactly independent and exponential all the same (Maddison et al., "A* Sampling",
2014).

The hash is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators",
2014): the token is the index into the stream whose state is hashed from seed and position.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 64
"""Tokens whose best noise is known from one hash. Changing it changes every seeded answer."""

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_BLOCK_STREAM = 0xD1B54A32D192ED03  # any constant: keeps the blocks' stream apart from the tokens'
_UNIT = 2.0**-52
_SLACK = 1e-12  # np.log need not be monotone to the last bit; a bound has to be


def splitmix64(state: int, index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Outputs number `index` (from 0) of the SplitMix64 generator that starts in `state`."""
    z = (index + np.uint64(1)) * np.uint64(_GAMMA)
    z += np.uint64(state & _MASK)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def _next(state: int) -> int:
    """`splitmix64` of index 0, in plain integers: for one value that is fifty times cheaper."""
    z = (state + _GAMMA) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _exponential(bits: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Hashes → unit exponentials, never 0 nor infinite, from their upper 52 bits."""
    return -np.log(((bits >> np.uint64(12)).astype(np.float64) + 0.5) * _UNIT)


class NoiseField:
    """The Gumbel noise of every token, for the draw of one position of one request.

    `seed` is the request's (any integer, taken modulo 2^64); `position` is the index, in the whole
    sequence of prompt and output, of the token to be drawn.
    """

    def __init__(self, seed: int, position: int) -> None:
        self._token_state = _next(_next(seed) ^ position)
        self._block_state = self._token_state ^ _BLOCK_STREAM

    def gumbel(self, tokens: NDArray[np.int64]) -> NDArray[np.float64]:
        """Noise of `tokens` [n], any non-negative ids in any order."""
        blocks = splitmix64(self._block_state, (tokens // BLOCK).astype(np.uint64))
        arrival = _exponential(blocks) / BLOCK
        first = (blocks % np.uint64(BLOCK)).astype(np.int64)
        later = _exponential(splitmix64(self._token_state, tokens.astype(np.uint64)))
        arrival += np.where(tokens % BLOCK == first, 0.0, later)
        return -np.log(arrival)

    def block_bests(self, count: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """For blocks 0, 1, …, where block b has the ids from b · `BLOCK` on: the token [count] that
        has the most noise in it, and upper bounds [count] of that noise."""
        blocks = splitmix64(self._block_state, np.arange(count, dtype=np.uint64))
        tokens = (blocks % np.uint64(BLOCK)).astype(np.int64) + np.arange(0, count * BLOCK, BLOCK)
        return tokens, _SLACK - np.log(_exponential(blocks) / BLOCK)

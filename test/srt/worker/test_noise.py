"""Sampling noise: fixed answers, independence of how it is asked, and the right distribution."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.srt.worker.noise import BLOCK, NoiseField, _next, splitmix64

FIRST = [
    -0.6925345992920583,
    2.942669562168411,
    1.656254257500583,
    -0.5588710361730965,
    -0.19266073196839317,
    -0.4195719482990543,
    -0.12501553032484894,
]
OTHER = [
    0.14444501777045754,
    -0.8163578419554631,
    -0.8671838865279413,
    0.10735393218417554,
    1.0476931790565016,
    0.14888526407542976,
    0.10422102951198897,
]


def test_splitmix64_gives_the_published_outputs() -> None:
    """Reference outputs of the generator's authors' C code for the state 1234567."""
    outputs = splitmix64(1234567, np.arange(5, dtype=np.uint64))
    assert outputs.tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@pytest.mark.parametrize("state", [0, 1, 2**63, 2**64 - 1])
def test_the_scalar_hash_is_the_vector_hash(state: int) -> None:
    assert _next(state) == int(splitmix64(state, np.zeros(1, np.uint64))[0])


def test_known_answers() -> None:
    """If these change, every seeded answer of every user changes."""
    tokens = np.array([0, 1, 63, 64, 1000, 49151, 151_935])
    first = NoiseField(0, 0).gumbel(tokens)
    other = NoiseField(2**63 + 12345, 7).gumbel(tokens)
    np.testing.assert_allclose(first, FIRST, rtol=1e-12)
    np.testing.assert_allclose(other, OTHER, rtol=1e-12)


@given(
    seed=st.integers(-(2**63), 2**64),
    position=st.integers(0, 1 << 20),
    tokens=st.lists(st.integers(0, 200_000), min_size=1, max_size=30),
)
def test_noise_of_a_token_is_its_own(seed: int, position: int, tokens: list[int]) -> None:
    """The same whatever else is asked with it, in whatever order."""
    field = NoiseField(seed, position)
    together = field.gumbel(np.array(tokens))
    alone = [NoiseField(seed, position).gumbel(np.array([t]))[0] for t in tokens]
    assert together.tolist() == alone


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 4096))
def test_a_bound_holds_for_its_block_and_is_reached(seed: int, position: int) -> None:
    field = NoiseField(seed, position)
    noise = field.gumbel(np.arange(20 * BLOCK)).reshape(20, BLOCK)
    tokens, bounds = field.block_bests(20)
    assert (noise.max(axis=1) <= bounds).all()
    assert (noise.argmax(axis=1) == tokens - np.arange(20) * BLOCK).all()
    np.testing.assert_allclose(noise.max(axis=1), bounds, atol=1e-9)


def test_seed_position_and_token_all_matter() -> None:
    tokens = np.arange(256)
    fields = [NoiseField(s, p) for s in range(8) for p in range(8)]
    values = np.concatenate([f.gumbel(tokens) for f in fields])
    assert len(np.unique(values)) == len(values)


def test_noise_is_gumbel() -> None:
    """Mean and variance, and Kolmogorov–Smirnov against exp(-exp(-x)), over 2^17 variables."""
    noise = np.concatenate([NoiseField(9, p).gumbel(np.arange(1 << 13)) for p in range(16)])
    count = len(noise)
    assert abs(noise.mean() - np.euler_gamma) < 5 * noise.std() / math.sqrt(count)
    assert abs(noise.var() - math.pi**2 / 6) < 0.03
    distance = np.abs(np.exp(-np.exp(-np.sort(noise))) - (np.arange(count) + 0.5) / count).max()
    assert distance < 1.95 / math.sqrt(count)  # p = 0.001


def test_neighbours_are_uncorrelated() -> None:
    """Between tokens of a block, between positions, and between seeds."""
    size = 1 << 14
    tokens = np.arange(size)
    base = NoiseField(3, 5).gumbel(tokens)
    others = [NoiseField(3, 6).gumbel(tokens), NoiseField(4, 5).gumbel(tokens), np.roll(base, 1)]
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 4 / math.sqrt(size)

"""The model of what a step takes: it learns what is true, and its inverse is one."""

from __future__ import annotations

import random

import pytest

from phloem.srt.scheduler.cost import StepCost, StepSize

TRUE = (0.004, 0.0007, 0.00012, 3e-8)
"""Seconds a step, a row, a token, a pair."""


def truth(size: StepSize) -> float:
    a, b, c, d = TRUE
    return a + b * size.rows + c * size.tokens + d * size.pairs


def random_size(rng: random.Random) -> StepSize:
    """Decoding rows, and now and then a chunk of a prompt."""
    rows = rng.randrange(1, 33)
    tokens = rows
    pairs = sum(StepSize.chunk(rng.randrange(2000), 1) for _ in range(rows))
    if rng.random() < 0.4:
        count = rng.randrange(1, 512)
        rows, tokens = rows + 1, tokens + count
        pairs += StepSize.chunk(rng.randrange(4000), count)
    return StepSize(rows, tokens, pairs)


def taught(seed: int, steps: int, noise: float = 0.0) -> StepCost:
    rng, cost = random.Random(seed), StepCost()
    for _ in range(steps):
        size = random_size(rng)
        cost.learn(size, truth(size) * (1 + rng.gauss(0, noise)))
    return cost


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.02), (0.1, 0.35)])
def test_known_coefficients_are_recovered(seed: int, noise: float, error: float) -> None:
    cost = taught(seed, 400, noise)
    rng = random.Random(seed + 1000)
    for _ in range(50):
        size = random_size(rng)
        assert cost.seconds(size) == pytest.approx(truth(size), rel=error, abs=1e-3)


def test_a_machine_that_slows_down_is_followed() -> None:
    cost, rng = taught(1, 500), random.Random(9)
    for _ in range(1500):
        size = random_size(rng)
        cost.learn(size, 3 * truth(size))
    size = StepSize(9, 264, 300_000)
    assert cost.seconds(size) == pytest.approx(3 * truth(size), rel=0.1)


def test_what_is_never_seen_does_not_blow_up() -> None:
    """A day of nothing but one and the same step, then another one."""
    cost = StepCost()
    for _ in range(20_000):
        cost.learn(StepSize(4, 4, 800), 0.01)
    assert cost.seconds(StepSize(4, 4, 800)) == pytest.approx(0.01, rel=0.05)
    size = StepSize(5, 260, 60_000)
    for _ in range(20):
        cost.learn(size, 0.05)
        cost.learn(StepSize(4, 4, 800), 0.01)
    assert cost.seconds(size) == pytest.approx(0.05, rel=0.2)


def test_more_work_never_takes_less_time() -> None:
    rng, cost = random.Random(3), taught(3, 300)
    for _ in range(300):
        base = random_size(rng)
        more = StepSize(base.rows + 1, base.tokens + 10, base.pairs + 1000)
        assert cost.seconds(more) >= cost.seconds(base) >= 0


@pytest.mark.parametrize("seed", range(20))
def test_a_chunk_is_as_large_as_the_time_allows(seed: int) -> None:
    cost, rng = taught(seed, 300), random.Random(seed)
    for _ in range(50):
        base, start = random_size(rng), rng.randrange(6000)
        seconds = rng.random() * 0.2

        def with_chunk(count: int, base: StepSize = base, start: int = start) -> float:
            pairs = base.pairs + StepSize.chunk(start, count)
            return cost.seconds(StepSize(base.rows + 1, base.tokens + count, pairs))

        most = cost.chunk_within(float("inf"), base, start, 4096)
        count = cost.chunk_within(seconds, base, start, 4096)
        assert 0 <= count <= most <= 4096
        if count:
            assert with_chunk(count) <= seconds * (1 + 1e-9)
        if count < most:
            assert with_chunk(count + 1) >= seconds * (1 - 1e-9)


def test_no_chunk_fits_where_the_step_alone_takes_too_long() -> None:
    cost = taught(2, 300)
    assert cost.chunk_within(0.0, StepSize(4, 4, 4000), 0, 512) == 0
    assert cost.chunk_within(-1.0, StepSize(0, 0, 0), 0, 512) == 0


@pytest.mark.parametrize("count", [1, 2, 7, 64])
@pytest.mark.parametrize("start", [0, 1, 100])
def test_pairs_are_counted_one_by_one(start: int, count: int) -> None:
    assert StepSize.chunk(start, count) == sum(start + i + 1 for i in range(count))


def test_a_chunk_is_at_most_twice_what_a_step_ever_had() -> None:
    cost, base = StepCost(), StepSize(4, 4, 400)
    assert cost.chunk_within(1e9, base, 0, 4096) == 32
    cost.learn(StepSize(4, 100, 9000), 0.05)
    assert cost.chunk_within(1e9, base, 0, 4096) == 200
    cost.learn(StepSize(1, 3000, 9000), 0.05)
    assert cost.chunk_within(1e9, base, 0, 4096) == 4096


def test_one_step_that_was_held_up_does_not_outweigh_the_others() -> None:
    cost, size = StepCost(), StepSize(4, 4, 400)
    for _ in range(50):
        cost.learn(size, 0.01)
    cost.learn(size, 10.0)
    assert cost.seconds(size) < 0.03

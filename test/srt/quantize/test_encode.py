"""Blocks against the `gguf` package's reading of them: how near they come to the values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from phloem.srt.quantize import QuantizeError
from phloem.srt.quantize.encode import TYPES, encode

Floats = NDArray[np.float32]

ERROR = {
    "F32": 0.0,
    "F16": 3e-4,
    "BF16": 2e-3,
    "Q8_0": 0.006,
    "Q6_K": 0.018,
    "Q5_K": 0.036,
    "Q4_K": 0.072,
    "Q4_1": 0.08,
    "Q4_0": 0.09,
}
"""Largest relative RMS error on normal values, from the most precise type to the least."""
K_QUANTS = ("Q4_K", "Q5_K", "Q6_K")
BY_FLOAT16 = tuple(name for name in TYPES if name not in ("F32", "BF16"))


def decoded(values: Floats, kind: str) -> Floats:
    packed = encode(values, TYPES[kind])
    assert packed.dtype == np.uint8
    assert packed.shape == (
        len(values),
        values.shape[1] // TYPES[kind].elements * TYPES[kind].nbytes,
    )
    back: Floats = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
    return back.reshape(values.shape)


def error(values: Floats, kind: str) -> float:
    """Relative root mean square."""
    difference = decoded(values, kind) - values
    return float(np.sqrt((difference**2).mean() / (values**2).mean()))


@pytest.fixture
def normal() -> Floats:
    return np.random.default_rng(1).standard_normal((64, 1024)).astype(np.float32)


def test_errors_are_within_bounds_and_each_type_beats_the_coarser(normal: Floats) -> None:
    errors = {kind: error(normal, kind) for kind in ERROR}
    assert all(errors[kind] <= bound for kind, bound in ERROR.items()), errors
    assert list(errors.values()) == sorted(errors.values())


@pytest.mark.parametrize("kind", K_QUANTS)
@pytest.mark.parametrize("scale", [3e-3, 1.0, 300.0])
def test_k_quants_keep_their_precision_at_any_scale_and_offset(
    normal: Floats, kind: str, scale: float
) -> None:
    assert error(normal * np.float32(scale), kind) <= 1.02 * ERROR[kind]
    heavy = np.random.default_rng(2).standard_t(4, (64, 1024)).astype(np.float32) * scale
    assert error(heavy.astype(np.float32), kind) <= 1.4 * ERROR[kind]
    negative = -np.abs(normal) * np.float32(scale) - np.float32(scale)
    assert error(negative, kind) <= ERROR[kind]


@pytest.mark.parametrize("kind", K_QUANTS)
def test_blocks_are_independent(normal: Floats, kind: str) -> None:
    whole = encode(normal, TYPES[kind])
    size = TYPES[kind].nbytes
    for row, block in ((0, 0), (7, 3), (63, 2)):
        alone = encode(normal[row : row + 1, block * 256 : (block + 1) * 256], TYPES[kind])
        np.testing.assert_array_equal(whole[row, block * size : (block + 1) * size], alone[0])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K"])
def test_sub_blocks_may_differ_by_orders_of_magnitude(kind: str) -> None:
    """Each sub-block has a scale of its own: a loud one costs a quiet one at most the step of the
    six-bit scales."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal((32, 8, 32)).astype(np.float32)
    values[:, 1:] *= 0.2
    back = decoded(values.reshape(32, 256), kind).reshape(values.shape)
    quiet = np.sqrt(((back - values)[:, 1:] ** 2).mean() / (values[:, 1:] ** 2).mean())
    assert quiet < 1.2 * ERROR[kind]


@pytest.mark.parametrize("kind", K_QUANTS)
def test_values_that_the_format_can_say_come_back(kind: str) -> None:
    """Blocks made of random scales and levels, with the outermost of each in use."""
    rng = np.random.default_rng(4)
    if kind == "Q6_K":
        levels = rng.integers(-32, 32, (64, 16, 16))
        levels[..., 0], levels[..., 1] = -32, 31
        scales = rng.integers(20, 128, (64, 16, 1)) * rng.choice([-1, 1], (64, 16, 1))
        scales[:, 0] = -128
        values = levels * scales / 1024
    else:
        top = {"Q4_K": 15, "Q5_K": 31}[kind]
        levels = rng.integers(0, top + 1, (64, 8, 32))
        levels[..., 0], levels[..., 1] = 0, top
        scales, minima = rng.integers(16, 64, (64, 8, 1)), rng.integers(0, 64, (64, 8, 1))
        scales[:, 0], minima[:, 0] = 63, 63
        values = levels * scales / 1024 - minima / 16
    exact = values.reshape(64, 256).astype(np.float32)
    np.testing.assert_array_equal(decoded(exact, kind), exact)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_legacy_blocks_of_whole_steps_are_exact(kind: str) -> None:
    lowest = {"Q4_0": -8, "Q8_0": -127}[kind]
    steps = np.random.default_rng(5).integers(lowest, -lowest, (16, 64))
    steps[:, ::32] = lowest
    values = (steps / 256).astype(np.float32)
    np.testing.assert_array_equal(decoded(values, kind), values)


@pytest.mark.parametrize("kind", TYPES)
def test_zeros_and_constants(kind: str) -> None:
    values = np.zeros((4, 256), np.float32)
    np.testing.assert_array_equal(decoded(values, kind), values)
    for constant in (1.0, -1.0, 3e-3, -2000.0):
        values[:] = constant
        np.testing.assert_allclose(decoded(values, kind), values, rtol=5e-3)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e-12, 1e-7])
def test_tiny_values_stay_tiny(normal: Floats, kind: str, size: float) -> None:
    """float16 scales end at 6e-8: below, values become zero or as small."""
    values = (normal[:4, :512] * size).astype(np.float32)
    values[0, :256] = 0
    back = decoded(values, kind)
    assert np.isfinite(back).all()
    assert np.abs(back - values).max() <= max(5 * size, 1e-6)


@pytest.mark.parametrize("kind", TYPES)
def test_values_up_to_float16s_largest(normal: Floats, kind: str) -> None:
    values = (normal / np.abs(normal).max() * 65504).astype(np.float32)
    assert error(values, kind) <= 1.02 * ERROR[kind]


@pytest.mark.parametrize("kind", BY_FLOAT16)
@pytest.mark.parametrize("bad", [7e4, -1e30, np.inf, -np.inf, np.nan])
def test_values_that_float16_cannot_scale_are_refused(
    normal: Floats, kind: str, bad: float
) -> None:
    values = normal[:2].copy()
    values[1, 77] = bad
    with pytest.raises(QuantizeError, match="only BF16 and F32"):
        encode(values, TYPES[kind])
    for wide in ("BF16", "F32"):
        np.testing.assert_allclose(decoded(values, wide), values, rtol=4e-3)

"""Products of the CPU kernels: every instruction set, every format, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from phloem.srt.kernels.cpu.library import (
    KernelError,
    Kernels,
    KernelsUnavailable,
    Matrix,
    Team,
    library,
    runnable_isas,
)

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

GROUP = 32
"""Columns that int4 codes in one range."""
SPAN = 768
"""Columns of integer weights that share a scale, at most."""
STEP = 64
"""Columns that a span has a multiple of."""
ROUNDING = 2.0**-24
"""Largest relative error of one float32 operation."""
SMALLEST = 2.0**-149
"""Of the numbers that float32 has."""
VANISHES = 2.0**-113
"""Rows of activations below this have steps as large as if this were their largest."""


@dataclass(frozen=True)
class Format:
    """`block` elements take `nbytes`; a block's float16 scales are at `scales`.

    A product may miss Σ w·x by `activations` · Σ |w| · scale_x, what activations of 15 bits cost
    (scale_x is the row's largest |x| / 16383, and rounding misses by half of it at most), plus
    `sums` · `ROUNDING` · K · max |w| · max |x|, what adding in float32 costs: in the worst case
    K / 2 roundings a sum, seen are the square root of it.

    `rms` is tight: the root mean square of errors, over that of products, for normal data.
    """

    block: int
    nbytes: int
    scales: tuple[int, ...] = ()
    activations: float = 0.5001
    sums: float = 4.0
    rms: float = 1e-4


FLOATS = {
    "F32": Format(1, 4, activations=0.0, sums=1.0, rms=1e-6),
    "F16": Format(1, 2, activations=0.0, sums=1.0, rms=1e-6),
    "BF16": Format(1, 2, activations=0.0, sums=1.0, rms=1e-6),
}
BLOCKS = {
    "Q4_0": Format(32, 18, (0,)),
    "Q4_1": Format(32, 20, (0, 2)),
    "Q5_0": Format(32, 22, (0,)),
    "Q5_1": Format(32, 24, (0, 2)),
    "Q8_0": Format(32, 34, (0,)),
    "Q4_K": Format(256, 144, (0, 2)),
    "Q5_K": Format(256, 176, (0, 2)),
    "Q6_K": Format(256, 210, (208,)),
    "IQ4_NL": Format(32, 18, (0,)),
}
QUANTISED = {"int8": Format(1, 4), "int4": Format(1, 4)}  # from float32, when they are loaded
FORMATS = {**FLOATS, **BLOCKS, **QUANTISED}

WIDTHS = [32, 64, 96, 576, 768, 1536]
ODD_WIDTHS = [1, 17, 33, 577]
BATCHES = [1, 2, 3, 5, 8, 17, 33, 47, 81]
STORED = 45
ROWS = 37
"""Of the matrix: two whole blocks of 16, and five more."""

isas = pytest.mark.parametrize("isa", runnable_isas())
formats = pytest.mark.parametrize("name", FORMATS)


def widths(name: str) -> list[int]:
    odd = ODD_WIDTHS if FORMATS[name].block == 1 else []
    return [width for width in WIDTHS + odd if width % FORMATS[name].block == 0]


@dataclass(frozen=True)
class Case:
    """A matrix, and what it should hold: `source` float32 rows in the matrix's order."""

    matrix: Matrix
    source: Floats
    order: NDArray[np.int32]

    @property
    def weights(self) -> Floats:
        """What it does hold."""
        return np.stack([self.matrix.row(i) for i in range(ROWS)])


def stored(name: str, columns: int, rng: np.random.Generator) -> tuple[Bytes, Floats]:
    """Random rows in a format, and their values by the gguf package.

    Blocks are random bytes, so that every code occurs, also those that no encoder writes; only
    scales are drawn so that values are about 1.
    """
    values = rng.standard_normal((STORED, columns)).astype(np.float32)
    if name == "F32" or name in QUANTISED:
        return values.view(np.uint8), values
    if name == "F16":
        return values.astype(np.float16).view(np.uint8), values.astype(np.float16).astype("f4")
    if name == "BF16":
        high = (values.view(np.uint32) >> 16).astype(np.uint16)
        return high.view(np.uint8), (high.astype(np.uint32) << 16).view(np.float32)
    layout = FORMATS[name]
    blocks = rng.integers(0, 256, (STORED, columns // layout.block, layout.nbytes), dtype=np.uint8)
    for at in layout.scales:
        scales = rng.standard_normal(blocks.shape[:2]).astype(np.float16)
        scales[::7] = 0
        scales[1::7] *= np.float16(1e-6)  # below the normal range
        blocks[:, :, at : at + 2] = scales[:, :, None].view(np.uint8)
    data = blocks.reshape(STORED, -1)
    return data, dequantize(data, GGMLQuantizationType[name])


@cache
def case(name: str, columns: int) -> Case:
    rng = np.random.default_rng(columns)
    data, values = stored(name, columns, rng)
    order = rng.permutation(STORED)[:ROWS].astype(np.int32)
    order[[3, 16, 36]] = -1
    order[5] = order[4]
    source = values[order]
    source[order < 0] = 0
    return Case(Matrix(name, data, columns, order, Team(2)), source, order)


@cache
def inputs(columns: int) -> Floats:
    x = np.random.default_rng(1).standard_normal((max(BATCHES), columns)).astype(np.float32)
    x[7, : columns // 2] = 0
    x[8] *= np.float32(1e-4)
    return x


@cache
def generic_product(name: str, columns: int) -> Floats:
    return case(name, columns).matrix.multiply(Kernels("generic"), inputs(columns))


def error_bound(name: str, x: Floats, weights: Floats) -> NDArray[np.float64]:
    """[rows of x, rows of the matrix]; see `Format`."""
    columns = x.shape[1]
    steps = np.maximum(np.abs(x).max(1), VANISHES)[:, None] / 16383
    sums = np.abs(weights).sum(1, dtype=np.float64)
    missed: NDArray[np.float64] = FORMATS[name].activations * steps * sums
    largest = np.abs(x).max(1)[:, None].astype(np.float64) * np.abs(weights).max(1)
    missed += FORMATS[name].sums * columns * (ROUNDING * largest + SMALLEST)
    return missed


def bits(values: Floats) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def span_steps(source: Floats) -> Floats:
    """The step of each weight's span: its output's largest magnitude there, divided by 127."""
    columns = source.shape[1]
    blocks = -(-columns // STEP)
    each = -(-blocks // -(-blocks // (SPAN // STEP))) * STEP
    peaks = [np.abs(source[:, b : b + each]).max(1) for b in range(0, columns, each)]
    return (np.repeat(np.stack(peaks, 1), each, 1)[:, :columns] / 127).astype(np.float32)


@pytest.mark.parametrize("name", FLOATS)
def test_floats_are_kept_exactly(name: str) -> None:
    for columns in widths(name):
        found = case(name, columns)
        assert np.array_equal(found.weights, found.source), columns


@pytest.mark.parametrize("name", [*BLOCKS, "int8"])
def test_integers_miss_half_a_step_of_the_span(name: str) -> None:
    """And what the multiples of 1/256 cost that make codes of nibbles."""
    largest = 0.5 + 15.5 / 512 if name.startswith("Q4") else 0.5
    for columns in widths(name):
        found = case(name, columns)
        missed = np.abs(found.weights - found.source)
        assert (missed <= (largest + 1e-4) * span_steps(found.source)).all(), columns
        assert not found.weights[found.source == 0].any() or name.startswith("Q4")


def test_int4_misses_half_a_step_of_the_group_and_of_the_span() -> None:
    """Root mean square of a group: the whole range in 15 steps, which is tried first, misses half
    a step anywhere; a narrower range is only taken if it does better. Scales are float16."""
    for columns in widths("int4"):
        found = case("int4", columns)
        steps = span_steps(found.source)
        for begin in range(0, columns, GROUP):
            part = found.source[:, begin : begin + GROUP]
            low, high = part.min(1), part.max(1)
            half_step = (high - low) / 30 + 2.0**-11 * (high - low + np.abs(low))
            missed = found.weights[:, begin : begin + GROUP] - part
            allowed = half_step + 0.54 * steps[:, begin] + 1e-6
            assert (np.sqrt((missed**2).mean(1)) <= allowed).all()


@isas
@formats
def test_products(isa: str, name: str) -> None:
    for columns in widths(name):
        found, x = case(name, columns), inputs(columns)
        weights = found.weights
        product = found.matrix.multiply(Kernels(isa), x)
        error = np.abs(product - x.astype(np.float64) @ weights.T.astype(np.float64))
        assert (error <= error_bound(name, x, weights)).all(), columns
        assert not product[:, found.order < 0].any()  # rows that are not there are zero


@isas
@formats
def test_products_on_average(isa: str, name: str) -> None:
    found, x = case(name, 768), inputs(768)[9:]
    expected = x.astype(np.float64) @ found.weights.T.astype(np.float64)
    error = found.matrix.multiply(Kernels(isa), x) - expected
    assert np.sqrt((error**2).mean() / (expected**2).mean()) < FORMATS[name].rms


@isas
@formats
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_instruction_set(
    isa: str, name: str
) -> None:
    kernels = Kernels(isa)
    for columns in widths(name):
        found, x = case(name, columns), inputs(columns)
        expected = bits(generic_product(name, columns))
        assert np.array_equal(bits(found.matrix.multiply(kernels, x)), expected), columns
        for count in BATCHES[:-1]:
            for begin in (0, 6):
                part = slice(begin, begin + count)
                product = found.matrix.multiply(kernels, x[part])
                assert np.array_equal(bits(product), expected[part]), (columns, count)


@isas
@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q4_K", "int4"])
def test_nibbles_give_the_bits_that_bytes_do(isa: str, name: str) -> None:
    for columns in widths(name):
        found, x = case(name, columns), inputs(columns)
        data, _ = stored(name, columns, np.random.default_rng(columns))
        nibbles = Matrix(name, data, columns, found.order, Team(2), nibbles=True)
        rows = np.stack([nibbles.row(i) for i in range(ROWS)])
        assert np.array_equal(bits(rows), bits(found.weights)), columns
        expected = bits(generic_product(name, columns))
        for count in (1, 2, 3, 4, 5, 8, 9, 17, 47):
            product = nibbles.multiply(Kernels(isa), x[6 : 6 + count])
            assert np.array_equal(bits(product), expected[6 : 6 + count]), (columns, count)
        if columns >= 576:
            assert nibbles.nbytes < 0.7 * found.matrix.nbytes


@isas
@formats
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so(isa: str, name: str, poison: float) -> None:
    found, x = case(name, 768), inputs(768)[:9].copy()
    expected = found.matrix.multiply(Kernels(isa), x)
    for row, column in ((0, 0), (4, 31), (5, 500), (8, 767)):
        x[row, column] = poison
    with np.errstate(invalid="ignore"):
        product = found.matrix.multiply(Kernels(isa), x)
    touched = np.isin(np.arange(9), [0, 4, 5, 8])
    assert not np.isfinite(product[touched][:, found.order >= 0]).any()
    assert np.array_equal(product[~touched], expected[~touched])


@isas
@formats
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-40, 1e-38, 1e-37, 1e-30, 1e30])
def test_extreme_activations(isa: str, name: str, scale: float) -> None:
    found, x = case(name, 768), inputs(768)[:9].copy()
    x[::2] *= np.float32(scale)  # whole rows
    x[1, 32:64] *= np.float32(scale)  # a group among others
    product = found.matrix.multiply(Kernels(isa), x)
    error = np.abs(product - x.astype(np.float64) @ found.weights.T.astype(np.float64))
    assert (error <= error_bound(name, x, found.weights)).all()
    assert np.array_equal(bits(product), bits(found.matrix.multiply(Kernels("generic"), x)))
    if scale == 0:
        assert not product[::2].any()


@formats
def test_packing_does_not_depend_on_threads(name: str) -> None:
    columns = widths(name)[-1]
    data, _ = stored(name, columns, np.random.default_rng(columns))
    packed = [Matrix(name, data, columns, case(name, columns).order, Team(n)) for n in (1, 3)]
    for matrix in packed:
        rows = np.stack([matrix.row(i) for i in range(ROWS)])
        assert np.array_equal(bits(rows), bits(case(name, columns).weights))


def test_a_matrix_of_many_blocks() -> None:
    """Blocks that no kernel takes together with the last ones, and a matrix of one row."""
    rng = np.random.default_rng(0)
    for rows in (1, 15, 16, 63, 64, 65, 129):
        values = rng.standard_normal((rows, 40)).astype(np.float32)
        matrix = Matrix("F32", values.view(np.uint8), 40, np.arange(rows, dtype=np.int32), Team(1))
        x = rng.standard_normal((5, 40)).astype(np.float32)
        for isa in runnable_isas():
            product = matrix.multiply(Kernels(isa), x)
            np.testing.assert_allclose(product, x @ values.T, rtol=1e-4, atol=1e-4)
            for i in range(5):
                assert np.array_equal(matrix.multiply(Kernels(isa), x[i : i + 1])[0], product[i])


def test_what_does_not_fit_is_refused() -> None:
    data, order = np.zeros((4, 128), np.uint8), np.arange(4, dtype=np.int32)
    with pytest.raises(KernelError, match="no kernel for rows of 32 in Q2_K"):
        Matrix("Q2_K", data, 32, order, Team(1))
    with pytest.raises(KernelError, match="no kernel for rows of 33 in Q4_0"):
        Matrix("Q4_0", data, 33, order, Team(1))
    with pytest.raises(ValueError, match="F32 has 124"):
        Matrix("F32", data, 31, order, Team(1))
    for bad in ([0, 4], [-2, 0]):
        with pytest.raises(ValueError, match="outside the 4"):
            Matrix("F32", data, 32, np.array(bad, np.int32), Team(1))
    matrix = Matrix("F32", data, 32, order, Team(1))
    with pytest.raises(ValueError, match="x has shape"):
        matrix.multiply(Kernels(), np.zeros((2, 31), np.float32))


def test_instruction_sets_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for isa in runnable_isas():
        assert Kernels(isa).isa == isa
    assert runnable_isas()[-1] == "generic"
    monkeypatch.delenv("PHLOEM_ISA", raising=False)
    assert Kernels().isa == runnable_isas()[0]
    monkeypatch.setenv("PHLOEM_ISA", "generic")
    assert Kernels().isa == "generic"
    with pytest.raises(KernelsUnavailable, match=r"called sse9; there are: .*generic"):
        Kernels("sse9")


def test_row_bytes_of_every_format() -> None:
    for name, layout in FORMATS.items():
        columns = 768
        expected = columns // layout.block * layout.nbytes
        assert library().phloem_row_bytes(name.encode(), columns) == expected

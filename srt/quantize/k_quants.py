"""float32 → Q4_K, Q5_K and Q6_K blocks, which the `gguf` package can only read.

A block is 256 elements of a row: sub-blocks with a small integer scale each (and a minimum, in
Q4_K and Q5_K), which share float16 factors. Scales are searched for: of several roundings of a
sub-block, each with the scale that suits it best by least squares, the one with the smallest
squared error is kept; then, as the shared factors have rounded the scales, their neighbours are
tried too.

Layout: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

BLOCK = 256

_STRETCHES = np.linspace(-0.9, 2.1, 11)
"""What is added to the number of steps over a sub-block's range in the roundings tried: a scale
below the whole range's cuts the outermost values and serves the many in the middle."""

_NEIGHBOURS = (0, -1, 1)
_SCALE_TOP = 63  # of the six-bit scales and minima of Q4_K and Q5_K


class _Affine(NamedTuple):
    """Sub-blocks as `scale * sc * q - minimum * m`.

    `d`, `dmin`: float16 `[blocks]`; `scales`, `minima`: six bits, `[blocks, 8]`; `levels`
    `[blocks, 8, 32]`. All but the first two are uint8.
    """

    d: NDArray[np.float16]
    dmin: NDArray[np.float16]
    scales: Bytes
    minima: Bytes
    levels: Bytes


def q4_k(values: Floats) -> Bytes:
    """Flat values, whole blocks → `[blocks, 144]`: d, dmin, scales and minima, low and high
    halves of bytes for an even sub-block and the one after it."""
    found = _fit_affine(values.reshape(-1, 8, 32), 15)
    return np.concatenate((_head(found), _pairs(found.levels)), axis=1)


def q5_k(values: Floats) -> Bytes:
    """Flat values, whole blocks → `[blocks, 176]`: as Q4_K, with the fifth bits (bit j of byte i
    is of element i of sub-block j) before the low four."""
    found = _fit_affine(values.reshape(-1, 8, 32), 31)
    fifth = np.packbits(found.levels >> 4, axis=1, bitorder="little").reshape(-1, 32)
    return np.concatenate((_head(found), fifth, _pairs(found.levels & np.uint8(15))), axis=1)


def q6_k(values: Floats) -> Bytes:
    """Flat values, whole blocks → `[blocks, 210]`: low four bits, high two bits, 16 scales, d.

    Each half of a block is four runs of 32 elements: runs 0 and 2 share the first 32 bytes of low
    bits, 1 and 3 the next, and all four the 32 bytes of high bits.
    """
    d, scales, levels = _fit_symmetric(values.reshape(-1, 16, 16))
    runs = levels.reshape(-1, 2, 4, 32)
    low = (runs[:, :, :2] & 15) | ((runs[:, :, 2:] & 15) << 4)
    places = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce((runs >> 4) << places, axis=2)
    parts = (low.reshape(-1, 128), high.reshape(-1, 64), scales.view(np.uint8), _as_bytes(d))
    return np.concatenate(parts, axis=1)


def _head(found: _Affine) -> Bytes:
    """`[blocks, 16]`: d, dmin, and 8 scales and 8 minima of six bits in 12 bytes. The first four
    of each fill the low six bits of a byte; the last four have their low halves in the last
    bytes and their two high bits on top of the first."""
    sc, m = found.scales, found.minima
    packed = (
        sc[:, :4] | ((sc[:, 4:] >> 4) << 6),
        m[:, :4] | ((m[:, 4:] >> 4) << 6),
        (sc[:, 4:] & 15) | ((m[:, 4:] & 15) << 4),
    )
    return np.concatenate((_as_bytes(found.d), _as_bytes(found.dmin), *packed), axis=1)


def _pairs(levels: Bytes) -> Bytes:
    """`[blocks, 8, 32]` of four bits → `[blocks, 128]`."""
    return (levels[:, 0::2] | (levels[:, 1::2] << np.uint8(4))).reshape(-1, 128)


def _as_bytes(d: NDArray[np.float16]) -> Bytes:
    return d.astype("<f2").view(np.uint8).reshape(-1, 2)


def _fit_affine(x: Floats, top: int) -> _Affine:
    """Levels 0..`top` for sub-blocks `x` `[blocks, 8, 32]`."""
    scale, offset = _search_affine(x, top)
    d, dmin = _shared(scale, _SCALE_TOP), _shared(offset, _SCALE_TOP)
    d32, dmin32 = d.astype(np.float32)[:, None], dmin.astype(np.float32)[:, None]
    sc0, m0 = _steps(scale, d32), _steps(offset, dmin32)
    best = np.full(x.shape[:2], np.inf, np.float32)
    scales, minima = np.zeros_like(sc0), np.zeros_like(m0)
    for sc_step in _NEIGHBOURS:
        for m_step in _NEIGHBOURS:
            sc = np.clip(sc0 + sc_step, 0, _SCALE_TOP)
            m = np.clip(m0 + m_step, 0, _SCALE_TOP)
            step, low = d32 * sc, dmin32 * m
            error = x - (_levels(x, step, low, top) * step[..., None] - low[..., None])
            squared = np.einsum("bsi,bsi->bs", error, error)
            better = squared < best
            best = np.where(better, squared, best)
            scales, minima = np.where(better, sc, scales), np.where(better, m, minima)
    levels = _levels(x, d32 * scales, dmin32 * minima, top)
    return _Affine(
        d, dmin, scales.astype(np.uint8), minima.astype(np.uint8), levels.astype(np.uint8)
    )


def _search_affine(x: Floats, top: int) -> tuple[Floats, Floats]:
    """The real scale and offset (both >= 0) of each sub-block, x ≈ scale * level - offset."""
    count = x.shape[-1]
    low = np.minimum(x.min(-1), 0)  # the format has no offset upwards
    spread = x.max(-1) - low
    from_low = x - low[..., None]
    sum_x, sum_xx = x.sum(-1), np.einsum("bsi,bsi->bs", x, x)
    best = np.full(low.shape, np.inf, np.float32)
    scale, offset = np.zeros_like(low), -low
    for stretch in _STRETCHES:
        per_unit = _divided(np.float32(top + stretch), spread)
        q = np.minimum(np.rint(from_low * per_unit[..., None]), top)
        sum_q, sum_qq = q.sum(-1), np.einsum("bsi,bsi->bs", q, q)
        sum_qx = np.einsum("bsi,bsi->bs", q, x)
        a = _divided(count * sum_qx - sum_q * sum_x, count * sum_qq - sum_q * sum_q)
        b = (sum_x - a * sum_q) / count
        upwards = b > 0
        a = np.where(upwards, _divided(sum_qx, sum_qq), a)
        b = np.where(upwards, 0, b)
        error = (
            sum_xx + a * a * sum_qq + count * b * b + 2 * (a * b * sum_q - a * sum_qx - b * sum_x)
        )
        better = (error < best) & (a >= 0)
        best = np.where(better, error, best)
        scale, offset = np.where(better, a, scale), np.where(better, -b, offset)
    return scale, offset


def _fit_symmetric(x: Floats) -> tuple[NDArray[np.float16], NDArray[np.int8], Bytes]:
    """d `[blocks]`, signed scales `[blocks, 16]` and levels 0..63 (32 is zero) of sub-blocks `x`
    `[blocks, 16, 16]`."""
    scale = _search_symmetric(x)
    d = _shared(scale, -128)  # so that the furthest gets the longest step there is
    d32 = d.astype(np.float32)[:, None]
    sc0 = np.rint(_divided(scale, d32))
    best = np.full(x.shape[:2], np.inf, np.float32)
    scales = np.zeros_like(sc0)
    for neighbour in _NEIGHBOURS:
        sc = np.clip(sc0 + neighbour, -128, 127)
        step = d32 * sc
        error = x - _centred(x, step) * step[..., None]
        squared = np.einsum("bsi,bsi->bs", error, error)
        better = squared < best
        best, scales = np.where(better, squared, best), np.where(better, sc, scales)
    levels = _centred(x, d32 * scales) + 32
    return d, scales.astype(np.int8), levels.astype(np.uint8)


def _search_symmetric(x: Floats) -> Floats:
    """The real scale of each sub-block, of either sign, x ≈ scale * level with levels -32..31:
    the value furthest from zero may take the level -32, which has no counterpart."""
    furthest = np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]
    best = np.full(furthest.shape, -np.inf, np.float32)
    scale = np.zeros_like(furthest)
    for stretch in _STRETCHES:
        per_unit = _divided(np.float32(-31 - stretch), furthest)
        q = np.clip(np.rint(x * per_unit[..., None]), -32, 31)
        sum_qx, sum_qq = np.einsum("bsi,bsi->bs", q, x), np.einsum("bsi,bsi->bs", q, q)
        a = _divided(sum_qx, sum_qq)
        explained = a * sum_qx  # of the sum of squares of x: the rest is the error
        better = explained > best
        best, scale = np.where(better, explained, best), np.where(better, a, scale)
    return scale


def _levels(x: Floats, step: Floats, low: Floats, top: int) -> Floats:
    """The nearest level of each element; 0 where the step is."""
    per_unit = _divided(np.float32(1), step)
    levels: Floats = np.clip(np.rint((x + low[..., None]) * per_unit[..., None]), 0, top)
    return levels


def _centred(x: Floats, step: Floats) -> Floats:
    levels: Floats = np.clip(np.rint(x * _divided(np.float32(1), step)[..., None]), -32, 31)
    return levels


def _shared(values: Floats, top: int) -> NDArray[np.float16]:
    """The factor by which integers from 0 to `top` reach the one of `values` `[blocks, n]` that is
    furthest from 0. Float16's small numbers are so coarse that the nearest may not reach far
    enough: then the next larger one is taken."""
    furthest = np.take_along_axis(values, np.abs(values).argmax(-1)[:, None], -1)[:, 0]
    nearest = (furthest / top).astype(np.float16)
    short = np.abs(nearest.astype(np.float32) * (abs(top) + 0.5)) < np.abs(furthest)
    away = np.copysign(np.float16(np.inf), furthest / top).astype(np.float16)
    return np.where(short, np.nextafter(nearest, away), nearest)


def _steps(values: Floats, d: Floats) -> Floats:
    """The six bits that bring `d` nearest to each value."""
    return np.clip(np.rint(_divided(values, d)), 0, _SCALE_TOP)


def _divided(numerator: Floats | np.float32, denominator: Floats) -> Floats:
    """The quotient, 0 where the denominator is."""
    shape = np.broadcast_shapes(np.shape(numerator), denominator.shape)
    out = np.zeros(shape, np.float32)
    return np.divide(numerator, denominator, out=out, where=denominator != 0)

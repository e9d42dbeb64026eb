"""Rotary frequencies and their scaling, in plain numpy float64.

Sources: RoPE arXiv:2104.09864; position interpolation arXiv:2306.15595; YaRN arXiv:2309.00071
(ramp of section 3.2, temperature of section 3.3); Llama 3.1's scaling as its model card's
reference code defines it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from phloem.srt.checkpoint.config import ModelConfig, RopeConfig, RopeScaling

Frequencies = NDArray[np.float64]


def rope_frequencies(config: ModelConfig) -> tuple[Frequencies, float]:
    """Inverse frequencies `[head_dim / 2]` and the factor that cos and sin are multiplied by.

    The angle of position `p` in pair `i` is `p * inv_freq[i]`; pair `i` is the dimensions
    `(i, i + head_dim / 2)` of a head.
    """
    rope = config.rope
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    base = rope.theta**-exponents
    match rope.scaling:
        case RopeScaling.NONE:
            return base, 1.0
        case RopeScaling.LINEAR:
            return base / rope.factor, 1.0
        case RopeScaling.FACTORS:
            return base / np.asarray(rope.factors, dtype=np.float64), 1.0
        case RopeScaling.LLAMA3:
            return _llama3(base, rope), 1.0
        case RopeScaling.YARN:
            return _yarn(base, rope, config.head_dim), _attention_factor(rope)


def _llama3(base: Frequencies, rope: RopeConfig) -> Frequencies:
    """Rotations over the original context decide: few → stretched, many → kept, else blended."""
    turns = _original_context(rope) * base / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    scaled: Frequencies = base * (keep + (1 - keep) / rope.factor)
    return scaled


def _yarn(base: Frequencies, rope: RopeConfig, dim: int) -> Frequencies:
    """Dimensions below the ramp are kept, above it stretched, on it blended."""
    low = _dimension_of_turns(rope.beta_fast, rope, dim)
    high = _dimension_of_turns(rope.beta_slow, rope, dim)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    stretch = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    scaled: Frequencies = base * (1 - stretch) + base / rope.factor * stretch
    return scaled


def _dimension_of_turns(turns: float, rope: RopeConfig, dim: int) -> float:
    """The (fractional) pair index whose rotation does `turns` turns over the original context."""
    length = _original_context(rope)
    return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_attention_factor(rope.factor, rope.mscale) / yarn_attention_factor(
            rope.factor, rope.mscale_all_dim
        )
    return yarn_attention_factor(rope.factor)


def yarn_attention_factor(factor: float, weight: float = 1.0) -> float:
    """YaRN's factor on cos and sin for a context stretched by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _original_context(rope: RopeConfig) -> int:
    if rope.original_context is None:
        raise ValueError(f"rope scaling {rope.scaling} needs original_context")
    return rope.original_context

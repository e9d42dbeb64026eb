"""Rotary frequencies, in numbers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from phloem.srt.checkpoint import ModelConfig, RopeConfig, RopeScaling
from phloem.srt.checkpoint.rope import rope_frequencies


def model(head_dim: int, **rope: Any) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=1,
        hidden_size=head_dim,
        intermediate_size=1,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=RopeConfig(**rope),
        context_length=1,
        tie_embeddings=True,
    )


def test_plain_frequencies_are_powers_of_theta() -> None:
    inv_freq, factor = rope_frequencies(model(8, theta=10000.0))
    np.testing.assert_allclose(inv_freq, [1.0, 0.1, 0.01, 0.001], rtol=1e-12)
    assert inv_freq.dtype == np.float64
    assert factor == 1.0


def test_linear_divides_all_and_factors_divide_each() -> None:
    plain, _ = rope_frequencies(model(8, theta=10000.0))
    linear, _ = rope_frequencies(model(8, theta=1e4, scaling=RopeScaling.LINEAR, factor=4.0))
    np.testing.assert_allclose(linear, plain / 4)
    each, factor = rope_frequencies(
        model(8, theta=1e4, scaling=RopeScaling.FACTORS, factors=(1.0, 2.0, 4.0, 8.0))
    )
    np.testing.assert_allclose(each, plain / [1, 2, 4, 8])
    assert factor == 1.0


def test_llama3() -> None:
    inv_freq, attention = rope_frequencies(
        model(16, theta=500000.0, scaling=RopeScaling.LLAMA3, factor=8.0, original_context=8192)
    )
    np.testing.assert_allclose(
        inv_freq,
        [
            1.0,
            0.19392274474868576,
            0.03760603093086393,
            0.007292664737217109,
            0.0005248461609929547,
            3.428102195952591e-05,
            6.647869871181235e-06,
            1.2891731721515574e-06,
        ],
        rtol=1e-6,
    )
    assert attention == 1.0


def test_llama3_with_64_dimensions_and_factor_32() -> None:
    inv_freq, _ = rope_frequencies(
        model(64, theta=500000.0, scaling=RopeScaling.LLAMA3, factor=32.0, original_context=8192)
    )
    picked = [inv_freq[i] for i in (0, 1, 14, 15, 16, 17, 31)]
    np.testing.assert_allclose(
        picked,
        [
            1.0,
            0.6636012376960885,
            0.003211445994752591,
            0.001290547928209264,
            0.00042955679655936815,
            9.70828780262767e-05,
            9.41830672543491e-08,
        ],
        rtol=1e-6,
    )


def test_yarn() -> None:
    inv_freq, attention = rope_frequencies(
        model(16, theta=10000.0, scaling=RopeScaling.YARN, factor=4.0, original_context=32)
    )
    np.testing.assert_allclose(
        inv_freq,
        [
            1.0,
            0.19764235376052372,
            0.025,
            0.007905694150420948,
            0.0025,
            0.0007905694150420948,
            0.00025,
            7.905694150420948e-05,
        ],
        rtol=1e-6,
    )
    assert attention == pytest.approx(0.1 * math.log(4) + 1, rel=1e-12)


def test_yarn_ramp_over_a_real_model() -> None:
    inv_freq, attention = rope_frequencies(
        model(64, theta=1e6, scaling=RopeScaling.YARN, factor=4.0, original_context=32768)
    )
    picked = [inv_freq[i] for i in (0, 8, 12, 16, 20, 24, 31)]
    np.testing.assert_allclose(
        picked,
        [
            1.0,
            0.03162277660168379,
            0.005154795480911533,
            0.0005833333333333333,
            4.445698525097307e-05,
            7.905694150420949e-06,
            3.84981631514873e-07,
        ],
        rtol=1e-6,
    )
    assert attention == pytest.approx(1.138629436111989, rel=1e-12)


def test_yarn_attention_factor_can_be_set_or_weighted() -> None:
    common: dict[str, Any] = {
        "theta": 1e4,
        "scaling": RopeScaling.YARN,
        "factor": 4.0,
        "original_context": 32,
    }
    assert rope_frequencies(model(16, **common, attention_factor=0.75))[1] == 0.75
    weighted = rope_frequencies(model(16, **common, mscale=1.0, mscale_all_dim=0.5))[1]
    assert weighted == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


def test_scaling_without_its_numbers_is_an_error() -> None:
    with pytest.raises(ValueError, match="original_context"):
        rope_frequencies(model(16, theta=1e4, scaling=RopeScaling.LLAMA3, factor=8.0))

"""Layers: a row's result is the same, bit for bit, whatever it is computed with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from phloem.srt.checkpoint.config import ModelConfig, RopeConfig
from phloem.srt.models.layers import Linear, RMSNorm, RotaryEmbedding, can_pack, silu_and_mul

ROWS = [1, 2, 3, 5, 8, 16, 17, 64, 257]


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def linear(
    in_features: int, parts: list[int], *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> Linear:
    layer = Linear(in_features, parts, bias=bias, dtype=dtype)
    torch.nn.init.normal_(layer.weight, std=0.05)
    if layer.bias is not None:
        torch.nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("k", "n"), [(576, 960), (1536, 576), (64, 250), (40, 100), (896, 4864)])
@pytest.mark.usefixtures("threads")
def test_linear_rows_do_not_depend_on_their_number(
    k: int, n: int, packed: bool, dtype: torch.dtype
) -> None:
    """Nor on their place: the first of some is the eighth of others."""
    layer = linear(k, [n], bias=True, dtype=dtype)
    if packed:
        if not can_pack(dtype):
            pytest.skip(f"oneDNN does not multiply {dtype} here")
        layer.pack()
    x = torch.randn(300, k).to(dtype)
    with torch.inference_mode():
        whole = layer(x)
        assert whole.shape == (300, n)
        for rows in ROWS:
            assert torch.equal(layer(x[7 : 7 + rows]), whole[7 : 7 + rows]), rows
        assert torch.equal(torch.cat([layer(x[i : i + 1]) for i in range(40)]), whole[:40])
        assert layer(x[:0]).shape == (0, n)


def test_packing_changes_nothing_but_the_order_of_sums() -> None:
    layer = linear(96, [40, 24], bias=True)
    x = torch.randn(11, 96)
    with torch.inference_mode():
        plain = layer(x)
        weight = layer.weight.clone()
        layer.pack()
        torch.testing.assert_close(layer(x), plain, rtol=1e-5, atol=1e-5)
        assert layer.weight.numel() == 0 or torch.equal(layer.weight, weight)


@pytest.mark.parametrize("size", [50, 1536, 4096])
@pytest.mark.usefixtures("threads")
def test_elementwise_rows_do_not_depend_on_their_number(size: int) -> None:
    norm = RMSNorm(2 * size, 1e-5, dtype=torch.float32)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(300, 2 * size)
    for layer in (norm, silu_and_mul):
        whole = layer(x)
        for rows in ROWS:
            assert torch.equal(layer(x[7 : 7 + rows]), whole[7 : 7 + rows]), (layer, rows)


def test_silu_and_mul() -> None:
    x = torch.cat((torch.linspace(-200, 200, 101), torch.randn(101)))[None]
    expected = torch.nn.functional.silu(x[:, :101].double()) * x[:, 101:].double()
    torch.testing.assert_close(silu_and_mul(x).double(), expected, rtol=1e-5, atol=1e-6)


def test_rotation_turns_pairs_and_keeps_relative_angles() -> None:
    config = ModelConfig(
        architecture="llama",
        vocab_size=8,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10_000.0),
        context_length=64,
        tie_embeddings=True,
    )
    rotary = RotaryEmbedding(config)
    x = torch.randn(1, 1, 16).expand(3, 1, 16).contiguous()
    turned = rotary.rotate(x, rotary.tables(torch.tensor([0, 1, 50])))
    torch.testing.assert_close(turned[0], x[0])
    one = torch.complex(x[0, 0, :8], x[0, 0, 8:]) * torch.polar(
        torch.ones(8), 10_000.0 ** -(torch.arange(8) / 8)
    )
    torch.testing.assert_close(turned[1, 0], torch.cat((one.real, one.imag)))
    y = torch.randn(1, 1, 16).expand(3, 1, 16).contiguous()
    near = rotary.rotate(x, rotary.tables(torch.tensor([3, 13, 43])))
    far = rotary.rotate(y, rotary.tables(torch.tensor([5, 15, 45])))
    products = (near * far).sum(-1)
    torch.testing.assert_close(products, products[:1].expand(3, 1), rtol=1e-4, atol=1e-4)

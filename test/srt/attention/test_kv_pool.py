"""The pool's layout, and what is in it."""

from __future__ import annotations

import pytest
import torch

from phloem.srt.attention.kv_pool import KVPool


def test_pool_has_equal_strides_and_a_zero_padding_slot() -> None:
    pool = KVPool(2, 10, 2, 16, torch.float32)
    assert pool.keys(1).shape == (10, 2, 16)
    assert pool.keys(1).stride() == pool.values(1).stride()
    assert pool.keys(1).is_contiguous()
    assert not pool.keys(1)[0].any()
    assert not pool.values(1)[0].any()
    k, v = torch.randn(2, 2, 2, 16)
    pool.write(1, torch.tensor([9, 4]), k, v)
    assert torch.equal(pool.keys(1)[[9, 4]], k)
    assert torch.equal(pool.values(1)[[9, 4]], v)
    with pytest.raises(ValueError, match="holds no token"):
        KVPool(1, 1, 1, 8, torch.float32)

"""How a backend is chosen."""

from __future__ import annotations

import pytest
import torch

from phloem.srt.attention.base import create_backend
from phloem.srt.attention.batch import AttentionDims, AttentionError
from phloem.srt.attention.kv_pool import KVPool


def test_an_unknown_backend_names_the_known_ones() -> None:
    store = KVPool(1, 4, 1, 8, torch.float32)
    with pytest.raises(AttentionError, match="torch_native"):
        create_backend("magic", store, AttentionDims(num_heads=1, num_kv_heads=1, head_dim=8))

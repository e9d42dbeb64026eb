"""What a batch refuses, and how it is laid out."""

from __future__ import annotations

import numpy as np
import pytest

from phloem.srt.attention.batch import AttentionBatch, AttentionDims, AttentionError


def test_new_slots_and_offsets() -> None:
    slots = [np.array([5, 9, 2], np.int32), np.array([7, 1], np.int32)]
    batch = AttentionBatch([1, 2], slots)
    assert batch.num_tokens == 3
    assert batch.new_slots().tolist() == [2, 7, 1]
    assert batch.row_offsets() == [(0, 1), (1, 3)]


@pytest.mark.parametrize("count", [0, 3])
def test_a_row_with_no_or_too_many_new_tokens(count: int) -> None:
    with pytest.raises(AttentionError, match=f"row 0: {count} new tokens in a sequence of 2"):
        AttentionBatch([count], [np.array([1, 2], np.int32)])


def test_dims_that_do_not_divide() -> None:
    with pytest.raises(AttentionError, match="9 query heads"):
        AttentionDims(num_heads=9, num_kv_heads=2, head_dim=64)
    with pytest.raises(AttentionError, match="sliding_window is 0"):
        AttentionDims(num_heads=9, num_kv_heads=3, head_dim=64, sliding_window=0)

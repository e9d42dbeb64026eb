"""Packed masks and the buffer that two processes share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained.bitmask import MaskBuffer, allowed_tokens, pack_mask, unpack_mask, words
from phloem.constrained.vocab import Vocabulary


@given(st.integers(1, 200).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_packing_round_trips(case: tuple[int, set[int]]) -> None:
    size, allowed = case
    row = pack_mask(allowed, size)
    assert row.dtype == np.int32
    assert row.shape == (words(size),)
    assert allowed_tokens(row, size) == sorted(allowed)
    for token in range(size):
        bit = int(row[token // 32]) >> (token % 32) & 1
        assert bool(bit) == (token in allowed) == bool(unpack_mask(row, size)[token])


def test_ids_outside_are_refused() -> None:
    with pytest.raises(ValueError, match="token 5"):
        pack_mask([5], 5)


def test_buffer_is_shared_and_alternates(tmp_path: Path) -> None:
    ours = MaskBuffer.create(tmp_path / "masks", 3, 70)
    theirs = MaskBuffer.open(tmp_path / "masks", 3, 70)
    ours.row(4, 2)[:] = [1, 2, 3]
    assert theirs.row(4, 2).tolist() == [1, 2, 3]
    assert theirs.row(6, 2).tolist() == [1, 2, 3]
    assert theirs.row(5, 2).tolist() == [0, 0, 0]
    with pytest.raises(IndexError):
        ours.row(0, 3)


def test_buffer_of_another_size_is_refused(tmp_path: Path) -> None:
    MaskBuffer.create(tmp_path / "masks", 3, 70)
    with pytest.raises(ValueError, match="expected"):
        MaskBuffer.open(tmp_path / "masks", 4, 70)


def test_vocabulary_checks_itself() -> None:
    assert Vocabulary([b"a", b""], frozenset({1}), (1,)).size == 2
    with pytest.raises(ValueError, match="size"):
        Vocabulary([b"a", b"b"], frozenset(), (), 1)
    with pytest.raises(ValueError, match="stop_ids"):
        Vocabulary([b"a"], frozenset(), (1,))

"""Packed vocabulary masks: 32 tokens a word, token `i` is bit `i % 32` of word `i // 32`.

`MaskBuffer` is the memory the grammar process fills and the worker reads: two buffers of rows, so
that step n + 1 may be filled while step n is still being sampled.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

BUFFERS = 2


def words(vocab_size: int) -> int:
    """int32 words that hold one row."""
    return -(-vocab_size // 32)


def pack_mask(allowed: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """Token ids → one packed row.

    Raises:
        ValueError: an id lies outside the vocabulary.
    """
    flags = np.zeros(words(vocab_size) * 32, dtype=bool)
    for token in allowed:
        if not 0 <= token < vocab_size:
            raise ValueError(f"token {token} is outside a vocabulary of {vocab_size}")
        flags[token] = True
    return np.packbits(flags, bitorder="little").view(np.int32)


def unpack_mask(row: NDArray[np.int32], vocab_size: int) -> NDArray[np.bool_]:
    """One packed row → [vocab_size] of bool."""
    flags = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")
    return flags[:vocab_size].astype(bool)


def allowed_tokens(row: NDArray[np.int32], vocab_size: int) -> list[int]:
    """The ids whose bits are set."""
    return [int(i) for i in np.flatnonzero(unpack_mask(row, vocab_size))]


class MaskBuffer:
    """Mask rows in a file that two processes map: int32 [2, rows, ceil(vocab/32)]."""

    def __init__(self, data: NDArray[np.int32]) -> None:
        self._data = data

    @classmethod
    def create(cls, path: str | Path, rows: int, vocab_size: int) -> MaskBuffer:
        """Make the file, all zero, or overwrite what is there."""
        shape = (BUFFERS, rows, words(vocab_size))
        return cls(np.memmap(path, dtype=np.int32, mode="w+", shape=shape))

    @classmethod
    def open(cls, path: str | Path, rows: int, vocab_size: int) -> MaskBuffer:
        """Map an existing file.

        Raises:
            ValueError: its size is not that of `rows` and `vocab_size`.
        """
        shape = (BUFFERS, rows, words(vocab_size))
        expected = int(np.prod(shape)) * 4
        actual = Path(path).stat().st_size
        if actual != expected:
            raise ValueError(f"{path}: {actual} bytes, expected {expected} for shape {shape}")
        return cls(np.memmap(path, dtype=np.int32, mode="r+", shape=shape))

    @property
    def rows(self) -> int:
        """Rows of one buffer."""
        return int(self._data.shape[1])

    def row(self, step_id: int, row: int) -> NDArray[np.int32]:
        """A view of row `row` in the buffer of step `step_id`.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < self.rows:
            raise IndexError(f"mask row {row} of {self.rows}")
        view: NDArray[np.int32] = self._data[step_id % BUFFERS, row]
        return view

"""A model as it goes into a GGUF file: typed metadata, and tensors under GGUF names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from gguf import GGUFValueType
from numpy.typing import NDArray

from phloem.srt.checkpoint.quant_types import BlockType
from phloem.srt.checkpoint.tensors import dequantize

_CHUNK_ELEMENTS = 1 << 18
"""Elements decoded at once: a few of their arrays fit into a core's cache."""


@dataclass(frozen=True)
class Field:
    """One metadata entry. `element` is the type of an array's elements."""

    key: str
    value: Any
    kind: GGUFValueType
    element: GGUFValueType | None = None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor under its GGUF name: `shape` in torch order, rows in the file's order; `data` is
    uint8 `[*shape[:-1], bytes of a row]`."""

    name: str
    shape: tuple[int, ...]
    block: BlockType
    data: NDArray[np.uint8]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def chunks(self) -> Iterator[slice]:
        """Runs of rows of a size that is good to work on."""
        rows = self.elements // self.shape[-1]
        step = max(1, _CHUNK_ELEMENTS // self.shape[-1])
        return (slice(start, min(start + step, rows)) for start in range(0, rows, step))

    def values(self, rows: slice) -> NDArray[np.float32]:
        """Some rows as `[rows, shape[-1]]` float32."""
        data = self.data.reshape(-1, self.data.shape[-1])[rows]
        return dequantize(data, self.block).reshape(len(data), self.shape[-1])


@dataclass(frozen=True, kw_only=True)
class Source:
    """What is to be written. `eos_ids` is what the written file must name, too."""

    architecture: str
    fields: tuple[Field, ...]
    tensors: tuple[StoredTensor, ...]
    eos_ids: tuple[int, ...]

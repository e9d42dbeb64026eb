"""A GGUF file as a source: every metadata field with the type it has there, tensors as they lie.

`phloem.srt.checkpoint.gguf_header` checks the file, but forgets the width of numbers; this walks
over its metadata once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGUFValueType

from phloem.srt.checkpoint import Checkpoint
from phloem.srt.checkpoint.gguf_header import GgufArray, GgufHeader, read_header
from phloem.srt.quantize.source import Field, Source, StoredTensor

_METADATA_AT = 24  # after magic bytes, version and two counts
_SIZES = {
    GGUFValueType.UINT8: 1,
    GGUFValueType.INT8: 1,
    GGUFValueType.UINT16: 2,
    GGUFValueType.INT16: 2,
    GGUFValueType.UINT32: 4,
    GGUFValueType.INT32: 4,
    GGUFValueType.FLOAT32: 4,
    GGUFValueType.BOOL: 1,
    GGUFValueType.UINT64: 8,
    GGUFValueType.INT64: 8,
    GGUFValueType.FLOAT64: 8,
}


def from_gguf(checkpoint: Checkpoint) -> Source:
    """The file of an open GGUF checkpoint. Raises `CheckpointError` for a damaged one."""
    header = read_header(Path(checkpoint.path))
    tensors = []
    for info in header.tensors.values():
        data = np.frombuffer(header.buffer, np.uint8, info.nbytes, info.offset)
        rows = data.reshape(*info.shape[:-1], -1)
        tensors.append(StoredTensor(info.name, info.shape, info.block, rows))
    return Source(
        architecture=str(header.metadata["general.architecture"]),
        fields=tuple(_fields(header)),
        tensors=tuple(tensors),
        eos_ids=checkpoint.config.eos_ids,
    )


def _fields(header: GgufHeader) -> Iterator[Field]:
    """The metadata in file order."""
    at = _METADATA_AT
    for key, value in header.metadata.items():
        at += 8 + len(key.encode())
        kind = GGUFValueType(int.from_bytes(header.buffer[at : at + 4], "little"))
        at += 4
        if isinstance(value, GgufArray):
            element = GGUFValueType(value.element)
            if element is GGUFValueType.STRING:
                texts = value.strings()
                at = value.offset + sum(8 + len(text.encode()) for text in texts)
                yield Field(key, texts, kind, element)
            else:
                at = value.offset + value.count * _SIZES[element]
                yield Field(key, value.numbers(), kind, element)
            continue
        at += 8 + len(value.encode()) if isinstance(value, str) else _SIZES[kind]
        yield Field(key, value, kind)

"""Writes the file: tensor by tensor, under another name until it is whole."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFValueType, GGUFWriter, LlamaFileType
from numpy.typing import NDArray

from phloem.srt.checkpoint import CheckpointError, open_checkpoint
from phloem.srt.quantize.encode import encode
from phloem.srt.quantize.errors import QuantizeError
from phloem.srt.quantize.plan import Target
from phloem.srt.quantize.source import Field, Source
from phloem.srt.resolve import detect_hardware

_FILE_TYPES = {
    "F32": LlamaFileType.ALL_F32,
    "F16": LlamaFileType.MOSTLY_F16,
    "BF16": LlamaFileType.MOSTLY_BF16,
    "Q4_0": LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": LlamaFileType.MOSTLY_Q4_1,
    "Q8_0": LlamaFileType.MOSTLY_Q8_0,
    "Q4_K": LlamaFileType.MOSTLY_Q4_K_S,
    "Q5_K": LlamaFileType.MOSTLY_Q5_K_S,
    "Q6_K": LlamaFileType.MOSTLY_Q6_K,
}
"""The label in general.file_type; the mixed kinds of K-quants ("M") are not ours."""

_ARCHITECTURE, _ALIGNMENT = "general.architecture", "general.alignment"
_FILE_TYPE, _QUANT_VERSION = "general.file_type", "general.quantization_version"


def write(
    source: Source,
    targets: Sequence[Target],
    kind: str,
    path: Path,
    *,
    on_bytes: Callable[[int], object],
) -> list[str]:
    """Write `targets` with the source's metadata to `path`, replacing what is there; notices.

    `kind` names the type that most are in. `on_bytes` hears how many bytes of tensors are done.
    The file takes its name when it is whole and was opened once; before that, and after an error,
    there is nothing.

    Raises:
        QuantizeError: the disk is full or refuses, or a tensor does not fit its type.
    """
    needed = sum(target.nbytes for target in targets)
    with _replacing(path, needed) as temporary:
        left_out = _write(source, targets, kind, temporary, on_bytes)
        _check(source, temporary)
    return [f"{key} is empty and left out: the writer has no form for it" for key in left_out]


@contextmanager
def _replacing(path: Path, needed: int) -> Iterator[Path]:
    """A name beside `path` to write to; renamed to `path` at the end, removed after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        free = shutil.disk_usage(path.parent).free
        if needed > free:
            raise QuantizeError(
                f"cannot write {path}: {needed:,} bytes are needed, {free:,} are free"
            )
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise QuantizeError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write(
    source: Source,
    targets: Sequence[Target],
    kind: str,
    path: Path,
    on_bytes: Callable[[int], object],
) -> list[str]:
    """Returns the keys that were left out."""
    writer = GGUFWriter(None, source.architecture)
    left_out = []
    for field in _fields(source, kind, any(target.block.elements > 1 for target in targets)):
        if field.kind is GGUFValueType.ARRAY and len(field.value) == 0:
            left_out.append(field.key)
            continue
        if field.key == _ALIGNMENT:
            writer.data_alignment = field.value
        writer.add_key_value(field.key, field.value, field.kind, field.element)
    for target in targets:
        writer.add_tensor_info(
            target.tensor.name,
            target.tensor.shape,
            np.dtype(np.float32),  # says only that the shape counts elements, not bytes
            target.nbytes,
            raw_dtype=GGMLQuantizationType[target.block.name],
        )
    try:
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        with ThreadPoolExecutor(detect_hardware().usable_cores) as pool:
            for target in targets:
                writer.write_tensor_data(_converted(target, pool))
                done += target.nbytes
                on_bytes(done)
    finally:
        writer.close()
    return left_out


def _fields(source: Source, kind: str, quantised: bool) -> Iterator[Field]:
    """The source's, with what tells of the types brought up to date."""
    changed = {_FILE_TYPE: Field(_FILE_TYPE, int(_FILE_TYPES[kind]), GGUFValueType.UINT32)}
    if quantised:
        version = Field(_QUANT_VERSION, GGML_QUANT_VERSION, GGUFValueType.UINT32)
        changed[_QUANT_VERSION] = version
    for field in source.fields:
        if field.key != _ARCHITECTURE:  # the writer begins with it
            yield changed.pop(field.key, field)
    yield from changed.values()


def _converted(target: Target, pool: ThreadPoolExecutor) -> NDArray[np.uint8]:
    """The tensor's bytes in the type wanted, `[rows, bytes of a row]`."""
    tensor = target.tensor
    if target.copied:
        return np.ascontiguousarray(tensor.data)
    out = np.empty((tensor.elements // tensor.shape[-1], target.row_nbytes), np.uint8)

    def convert(rows: slice) -> None:
        out[rows] = encode(tensor.values(rows), target.block)

    try:
        for _ in pool.map(convert, tensor.chunks()):
            pass
    except QuantizeError as error:
        raise QuantizeError(
            f"tensor {tensor.name} does not fit {target.block.name}: {error}"
        ) from error
    return out


def _check(source: Source, path: Path) -> None:
    """Open the file as anyone will."""
    try:
        written = open_checkpoint(path).config
    except CheckpointError as error:
        raise QuantizeError(f"the file cannot be read back: {error.reason}") from error
    lost = set(source.eos_ids) - set(written.eos_ids)
    if lost:
        raise QuantizeError(
            f"the model has {len(source.eos_ids)} end tokens, more than GGUF can name: "
            f"{', '.join(map(str, sorted(lost)))} would be lost"
        )

"""GGUF → GGUF: what is copied, what is converted, and how a file comes into being."""

from __future__ import annotations

import dataclasses
import errno
import os
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFValueType

from phloem.srt.checkpoint import CheckpointError, open_checkpoint
from phloem.srt.quantize import QuantizeError, Summary, convert, writing
from phloem.srt.quantize.encode import TYPES
from phloem.srt.quantize.from_gguf import from_gguf
from phloem.srt.quantize.plan import plan
from phloem.srt.quantize.source import Field

Write = Callable[..., Path]

ODD_FIELDS: dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]] = {
    "odd.u8": (200, GGUFValueType.UINT8, None),
    "odd.i16": (-3000, GGUFValueType.INT16, None),
    "odd.u64": (1 << 40, GGUFValueType.UINT64, None),
    "odd.f64": (0.1, GGUFValueType.FLOAT64, None),
    "odd.f32": (0.25, GGUFValueType.FLOAT32, None),
    "odd.flag": (True, GGUFValueType.BOOL, None),
    "odd.text": ("žlutý\nkůň", GGUFValueType.STRING, None),
    "odd.texts": (["", "é", "a b"], GGUFValueType.ARRAY, GGUFValueType.STRING),
    "odd.flags": ([True, False], GGUFValueType.ARRAY, GGUFValueType.BOOL),
    "odd.shorts": ([1, 65535], GGUFValueType.ARRAY, GGUFValueType.UINT16),
    "odd.doubles": ([0.1, -2.5], GGUFValueType.ARRAY, GGUFValueType.FLOAT64),
    "general.file_type": (0, GGUFValueType.UINT32, None),
    "odd.last": (-5, GGUFValueType.INT64, None),
}


def to(source: Path, target: Path, kind: str, **options: Any) -> Summary:
    return convert(open_checkpoint(source), target, kind, **options)


def fields(path: Path) -> dict[str, tuple[list[GGUFValueType], Any]]:
    """Key → types and contents, as the reference package reads them."""
    reader = gguf.GGUFReader(path)
    return {key: (field.types, field.contents()) for key, field in reader.fields.items()}


def values(path: Path) -> dict[str, tuple[str, Any]]:
    """GGUF name → type and values, as the reference package reads them."""
    return {
        t.name: (
            t.tensor_type.name,
            gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]),
        )
        for t in gguf.GGUFReader(path).tensors
    }


def test_every_field_keeps_its_place_type_and_value(write_gguf: Write, tmp_path: Path) -> None:
    source, target = write_gguf(fields=ODD_FIELDS, alignment=64), tmp_path / "out.gguf"
    to(source, target, "Q8_0")
    before, after = fields(source), fields(target)
    assert list(after) == [*before, "general.quantization_version"]
    changed = {"general.file_type": 7, "general.quantization_version": 2}
    for key, (types, content) in after.items():
        if key in changed:
            assert (types, content) == ([GGUFValueType.UINT32], changed[key])
        elif not key.startswith("GGUF."):
            assert (types, content) == before[key]
    assert all(t.data_offset % 64 == 0 for t in gguf.GGUFReader(target).tensors)


def test_unquantised_types_need_no_quantization_version(write_gguf: Write, tmp_path: Path) -> None:
    to(write_gguf(), tmp_path / "out.gguf", "BF16")
    after = fields(tmp_path / "out.gguf")
    assert "general.quantization_version" not in after
    assert after["general.file_type"][1] == 32


def test_empty_array_is_left_out_and_told(write_gguf: Write, tmp_path: Path) -> None:
    """The one thing that the writer of the reference package has no form for."""
    source = from_gguf(open_checkpoint(write_gguf()))
    empty = Field("odd.empty", [], GGUFValueType.ARRAY, GGUFValueType.STRING)
    source = dataclasses.replace(source, fields=(*source.fields, empty))
    targets, target = plan(source.tensors, "F16", "F16"), tmp_path / "out.gguf"
    (said,) = writing.write(source, targets, "F16", target, on_bytes=lambda _: None)
    assert said.startswith("odd.empty is empty and left out")
    assert "odd.empty" not in fields(target)


@pytest.mark.parametrize("kind", TYPES)
def test_matrices_are_converted_and_vectors_are_not(
    write_gguf: Write, tmp_path: Path, kind: str
) -> None:
    source, target = write_gguf(), tmp_path / "out.gguf"
    summary = to(source, target, kind)
    before, after = values(source), values(target)
    assert list(after) == list(before)
    bound = {"Q4_0": 0.1, "Q4_1": 0.085, "Q4_K": 0.075}.get(kind, 0.04)
    for name, (stored, content) in after.items():
        original = before[name][1]
        if original.ndim == 1:
            assert stored == "F32"
            np.testing.assert_array_equal(content, original)
            continue
        assert stored == kind
        if "_K" not in kind:
            packed = gguf.quants.quantize(original, GGMLQuantizationType[kind])
            expected = gguf.quants.dequantize(packed, GGMLQuantizationType[kind])
            np.testing.assert_array_equal(content, expected)
        error = np.sqrt(((content - original) ** 2).mean() / (original**2).mean())
        assert error <= bound
    opened = open_checkpoint(target)
    assert opened.format == f"gguf {kind}"
    ours = [tensor.numpy_float32() for tensor in opened.tensors()]
    for got, (_, expected) in zip(ours, after.values(), strict=True):
        np.testing.assert_array_equal(got, expected)
    sizes = [t.n_bytes for t in gguf.GGUFReader(target).tensors]
    assert summary.bytes_after == sum(sizes)
    assert sum(count for count, _ in summary.by_type.values()) == len(after)
    assert sum(size for _, size in summary.by_type.values()) == summary.bytes_after
    assert summary.notices == ()


def test_large_tensors_are_converted_in_parts_without_a_seam(
    write_gguf: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    to(write_gguf(), tmp_path / "whole.gguf", "Q5_K")
    monkeypatch.setattr("phloem.srt.quantize.source._CHUNK_ELEMENTS", 7 * 256)
    to(tmp_path / "source.gguf", tmp_path / "parts.gguf", "Q5_K")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "parts.gguf").read_bytes()


def test_tensors_already_of_the_type_are_taken_as_they_are(
    write_gguf: Write, tmp_path: Path
) -> None:
    source = write_gguf(kind="Q4_0")
    summary = to(source, tmp_path / "same.gguf", "Q4_0")
    assert summary.notices == ()
    for ours, theirs in zip(
        gguf.GGUFReader(tmp_path / "same.gguf").tensors,
        gguf.GGUFReader(source).tensors,
        strict=True,
    ):
        np.testing.assert_array_equal(ours.data, theirs.data)
    again = to(source, tmp_path / "finer.gguf", "Q8_0")
    assert again.notices == ("9 tensors converted from Q4_0: what that type lost stays lost",)


def test_embedding_and_output_may_have_another_type(write_gguf: Write, tmp_path: Path) -> None:
    to(write_gguf(), tmp_path / "out.gguf", "Q4_K", embedding_kind="Q8_0")
    kinds = {name: stored for name, (stored, _) in values(tmp_path / "out.gguf").items()}
    assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_down.weight"] == "Q4_K"
    assert fields(tmp_path / "out.gguf")["general.file_type"][1] == 14


def test_target_is_not_overwritten_unless_forced(write_gguf: Write, tmp_path: Path) -> None:
    source, target = write_gguf(), tmp_path / "out.gguf"
    target.write_bytes(b"precious")
    with pytest.raises(QuantizeError, match="exists"):
        to(source, target, "Q8_0")
    assert target.read_bytes() == b"precious"
    to(source, target, "Q8_0", force=True)
    assert open_checkpoint(target).format == "gguf Q8_0"


@pytest.mark.parametrize("link", [None, "symbolic", "hard"])
def test_source_is_never_overwritten(write_gguf: Write, tmp_path: Path, link: str | None) -> None:
    source = write_gguf()
    target = source if link is None else tmp_path / "other.gguf"
    if link == "symbolic":
        target.symlink_to(source)
    elif link == "hard":
        target.hardlink_to(source)
    before = source.read_bytes()
    with pytest.raises(QuantizeError, match="is the source itself"):
        to(source, target, "Q8_0", force=True)
    assert source.read_bytes() == before


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("out.bin", "must end in .gguf"),
        ("absent/out.gguf", "there is no folder"),
        ("folder.gguf", "is no file"),
    ],
)
def test_impossible_targets(write_gguf: Write, tmp_path: Path, target: str, said: str) -> None:
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(QuantizeError, match=said):
        to(write_gguf(), tmp_path / target, "Q8_0", force=True)


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"source.gguf"}


def test_full_disk_is_told_before_anything_is_written(
    write_gguf: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**9, 10**9 - 1000, 1000))
    source = write_gguf()
    with pytest.raises(QuantizeError, match=r"[\d,]+ bytes are needed, 1,000 are free"):
        to(source, tmp_path / "out.gguf", "Q8_0")
    assert leftovers(tmp_path) == set()


def test_disk_that_fails_half_way_leaves_everything_as_it_was(
    write_gguf: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = write_gguf(), tmp_path / "out.gguf"
    target.write_bytes(b"precious")
    written = []

    def fails(writer: gguf.GGUFWriter, tensor: Any) -> None:
        written.append(tensor)
        if len(written) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", fails)
    with pytest.raises(QuantizeError, match=r"cannot write .*out\.gguf: No space left on device"):
        to(source, target, "Q8_0", force=True)
    assert target.read_bytes() == b"precious"
    assert leftovers(tmp_path) == {"out.gguf"}


def test_interruption_leaves_nothing(
    write_gguf: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    source = write_gguf()
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", interrupted)
    with pytest.raises(KeyboardInterrupt):
        to(source, tmp_path / "out.gguf", "Q8_0")
    assert leftovers(tmp_path) == set()


def test_values_beyond_the_type_name_their_tensor(write_gguf: Write, tmp_path: Path) -> None:
    huge = np.full((512, 256), 1e6, np.float32)
    source = write_gguf(tensors={"blk.0.ffn_up.weight": huge})
    with pytest.raises(QuantizeError, match=r"tensor blk\.0\.ffn_up\.weight does not fit Q4_0"):
        to(source, tmp_path / "out.gguf", "Q4_0")
    assert leftovers(tmp_path) == set()
    to(source, tmp_path / "out.gguf", "BF16")


def test_damaged_source_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "source.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError):
        to(tmp_path / "source.gguf", tmp_path / "out.gguf", "Q8_0")


def test_progress_reaches_the_total(write_gguf: Write, tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []

    class Listener:
        def say(self, text: str) -> None: ...

        @contextmanager
        def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
            yield lambda done: heard.append((done, total))

    summary = to(write_gguf(), tmp_path / "out.gguf", "Q8_0", progress=Listener())
    assert heard == sorted(heard)
    assert heard[-1] == (summary.bytes_after, summary.bytes_after)


@pytest.mark.model
def test_default_model_keeps_all_but_its_types(default_model: Path, tmp_path: Path) -> None:
    source = open_checkpoint(default_model)
    summary = convert(source, tmp_path / "out.gguf", "Q4_1", embedding_kind="Q6_K")
    assert summary.by_type.keys() == {"Q4_1", "Q8_0", "F32"}  # its rows of 576 allow no Q6_K
    target = open_checkpoint(tmp_path / "out.gguf")
    assert target.config == source.config
    assert target.tokenizer_data() == source.tokenizer_data()
    for ours, theirs in zip(target.tensors(), source.tensors(), strict=True):
        assert (ours.name, ours.block) == (theirs.name, theirs.block)
        np.testing.assert_array_equal(ours.data, theirs.data)

"""Damaged GGUF files: a clear error, at once, whatever the damage."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from phloem.srt.checkpoint import CheckpointError, open_checkpoint
from phloem.srt.checkpoint.gguf_header import read_header

Write = Callable[..., Path]


def exercise(path: Path) -> bool:
    """Open and read everything; True if that worked. Any error but `CheckpointError` escapes."""
    try:
        checkpoint = open_checkpoint(path)
        for tensor in checkpoint.tensors():
            assert tensor.data.nbytes > 0
        checkpoint.tokenizer_data()
        checkpoint.vocabulary()
    except CheckpointError:
        return False
    return True


@pytest.fixture
def intact(write_gguf: Write) -> bytes:
    return write_gguf("intact.gguf").read_bytes()


def test_truncated_anywhere(intact: bytes, tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(intact)
    header = min(info.offset for info in read_header(path).tensors.values())
    cuts = [*range(0, 64), *range(64, header, 97), *range(header, len(intact) - 32, 5003)]
    for cut in cuts:
        path.write_bytes(intact[:cut])
        assert not exercise(path), cut


def test_flipped_bits_in_the_header(intact: bytes, tmp_path: Path) -> None:
    """Some flips change only a name or a number that is still possible; none may crash, hang or
    allocate without bound."""
    path = tmp_path / "flipped.gguf"
    rng = random.Random(7)
    end = intact.index(b"token_embd.weight") + 2000
    tracemalloc.start()
    try:
        for _ in range(300):
            damaged = bytearray(intact)
            for _ in range(rng.choice((1, 1, 4))):
                damaged[rng.randrange(end)] ^= 1 << rng.randrange(8)
            path.write_bytes(damaged)
            exercise(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", [2**32, 2**48, 2**63, 2**64 - 1])
def test_absurd_counts_and_lengths(intact: bytes, tmp_path: Path, value: int) -> None:
    path = tmp_path / "absurd.gguf"
    places = [8, 16, 24]  # tensor count, metadata count, length of the first key
    tokens = intact.index(b"tokenizer.ggml.tokens") + len("tokenizer.ggml.tokens")
    places += [tokens + 8, tokens + 16]  # count of the array, length of its first string
    places.append(intact.index(b"token_embd.weight") + len("token_embd.weight") + 4)  # dimension
    for place in places:
        damaged = bytearray(intact)
        struct.pack_into("<Q", damaged, place, value)
        path.write_bytes(damaged)
        assert not exercise(path), place


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GG", "magic"),
        (b"PK\x03\x04" + bytes(60), "magic"),
        (b"GGUF", "truncated inside its header"),
        (
            struct.pack("<4sIQQ", b"GGUF", 1, 0, 0),
            r"version 1 is not supported \(supported: 2, 3\)",
        ),
        (struct.pack("<4sIQQ", b"GGUF", 9, 0, 0), "version 9"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 5, 0), "5 tensors cannot fit"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 0, 5), "5 metadata entries cannot fit"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 0) + bytes(16), "empty metadata key"),
        (
            struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 77) + bytes(16),
            "value type 77",
        ),
        (
            struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1) + bytes(16),
            "arrays of value type 9",
        ),
        (
            struct.pack("<4sIQQQ1sIQ1s", b"GGUF", 3, 0, 1, 1, b"k", 8, 1, b"\xff") + bytes(16),
            "not UTF-8",
        ),
    ],
)
def test_reasons(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        read_header(path)


def test_metadata_twice(tmp_path: Path) -> None:
    entry = struct.pack("<Q1sIB", 1, b"k", 0, 7)
    path = tmp_path / "twice.gguf"
    path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 3, 0, 2) + entry + entry + bytes(8))
    with pytest.raises(CheckpointError, match="occurs twice"):
        read_header(path)


def tensor_file(path: Path, *tensors: tuple[bytes, int], size: int = 64) -> Path:
    """F32 tensors of eight elements at the given offsets, and `size` bytes of data."""
    data = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), 0)
    for name, offset in tensors:
        data += struct.pack("<Q", len(name)) + name + struct.pack("<IQIQ", 1, 8, 0, offset)
    data += bytes(-len(data) % 32 + size)
    path.write_bytes(data)
    return path


def test_tensors_must_lie_apart_aligned_and_inside(tmp_path: Path) -> None:
    path = tmp_path / "t.gguf"
    header = read_header(tensor_file(path, (b"a", 32), (b"b", 0)))
    assert {name: info.nbytes for name, info in header.tensors.items()} == {"a": 32, "b": 32}
    for tensors, message in (
        (((b"a", 0), (b"b", 0)), "misplaced"),
        (((b"a", 0), (b"b", 33)), "misplaced"),
        (((b"a", 0), (b"b", 64)), r"truncated: tensor 'b' ends at byte"),
        (((b"a", 0), (b"a", 32)), "two tensors 'a'"),
    ):
        with pytest.raises(CheckpointError, match=message):
            read_header(tensor_file(path, *tensors))

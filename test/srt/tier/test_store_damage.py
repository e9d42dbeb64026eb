"""Kills, torn writes and rotten files: a block is right or it is not there."""

from __future__ import annotations

import logging
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from phloem.srt.tier.errors import DamagedBlock, TierError
from phloem.srt.tier.segment import FILE_BYTES, BlockFormat
from phloem.srt.tier.store import DiskStore

SIZE = 50
FORM = BlockFormat(b"f" * 16, SIZE)
RECORD = FORM.record_bytes
LARGE = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def fill(root: Path, count: int, limit: int = LARGE, start: int = 0) -> Path:
    """A closed store of blocks; its folder."""
    with closing(DiskStore.open(root, FORM, limit)) as store:
        for number in range(start, start + count):
            store.put(key(number), block(number))
    return store.folder


def check(root: Path, count: int, limit: int = LARGE) -> set[int]:
    """Open the store, and read everything: what is there. A wrong block fails."""
    with closing(DiskStore.open(root, FORM, limit)) as store:
        for number in range(count):
            out = bytearray(SIZE)
            try:
                found = store.get(key(number), out)
            except DamagedBlock:
                assert key(number) not in store
                assert key(number) in store.take_gone()
                continue
            assert not found or out == block(number)
        return {int.from_bytes(there, "big") for there in store.oldest_first()}


def copied(folder: Path, root: Path) -> Path:
    """A fresh copy of a store under another root; its folder."""
    shutil.rmtree(root, ignore_errors=True)
    return Path(shutil.copytree(folder, root / folder.name))


def only_segment(folder: Path) -> Path:
    (segment,) = folder.glob("segment-*")
    return segment


@pytest.mark.parametrize("index", ["full", "older", "none"])
def test_a_segment_that_ends_anywhere(tmp_path: Path, index: str) -> None:
    """Cut at every byte of the last records, with an index that knows of them or does not."""
    first, count = 6, 9
    folder = fill(tmp_path / "whole", first)
    saved = (folder / "index.sqlite").read_bytes()
    fill(tmp_path / "whole", count - first, start=first)
    if index == "older":
        (folder / "index.sqlite").write_bytes(saved)
    if index == "none":
        (folder / "index.sqlite").unlink()
    full = only_segment(folder).stat().st_size
    assert full == FILE_BYTES + count * RECORD
    for size in range(full - 3 * RECORD, full + 1):
        here = copied(folder, tmp_path / "cut")
        with only_segment(here).open("r+b") as file:
            file.truncate(size)
        whole = (size - FILE_BYTES) // RECORD
        assert check(tmp_path / "cut", count) == set(range(whole))
        fill(tmp_path / "cut", 2, start=count)  # it can be gone on with
        assert check(tmp_path / "cut", count + 2) == {*range(whole), count, count + 1}
        assert only_segment(here).stat().st_size == FILE_BYTES + (whole + 2) * RECORD


def test_a_segment_that_was_just_begun(tmp_path: Path) -> None:
    folder = fill(tmp_path / "whole", 1)
    for size in range(FILE_BYTES + 1):
        here = copied(folder, tmp_path / "cut")
        with only_segment(here).open("r+b") as file:
            file.truncate(size)
        assert check(tmp_path / "cut", 1) == set()
        fill(tmp_path / "cut", 1)
        assert check(tmp_path / "cut", 1) == {0}


@pytest.mark.parametrize("with_index", [True, False])
def test_any_byte_of_a_segment_may_be_wrong(
    tmp_path: Path, with_index: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """One block is lost, no other, and no wrong one is given."""
    count = 4
    folder = fill(tmp_path / "whole", count)
    if not with_index:
        (folder / "index.sqlite").unlink()
    rng = random.Random(1)
    data = only_segment(folder).read_bytes()
    for at in range(FILE_BYTES, len(data)):
        here = copied(folder, tmp_path / "rotten")
        rotten = bytearray(data)
        rotten[at] ^= 1 << rng.randrange(8)
        only_segment(here).write_bytes(rotten)
        lost = (at - FILE_BYTES) // RECORD
        assert check(tmp_path / "rotten", count) == set(range(count)) - {lost}
        fill(tmp_path / "rotten", count)  # what was lost can come again
        assert check(tmp_path / "rotten", count) == set(range(count))
    assert all("damaged blocks, which are not used" in record.message for record in caplog.records)


def test_damage_is_told_once_a_segment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = fill(tmp_path, 8)
    segment = only_segment(folder)
    data = bytearray(segment.read_bytes())
    for number in (1, 2, 5):
        data[FILE_BYTES + (number + 1) * RECORD - 1] ^= 0x10
    segment.write_bytes(data)
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        for number in (1, 2, 5):
            with pytest.raises(DamagedBlock, match="its checksum is wrong"):
                store.get(key(number), bytearray(SIZE))
            assert store.get(key(number), bytearray(SIZE)) is False
        assert store.take_gone() == [key(1), key(2), key(5)]
        assert store.stats().damaged == 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert str(segment) in caplog.text


def test_records_that_changed_places(tmp_path: Path) -> None:
    """Whole records, each with a right checksum, but not where the index says."""
    folder = fill(tmp_path, 6)
    segment = only_segment(folder)
    data = segment.read_bytes()
    records = [data[at : at + RECORD] for at in range(FILE_BYTES, len(data), RECORD)]
    records[1], records[4] = records[4], records[1]
    segment.write_bytes(data[:FILE_BYTES] + b"".join(records))
    assert check(tmp_path, 6) == {0, 2, 3, 5}


@pytest.mark.parametrize("ending", ["index.sqlite", "index.sqlite-wal"])
def test_any_part_of_the_index_may_be_wrong(tmp_path: Path, ending: str) -> None:
    """Bytes flipped, cut off, or all of it something else: the segments have it all."""
    count = 40
    folder = tmp_path / "live" / FORM.fingerprint.hex()
    with closing(DiskStore.open(tmp_path / "live", FORM, LARGE)) as store:
        for number in range(count):
            store.put(key(number), block(number))
            if number % 10 == 9:
                store.commit()
        kept = shutil.copytree(folder, tmp_path / "kept")  # with the log that a kill leaves
    data = (kept / ending).read_bytes()
    assert len(data) > 4000
    rng = random.Random(2)
    for trial in range(60):
        shutil.rmtree(tmp_path / "rotten", ignore_errors=True)
        here = tmp_path / "rotten" / folder.name
        shutil.copytree(kept, here)
        rotten = bytearray(data)
        if trial % 3 == 0:
            del rotten[rng.randrange(len(rotten)) :]
        elif trial % 3 == 1:
            for _ in range(rng.randrange(1, 30)):
                rotten[rng.randrange(len(rotten))] ^= 1 << rng.randrange(8)
        else:
            start = rng.randrange(len(rotten))
            rotten[start : start + 500] = rng.randbytes(500)
        (here / ending).write_bytes(rotten)
        there = check(tmp_path / "rotten", count)
        assert there <= set(range(count))
        fill(tmp_path / "rotten", count)
        assert check(tmp_path / "rotten", count) == set(range(count))


def _write_index(path: Path, *statements: str) -> None:
    path.unlink(missing_ok=True)
    with closing(sqlite3.connect(path)) as database:
        for statement in statements:
            database.execute(statement)
        database.commit()


@pytest.mark.parametrize("kind", ["text", "other", "version", "size", "model"])
def test_a_foreign_index_is_set_aside(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = fill(tmp_path, 5)
    path = folder / "index.sqlite"
    match kind:
        case "text":
            path.write_text("no database at all" * 100)
            reason = "file is not a database"
        case "other":
            _write_index(path, "CREATE TABLE blocks (key, segment, offset)")
            reason = "it is no index of KV"
        case "version":
            with closing(sqlite3.connect(path)) as database:
                database.execute("PRAGMA user_version = 2")
                database.execute("UPDATE blocks SET offset = 64")
                database.commit()
            reason = "it is of version 2, not 1"
        case "size" | "model":
            column = "block_bytes = 49" if kind == "size" else "fingerprint = x'00'"
            with closing(sqlite3.connect(path)) as database:
                database.execute(f"UPDATE format SET {column}")
                database.execute("UPDATE blocks SET offset = 64")
                database.commit()
            reason = "it is of another model, or of blocks of another size"
    foreign = path.read_bytes()
    assert check(tmp_path, 5) == set(range(5))  # from the segments
    assert f"{path} is not used ({reason}) and set aside as index.damaged" in caplog.text
    assert (folder / "index.damaged").read_bytes()[:100] == foreign[:100]
    caplog.clear()
    assert check(tmp_path, 5) == set(range(5))
    assert not caplog.records


def test_rows_that_lead_nowhere(tmp_path: Path) -> None:
    folder = fill(tmp_path, 5)
    with closing(sqlite3.connect(folder / "index.sqlite")) as database:
        database.execute("UPDATE blocks SET offset = offset + 1 WHERE key = ?", (key(0),))
        database.execute("UPDATE blocks SET offset = -64 WHERE key = ?", (key(1),))
        database.execute("UPDATE blocks SET segment = 7 WHERE key = ?", (key(2),))
        database.execute("UPDATE blocks SET offset = 'x' WHERE key = ?", (key(3),))
        database.execute("INSERT INTO blocks VALUES (x'00', 1, 64)")
        database.execute("INSERT INTO blocks VALUES (?, 1, ?)", (key(9), FILE_BYTES + 9 * RECORD))
        database.commit()
    assert check(tmp_path, 10) == {4}
    fill(tmp_path, 10)
    assert check(tmp_path, 10) == set(range(10))
    assert not (folder / "segment-00000007.kv").exists()  # a number is never given twice


def test_a_foreign_segment_is_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = BlockFormat(b"g" * 16, SIZE)
    with closing(DiskStore.open(tmp_path, other, LARGE)) as store:
        store.put(key(0), block(7))
    folder = fill(tmp_path, 1, start=1)
    foreign = folder / "segment-00000044.kv"
    shutil.copy(only_segment(store.folder), foreign)
    before = foreign.read_bytes()
    assert check(tmp_path, 3) == {1}
    assert f"{foreign} is not used: it is of something else" in caplog.text
    fill(tmp_path, 100, start=2)
    assert foreign.read_bytes() == before


def test_a_segment_that_went_away(tmp_path: Path) -> None:
    limit = 64 * (FILE_BYTES + 3 * RECORD)  # three blocks a segment
    folder = fill(tmp_path, 12, limit)
    (folder / "segment-00000002.kv").unlink()
    assert check(tmp_path, 12, limit) == {0, 1, 2, *range(6, 12)}


def test_a_segment_that_shrinks_while_it_is_open(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        for number in range(4):
            store.put(key(number), block(number))
        with only_segment(store.folder).open("r+b") as file:
            file.truncate(FILE_BYTES + 2 * RECORD + 40)
        for number in (2, 3):
            with pytest.raises(DamagedBlock, match="the file ends before it"):
                store.get(key(number), bytearray(SIZE))
        assert store.oldest_first() == [key(0), key(1)]


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskStore.open(tmp_path / "file", FORM, LARGE)
    folder = tmp_path / FORM.fingerprint.hex()
    (folder / "index.sqlite-wal").mkdir(parents=True)  # SQLite can make nothing of it
    with pytest.raises((TierError, OSError)):
        DiskStore.open(tmp_path, FORM, LARGE)
    (folder / "index.sqlite-wal").rmdir()
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        assert len(store) == 0


_WRITER = """
import random, sys
from pathlib import Path
from phloem.srt.tier.segment import BlockFormat
from phloem.srt.tier.store import DiskStore

root, limit, size, first = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = DiskStore.open(root, BlockFormat(b"k" * 16, size), limit)
print("open", flush=True)
for number in range(first, 1 << 40):
    store.put(number.to_bytes(16, "big"), random.Random(number).randbytes(size))
    print(number, flush=True)
    if number % 7 == 0:
        store.commit()
"""


@pytest.mark.parametrize("limit_blocks", [10_000, 40])
def test_kills_at_any_moment(tmp_path: Path, limit_blocks: int) -> None:
    """A real process is killed while it writes. All that it had written is there, but for what
    gave way."""
    size = 70_001
    form = BlockFormat(b"k" * 16, size)
    limit = limit_blocks * form.record_bytes
    rng = random.Random(3)
    last = 0
    for _ in range(8):
        arguments = [str(tmp_path), str(limit), str(size), str(last + 1)]
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, *arguments], stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "open\n"
            time.sleep(rng.uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
            written = [int(line) for line in process.stdout.read().split("\n")[:-1]]
        last = max([last, *written])
        with closing(DiskStore.open(tmp_path, form, limit)) as store:
            kept = [int.from_bytes(found, "big") for found in store.oldest_first()]
            newest = max([last, *kept])  # one may have been written and not told
            assert newest <= last + 1
            assert kept == list(range(newest - len(kept) + 1, newest + 1))
            assert len(kept) == newest or len(kept) > limit_blocks * 0.9
            for number in kept[-20:]:
                out = bytearray(size)
                assert store.get(key(number), out)
                assert out == block(number, size)
            last = newest
    assert last > 40

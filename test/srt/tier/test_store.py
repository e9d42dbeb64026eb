"""The disk store as a dictionary that survives, within its limit."""

from __future__ import annotations

import fcntl
import logging
import os
import random
import resource
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from phloem.srt.tier.errors import TierError
from phloem.srt.tier.segment import FILE_BYTES, BlockFormat
from phloem.srt.tier.store import SEGMENTS, DiskStore

SIZE = 50
FORM = BlockFormat(b"f" * 16, SIZE)
RECORD = FORM.record_bytes
LARGE = 1 << 20


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def block(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def get(store: DiskStore, number: int) -> bytes | None:
    out = bytearray(SIZE)
    return bytes(out) if store.get(key(number), out) else None


def folder_bytes(root: Path) -> int:
    return sum(path.stat().st_size for path in root.glob("*/segment-*.kv"))


def put_all(store: DiskStore, numbers: range) -> None:
    for number in numbers:
        store.put(key(number), block(number))


@pytest.mark.parametrize("seed", range(12))
def test_random_histories_are_a_dictionarys(tmp_path: Path, seed: int) -> None:
    """Puts, gets, reopens with other limits, kills (a store given up without a commit). What is
    there is right, what went was told, and the files are never over the limit."""
    rng = random.Random(seed)
    limit = rng.choice([2, 3, 5, 20]) * (FILE_BYTES + RECORD) + rng.randrange(RECORD)
    if rng.random() < 0.3:
        limit *= SEGMENTS
    store = DiskStore.open(tmp_path, FORM, limit)
    there: set[int] = set()
    for _ in range(400):
        number = rng.randrange(60)
        action = rng.random()
        if action < 0.5:
            store.put(key(number), block(number))
            there.add(number)
            for gone in store.take_gone():
                there.remove(int.from_bytes(gone, "big"))
            assert number in there
        elif action < 0.85:
            assert get(store, number) == (block(number) if number in there else None)
        elif action < 0.93:
            store.commit()
        else:
            if action < 0.97:
                store.close()
            else:
                abandon(store)
            before = limit
            if rng.random() < 0.3:
                limit = max(2 * (FILE_BYTES + RECORD), int(limit * rng.uniform(0.4, 1.8)))
            store = DiskStore.open(tmp_path, FORM, limit)
            assert not store.take_gone()
            kept = {int.from_bytes(found, "big") for found in store.oldest_first()}
            assert kept == there if limit >= before else kept <= there
            there = kept
        assert folder_bytes(tmp_path) <= limit
        assert len(store) == len(there) == len(store.oldest_first())
        assert store.stats().bytes == folder_bytes(tmp_path)
    store.close()


def abandon(store: DiskStore) -> None:
    """Close its files as a kill does: without a commit."""
    store._index.close()
    store._release()


def test_blocks_come_back_in_a_later_process_oldest_first(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        put_all(store, range(200))
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        assert store.oldest_first() == [key(number) for number in range(200)]
        assert all(get(store, number) == block(number) for number in range(200))
        assert key(3) in store
        assert key(200) not in store
        stats = store.stats()
        assert (stats.blocks, stats.read, stats.written, stats.missing) == (200, 200, 0, 0)


def test_what_was_read_lately_stays(tmp_path: Path) -> None:
    """Segments go whole, the one that nobody read for longest first; also after a restart."""
    limit = 10 * (FILE_BYTES + RECORD)  # segments of one block
    with closing(DiskStore.open(tmp_path, FORM, limit)) as store:
        put_all(store, range(10))
        assert get(store, 0) == block(0)
        put_all(store, range(10, 14))
        assert store.take_gone() == [key(number) for number in (1, 2, 3, 4)]
        assert get(store, 5) == block(5)
    with closing(DiskStore.open(tmp_path, FORM, limit)) as store:
        put_all(store, range(20, 27))
        assert store.take_gone() == [key(number) for number in (6, 7, 8, 9, 0, 10, 11)]
        store.put(key(6), block(6))
        assert store.oldest_first()[-1] == key(6)


def test_a_smaller_limit_holds_at_once(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        put_all(store, range(500))
    limit = folder_bytes(tmp_path) // 3
    with closing(DiskStore.open(tmp_path, FORM, limit)) as store:
        assert folder_bytes(tmp_path) <= limit
        kept = [int.from_bytes(found, "big") for found in store.oldest_first()]
        assert kept == list(range(500 - len(kept), 500))
        assert len(kept) > 100
    with pytest.raises(TierError, match="two blocks take"):
        DiskStore.open(tmp_path, FORM, 2 * RECORD)


def test_a_block_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        put_all(store, range(5))
        before = folder_bytes(tmp_path)
        put_all(store, range(5))
        assert folder_bytes(tmp_path) == before


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        for wrong_key, data in ((b"short", block(1)), (key(1), b"short"), (key(1), bytes(51))):
            with pytest.raises(ValueError, match="a block of"):
                store.put(wrong_key, data)
        with pytest.raises(ValueError, match="a buffer of 49"):
            store.get(key(1), bytearray(49))
        assert len(store) == 0


def test_views_are_taken(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        store.put(key(1), memoryview(bytearray(block(1))))
        out = bytearray(SIZE)
        assert store.get(key(1), memoryview(out))
        assert out == block(1)


def test_nobody_else_can_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with closing(DiskStore.open(tmp_path / "kv", FORM, LARGE)) as store:
            store.put(key(1), block(1))
            folders = [tmp_path / "kv", store.folder]
            assert all(folder.stat().st_mode & 0o777 == 0o700 for folder in folders)
            (segment,) = store.folder.glob("segment-*")
            assert segment.stat().st_mode & 0o777 == 0o600
        store.folder.chmod(0o755)
        with closing(DiskStore.open(tmp_path / "kv", FORM, LARGE)):
            assert store.folder.stat().st_mode & 0o777 == 0o700
    finally:
        os.umask(before)


def test_two_servers_do_not_share_a_store(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        put_all(store, range(3))
        with pytest.raises(TierError, match=f"another server keeps its KV in {store.folder}"):
            DiskStore.open(tmp_path, FORM, LARGE)
        other = BlockFormat(b"g" * 16, SIZE)
        with closing(DiskStore.open(tmp_path, other, LARGE)) as second:
            assert len(second) == 0
        assert get(store, 1) == block(1)
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        assert len(store) == 3


def test_a_store_that_nobody_has_open_makes_room(tmp_path: Path) -> None:
    limit = 100 * (FILE_BYTES + RECORD)
    forms = [BlockFormat(bytes([i]) * 16, SIZE) for i in range(4)]
    folders = [tmp_path / form.fingerprint.hex() for form in forms]
    for age, form in enumerate(forms[:2]):
        with closing(DiskStore.open(tmp_path, form, limit)) as store:
            put_all(store, range(10))
        os.utime(store.folder / "lock", (age, age))
    (tmp_path / "hashes.json").write_text("{}")
    (tmp_path / "elsewhere").mkdir()
    with (
        closing(DiskStore.open(tmp_path, forms[2], limit)) as busy,
        closing(DiskStore.open(tmp_path, forms[3], limit)) as store,
    ):
        put_all(busy, range(30))
        put_all(store, range(5))
        assert folders[0].exists()
        for number in range(5, 200):
            store.put(key(number), block(number))
            idle = [folder for folder in folders[:2] if folder.exists()]
            assert folder_bytes(tmp_path) <= limit or not idle
            assert folders[1] in idle or not idle  # the one opened last goes last
        assert not any(folder.exists() for folder in folders[:2])
        assert all(get(busy, number) == block(number) for number in range(30))
    assert (tmp_path / "hashes.json").exists()
    assert (tmp_path / "elsewhere").exists()


def test_a_removal_that_was_killed_is_finished(tmp_path: Path) -> None:
    left = tmp_path / f"removed-{'0' * 32}"
    left.mkdir()
    (left / "segment-00000001.kv").write_bytes(bytes(1000))
    with closing(DiskStore.open(tmp_path, FORM, LARGE)):
        assert not left.exists()


def test_a_lock_file_that_was_removed_is_no_lock(tmp_path: Path) -> None:
    """A server that waited at the lock of a store being removed must not think it has the next."""
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        (store.folder / "lock").unlink()
        with closing(DiskStore.open(tmp_path, BlockFormat(b"g" * 16, SIZE), LARGE)):
            pass
    handle = os.open(store.folder / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(TierError, match="another server"):
        DiskStore.open(tmp_path, FORM, LARGE)
    os.close(handle)


@contextmanager
def no_file_over(count: int) -> Iterator[None]:
    """As a full disk does, writes fail, and may be done in part before."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_full_disk_fails_the_put_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    form = BlockFormat(b"f" * 16, 1 << 20)  # so that the index is no matter
    data = [block(number, form.block_bytes) for number in range(4)]
    out = bytearray(form.block_bytes)
    with closing(DiskStore.open(tmp_path, form, 1 << 30)) as store:
        store.put(key(0), data[0])
        with no_file_over(FILE_BYTES + form.record_bytes * 2 - 7):
            for _ in range(2):
                with pytest.raises(OSError, match="File too large"):
                    store.put(key(1), data[1])
        assert key(1) not in store
        assert folder_bytes(tmp_path) == FILE_BYTES + form.record_bytes
        store.put(key(2), data[2])
        assert store.get(key(2), out)
        assert out == data[2]
    with closing(DiskStore.open(tmp_path, form, 1 << 30)) as store:
        assert store.oldest_first() == [key(0), key(2)]
        assert store.get(key(0), out)
        assert out == data[0]
    assert not caplog.records


def test_an_index_that_cannot_be_written_is_written_later(tmp_path: Path) -> None:
    with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
        put_all(store, range(10))
        with no_file_over(0), pytest.raises(OSError, match="index of the KV on disk"):
            store.commit()
        assert store.uncommitted == 10
        store.commit()
        assert store.uncommitted == 0
        assert get(store, 4) == block(4)


def test_opening_says_nothing_when_all_is_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for start in (0, 10):
        with closing(DiskStore.open(tmp_path, FORM, LARGE)) as store:
            put_all(store, range(start, start + 10))
    assert not caplog.records

"""The disk store: blocks by key in segments, found again by an index, within a limit of bytes.

    ROOT/FINGERPRINT/lock              held while a server has the store open
                     index.sqlite      which block is where
                     segment-N.kv      the blocks

What a block is, is decided by its segment alone, where each carries its key and checksum: the index
only says where to look. So nothing has to be forced to the disk. A kill loses blocks at most whose
writing was not over; what a power failure leaves is found damaged, and is not used.
"""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from phloem.srt.tier.chain import KEY_BYTES
from phloem.srt.tier.errors import DamagedBlock, TierError
from phloem.srt.tier.index import DamagedIndex, Index
from phloem.srt.tier.neighbours import shrink_others, take_lock
from phloem.srt.tier.segment import FILE_BYTES, BlockFormat, Data, ForeignSegment, Segment

log = logging.getLogger(__name__)

SEGMENTS = 64
"""Segments that a full store has: the share of it that goes at once is one of so many."""

_INDEX = "index.sqlite"
_SEGMENT_NAME = re.compile(r"segment-(\d{1,18})\.kv")


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was opened, but for `blocks`, `bytes` and `segments`, which are
    there now."""

    blocks: int
    bytes: int
    segments: int
    written: int
    read: int
    missing: int
    damaged: int
    dropped: int


class DiskStore:
    """Made by `open`; of one thread at a time."""

    def __init__(self, folder: Path, form: BlockFormat, limit_bytes: int, lock: int) -> None:
        self.folder = folder
        self._form = form
        self._limit = limit_bytes
        self._lock = lock
        records = max(1, (limit_bytes // SEGMENTS - FILE_BYTES) // form.record_bytes)
        self._segment_bytes = FILE_BYTES + records * form.record_bytes
        self._segments: dict[int, Segment] = {}
        self._homes: dict[bytes, Segment] = {}
        self._current: Segment | None = None  # what is appended to
        self._next_number = 1
        self._clock = 0
        self._gone: list[bytes] = []
        self._written = self._read = self._missing = self._damaged = self._dropped = 0

    @classmethod
    def open(cls, root: Path, form: BlockFormat, limit_bytes: int) -> DiskStore:
        """The store of this format under `root`; folders are made if need be. It has what is whole
        in it and within `limit_bytes`, which stores beside it that no server has open count in.

        Raises `TierError` if another server has it open or the limit is too small, and `OSError`.
        """
        least = 2 * (FILE_BYTES + form.record_bytes)
        if limit_bytes < least:
            raise TierError(
                f"a limit of {limit_bytes:,} bytes is too small: two blocks take {least:,}"
            )
        folder = root / form.fingerprint.hex()
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)  # KV tells the prompts it is of
        lock = take_lock(folder)
        if lock is None:
            raise TierError(f"another server keeps its KV in {folder}")
        store = cls(folder, form, limit_bytes, lock)
        try:
            store._load()
        except BaseException:
            store._release()
            raise
        return store

    # ------------------------------------------------------------------ opening

    def _load(self) -> None:
        began = time.perf_counter()
        self._index, rows, used = self._open_index()
        try:
            self._open_segments()
            self._clock = max(used.values(), default=0)
            self._forget(self._take_rows(rows))
            for segment in self._segments.values():
                segment.used = used.get(segment.number, 0)
                if self._adopt(segment) or not segment.used:
                    self._use(segment)  # later than the index knows
            if self._segments:
                newest = self._segments[max(self._segments)]
                self._forget(_misplaced(newest))
                if newest.size < self._segment_bytes:
                    self._current = newest
            self._make_room(0)
            self._gone.clear()  # nobody was told of them
            self._index.commit()
            shrink_others(self.folder, self._limit - self._bytes())
        except BaseException:
            self._index.close()
            raise
        log.debug(
            "%d blocks of KV in %s, opened in %.3f s",
            len(self._homes),
            self.folder,
            time.perf_counter() - began,
        )

    def _open_index(self) -> tuple[Index, list[tuple[int, int, bytes]], dict[int, int]]:
        """The index, its blocks, and when segments were used. One that is damaged or of something
        else is set aside."""
        path = self.folder / _INDEX
        try:
            return _read_index(path, self._form)
        except DamagedIndex as error:
            aside = path.with_suffix(".damaged")
            log.warning(
                "%s is not used (%s) and set aside as %s; the index is made again from the "
                "segments beside it",
                path,
                error,
                aside.name,
            )
            path.replace(aside)
            for left in ("-wal", "-shm"):
                Path(f"{path}{left}").unlink(missing_ok=True)
        try:
            return _read_index(path, self._form)
        except DamagedIndex as error:
            raise TierError(f"{path} cannot be made: {error}") from error

    def _open_segments(self) -> None:
        for path in sorted(self.folder.iterdir()):
            match = _SEGMENT_NAME.fullmatch(path.name)
            if match is None:
                continue
            number = int(match[1])
            self._next_number = max(self._next_number, number + 1)
            try:
                self._segments[number] = Segment.open(path, number, self._form)
            except (ForeignSegment, OSError) as error:
                reason = "it is of something else" if isinstance(error, ForeignSegment) else error
                log.warning("%s is not used: %s", path, reason)

    def _take_rows(self, rows: list[tuple[int, int, bytes]]) -> list[bytes]:
        """Enter what the index tells; the keys of blocks that cannot be where it says."""
        wrong = []
        for number, offset, key in rows:
            self._next_number = max(self._next_number, number + 1)
            segment = self._segments.get(number)
            if segment is None or not segment.fits(offset) or len(key) != KEY_BYTES:
                wrong.append(key)
                continue
            segment.keys[key] = offset
            self._homes[key] = segment
        return wrong

    def _adopt(self, segment: Segment) -> bool:
        """Enter what was written after the index was; False if there is nothing."""
        known = len(segment.keys)
        last = max(segment.keys.values(), default=None)
        since = FILE_BYTES if last is None else last + self._form.record_bytes
        for offset, key in segment.records(since):
            if key not in self._homes:
                segment.keys[key] = offset
                self._homes[key] = segment
                self._index.add(key, segment.number, offset)
        return len(segment.keys) > known

    # ------------------------------------------------------------------ blocks

    def __contains__(self, key: bytes) -> bool:
        return key in self._homes

    def __len__(self) -> int:
        return len(self._homes)

    def oldest_first(self) -> list[bytes]:
        """Keys of all blocks, in the order in which they will go."""
        return [key for segment in self._by_use() for key in segment.keys]

    def put(self, key: bytes, data: Data) -> None:
        """Keep a block; whatever has to give way for it goes. Does nothing for one that is there.

        Raises `ValueError` for a key or data of another size, and `OSError` when it cannot be
        written; the store then is as before, but for what gave way.
        """
        if len(key) != KEY_BYTES or len(data) != self._form.block_bytes:
            raise ValueError(f"a key of {len(key)} bytes, a block of {len(data)}")
        segment = self._homes.get(key)
        if segment is None:
            segment = self._room_for_one()
            offset = segment.append(key, data)
            self._homes[key] = segment
            self._index.add(key, segment.number, offset)
            self._written += 1
        self._use(segment)

    def get(self, key: bytes, out: Data) -> bool:
        """Fill `out` [block_bytes] with a block; False if it is not there.

        Raises `DamagedBlock` if it is not what was written, after having forgotten it, and
        `ValueError` for a buffer of another size. `out` may then be anything.
        """
        if len(out) != self._form.block_bytes:
            raise ValueError(f"a buffer of {len(out)} bytes for {self._form.block_bytes}")
        segment = self._homes.get(key)
        if segment is None:
            self._missing += 1
            return False
        try:
            segment.read(key, out)
        except DamagedBlock as error:
            if not segment.damage_told:
                segment.damage_told = True
                log.warning("%s has damaged blocks, which are not used: %s", segment.path, error)
            self._damaged += 1
            segment.spoil(key)
            self._forget([key])
            raise
        self._read += 1
        self._use(segment)
        return True

    def expect(self, key: bytes) -> None:
        """Have the system read a block ahead."""
        segment = self._homes.get(key)
        if segment is not None:
            segment.expect(key)

    def take_gone(self) -> list[bytes]:
        """Keys that went since the last call, for want of room or as damaged, and did not come
        back."""
        gone = [key for key in self._gone if key not in self._homes]
        self._gone.clear()
        return gone

    @property
    def uncommitted(self) -> int:
        """Blocks that came or went since the last commit."""
        return self._index.pending

    def commit(self) -> None:
        """Write the index. Raises `OSError`; a later commit writes what this one could not."""
        self._index.commit()

    def stats(self) -> StoreStats:
        return StoreStats(
            blocks=len(self._homes),
            bytes=self._bytes(),
            segments=len(self._segments),
            written=self._written,
            read=self._read,
            missing=self._missing,
            damaged=self._damaged,
            dropped=self._dropped,
        )

    def close(self) -> None:
        """Commit and give the store up. Raises `OSError` when the index cannot be written; the
        store is closed all the same."""
        try:
            self._index.commit()
        finally:
            self._index.close()
            self._release()

    def _release(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        os.close(self._lock)

    # ------------------------------------------------------------------ room

    def _bytes(self) -> int:
        return sum(segment.size for segment in self._segments.values())

    def _by_use(self) -> list[Segment]:
        """The segments, least recently used first."""
        return sorted(self._segments.values(), key=lambda segment: (segment.used, segment.number))

    def _use(self, segment: Segment) -> None:
        self._clock += 1
        segment.used = self._clock
        self._index.set_used(segment.number, segment.used)

    def _forget(self, keys: list[bytes]) -> None:
        for key in keys:
            segment = self._homes.pop(key, None)
            if segment is not None:
                del segment.keys[key]
        self._index.remove(keys)
        self._gone += keys

    def _room_for_one(self) -> Segment:
        """The segment that the next block goes to. Raises `OSError`."""
        current = self._current
        if current is None or current.size >= self._segment_bytes:
            self._current = None
            self._make_room(FILE_BYTES + self._form.record_bytes)
            shrink_others(self.folder, self._limit - self._bytes() - self._segment_bytes)
            number, self._next_number = self._next_number, self._next_number + 1
            path = self.folder / f"segment-{number:08}.kv"
            current = Segment.create(path, number, self._form)
            self._segments[number] = self._current = current
        else:
            self._make_room(self._form.record_bytes)
        return current

    def _make_room(self, count: int) -> None:
        """Drop segments, the least recently used first and the current one never, until `count`
        bytes more are within the limit."""
        over = self._bytes() + count - self._limit
        for segment in self._by_use():
            if over <= 0:
                return
            if segment is not self._current:
                over -= segment.size
                self._drop(segment)

    def _drop(self, segment: Segment) -> None:
        segment.path.unlink(missing_ok=True)
        segment.close()
        del self._segments[segment.number]
        self._index.set_used(segment.number, None)
        self._dropped += len(segment.keys)
        self._forget(list(segment.keys))


def _read_index(
    path: Path, form: BlockFormat
) -> tuple[Index, list[tuple[int, int, bytes]], dict[int, int]]:
    index = Index(path, form)
    try:
        return index, list(index.blocks()), index.used()
    except BaseException:
        index.close()
        raise


def _misplaced(segment: Segment) -> list[bytes]:
    """Keys of blocks that are not where they should be. Asked of the segment that was being written
    when the last server ended; in the others it is seen when they are read."""
    return [key for key, offset in segment.keys.items() if segment.key_at(offset) != key]

"""The index of a store: which block is where, in SQLite. It spares a start the reading of all
segments; they alone could tell it all again, so a lost index costs time and nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from phloem.srt.tier.segment import BlockFormat

_APPLICATION = 0x50484B56
"""Marks the file as ours; `PHKV`."""
_VERSION = 1

_SCHEMA = f"""
CREATE TABLE format (fingerprint BLOB NOT NULL, block_bytes INTEGER NOT NULL);
CREATE TABLE segments (number INTEGER PRIMARY KEY, used INTEGER NOT NULL);
CREATE TABLE blocks (
    key BLOB PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL
) WITHOUT ROWID;
PRAGMA application_id = {_APPLICATION};
PRAGMA user_version = {_VERSION};
"""


class DamagedIndex(Exception):
    """The file is not an index, or one of something else."""


class Index:
    """One file. Changes are told one after another and written together by `commit`."""

    def __init__(self, path: Path, form: BlockFormat) -> None:
        """Opens it, or makes an empty one. Raises `DamagedIndex`."""
        self._changed: dict[bytes, tuple[int, int] | None] = {}
        self._used: dict[int, int | None] = {}
        try:
            self._database = sqlite3.connect(path, isolation_level=None)
        except sqlite3.Error as error:
            raise DamagedIndex(str(error)) from error
        try:
            self._prepare(form)
        except sqlite3.Error as error:
            self._database.close()
            raise DamagedIndex(str(error)) from error
        except BaseException:
            self._database.close()
            raise

    def _prepare(self, form: BlockFormat) -> None:
        # One process at a time has the store, so the log needs no memory shared with others.
        self._database.execute("PRAGMA locking_mode = EXCLUSIVE")
        new = self._pragma("schema_version") == 0
        if not new:
            self._check(form)
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        if new:
            self._database.executescript(f"BEGIN; {_SCHEMA}")
            self._database.execute(
                "INSERT INTO format VALUES (?, ?)", (form.fingerprint, form.block_bytes)
            )
            self._database.execute("COMMIT")

    def _check(self, form: BlockFormat) -> None:
        if self._pragma("application_id") != _APPLICATION:
            raise DamagedIndex("it is no index of KV")
        if self._pragma("user_version") != _VERSION:
            raise DamagedIndex(f"it is of version {self._pragma('user_version')}, not {_VERSION}")
        if self._pragma("quick_check(1)") != "ok":
            raise DamagedIndex("SQLite finds it damaged")
        if self._rows("SELECT * FROM format") != [(form.fingerprint, form.block_bytes)]:
            raise DamagedIndex("it is of another model, or of blocks of another size")

    def _pragma(self, name: str) -> object:
        return self._rows(f"PRAGMA {name}")[0][0]

    def _rows(self, query: str) -> list[tuple[object, ...]]:
        return self._database.execute(query).fetchall()

    def blocks(self) -> Iterator[tuple[int, int, bytes]]:
        """Segment, offset and key of every block, in this order. Raises `DamagedIndex`."""
        rows = self._checked("SELECT segment, offset, key FROM blocks ORDER BY segment, offset")
        for segment, offset, key in rows:
            if isinstance(segment, int) and isinstance(offset, int) and isinstance(key, bytes):
                yield segment, offset, key

    def used(self) -> dict[int, int]:
        """By number of a segment, when it was used last. Raises `DamagedIndex`."""
        rows = self._checked("SELECT number, used FROM segments")
        return {n: used for n, used in rows if isinstance(n, int) and isinstance(used, int)}

    def _checked(self, query: str) -> list[tuple[object, ...]]:
        try:
            return self._rows(query)
        except sqlite3.Error as error:
            raise DamagedIndex(str(error)) from error

    def add(self, key: bytes, segment: int, offset: int) -> None:
        self._changed[key] = (segment, offset)

    def remove(self, keys: Iterable[bytes]) -> None:
        self._changed |= dict.fromkeys(keys)

    def set_used(self, number: int, used: int | None) -> None:
        """`used` None: there is no such segment any more."""
        self._used[number] = used

    @property
    def pending(self) -> int:
        """Blocks that changed since the last commit."""
        return len(self._changed)

    def commit(self) -> None:
        """Write what changed. Raises `OSError`; the changes are then still to be written."""
        if not self._changed and not self._used:
            return
        try:
            self._database.execute("BEGIN")
            self._write("DELETE FROM blocks WHERE key = ?", [(key,) for key in self._changed])
            self._write(
                "INSERT INTO blocks VALUES (?, ?, ?)",
                [(key, *place) for key, place in self._changed.items() if place is not None],
            )
            self._write("DELETE FROM segments WHERE number = ?", [(n,) for n in self._used])
            self._write(
                "INSERT INTO segments VALUES (?, ?)",
                [(n, used) for n, used in self._used.items() if used is not None],
            )
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            with suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise OSError(f"the index of the KV on disk cannot be written: {error}") from error
        self._changed.clear()
        self._used.clear()

    def _write(self, statement: str, rows: Iterable[tuple[object, ...]]) -> None:
        self._database.executemany(statement, rows)

    def close(self) -> None:
        self._database.close()

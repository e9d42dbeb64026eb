"""A file of JSON lines, one for each item of a piece of work that may be killed at any moment.

A line is on disk once its `append` returned, also after the process is killed or the power fails. A
last line that was cut short by that is cut off when the file is opened again, and its item is done
again: in the end each item has one line. What is held in memory does not grow with the file.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Final, Self

KeyOf = Callable[[bytes], str]
"""A line's key; raises `ValueError` for what is no line of this kind."""

_SLICE: Final = 1000  # keys that are put into the index in one go


class LineFileError(ValueError):
    """The file cannot be gone on with; the message says why."""


class DuplicateKey(LineFileError):
    """Two items have the same key."""


class LineFile:
    """The file `path`, which is made if need be, and is this object's alone until `close`.

    `opening` is how every line begins, and `key_of` tells a line's key. Lines for which `keep` is
    False are taken out at once, so that their items are done again. Methods may be called from any
    thread. Raises `LineFileError` for a file of something else or one in use, and `OSError`.
    """

    def __init__(
        self,
        path: Path,
        *,
        opening: bytes,
        key_of: KeyOf,
        keep: Callable[[bytes], bool] | None = None,
    ) -> None:
        self.path = path
        self.found = 0  # lines that were there
        self._opening = opening
        self._key_of = key_of
        self._index = _Index()
        self._changed = threading.Condition()
        self._buffer = bytearray()
        self._put = 0  # lines that were appended, and how many of them are on disk
        self._synced = 0
        self._writing = False
        self._failure: OSError | None = None
        self._file = _opened(path)
        try:
            self._size = self._read(keep)
            os.ftruncate(self._file, self._size)
            os.fsync(self._file)
            _sync_folder(path.parent)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def claim(self, key: str) -> bytes | None:
        """The line that an earlier run left for `key`; None if it is to be done now. Raises
        `DuplicateKey` when it was claimed before."""
        place = self._index.claim(key)
        return None if place is None else os.pread(self._file, place[1], place[0])

    def append(self, line: bytes) -> None:
        """Add the line of a key that was claimed, and see it on disk. Lines that come together
        share one wait for the disk. Raises `OSError`; then nothing more can be added."""
        with self._changed:
            self._buffer += line + b"\n"
            self._put += 1
            ticket = self._put
            while self._writing and self._synced < ticket and self._failure is None:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            if self._synced >= ticket:
                return
            self._writing = True
            taken, self._buffer = self._buffer, bytearray()
            upto = self._put
        self._write_for_all(taken, upto)

    def close(self) -> None:
        """Let go of the file; what was appended is on disk."""
        with self._changed:
            while self._writing:
                self._changed.wait()
            if self._file >= 0:
                os.close(self._file)
                self._file = -1
                self._failure = self._failure or OSError(f"{self.path} is closed")
        self._index.close()

    # ------------------------------------------------------------------ inside

    def _write_for_all(self, data: bytearray, upto: int) -> None:
        failure = None
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._file, view) :]
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self._size)  # no line is left that goes on in another
            failure = error
        with self._changed:
            self._writing = False
            if failure is None:
                self._size += len(data)
                self._synced = upto
            else:
                self._failure = failure
            self._changed.notify_all()
        if failure is not None:
            raise failure

    def _read(self, keep: Callable[[bytes], bool] | None) -> int:
        """Take in what is there; the size of its whole lines. With `keep`, the file is another
        one afterwards, if a line was to go."""
        if keep is not None and not all(keep(line) for line in self._lines()):
            self._file = _rewritten(self.path, self._file, filter(keep, self._lines()))
        end = 0

        def places() -> Iterator[tuple[str, int, int]]:
            nonlocal end
            for line in self._lines():
                self.found += 1
                yield self._key_of(line), end, len(line)
                end += len(line)

        self._index.load(places())
        return end

    def _lines(self) -> Iterator[bytes]:
        """The whole lines; raises at one of another kind."""
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    if line.startswith(self._opening) or self._opening.startswith(line):
                        return
                    raise self._foreign(number)
                try:
                    self._key_of(line)
                except ValueError:
                    raise self._foreign(number) from None
                yield line

    def _foreign(self, number: int) -> LineFileError:
        return LineFileError(
            f"{self.path}, line {number}, is no result of such a run: give a new file, or the one "
            "that the run before this one wrote"
        )


class _Index:
    """Where the line of a key is, in a temporary database, which goes to disk when it is large."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._database = sqlite3.connect("", check_same_thread=False, isolation_level=None)
        self._database.execute("PRAGMA journal_mode = OFF")
        self._database.execute(
            "CREATE TABLE line (key BLOB PRIMARY KEY, start INTEGER, size INTEGER, claimed INTEGER)"
            " WITHOUT ROWID"
        )

    def load(self, places: Iterable[tuple[str, int, int]]) -> None:
        """Of two lines with one key the first counts."""
        rest = iter(places)
        while some := list(islice(rest, _SLICE)):
            with self._lock:
                self._database.execute("BEGIN")
                self._database.executemany(
                    "INSERT OR IGNORE INTO line VALUES (?, ?, ?, 0)",
                    ((_digest(key), start, size) for key, start, size in some),
                )
                self._database.execute("COMMIT")

    def claim(self, key: str) -> tuple[int, int] | None:
        digest = _digest(key)
        with self._lock:
            row = self._database.execute(
                "SELECT start, size, claimed FROM line WHERE key = ?", (digest,)
            ).fetchone()
            if row is None:
                self._database.execute("INSERT INTO line VALUES (?, NULL, NULL, 1)", (digest,))
                return None
            if row[2]:
                raise DuplicateKey(f"two items have the key {key!r}")
            self._database.execute("UPDATE line SET claimed = 1 WHERE key = ?", (digest,))
            return row[0], row[1]

    def close(self) -> None:
        with self._lock:
            self._database.close()


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _opened(path: Path) -> int:
    """The file, locked."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _lock(file, path)
    return file


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise LineFileError(f"{path} is in use: another run writes to it") from None


def _rewritten(path: Path, old: int, lines: Iterable[bytes]) -> int:
    """Replace the file by one with these lines, in one step; the new one, locked. The old one is
    closed."""
    draft = path.with_name(f".{path.name}.new")
    with draft.open("wb") as file:
        file.writelines(lines)
        file.flush()
        os.fsync(file.fileno())
    new = _opened(draft)
    os.replace(draft, path)
    os.close(old)
    return new


def _sync_folder(folder: Path) -> None:
    """Make new names in a folder outlive a power cut."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)

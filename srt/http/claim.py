"""Which servers live in a folder: each holds a lock file, which the system lets go with it.

Several servers may keep their files and batches in one folder. A batch belongs to the server that
accepted it; when that one is gone, killed or not, another may take its batches over.
"""

from __future__ import annotations

import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

_SUFFIX: Final = ".lock"


class Claim:
    """This server's lock in `folder`, held from `open` to `close`. `id` names the server."""

    def __init__(self, folder: Path) -> None:
        self.id = uuid.uuid4().hex
        self._folder = folder
        self._file: int | None = None

    def open(self, when_alone: Callable[[], None]) -> None:
        """Take the lock. When no other server lives, `when_alone` is called, and none can begin to
        before it returns. Raises `OSError` when the folder cannot be written."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with self._guarded():
            self._file = os.open(self._path(self.id), os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._living():
                when_alone()

    def close(self) -> None:
        """May be called again."""
        if self._file is not None:
            with self._guarded():
                self._path(self.id).unlink(missing_ok=True)
                os.close(self._file)
            self._file = None

    def others(self) -> set[str]:
        """The ids of the other servers that live. Lock files of dead ones are removed."""
        with self._guarded():
            return self._living()

    def _living(self) -> set[str]:
        living = set()
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path.stem == self.id:
                continue
            if _held(path):
                living.add(path.stem)
            else:
                path.unlink(missing_ok=True)
        return living

    def _path(self, server: str) -> Path:
        return self._folder / f"{server}{_SUFFIX}"

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Nobody else looks at, or makes, a lock file meanwhile: one that was just made is not
        locked yet."""
        guard = os.open(self._folder / "guard", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(guard, fcntl.LOCK_EX)
            yield
        finally:
            os.close(guard)


def _held(path: Path) -> bool:
    with suppress(FileNotFoundError):
        file = os.open(path, os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
    return False

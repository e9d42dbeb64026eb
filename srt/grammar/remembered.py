"""Which constraints were compiled, for the next start: compiled grammars themselves are too big to
be kept, and soon made again.

A sqlite file of constraints, written by a thread of its own. Losing some costs a later request the
compile that it saves, so nothing waits for the disk, and a file that cannot be had is a warning.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec

from phloem.constrained.spec import Constraint

MOST: Final = 256
"""Constraints that are remembered: those used last."""
MOST_BYTES: Final = 64 << 10
"""Of one of them; longer ones are not remembered."""

_SCHEMA: Final = (
    "CREATE TABLE IF NOT EXISTS constraints"
    " (key TEXT PRIMARY KEY, spec BLOB NOT NULL, used INTEGER NOT NULL)"
)
_BUSY_SECONDS: Final = 5.0

log = logging.getLogger(__name__)
_encoder = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Constraint)


class Remembered:
    """The constraints in the file at `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._uses: OrderedDict[str, None] = OrderedDict()
        """Keys in the file, the one used last at the end."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="remember")

    def load(self) -> list[Constraint]:
        """What is there, the last used first. What cannot be read any more is left out."""
        try:
            with closing(self._connect()) as connection, connection:
                rows = connection.execute(
                    "SELECT key, spec FROM constraints ORDER BY used DESC LIMIT ?", (MOST,)
                ).fetchall()
        except (OSError, sqlite3.Error) as error:
            log.warning("constraints of earlier runs are not known: %s: %s", self._path, error)
            return []
        found: list[Constraint] = []
        for key, spec in rows:
            try:
                found.append(_decoder.decode(spec))
            except msgspec.DecodeError:
                continue  # another version's
            self._uses[key] = None
            self._uses.move_to_end(key, last=False)
        return found

    def compiled(self, key: str, constraint: Constraint) -> None:
        """This one was compiled."""
        spec = _encoder.encode(constraint)
        if len(spec) > MOST_BYTES:
            return
        self._uses[key] = None
        self._uses.move_to_end(key)
        while len(self._uses) > MOST:
            self._uses.popitem(last=False)
        self._thread.submit(self._write, {key: spec}, list(self._uses))

    def used(self, key: str) -> None:
        """This one was asked for again. It is written with the next one that is new, or at the
        end."""
        if key in self._uses:
            self._uses.move_to_end(key)

    def close(self) -> None:
        """Write what is left to be written."""
        self._thread.submit(self._write, {}, list(self._uses))
        self._thread.shutdown()

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        connection = sqlite3.connect(self._path, timeout=_BUSY_SECONDS)
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute(_SCHEMA)
        return connection

    def _write(self, new: dict[str, bytes], uses: list[str]) -> None:
        try:
            with closing(self._connect()) as connection, connection:
                connection.executemany(
                    "INSERT OR REPLACE INTO constraints VALUES (?, ?, 0)", new.items()
                )
                connection.execute("UPDATE constraints SET used = -1")  # another server's
                connection.executemany(
                    "UPDATE constraints SET used = ? WHERE key = ?", enumerate(uses)
                )
                connection.execute(
                    "DELETE FROM constraints WHERE key NOT IN"
                    " (SELECT key FROM constraints ORDER BY used DESC LIMIT ?)",
                    (MOST,),
                )
        except (OSError, sqlite3.Error) as error:
            log.warning("a constraint is not remembered: %s: %s", self._path, error)

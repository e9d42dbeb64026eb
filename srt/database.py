"""A sqlite file behind an event loop: one connection, in a thread of its own.

    async with Database(folder / "state.sqlite", SCHEMA) as database:
        rows = await database.run(lambda c: c.execute("SELECT …").fetchall())

Each call is one transaction: committed when it returns, rolled back when it raises. They run in
the order in which they were made.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self, TypeVar

T = TypeVar("T")

_BUSY_SECONDS: Final = 10.0


class Database:
    """`schema` is SQL that may run on every start (`CREATE TABLE IF NOT EXISTS …`). What was
    committed outlives a killed process: the journal is a write-ahead log. `path` None keeps all in
    memory."""

    def __init__(self, path: Path | None, schema: str) -> None:
        self._path = path
        self._schema = schema
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="database")
        self._connection: sqlite3.Connection | None = None

    async def __aenter__(self) -> Self:
        await self._call(self._open)
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """What `work` returns. Raises what it raises; then nothing of it was written."""
        return await self._call(self._transaction, work)

    async def close(self) -> None:
        """Wait for what was begun, and close the file. May be called again."""
        if self._connection is not None:
            await self._call(self._connection.close)
            self._connection = None
        self._thread.shutdown(wait=True)

    def _open(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        connection = sqlite3.connect(
            self._path or ":memory:", timeout=_BUSY_SECONDS, isolation_level=None
        )
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.executescript(self._schema)
        self._connection = connection

    def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        assert self._connection is not None, "the database is not open"
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            result = work(self._connection)
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")
        return result

    async def _call(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

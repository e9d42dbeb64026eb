"""A database is written in whole transactions, in order, and outlives its process."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from phloem.srt.database import Database

SCHEMA = "CREATE TABLE IF NOT EXISTS t (id INTEGER PRIMARY KEY, word TEXT UNIQUE)"


def _add(*words: str) -> Callable[[sqlite3.Connection], None]:
    def work(connection: sqlite3.Connection) -> None:
        for word in words:
            connection.execute("INSERT INTO t (word) VALUES (?)", (word,))

    return work


async def _words(database: Database) -> list[str]:
    rows = await database.run(lambda c: c.execute("SELECT word FROM t ORDER BY id").fetchall())
    return [row["word"] for row in rows]


@pytest.mark.parametrize("memory", [True, False])
async def test_a_call_is_written_whole_or_not_at_all(tmp_path: Path, memory: bool) -> None:
    path = None if memory else tmp_path / "deep" / "er" / "state.sqlite"
    async with Database(path, SCHEMA) as database:
        await database.run(_add("a", "b"))
        with pytest.raises(sqlite3.IntegrityError):
            await database.run(_add("c", "a"))
        assert await _words(database) == ["a", "b"]


async def test_calls_run_in_order(tmp_path: Path) -> None:
    async with Database(tmp_path / "s.sqlite", SCHEMA) as database:
        await asyncio.gather(*(database.run(_add(str(i))) for i in range(50)))
        assert await _words(database) == [str(i) for i in range(50)]


_ENDLESS = """
import asyncio, sys
from pathlib import Path
from phloem.srt.database import Database

async def main():
    async with Database(Path(sys.argv[1]), sys.argv[2]) as database:
        i = 0
        while True:
            await database.run(lambda c: c.execute("INSERT INTO t (word) VALUES (?)", (str(i),)))
            print(i, flush=True)
            i += 1

asyncio.run(main())
"""


async def test_what_was_committed_outlives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "s.sqlite"
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _ENDLESS, str(path), SCHEMA, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    told = [int(await child.stdout.readline()) for _ in range(20)]
    child.kill()
    await child.communicate()
    async with Database(path, SCHEMA) as database:
        words = await _words(database)
    assert words[:20] == [str(i) for i in told]
    assert words == [str(i) for i in range(len(words))]

"""What a batch has got so far: its output and error files, which are written a line at a time.

The two files are the only record of which requests are done. A line is in one of them once its
`append` returned, also after the process is killed or the power fails; a line that was cut short by
that is cut off when the files are opened again, and its request is made again. So each request has
one line in the end.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

from phloem.srt.disk import sync, write_all
from phloem.srt.http.batches.lines import MAX_REQUESTS
from phloem.srt.http.framing import on_one_line

_RECORD_SEPARATOR: Final = "-"

Progress = Callable[[int, int], Awaitable[None]]


class _Id(msgspec.Struct):
    """Of an output line, what says which request it is of."""

    id: str


_decoder = msgspec.json.Decoder(_Id)


def record_id(batch: str, index: int) -> str:
    """The id of the output line of a batch's request `index`."""
    return f"batch_req_{batch.removeprefix('batch_')}{_RECORD_SEPARATOR}{index}"


class Journal:
    """The files `output` and `errors` of one batch, open from `open` to `close`.

    `completed` and `failed` count their lines. `progress` is told of them when they are on disk.
    """

    def __init__(self, output: Path, errors: Path, progress: Progress) -> None:
        self.completed = 0
        self.failed = 0
        self._paths = (output, errors)
        self._progress = progress
        self._files: list[FileIO] = []
        self._sizes = [0, 0]
        self._done = bytearray(MAX_REQUESTS)
        self._buffers = (bytearray(), bytearray())
        self._lock = asyncio.Lock()

    def open(self) -> None:
        """Find out what is there. Blocks; raises `OSError`."""
        for which, path in enumerate(self._paths):
            file = path.open("a+b", buffering=0)
            self._files.append(file)
            end = 0
            for index, size in _records(path):
                self._count(index, failed=bool(which))
                end += size
            os.truncate(path, end)
            self._sizes[which] = end
            os.fsync(file)
        sync(self._paths[0].parent)

    def done(self, index: int) -> bool:
        """Whether request `index` has its line, or will have it when `settle` returns."""
        return bool(self._done[index])

    def put(self, index: int, line: bytes, *, failed: bool) -> None:
        """Take in the line of a request that is not done, for the next `settle`."""
        self._count(index, failed=failed)
        self._buffers[failed].extend(on_one_line(line) + b"\n")

    async def append(self, index: int, line: bytes, *, failed: bool) -> None:
        """`put` a line and see it on disk. Who is cancelled while it waits knows that it will be
        there when `settle` returns. Raises `OSError`; then the files must be opened again."""
        self.put(index, line, failed=failed)
        await asyncio.shield(asyncio.ensure_future(self.settle()))

    async def settle(self) -> None:
        """Write all that was put. Lines that come meanwhile are written together afterwards, with
        one more wait for the disk. Raises as `append` does."""
        async with self._lock:
            if any(self._buffers):
                taken, self._buffers = self._buffers, (bytearray(), bytearray())
                await asyncio.to_thread(self._write, taken)
                await self._progress(self.completed, self.failed)

    async def close(self) -> tuple[int, int]:
        """Settle and close; the sizes of the files in bytes. May be called again. Raises as
        `append` does, with the files closed."""
        try:
            await self.settle()
        finally:
            while self._files:
                self._files.pop().close()
        return self._sizes[0], self._sizes[1]

    def _write(self, buffers: tuple[bytearray, bytearray]) -> None:
        for which, data in enumerate(buffers):
            if not data:
                continue
            file = self._files[which]
            try:
                write_all(file.fileno(), data)
            except OSError:
                file.truncate(self._sizes[which])  # no line is left that goes on in another
                raise
            os.fsync(file)
            self._sizes[which] += len(data)

    def _count(self, index: int, *, failed: bool) -> None:
        self._done[index] = 1
        if failed:
            self.failed += 1
        else:
            self.completed += 1


def _records(path: Path) -> Iterator[tuple[int, int]]:
    """Of each whole line, the request's index and the line's size; ends before one that is not."""
    with path.open("rb") as file:
        for line in file:
            try:
                index = int(_decoder.decode(line).id.rpartition(_RECORD_SEPARATOR)[2])
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError):
                return
            if not line.endswith(b"\n") or not 0 <= index < MAX_REQUESTS:
                return
            yield index, len(line)

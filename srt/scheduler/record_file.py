"""The file of a recording: what came into a scheduler, in order, with the clock as it was read.

    b"PHLOEMR1", then records: length (4 bytes, little-endian), MessagePack of one `Record`

The first record is a `Header`. What was being written when the process was killed is cut off in the
middle; the reader leaves it out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from phloem.srt.messages import FromGrammar, StepResult, ToScheduler, WorkerReady
from phloem.srt.tier_messages import FromTier
from phloem.srt.wire import Wire

log = logging.getLogger(__name__)

MAGIC = b"PHLOEMR1"
FLUSH_SECONDS = 1.0
BUFFER_BYTES = 1 << 16
MAX_RECORD_BYTES = 256 << 20


class RecordingError(ValueError):
    """A file is no recording, or of a version that cannot be replayed; the message says which."""


class Header(Wire, frozen=True, tag="header"):
    """The scheduler as it was started. `limits` are the fields of `SchedulerLimits`; `ticks` as in
    the records below. `started` is in seconds since 1970."""

    phloem: str
    started: float
    limits: dict[str, Any]
    worker: WorkerReady
    ticks: list[int]


class Received(Wire, frozen=True, tag="receive"):
    """`ticks` of this and the others: what the clock said each time it was read in this call, as
    nanoseconds since the last reading before (the first of all: since the clock's zero).
    `sent` is the number of messages to the frontend that the call gave."""

    ticks: list[int]
    sent: int
    message: ToScheduler


class FromGrammarCame(Wire, frozen=True, tag="grammar"):
    ticks: list[int]
    sent: int
    message: FromGrammar


class FromTierCame(Wire, frozen=True, tag="tier"):
    ticks: list[int]
    sent: int
    message: FromTier


class Applied(Wire, frozen=True, tag="apply"):
    ticks: list[int]
    sent: int
    message: StepResult


class Expired(Wire, frozen=True, tag="expire"):
    ticks: list[int]
    sent: int


class Planned(Wire, frozen=True, tag="plan"):
    """`step` is None, and `rows` 0, when there was nothing to plan; `digest` is `plan_digest`'s."""

    ticks: list[int]
    sent: int
    step: int | None = None
    rows: int = 0
    digest: bytes = b""


class Aliases(Wire, frozen=True, tag="aliases"):
    """Keys of KV blocks in the lower tier, hashed as in the messages from the tier → the keys that
    the labels have."""

    keys: dict[bytes, bytes]


class Raised(Wire, frozen=True, tag="raised"):
    """The call whose record stands before this one raised an error of this type."""

    error: str


Call = Received | FromGrammarCame | FromTierCame | Applied | Expired | Planned
"""A call of the scheduler."""

Record = Header | Call | Aliases | Raised


class RecordWriter:
    """Appends records to a new file, at most `FLUSH_SECONDS` late. When the disk fails the
    recording ends, with an error in the log; the server goes on.

    A file that exists is left as it is, since it may be what a crash left behind: the recording
    goes to `path` with a number after it. Raises `OSError` if no file can be made.
    """

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO | None
        self.path, self._file = _new_file(path)
        self._encoder = msgspec.msgpack.Encoder()
        self._buffer = bytearray(MAGIC)
        self._flushed = time.monotonic()

    def write(self, record: Record) -> None:
        data = self._encoder.encode(record)
        self._buffer += len(data).to_bytes(4, "little") + data
        late = time.monotonic() - self._flushed >= FLUSH_SECONDS
        if late or len(self._buffer) >= BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._file is not None:
            try:
                while self._buffer:
                    del self._buffer[: self._file.write(self._buffer)]
            except OSError as error:
                log.error("the recording %s ends here: %s", self.path, error)
                self._file.close()
                self._file = None
        self._buffer.clear()
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Write what is left and close the file. May be called again."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


def _new_file(path: Path) -> tuple[Path, BinaryIO]:
    for number in count():
        free = path.with_name(f"{path.name}.{number}") if number else path
        try:
            file = free.open("xb", buffering=0)
        except FileExistsError:
            continue
        if number:
            log.warning("%s exists, so the recording goes to %s", path, free)
        return free, file
    raise AssertionError("numbers do not end")


class RecordReader:
    """Iterates over the whole records of a file. Raises `RecordingError` where it is damaged,
    `OSError` if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.cut = False
        """The file ends in the middle of a record."""

    def __iter__(self) -> Iterator[Record]:
        path = self._path
        decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise RecordingError(f"{path} is no recording of this version")
            while head := file.read(4):
                size = int.from_bytes(head, "little")
                at = file.tell()
                if size > MAX_RECORD_BYTES:
                    raise RecordingError(
                        f"{path} is damaged at byte {at}: a record of {size} bytes"
                    )
                data = file.read(size)
                if len(head) < 4 or len(data) < size:
                    self.cut = True
                    return
                try:
                    yield decoder.decode(data)
                except msgspec.DecodeError as error:
                    raise RecordingError(f"{path} is damaged at byte {at}: {error}") from error

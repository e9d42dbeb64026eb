"""The requests of a batch's input file: read a line at a time, and checked as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from phloem.srt.http.batches.protocol import BatchProblem, InputLine

MAX_REQUESTS: Final = 50_000
"""Requests of one batch, as OpenAI has it. It bounds what is held of a file: a mark and the hash
of the `custom_id` of each."""

MAX_PROBLEMS: Final = 100
"""Of a file with more, the first are told."""

MAX_CUSTOM_ID: Final = 512

_decoder = msgspec.json.Decoder(InputLine)
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True)
class Line:
    """One line that is not blank: its number in the file, its index among such lines, and its
    text; None for one that is longer than it may be, which is not read."""

    number: int
    index: int
    text: bytes | None


class InputFile:
    """The lines of a file, of which at most `limit` bytes are read at once."""

    def __init__(self, path: Path, limit: int) -> None:
        self._file = path.open("rb")
        self._limit = limit
        self._number = 0
        self._index = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Line]:
        while (line := self.next()) is not None:
            yield line

    def next(self) -> Line | None:
        """The next line that is not blank; None at the end."""
        while text := self._file.readline(self._limit + 1):
            self._number += 1
            whole: bytes | None = text
            while not text.endswith(b"\n") and len(text) > self._limit:
                whole = None
                text = self._file.readline(self._limit + 1)
            if whole is None or whole.strip():
                self._index += 1
                return Line(self._number, self._index - 1, whole)
        return None

    def close(self) -> None:
        self._file.close()


def read_line(text: bytes) -> InputLine:
    """A line that was checked."""
    return _decoder.decode(text)


@dataclass
class InputCheck:
    """The check of all lines, in slices, so that whoever runs it can stop in between.

    `problems` is what was found, `total` the number of requests.
    """

    path: Path
    endpoint: str
    limit: int
    total: int = 0
    problems: list[BatchProblem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lines = InputFile(self.path, self.limit)
        self._seen: set[bytes] = set()

    def advance(self, count: int) -> bool:
        """Check up to `count` lines more; False when that was all."""
        for _ in range(count):
            line = self._lines.next()
            if line is None:
                if not self.total:
                    self._problem(None, "empty_file", "There is no request in the file.")
                return False
            self.total += 1
            if self.total > MAX_REQUESTS:
                told = f"A batch has at most {MAX_REQUESTS:,} requests."
                self._problem(None, "too_many_requests", told)
                return False
            self._check(line)
            if len(self.problems) >= MAX_PROBLEMS:
                return False
        return True

    def close(self) -> None:
        self._lines.close()

    def _check(self, line: Line) -> None:
        if line.text is None:
            told = f"The line is longer than {self.limit:,} bytes."
            return self._problem(line, "line_too_long", told)
        try:
            request = _decoder.decode(line.text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._explain(line, line.text)
        if not request.custom_id or len(request.custom_id) > MAX_CUSTOM_ID:
            told = f"custom_id has 1 to {MAX_CUSTOM_ID} characters."
            return self._problem(line, "invalid_custom_id", told, "custom_id")
        if request.method != "POST":
            told = f"The method of a request is POST, not {_short(request.method)}."
            return self._problem(line, "invalid_method", told, "method")
        if request.url != self.endpoint:
            told = f"The url {_short(request.url)} is not the batch's endpoint, {self.endpoint}."
            return self._problem(line, "invalid_url", told, "url")
        if not bytes(request.body).startswith(b"{"):
            return self._problem(line, "invalid_body", "body is not an object.", "body")
        digest = blake2b(request.custom_id.encode(), digest_size=16).digest()
        if digest in self._seen:
            told = f"The custom_id {_short(request.custom_id)} stands in a line before this one."
            return self._problem(line, "duplicate_custom_id", told, "custom_id")
        self._seen.add(digest)
        return None

    def _explain(self, line: Line, text: bytes) -> None:
        """What is wrong with a line that is not an `InputLine`."""
        try:
            found = _object.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._problem(line, "invalid_json_line", "The line is not a JSON object.")
        for name in InputLine.__struct_fields__:
            if name not in found:
                return self._problem(line, "missing_required_parameter", f"No {name}.", name)
        strings = ("custom_id", "method", "url")
        name = next((s for s in strings if not bytes(found[s]).startswith(b'"')), "body")
        return self._problem(line, f"invalid_{name}", f"{name} is not what it must be.", name)

    def _problem(self, line: Line | None, code: str, told: str, param: str | None = None) -> None:
        number = None if line is None else line.number
        self.problems.append(BatchProblem(code=code, message=told, param=param, line=number))


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:100] + "…")

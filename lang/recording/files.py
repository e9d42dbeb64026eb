"""Traces as JSON: one in a file, or one a line, as every run appends it when asked to."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec.structs import replace

from phloem.lang.recording.spans import Branch, Span, Trace

VARIABLE: Final = "PHLOEM_TRACE"
"""Environment variable with the file that every run's trace is appended to."""

_DIGITS: Final = 6  # of seconds: microseconds

_log = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Trace)


class TraceError(Exception):
    """A file is not a trace, or not whole; the message says where."""


def save(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write one trace, in lines for people. Raises `OSError`."""
    data = msgspec.json.format(_encoder.encode(_shifted(trace)), indent=1)
    Path(path).write_bytes(data + b"\n")


def load(path: str | os.PathLike[str]) -> Iterator[Trace]:
    """The traces of a file: that of `save`, or those of a file with one a line, read a line at a
    time. A last line that was cut short is left out. Raises `TraceError` and `OSError`."""
    with Path(path).open("rb") as file:
        first = file.readline()
        if first.strip() in (b"{", b""):
            yield _decode(first + file.read(), f"{path}")
            return
        number = 1
        line = first
        while line:
            if line.strip() and (line.endswith(b"\n") or _is_json(line)):
                yield _decode(line, f"{path}, line {number}")
            line = file.readline()
            number += 1


def save_traces(path: str | os.PathLike[str] | None) -> None:
    """Append the trace of every run that ends from now on to a file, one a line; None ends that.
    At first it is the file that the environment variable `PHLOEM_TRACE` names, if any. Prompts are
    not in a trace; the first characters of answers are."""
    _sink.set(None if path is None else Path(path))


def keep(trace: Trace) -> None:
    """Append `trace` to the file that `save_traces` names. Never raises: what goes wrong is logged,
    once for a file."""
    _sink.keep(trace)


class _Sink:
    """The file for every run's trace. A line is one write to a file opened for appending, so that
    several processes may share it."""

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.Lock()
        self._path = path
        self._failed = False

    def set(self, path: Path | None) -> None:
        with self._lock:
            self._path = path
            self._failed = False

    def keep(self, trace: Trace) -> None:
        path = self._path
        if path is None:
            return
        line = _encoder.encode(_shifted(trace)) + b"\n"
        with self._lock:
            try:
                with path.open("ab", buffering=0) as file:
                    file.write(line)
            except OSError as error:
                if not self._failed:
                    _log.warning("traces cannot be written to %s: %s", path, error)
                self._failed = True


_sink = _Sink(Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)


def _shifted(trace: Trace) -> Trace:
    """The trace with times from the run's start, rounded."""
    zero = trace.zero

    def at(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds - zero, _DIGITS)

    def moved(span: Span) -> Span:
        return replace(
            span,
            called=at(span.called),
            sent=at(span.sent),
            first=at(span.first),
            ended=at(span.ended),
        )

    def begun(branch: Branch) -> Branch:
        return replace(branch, started=at(branch.started)) if branch.id else branch

    return replace(
        trace,
        zero=0.0,
        ended=round(trace.seconds, _DIGITS),
        spans=[moved(span) for span in list(trace.spans)],
        branches=[begun(branch) for branch in list(trace.branches)],
    )


def _decode(data: bytes, where: str) -> Trace:
    try:
        trace = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where} is no trace of a program: {error}") from error
    ids = {span.id for span in trace.spans}
    known = {branch.id for branch in trace.branches}
    sound = (
        all(span.branch in known and ids.issuperset(span.needs) for span in trace.spans)
        and all(branch.parent < branch.id or branch.id == 0 for branch in trace.branches)
        and all(branch.parent in known for branch in trace.branches)
    )
    if not sound or len(ids) != len(trace.spans) or len(known) != len(trace.branches):
        raise TraceError(f"{where} is no whole trace: it names what is not in it")
    return trace


def _is_json(line: bytes) -> bool:
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError:
        return False
    return True

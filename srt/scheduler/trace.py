"""Traces: what arrived when, one JSON object a line, for `benchmark/policy.py` to replay.

    {"id": "a1", "prompt": [["system", 512], ["question 7", 40]], "output": 120}
    {"id": "a2", "after": ["a1"], "prompt": [["system", 512], ["question 7", 40],
     ["output of a1", 120], ["question 8", 25]], "output": 80, "program": "a", "tenant": "acme"}
    {"id": "b1", "arrival": 3.25, "prompt": [1, 5029, 318, 257], "output": [7, 2]}

`arrival` is in seconds from the trace's start or, when the request comes `after` others (ids that
stand above it), from the end of the last of these. A prompt is a list of token ids, of segments
[label, tokens], or of both: segments of the same label begin with the same tokens, so a server's
owner can tell what was shared without telling what it was. `output` lists the answer in the same
way; a number n is short for [["output of ID", n]]. `program`, `tenant`, `namespace` (whose KV is
apart from others') and `priority` (higher first) may be left out.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

import msgspec

VOCABULARY = (1 << 31) - 1
"""Token ids of segments are smaller than this: as many as int32 has, so that two labels never meet
by chance."""

Segments = list[int | tuple[str, int]]


class TraceError(ValueError):
    """A file is no trace; the message names the line."""


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a trace, as above."""

    id: str
    arrival: float = 0.0
    after: list[str] = []
    prompt: Segments
    output: int | Segments
    program: str = ""
    tenant: str = ""
    namespace: str = ""
    priority: int = 0

    def prompt_tokens(self) -> array[int]:
        return expand(self.prompt)

    def output_tokens(self) -> array[int]:
        if isinstance(self.output, int):
            return expand([(f"output of {self.id}", self.output)])
        return expand(self.output)


def expand(segments: Segments) -> array[int]:
    """The token ids that `segments` stand for."""
    tokens = array("i")
    for segment in segments:
        if isinstance(segment, int):
            tokens.append(segment)
        else:
            tokens.extend(_segment(*segment))
    return tokens


@lru_cache(maxsize=1 << 14)
def _segment(label: str, count: int) -> array[int]:
    draw = random.Random(label).randrange
    return array("i", [draw(VOCABULARY) for _ in range(count)])


def read_trace(path: Path) -> list[TraceRequest]:
    """Requests of a trace file. Raises `TraceError`, and `OSError` if it cannot be read."""
    decoder = msgspec.json.Decoder(TraceRequest)
    requests: list[TraceRequest] = []
    known: set[str] = set()
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
            _check(request, known)
        except (msgspec.DecodeError, ValueError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
        known.add(request.id)
        requests.append(request)
    return requests


def _check(request: TraceRequest, known: set[str]) -> None:
    if request.id in known:
        raise ValueError(f"there is a request {request.id!r} above")
    missing = [other for other in request.after if other not in known]
    if missing:
        raise ValueError(f"it comes after {missing[0]!r}, which does not stand above it")
    for segments in (request.prompt, request.output):
        for number in [segments] if isinstance(segments, int) else map(_number, segments):
            if not 0 <= number <= VOCABULARY:
                raise ValueError(f"{number} is neither a token id nor a count")
    if not any(isinstance(segment, int) or segment[1] for segment in request.prompt):
        raise ValueError("the prompt is empty")


def _number(segment: int | tuple[str, int]) -> int:
    return segment if isinstance(segment, int) else segment[1]


def trace_lines(requests: Iterable[TraceRequest]) -> Iterator[bytes]:
    """The lines of a trace file."""
    encoder = msgspec.json.Encoder()
    for request in requests:
        yield encoder.encode(request) + b"\n"

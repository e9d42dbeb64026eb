"""`phloem batch`'s work: requests from a file to a server, a bounded number at once, and each
result to a file that a killed run goes on with."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import aiohttp
import msgspec
from msgspec import Raw

from phloem.lang.line_file import DuplicateKey, LineFile
from phloem.srt.cli.batch_lines import Fault, Request, read, result, succeeded
from phloem.srt.http.batches.job import PAUSES_S
from phloem.srt.http.batches.lines import InputFile, Line
from phloem.srt.http.batches.protocol import LineError, LineResponse
from phloem.srt.http.middleware import REQUEST_ID_HEADER

_LATER: Final = (429, 502, 503)
_LONGEST_PAUSE_S: Final = 60.0
_SLICE: Final = 256  # lines that are skipped in one go


class ServerGone(Exception):
    """The server cannot be reached, and was waited for."""


@dataclass
class Counts:
    """How far it is. `found` results were there before; `bytes` of the input are done."""

    done: int = 0
    failed: int = 0
    found: int = 0
    bytes: int = 0
    first_error: str = ""
    duplicates: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A file's way through a server. `tries` is how often a request is sent that the server has no
    room for, or that does not reach it; `on_progress` is called after each line."""

    session: aiohttp.ClientSession
    base_url: str
    lines: InputFile
    results: LineFile
    endpoint: str | None
    concurrency: int
    tries: int
    on_progress: Callable[[Counts], None]
    counts: Counts = field(default_factory=Counts)

    async def run(self) -> Counts:
        """Every line to its result. Raises `ServerGone` and `OSError`: what is done by then is
        written down, and another run goes on with the rest."""
        room = asyncio.Semaphore(self.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for number in itertools.count(1):
                    line = self.lines.next()
                    if line is None:
                        break
                    if number % _SLICE == 0:
                        await asyncio.sleep(0)
                    asked = self._claimed(line)
                    if asked is None:
                        continue
                    await room.acquire()
                    task = group.create_task(self._make(asked, line))
                    task.add_done_callback(lambda _: room.release())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return self.counts

    def _claimed(self, line: Line) -> Request | Fault | None:
        """What a line asks for, if it is still to be done."""
        asked = read(line, self.endpoint)
        counts = self.counts
        try:
            found = self.results.claim(asked.custom_id)
        except DuplicateKey:
            counts.failed += 1
            if len(counts.duplicates) < 10:
                counts.duplicates.append(f"line {line.number}: {asked.custom_id!r}")
            return None
        if found is None:
            return asked
        counts.found += 1
        self._count(line, found)
        return None

    async def _make(self, asked: Request | Fault, line: Line) -> None:
        if isinstance(asked, Fault):
            made = result(asked.custom_id, error=LineError(code=asked.code, message=asked.message))
        else:
            made = await self._answer(asked)
        await asyncio.to_thread(self.results.append, made)
        self._count(line, made)

    def _count(self, line: Line, made: bytes) -> None:
        counts = self.counts
        counts.bytes += len(line.text or b"")
        if succeeded(made):
            counts.done += 1
        else:
            counts.failed += 1
            counts.first_error = counts.first_error or _reason(made)
        self.on_progress(counts)

    async def _answer(self, request: Request) -> bytes:
        """The result of a request: it is sent again while the server is full or away."""
        for attempt in itertools.count(1):
            response = None
            reason = ""
            try:
                response = await self._post(request)
            except (aiohttp.ClientError, OSError) as error:
                reason = f"{type(error).__name__}: {error}"
            last = attempt >= self.tries
            if response is not None and (response[0] not in _LATER or last):
                return _made(request, *response[:3])
            if last:
                raise ServerGone(f"{self.base_url} cannot be reached: {reason}")
            pause = PAUSES_S[min(attempt - 1, len(PAUSES_S) - 1)]
            await asyncio.sleep(max(pause, response[3] if response is not None else 0.0))
        raise AssertionError("unreachable")

    async def _post(self, request: Request) -> tuple[int, str, bytes, float]:
        """Status, request id, body, and the seconds after which to come again."""
        async with self.session.post(self.base_url + request.url, data=request.body) as reply:
            try:
                later = float(reply.headers.get("Retry-After", "0"))
            except ValueError:
                later = 0.0  # a date
            later = min(max(later, 0.0), _LONGEST_PAUSE_S)
            request_id = reply.headers.get(REQUEST_ID_HEADER, "")
            return reply.status, request_id, await reply.read(), later


def _made(request: Request, status: int, request_id: str, body: bytes) -> bytes:
    try:
        whole = msgspec.json.format(body, indent=-1)  # one line, whatever the server writes
    except (msgspec.DecodeError, UnicodeDecodeError):
        said = body[:200].decode(errors="replace")
        error = LineError(
            code="invalid_reply", message=f"HTTP {status} with a body that is not JSON: {said}"
        )
        return result(request.custom_id, error=error)
    response = LineResponse(status_code=status, request_id=request_id, body=Raw(whole))
    return result(request.custom_id, response=response)


def _reason(made: bytes) -> str:
    """Of a failed result, whose it is and its error, in one short line."""
    found = msgspec.json.decode(made)
    error = found["error"] or found["response"]["body"]
    if isinstance(error, dict):
        inner = error.get("error", error)
        error = inner.get("message", inner) if isinstance(inner, dict) else inner
    return f"{found['custom_id']}: {' '.join(str(error).split())[:300]}"

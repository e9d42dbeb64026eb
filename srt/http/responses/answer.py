"""One response as it grows: chunks of the engine → events, and the `response` at any time.

created → (queued) → in_progress → events of the items → completed, incomplete or failed
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

from msgspec import UNSET, structs

from phloem.srt.errors import PhloemError
from phloem.srt.generation import Chunk
from phloem.srt.http.choice import Choice
from phloem.srt.http.logprobs import chat_logprobs
from phloem.srt.http.responses.output import Output
from phloem.srt.http.responses.paths import Paths
from phloem.srt.http.responses.replies import (
    Completed,
    Created,
    Event,
    Failed,
    IncompleteDetails,
    InProgress,
    Queued,
    Response,
    StateEvent,
    Status,
    response_error,
    usage_of,
)
from phloem.srt.http.responses.replies import Incomplete as IncompleteEvent
from phloem.srt.http.tool_parser import AnswerParser
from phloem.srt.http.usage import UsageCounter
from phloem.srt.http.warning import Warnings
from phloem.srt.messages import FinishReason

_STATUS: dict[FinishReason, Status] = {
    FinishReason.STOP: "completed",
    FinishReason.LENGTH: "incomplete",
    FinishReason.ABORT: "cancelled",
}
_LAST: dict[Status, type[StateEvent]] = {
    "completed": Completed,
    "incomplete": IncompleteEvent,
    "cancelled": IncompleteEvent,
    "failed": Failed,
}


class ResponseAnswer:
    """`blank` is the response before anything came of it; its `warnings` are told under outer
    `paths`. The same chunks make the same response, however they are told: the whole reply is the
    `response` of the last event."""

    def __init__(
        self,
        blank: Response,
        parser: Callable[[], AnswerParser],
        warnings: Warnings | None = None,
        paths: Paths | None = None,
    ) -> None:
        self._response = blank
        self._choice = Choice(0, parser())
        self._warnings = warnings or Warnings()
        self._paths = paths or Paths({})
        self._usage = UsageCounter()
        self._numbers = itertools.count()
        key = blank.id.removeprefix("resp_")
        self._output = Output(key, lambda: next(self._numbers))

    @property
    def response(self) -> Response:
        """As it is by now."""
        if self._choice.last is None:
            return self._blank()
        usage = usage_of(self._usage.usage())
        return structs.replace(self._blank(), output=self._output.items(), usage=usage)

    def _blank(self) -> Response:
        """Its state, without what came of it."""
        told = self._warnings.told
        warnings = UNSET if told is UNSET else [self._paths.warning(one) for one in told]
        return structs.replace(self._response, warnings=warnings)

    def opening(self) -> Iterator[Event]:
        """The events before the first chunk."""
        yield self._state(Created)
        if self._response.status == "queued":
            yield self._state(Queued)
        else:
            yield self._state(InProgress)

    def add(self, index: int, chunk: Chunk) -> None:
        """Take in a chunk, for `response`."""
        for _ in self.frames(index, chunk):
            continue

    def frames(self, index: int, chunk: Chunk) -> Iterator[Event]:
        """Take in a chunk, and give the events that it makes. They are all to be taken."""
        self._usage.add(index, chunk)
        self._warnings.see(chunk)
        if self._response.status == "queued" and chunk.completion_tokens:
            self._response = structs.replace(self._response, status="in_progress")
            yield self._state(InProgress)
        pieces = self._choice.add(chunk)
        logprobs = chat_logprobs(chunk.logprobs)
        yield from self._output.feed(pieces, [] if logprobs is None else logprobs.content)
        if chunk.finish is not None:
            yield from self._end(_STATUS[chunk.finish.reason])

    def closing(self) -> Iterator[Event]:
        """The last event."""
        yield self._state(_LAST[self._response.status], self.response)

    def failed(self, error: PhloemError) -> None:
        """It ended in `error`, whatever came before; `closing` says so."""
        self._response = structs.replace(
            self._response, status="failed", error=response_error(error), incomplete_details=None
        )

    def cancelled(self) -> Iterator[Event]:
        """It was ended from outside: the events that end its items."""
        return self._end("cancelled")

    def _end(self, status: Status) -> Iterator[Event]:
        yield from self._output.close("completed" if status == "completed" else "incomplete")
        cut = IncompleteDetails("max_output_tokens") if status == "incomplete" else None
        outcome = self._choice.constraint
        self._response = structs.replace(
            self._response,
            status=status,
            completed_at=int(time.time()) if status == "completed" else None,
            incomplete_details=cut,
            constraint=UNSET if outcome is None else outcome,
        )

    def _state(self, event: type[StateEvent], response: Response | None = None) -> Event:
        return event(sequence_number=next(self._numbers), response=response or self._blank())

"""How long one answer took, as its client is told who asks for it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from phloem.srt.generation import Chunk


class AnswerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Times of one choice, in milliseconds, from when its request was read; what is not known (of
    an answer without tokens, or of one) is null.

    `generation_time_ms` lies between the first token and the last, `mean_itl_ms` between two that
    follow each other. `tokens_per_second` counts from the end of the waiting on.
    """

    queue_time_ms: float
    time_to_first_token_ms: float | None
    generation_time_ms: float | None
    mean_itl_ms: float | None
    tokens_per_second: float | None


class Stopwatch:
    """Watches the chunks of one choice. It runs from when it is made."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._started = clock()
        self._first: float | None = None
        self._last = self._started
        self._tokens = 0
        self._queue_s = 0.0

    def see(self, chunk: Chunk) -> None:
        self._queue_s = chunk.queue_seconds
        if not chunk.token_ids:
            return
        self._last = self._clock()
        if self._first is None:
            self._first = self._last
        self._tokens += len(chunk.token_ids)

    def metrics(self) -> AnswerMetrics:
        if self._first is None:
            return AnswerMetrics(
                queue_time_ms=self._queue_s * 1e3,
                time_to_first_token_ms=None,
                generation_time_ms=None,
                mean_itl_ms=None,
                tokens_per_second=None,
            )
        generation = self._last - self._first
        working = self._last - self._started - self._queue_s
        gaps = self._tokens - 1
        return AnswerMetrics(
            queue_time_ms=self._queue_s * 1e3,
            time_to_first_token_ms=(self._first - self._started) * 1e3,
            generation_time_ms=generation * 1e3,
            mean_itl_ms=generation * 1e3 / gaps if gaps else None,
            tokens_per_second=self._tokens / working if working > 0 else None,
        )

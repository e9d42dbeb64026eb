"""What is recorded of a run: a span for each call, a branch for each line of text.

Recording is always on, so it is cheap: a call costs one small struct and a few reads of the clock.
No prompt is kept, and of an answer its first characters.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from time import perf_counter
from typing import Final, Literal, Protocol

import msgspec

Kind = Literal["gen", "select"]

PREVIEW_CHARS: Final = 80
_ERROR_CHARS: Final = 500

UNATTACHED: Final = -1
"""Id of a span that belongs to no trace: of a value that no call makes."""


class Counts(Protocol):
    """Token counts of a call, as `phloem.lang.backend.base.Usage` has them."""

    @property
    def prompt_tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def completion_tokens(self) -> int: ...
    @property
    def forced_tokens(self) -> int: ...


class Span(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One call, from when the program asked for it to its value or error.

    Times are seconds of one monotonic clock, `Trace.zero` being the run's start. Between `called`
    and `sent` the call waited for the variables in its prompt; `first` is when the first of the
    answer came, if that is known; `queue_s` of the time before it was waiting in the server.

    `needs` are the calls whose values the prompt was the first to have in it, by id. Of the prompt,
    `cached_tokens` were not computed; of the answer, `forced_tokens` were not sampled, since the
    constraint left no choice. `scored_tokens` are those of the choices of a `select`, whose
    `answers` is their number. `read` says that the program, or a later call, used the value.
    """

    id: int = UNATTACHED
    branch: int = 0
    kind: Kind = "gen"
    name: str | None = None
    constraint: str | None = None
    answers: int = 1
    needs: tuple[int, ...] = ()
    called: float = 0.0
    sent: float | None = None
    first: float | None = None
    ended: float | None = None
    queue_s: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    forced_tokens: int = 0
    scored_tokens: int = 0
    retries: int = 0
    finish: str | None = None
    error: str | None = None
    read: bool = False
    preview: str = ""

    def sending(self) -> None:
        """The variables in its prompt have values: from here on a backend works on it. What that
        notes (`note_retry` and the others) in this task is of this call."""
        self.sent = perf_counter()
        _current.set(self)

    def piece(self) -> None:
        """A piece of the answer came."""
        if self.first is None:
            self.first = perf_counter()

    def count(self, usage: Counts) -> None:
        """The call's token counts."""
        self.prompt_tokens = usage.prompt_tokens
        self.cached_tokens = usage.cached_tokens
        self.completion_tokens = usage.completion_tokens
        self.forced_tokens = usage.forced_tokens

    def succeed(self, value: object, finish: str | None) -> None:
        """It ends with `value`."""
        self.ended = perf_counter()
        self.finish = finish
        if isinstance(value, str):
            self.preview = value[:PREVIEW_CHARS]
        elif isinstance(value, list):
            self.preview = " | ".join(str(one)[:PREVIEW_CHARS] for one in value[:4])[:PREVIEW_CHARS]

    def fail(self, error: str) -> None:
        """It ends without a value."""
        self.ended = perf_counter()
        self.error = error[:_ERROR_CHARS]


class Branch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One line of text: the program's own (id 0), or a fork or copy of another one.

    `index` of the `size` forks that one `fork` made at `started`; `group` is the same for them.
    """

    id: int = 0
    parent: int = 0
    group: int = 0
    index: int = 0
    size: int = 1
    started: float = 0.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums over the calls of a trace."""

    calls: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    forced_tokens: int
    scored_tokens: int
    retries: int

    @property
    def computed_tokens(self) -> int:
        """Tokens of prompts that had to be computed."""
        return self.prompt_tokens - self.cached_tokens


class Trace(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="format", tag="phloem-trace-1"
):
    """One run of a program. While it runs, spans and branches are added, and spans change.

    `started_at` is seconds since 1970, `zero` the same moment on the clock of the other times;
    `ended` is None while it runs. `dropped` calls came after the most that are kept. Up to
    `programs` ran at once, of the batch that it was in.
    """

    program: str = ""
    backend: str = ""
    started_at: float
    zero: float = 0.0
    ended: float | None = None
    error: str | None = None
    spans: list[Span]
    branches: list[Branch]
    dropped: int = 0
    programs: int = 1

    @property
    def seconds(self) -> float:
        """How long it took, or has taken so far."""
        return (perf_counter() if self.ended is None else self.ended) - self.zero

    def totals(self) -> Totals:
        """Sums over its calls."""
        spans = list(self.spans)
        return Totals(
            calls=len(spans),
            failed=sum(span.error is not None for span in spans),
            prompt_tokens=sum(span.prompt_tokens for span in spans),
            cached_tokens=sum(span.cached_tokens for span in spans),
            completion_tokens=sum(span.completion_tokens for span in spans),
            forced_tokens=sum(span.forced_tokens for span in spans),
            scored_tokens=sum(span.scored_tokens for span in spans),
            retries=sum(span.retries for span in spans),
        )


_current: ContextVar[Span | None] = ContextVar("phloem_span", default=None)


def note_retry() -> None:
    """The call of this task is sent once more."""
    span = _current.get()
    if span is not None:
        span.retries += 1


def note_prompt(prompt_tokens: int, cached_tokens: int) -> None:
    """The call of this task had (also) this prompt; for backends whose reply has no usage."""
    span = _current.get()
    if span is not None:
        span.prompt_tokens += prompt_tokens
        span.cached_tokens += cached_tokens


def note_times(queue_s: float, first_token_s: float | None) -> None:
    """How long the server let the call of this task wait, and when the first token was there, both
    from when it got the call. Of several answers, the first counts."""
    span = _current.get()
    if span is None or span.sent is None:
        return
    span.queue_s = queue_s if span.queue_s is None else min(span.queue_s, queue_s)
    if first_token_s is not None:
        first = min(span.sent + first_token_s, perf_counter())
        span.first = first if span.first is None else min(span.first, first)

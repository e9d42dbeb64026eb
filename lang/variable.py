"""A value that is still being made: written once on the loop, read from any thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from phloem.lang.backend.base import TokenLogprob, Usage
from phloem.lang.background import background
from phloem.lang.choices import ChoiceScore
from phloem.lang.errors import GenerationError, UsageError
from phloem.lang.feed import Feed


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known of how a value came to be.

    `finish_reasons`, `matched` and `logprobs` have one entry an answer (`n` of them); `matched` is
    the stop string or token id that ended it. `scores` and `values` belong to `select`, in the
    order of its choices. Token counts are sums over the call.
    """

    usage: Usage = field(default_factory=Usage)
    finish_reasons: tuple[str, ...] = ()
    matched: tuple[str | int | None, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    scores: tuple[ChoiceScore, ...] = ()
    values: tuple[float, ...] = ()

    @property
    def finish_reason(self) -> str | None:
        """That of the first answer; None for a value that no call made, or a choice."""
        return self.finish_reasons[0] if self.finish_reasons else None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data, for logs and for code that expects a dict."""
        info: dict[str, Any] = {
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "finish_reason": self.finish_reason,
        }
        if self.scores:
            info["choice_tokens"] = [list(score.tokens) for score in self.scores]
            info["choice_logprobs"] = [list(score.logprobs) for score in self.scores]
            info["choice_values"] = list(self.values)
        if any(self.logprobs):
            info["output_token_logprobs"] = [
                [(entry.logprob, entry.token) for entry in answer] for answer in self.logprobs
            ]
        return info


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished value: text, a list of texts (`n`, or gathered from forks), or whatever a program
    assigned."""

    value: Any
    meta: Meta = field(default_factory=Meta)


class Variable:
    """One value to come. `pieces` carries its text as it grows."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.pieces: Feed[str] = Feed()
        self._future: Future[Outcome] = Future()
        # a future that "runs" cannot be cancelled by a coroutine that stops waiting for it
        self._future.set_running_or_notify_cancel()

    @classmethod
    def known(cls, name: str | None, value: object) -> Variable:
        """A variable that has its value from the start."""
        variable = cls(name)
        if isinstance(value, str):
            variable.pieces.push(value)
        variable.resolve(Outcome(value))
        return variable

    @property
    def done(self) -> bool:
        return self._future.done()

    @property
    def error(self) -> GenerationError | None:
        """Why there is no value; None while it is pending, or when there is one."""
        if not self.done:
            return None
        error = self._future.exception()
        assert error is None or isinstance(error, GenerationError)
        return error

    def resolve(self, outcome: Outcome) -> None:
        self._future.set_result(outcome)
        self.pieces.close()

    def fail(self, error: GenerationError) -> None:
        self._future.set_exception(error)
        self.pieces.close()

    def outcome(self) -> Outcome:
        """Block until there is a value, and return it; raises what prevented it."""
        if not self.done and background.is_current_thread:
            raise UsageError(
                f"waiting for {self.name!r} on the event loop that is to make it would never end"
            )
        try:
            return self._future.result()
        except GenerationError as error:
            raise error.reraised() from error.cause

    async def wait(self) -> Outcome:
        """The same on an event loop; raises the stored error itself, for others to pass on."""
        if self.done:
            return self._future.result()
        return await asyncio.wrap_future(self._future)

    def text_iter(self) -> Iterator[str]:
        """The value's text as it comes; raises at its end if it has none."""
        yield from self.pieces
        self._check_text(self.outcome())

    async def text_async_iter(self) -> AsyncIterator[str]:
        """The same on an event loop."""
        async for piece in self.pieces:
            yield piece
        self._check_text(self.outcome())  # does not block: pieces end after the value is there

    def _check_text(self, outcome: Outcome) -> None:
        if not isinstance(outcome.value, str):
            raise UsageError(f"{self.name!r} is no text but a {type(outcome.value).__name__}")

    def settle(self) -> None:
        """Block until there is a value or an error."""
        self._future.exception()

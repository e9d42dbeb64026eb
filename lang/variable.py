"""A value that is still being made: written once on the loop, read from any thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from phloem.lang.backend.base import TokenLogprob, Usage
from phloem.lang.background import background
from phloem.lang.choices import ChoiceScore
from phloem.lang.errors import GenerationError, UsageError
from phloem.lang.feed import Feed
from phloem.lang.recording.spans import Span


@dataclass(frozen=True, slots=True)
class Meta:
    """What is known of how a value came to be.

    `finish_reasons`, `matched`, `logprobs` and `reasoning` have one entry an answer (`n` of them);
    `matched` is the stop string or token id that ended it, `reasoning` what the model thought
    before it. `scores` and `values` belong to `select`, in the order of its choices. Token counts
    are sums over the call.
    """

    usage: Usage = field(default_factory=Usage)
    finish_reasons: tuple[str, ...] = ()
    matched: tuple[str | int | None, ...] = ()
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    scores: tuple[ChoiceScore, ...] = ()
    values: tuple[float, ...] = ()
    reasoning: tuple[str, ...] = ()

    @property
    def finish_reason(self) -> str | None:
        """That of the first answer; None for a value that no call made, or a choice."""
        return self.finish_reasons[0] if self.finish_reasons else None

    def as_dict(self) -> dict[str, Any]:
        """The same as plain data with SGLang's names: what there is one of an answer is a list for
        `n` above 1. A logprob is `(logprob, None, text)`: ids of tokens are not known here."""
        info: dict[str, Any] = {
            "prompt_tokens": self.usage.prompt_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "finish_reason": self._each([self._end(i) for i in range(len(self.finish_reasons))]),
        }
        if self.scores:
            info["choice_tokens"] = [list(score.tokens) for score in self.scores]
            info["choice_logprobs"] = [list(score.logprobs) for score in self.scores]
            info["choice_values"] = list(self.values)
            info["normalized_prompt_logprobs"] = [score.mean for score in self.scores]
            info["input_token_logprobs"] = [
                [(value, None, text) for text, value in zip(*pair, strict=True)]
                for pair in ((score.tokens, score.logprobs) for score in self.scores)
            ]
        if any(self.logprobs):
            info["output_token_logprobs"] = self._each(
                [[(entry.logprob, None, entry.token) for entry in one] for one in self.logprobs]
            )
        if any(entry.top for one in self.logprobs for entry in one):
            info["output_top_logprobs"] = self._each(
                [
                    [[(value, None, text) for text, value in entry.top] for entry in one]
                    for one in self.logprobs
                ]
            )
        if any(self.reasoning):
            info["reasoning_content"] = self._each(list(self.reasoning))
        return info

    def _end(self, index: int) -> dict[str, Any]:
        reason = self.finish_reasons[index]
        if reason == "length":
            return {"type": "length", "length": self.usage.completion_tokens}
        return {"type": reason, "matched": self.matched[index] if self.matched else None}

    def _each(self, answers: list[Any]) -> Any:
        """The one of a single answer, else all."""
        if not answers:
            return None
        return answers[0] if len(answers) == 1 else answers


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished value: text, an object made of text, a list (`n`, or gathered from forks), or
    whatever a program assigned. `text` is how it stands in the prompt, None if it cannot."""

    value: Any
    meta: Meta = field(default_factory=Meta)
    text: str | None = None

    @classmethod
    def of_text(cls, text: str, meta: Meta | None = None) -> Outcome:
        """A value that is a text."""
        return cls(text, meta or Meta(), text)


class Variable:
    """One value to come. `pieces` carries its text as it grows."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self.pieces: Feed[str] = Feed()
        self.span = Span(name=name)
        self.parts: Sequence[Variable] = ()  # of a gathered value, where it comes from
        self.gathered = False  # by a join
        self._future: Future[Outcome] = Future()
        # a future that "runs" cannot be cancelled by a coroutine that stops waiting for it
        self._future.set_running_or_notify_cancel()
        self._waiters: list[asyncio.Future[None]] = []  # of the loop that makes the value

    @classmethod
    def known(cls, name: str | None, value: object) -> Variable:
        """A variable that has its value from the start."""
        variable = cls(name)
        text = value if isinstance(value, str) else None
        if text is not None:
            variable.pieces.push(text)
        variable.resolve(Outcome(value, text=text))
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

    def peek(self) -> Outcome | None:
        """The outcome if there is one by now; nobody is taken to have read it."""
        return self._future.result() if self.done and self.error is None else None

    def resolve(self, outcome: Outcome) -> None:
        shown = outcome.value if outcome.text is None else outcome.text
        self.span.succeed(shown, outcome.meta.finish_reason)
        self._future.set_result(outcome)
        self._ended()

    def fail(self, error: GenerationError) -> None:
        own = error.variable == self.name
        self.span.fail(f"{type(error.cause).__name__}: {error.cause}" if own else str(error))
        self._future.set_exception(error)
        self._ended()

    def _ended(self) -> None:
        self.pieces.close()
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():  # of a task that was cancelled
                waiter.set_result(None)

    def outcome(self) -> Outcome:
        """Block until there is a value, and return it; raises what prevented it."""
        self._refuse_to_block()
        try:
            outcome = self._future.result()
            self.mark_read()
            return outcome
        except GenerationError as error:
            raise error.reraised() from error.cause

    def text(self) -> str:
        """Block until there is a value, and return its text. Raises as `outcome` does, and
        `UsageError` for a value that is no text."""
        return self._text_of(self.outcome())

    async def wait(self) -> Outcome:
        """The same on an event loop; raises the stored error itself, for others to pass on."""
        if not self.done and background.is_current_thread:
            # made on this very loop: cheaper than waking it from another thread
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
        if self.done:
            return self._future.result()
        return await asyncio.wrap_future(self._future)

    def mark_read(self) -> None:
        """Somebody has a use for the value."""
        self.span.read = True
        for part in self.parts:
            part.mark_read()

    def text_iter(self) -> Iterator[str]:
        """The value's text as it comes; raises at its end if it has none."""
        self._refuse_to_block()
        yield from self.pieces
        self._text_of(self.outcome())

    async def text_async_iter(self) -> AsyncIterator[str]:
        """The same on an event loop."""
        async for piece in self.pieces:
            yield piece
        self._text_of(self.outcome())  # does not block: pieces end after the value is there

    async def text_async_iter_with_meta(self) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """The same, each piece with what is known of the value then; all of it behind the last."""
        async for piece in self.pieces:
            yield piece, {"finish_reason": None}
        outcome = self.outcome()
        self._text_of(outcome)
        yield "", outcome.meta.as_dict()

    def settle(self) -> None:
        """Block until there is a value or an error."""
        self._refuse_to_block()
        self._future.exception()

    def _text_of(self, outcome: Outcome) -> str:
        if outcome.text is None:
            raise UsageError(f"{self.name!r} is no text but a {type(outcome.value).__name__}")
        return outcome.text

    def _refuse_to_block(self) -> None:
        if not self.done and background.is_current_thread:
            raise UsageError(
                f"waiting for {self.name!r} on the event loop that is to make it would never end"
            )

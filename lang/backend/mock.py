"""A model for tests: scripted answers, no network, no chance.

backend = MockBackend({"city": "Paris", "step": ["one", "two"], "bad": ValueError("no")})
program.run(backend=backend)
assert backend.calls[0].prompt == TextPrompt("…")
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from phloem.lang.backend.base import (
    BackendInfo,
    Call,
    Delta,
    Prompt,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from phloem.lang.choices import ChoiceScore
from phloem.lang.errors import BackendError
from phloem.lang.sampling import Sampling


@dataclass(frozen=True, slots=True)
class MockReply:
    """An answer with its end and, if wanted, its logprobs."""

    text: str
    finish: Literal["stop", "length"] = "stop"
    matched: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


Answer = str | MockReply | BaseException
"""What `MockBackend` answers: a text, a text with how it ends, or an error."""

Script = Mapping[str, Answer | Sequence[Answer]] | Callable[[Call], Answer | Sequence[Answer]]
"""Its answers by the name of the variable, or as a function of the call."""


class MockBackend:
    """Answers by the name of the variable.

    `answers` maps a name to one answer, given every time, or to a list, of which each call takes as
    many as it asks for (`n`) until none is left. It may also be a function of the call. An
    exception as answer is raised. An unknown name is an error, never an invented text.

    `scores` maps the text of a choice to its logprob, or to one for each of its tokens; choices not
    in it get -1, -2, … in their order, so that the first wins. An exception as `scores` is raised.

    `latency_s`, or what that function of the call gives, passes before the first piece; streamed
    answers come in pieces of `piece_chars`. Counts of tokens are counts of words. `calls` and
    `scored` record what was asked for; `cancelled` counts calls that were left before their end.
    """

    def __init__(
        self,
        answers: Script | None = None,
        *,
        scores: Mapping[str, float | Sequence[float]] | BaseException | None = None,
        latency_s: float | Callable[[Call], float] = 0.0,
        piece_chars: int = 4,
        model: str = "mock",
    ) -> None:
        self._answers: Script = {} if answers is None else answers
        self._used: dict[str, int] = {}
        self._scores = {} if scores is None else scores
        self._latency_s = latency_s
        self._piece_chars = piece_chars
        self._model = model
        self.calls: list[Call] = []
        self.scored: list[tuple[Prompt, tuple[str, ...]]] = []
        self.cancelled = 0

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        self.calls.append(call)
        ended = False
        try:
            await asyncio.sleep(self._latency(call))
            words = 0
            for index, answer in enumerate(self._next(call)):
                reply = _reply(answer)
                words += len(reply.text.split())
                for piece in self._pieces(reply.text, call.stream):
                    yield Delta(index, piece)
                yield Delta(
                    index, logprobs=reply.logprobs, finish=reply.finish, matched=reply.matched
                )
            yield Delta(usage=Usage(len(_text(call.prompt).split()), words))
            ended = True
        except Exception:
            ended = True
            raise
        finally:
            self.cancelled += not ended

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        self.scored.append((prompt, tuple(choices)))
        await asyncio.sleep(self._latency(Call(prompt, Sampling())))
        if isinstance(self._scores, BaseException):
            raise self._scores
        return [
            _score(choice, self._scores.get(choice, -1.0 - rank))
            for rank, choice in enumerate(choices)
        ]

    async def info(self) -> BackendInfo:
        return BackendInfo(self._model)

    async def aclose(self) -> None:
        """Nothing to let go of."""

    def _latency(self, call: Call) -> float:
        return self._latency_s(call) if callable(self._latency_s) else self._latency_s

    def _next(self, call: Call) -> Sequence[Answer]:
        wanted = call.sampling.samples
        if callable(self._answers):
            found = self._answers(call)
        elif call.name is not None and call.name in self._answers:
            found = self._answers[call.name]
        else:
            raise BackendError(f"MockBackend has no answer for {call.name!r}")
        if isinstance(found, str | MockReply | BaseException):
            return [found] * wanted
        if callable(self._answers):
            answers = list(found)
        else:
            used = self._used.get(call.name or "", 0)
            self._used[call.name or ""] = used + wanted
            answers = list(found[used : used + wanted])
        if len(answers) != wanted:
            raise BackendError(f"MockBackend has no answer left for {call.name!r}")
        return answers

    def _pieces(self, text: str, stream: bool) -> Sequence[str]:
        if not stream:
            return [text]
        return [text[i : i + self._piece_chars] for i in range(0, len(text), self._piece_chars)]


def _reply(answer: Answer) -> MockReply:
    if isinstance(answer, BaseException):
        raise answer
    return MockReply(answer) if isinstance(answer, str) else answer


def _score(choice: str, logprobs: float | Sequence[float]) -> ChoiceScore:
    """One token a logprob: single characters, then the rest."""
    values = (logprobs,) if isinstance(logprobs, float | int) else tuple(logprobs)
    heads = len(values) - 1
    if heads >= len(choice):
        raise ValueError(f"{len(values)} logprobs for the {len(choice)} characters of {choice!r}")
    return ChoiceScore((*choice[:heads], choice[heads:]), values)


def _text(prompt: Prompt) -> str:
    if isinstance(prompt, TextPrompt):
        return prompt.text
    return " ".join([*(message.content for message in prompt.messages), prompt.partial])

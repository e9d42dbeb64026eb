"""What a program needs of a model: one protocol, and the values that cross it.

A backend never sees templates of the client's making: a chat program arrives as messages and the
assistant's text so far, and the server's own template turns them into a prompt.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from phloem.constrained.spec import Constraint
from phloem.lang.choices import ChoiceScore
from phloem.lang.sampling import Sampling


@dataclass(frozen=True, slots=True)
class Message:
    """A finished chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Plain text for the model to go on from."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation whose next words are the assistant's; `partial` is its message so far."""

    messages: tuple[Message, ...]
    partial: str = ""


Prompt = TextPrompt | ChatPrompt
"""What the model goes on from."""


@dataclass(frozen=True, slots=True)
class Call:
    """One generation. `name` is the variable it is for; `stream` says that someone watches, so
    that pieces are wanted as they come."""

    prompt: Prompt
    sampling: Sampling
    constraint: Constraint | None = None
    name: str | None = None
    stream: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A generated token's text and natural logprob; `top` are the likeliest tokens in its place."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a call; `cached_tokens` of the prompt were not computed anew, and
    `forced_tokens` of the answer not sampled."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    forced_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of answer `index`. Its texts joined are the answer; the last one has `finish`.
    `reasoning` is what was thought before it, where the backend tells the two apart.

    `usage`, if it comes, is of the whole call.
    """

    index: int = 0
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Literal["stop", "length"] | None = None
    matched: str | int | None = None
    usage: Usage | None = None
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """Which model answers; `context_length` in tokens where it is known."""

    model: str
    context_length: int | None = None


@runtime_checkable
class Backend(Protocol):
    """A model as programs see it. All methods run on the event loop of `phloem.lang.background`.

    Errors are `phloem.lang.errors.BackendError`. Closing an iterator, or cancelling the task that
    waits, stops the work behind it.
    """

    def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        """The answers to `call`. Ends after every answer had its `finish`."""
        ...

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        """The tokens and logprobs of each choice after `prompt`, in order.

        Raises `ValueError` where a choice cannot be told apart from the prompt (see
        `phloem.lang.choices.boundary`).
        """
        ...

    async def info(self) -> BackendInfo:
        """Asks the model who it is."""
        ...

    async def aclose(self) -> None:
        """Let go of connections. A closed backend is not used again."""
        ...

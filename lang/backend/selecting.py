"""`select` on any backend: by one that can decide itself, or from the scores of one that cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from phloem.lang.backend.base import Backend, Prompt, TextPrompt, Usage
from phloem.lang.choices import ChoiceScore, ChoicesMethod, decide
from phloem.lang.errors import BackendError

# What "without the prompt" means: a sequence's first token has no logprob, so a bare line end
# stands before the choice.
NO_PROMPT = TextPrompt("\n")


@dataclass(frozen=True, slots=True)
class Selected:
    """The winner's index. `scores` and `values`, by which the choices were judged, are empty where
    a backend decided without any."""

    index: int
    scores: tuple[ChoiceScore, ...] = ()
    values: tuple[float, ...] = ()
    usage: Usage = field(default_factory=Usage)


@runtime_checkable
class Selecting(Protocol):
    """A backend that decides itself, in fewer round trips than `score` takes or without it."""

    async def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
    ) -> Selected:
        """Picks one of `choices` after `prompt` by `method`; raises what `Backend.score` does."""
        ...


async def select(
    backend: Backend, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
) -> Selected:
    """Let `backend` pick one of `choices`."""
    if isinstance(backend, Selecting):
        return await backend.select(prompt, choices, method)
    return await select_by_scores(backend, prompt, choices, method)


async def select_by_scores(
    backend: Backend, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
) -> Selected:
    """The same from `backend.score`. Raises `BackendError` when that is not one a choice."""
    scores = await backend.score(prompt, choices)
    if len(scores) != len(choices):
        raise BackendError(f"{len(scores)} scores for {len(choices)} choices")
    unconditional = None
    if method is ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED:
        unconditional = await backend.score(NO_PROMPT, choices)
    decision = decide(method, scores, unconditional)
    return Selected(decision.index, tuple(scores), decision.values)

"""Scores of choices from what servers with OpenAI's API tell of a prompt. No I/O.

Two ways. `prompt_logprobs` (vLLM's) gives each token of the prompt by id. `echo` of completions
gives the prompt back with its tokens' texts and logprobs. Either way the prompt alone is sent, too:
where its own tokens end, the choices begin.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from phloem.lang.backend.base import Prompt, TextPrompt
from phloem.lang.backend.dialects import Dialect, unsupported
from phloem.lang.backend.http_transport import Body
from phloem.lang.backend.openai_wire import Logprobs, PromptLogprobs, Reply
from phloem.lang.choices import ChoiceScore, boundary
from phloem.lang.errors import BackendError

Way = Literal["echo", "prompt_logprobs"]


def scoring(dialect: Dialect, prompt: Prompt) -> Way:
    """How a prompt can be scored. Raises `RequestRefused` where it cannot, and `ValueError` for an
    empty prompt, which servers refuse with reasons of their own."""
    text = isinstance(prompt, TextPrompt)
    if dialect.scoring is None or (dialect.scoring == "echo" and not text):
        what = "a prompt" if dialect.scoring is None else "a chat"
        raise unsupported(
            f"{dialect.title} does not tell the logprobs of {what}, which select judges by; "
            "OpenAIBackend(…, select_by_generation=True) lets the model generate a choice instead",
            "choices",
        )
    if isinstance(prompt, TextPrompt) and not prompt.text:
        raise ValueError(
            "select needs text before the choices: a sequence's first token has no logprob"
        )
    return dialect.scoring


def echo_request(texts: Sequence[str], model: str, way: Way) -> Body:
    """Body of `/completions` that asks for the logprobs of `texts`."""
    body: Body = {"model": model, "prompt": texts, "temperature": 0}
    if way == "echo":
        return body | {"echo": True, "max_tokens": 0, "logprobs": 0}
    return body | {"max_tokens": 1, "prompt_logprobs": 0}


def echo_scores(reply: Reply, count: int, way: Way) -> list[ChoiceScore]:
    """Its reply → scores of all texts but the first, which is the prompt."""
    ordered = sorted(reply.choices, key=lambda choice: choice.index)
    if [choice.index for choice in ordered] != list(range(count)):
        raise BackendError(f"{len(ordered)} replies to {count} scored texts")
    if way == "prompt_logprobs":
        return prompt_scores([choice.prompt_logprobs for choice in ordered])
    ids: dict[str, int] = {}
    tokens: list[list[tuple[int, str, float | None]]] = []
    for choice in ordered:
        found = choice.logprobs or Logprobs()
        texts, values = found.tokens or [], found.token_logprobs or []
        if not texts or len(texts) != len(values):
            raise BackendError("the server gave no logprobs of the prompt")
        tokens.append(
            [
                (ids.setdefault(text, len(ids)), text, value)
                for text, value in zip(texts, values, strict=True)
            ]
        )
    return _scores(tokens)


def prompt_scores(prompts: Sequence[PromptLogprobs | None]) -> list[ChoiceScore]:
    """The same from `prompt_logprobs`, one a text."""
    tokens = []
    for prompt in prompts:
        if not prompt:
            raise BackendError("the server gave no logprobs of the prompt")
        sequence: list[tuple[int, str, float | None]] = []
        for entry in prompt:
            if not entry:
                sequence.append((-1, "", None))
                continue
            token_id, token = next(iter(entry.items()))
            sequence.append((token_id, token.decoded_token or "", token.logprob))
        tokens.append(sequence)
    return _scores(tokens)


def _scores(tokens: Sequence[Sequence[tuple[int, str, float | None]]]) -> list[ChoiceScore]:
    prompt, *full = ([token_id for token_id, _, _ in sequence] for sequence in tokens)
    start = boundary(prompt, full)
    scores = []
    for sequence in tokens[1:]:
        values = [value for _, _, value in sequence[start:] if value is not None]
        if len(values) != len(sequence) - start:
            raise BackendError("a scored token has no logprob")
        scores.append(ChoiceScore(tuple(text for _, text, _ in sequence[start:]), tuple(values)))
    return scores

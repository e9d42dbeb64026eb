"""The prompts of a completion request: texts, ids, or lists of either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from phloem.srt.generation import EngineClient, Logprob
from phloem.srt.http.body import invalid
from phloem.srt.http.protocol import CompletionRequest
from phloem.srt.http.sampling import cut_prompt, token_ids
from phloem.srt.http.warning import Warnings

MAX_PROMPTS: Final = 1024


@dataclass(frozen=True)
class Prompt:
    """A prompt for the engine, and what the reply says of it: with `echo` its text and its first
    token, which has no logprob, and its ids. `stop_token_ids` are the prompt's own."""

    value: str | list[int]
    echo: str | None = None
    first: Logprob | None = None
    stop_token_ids: tuple[int, ...] = ()

    @property
    def ids(self) -> list[int]:
        """Its ids, if it was tokenised."""
        return [] if isinstance(self.value, str) else self.value


async def read_prompts(
    request: CompletionRequest, engine: EngineClient, warnings: Warnings
) -> list[Prompt]:
    """The prompts of a request, checked. Raises `InvalidRequest`."""
    values = _prompt_list(request.prompt, engine)
    if request.suffix:
        return [
            await _infill(value, request.suffix, i, request, engine)
            for i, value in enumerate(values)
        ]
    return [await _prompt(value, i, request, engine, warnings) for i, value in enumerate(values)]


def prompt_texts(request: CompletionRequest) -> list[str | None]:
    """The prompts as texts; None for one of token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    return [one if isinstance(one, str) else None for one in prompt]


async def first_token(token_id: int, engine: EngineClient) -> Logprob:
    """A prompt's first token has no logprob, and so no record of the engine's; this names it."""
    text = await engine.detokenize([token_id])
    return Logprob(token_id, text, text.encode(), 0.0)


def _prompt_list(
    prompt: str | list[str | int | list[int]], engine: EngineClient
) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    strings = [one for one in prompt if isinstance(one, str)]
    ids = [one for one in prompt if isinstance(one, int)]
    lists = [one for one in prompt if isinstance(one, list)]
    if not prompt:
        raise invalid("There is no prompt.", "prompt")
    if len(prompt) not in (len(strings), len(ids), len(lists)):
        raise invalid("A list of prompts holds strings, ids or lists of ids, not both.", "prompt")
    if len(strings) > MAX_PROMPTS or len(lists) > MAX_PROMPTS:
        raise invalid(f"At most {MAX_PROMPTS} prompts, not {len(prompt)}.", "prompt")
    if ids:
        return [list(token_ids(ids, engine.card, "prompt"))]
    if lists:
        return [list(token_ids(one, engine.card, f"prompt[{i}]")) for i, one in enumerate(lists)]
    return [*strings]


async def _prompt(
    value: str | list[int],
    index: int,
    request: CompletionRequest,
    engine: EngineClient,
    warnings: Warnings,
) -> Prompt:
    scored = bool(request.echo) and request.logprobs is not None
    cut = request.truncate_prompt_tokens is not None
    opening = request.add_special_tokens is not False
    text = value if isinstance(value, str) else None
    if text is not None and (scored or cut or request.return_token_ids or not opening or not text):
        value = await engine.tokenize(text, opening=opening)
    if not value:
        raise invalid(
            "The prompt is empty, and this model does not start from nothing.",
            _param(request, index),
        )
    if not isinstance(value, str):
        whole = value
        value = cut_prompt(whole, request, request.max_tokens, engine.card, warnings)
        text = text if value == whole else None
    if not request.echo:
        return Prompt(value)
    echo = text if text is not None else await engine.detokenize(list(value))  # type: ignore[arg-type]
    if not scored or isinstance(value, str):
        return Prompt(value, echo)
    return Prompt(value, echo, await first_token(value[0], engine))


async def _infill(
    value: str | list[int],
    suffix: str,
    index: int,
    request: CompletionRequest,
    engine: EngineClient,
) -> Prompt:
    """A prompt for what lies between `value` and `suffix`."""
    if not isinstance(value, str):
        raise invalid("A prompt with a suffix is a text.", _param(request, index))
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise invalid(f"{name} and suffix exclude each other.", name)
    if request.add_special_tokens is False:
        raise invalid("A prompt with a suffix has special tokens.", "add_special_tokens")
    prompt = await engine.infill(value, suffix)
    return Prompt(prompt.ids, stop_token_ids=prompt.stop_token_ids)


def _param(request: CompletionRequest, index: int) -> str:
    several = isinstance(request.prompt, list) and not isinstance(request.prompt[0], int)
    return f"prompt[{index}]" if several else "prompt"

"""Text completions: engine chunks → a whole `text_completion`, or the chunks of a streamed one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from msgspec import UNSET, UnsetType

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import Chunk, ConstraintOutcome, EngineClient, Logprob
from phloem.srt.http.logprobs import CompletionLogprobsBuilder, join
from phloem.srt.http.protocol import CompletionRequest
from phloem.srt.http.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    ReplyHead,
    Usage,
    finish_name,
    matched_stop,
    outcome_of_all,
    valid_or_unset,
)
from phloem.srt.http.sampling import token_ids
from phloem.srt.http.usage import UsageCounter

MAX_PROMPTS = 1024


@dataclass(frozen=True)
class Prompt:
    """A prompt for the engine, and what `echo` says of it: its text and its first token."""

    value: str | list[int]
    echo: str | None = None
    first: Logprob | None = None


async def read_prompts(request: CompletionRequest, engine: EngineClient) -> list[Prompt]:
    """The prompts of a request, checked. Raises `InvalidRequest`."""
    values = _prompt_list(request.prompt, engine)
    return [await _prompt(value, i, request, engine) for i, value in enumerate(values)]


def prompt_texts(request: CompletionRequest) -> list[str | None]:
    """The prompts as texts; None for one of token ids."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    return [one if isinstance(one, str) else None for one in prompt]


def _prompt_list(
    prompt: str | list[str | int | list[int]], engine: EngineClient
) -> list[str | list[int]]:
    if isinstance(prompt, str):
        return [prompt]
    strings = [one for one in prompt if isinstance(one, str)]
    ids = [one for one in prompt if isinstance(one, int)]
    lists = [one for one in prompt if isinstance(one, list)]
    if not prompt:
        raise _invalid("There is no prompt.", "prompt")
    if len(prompt) not in (len(strings), len(ids), len(lists)):
        raise _invalid("A list of prompts holds strings, ids or lists of ids, not both.", "prompt")
    if len(strings) > MAX_PROMPTS or len(lists) > MAX_PROMPTS:
        raise _invalid(f"At most {MAX_PROMPTS} prompts, not {len(prompt)}.", "prompt")
    if ids:
        return [list(token_ids(ids, engine.card, "prompt"))]
    if lists:
        return [list(token_ids(one, engine.card, f"prompt[{i}]")) for i, one in enumerate(lists)]
    return [*strings]


async def _prompt(
    value: str | list[int], index: int, request: CompletionRequest, engine: EngineClient
) -> Prompt:
    param = "prompt" if isinstance(request.prompt, str) else f"prompt[{index}]"
    scored = bool(request.echo) and request.logprobs is not None
    text = value if isinstance(value, str) else None
    if text is not None and (scored or not text):
        value = await engine.tokenize(text)
    if not value:
        raise _invalid("The prompt is empty, and this model does not start from nothing.", param)
    if not request.echo:
        return Prompt(value)
    echo = text if text is not None else await engine.detokenize(list(value))  # type: ignore[arg-type]
    if not scored or isinstance(value, str):
        return Prompt(value, echo)
    return Prompt(value, echo, await first_token(value[0], engine))


async def first_token(token_id: int, engine: EngineClient) -> Logprob:
    """A prompt's first token has no logprob, and so no record of the engine's; this names it."""
    text = await engine.detokenize([token_id])
    return Logprob(token_id, text, text.encode(), 0.0)


class _Choice:
    """One choice as it grows."""

    def __init__(self, index: int, prompt: Prompt, logprobs: int | None) -> None:
        self.index = index
        self.parts: list[CompletionChoice] = []
        self.constraint: ConstraintOutcome | None = None
        self._prompt = prompt
        self._echoed = prompt.echo is None
        self._builder = None if logprobs is None else CompletionLogprobsBuilder(logprobs)

    def add(self, chunk: Chunk) -> CompletionChoice | None:
        """The piece that a chunk adds; None when there is nothing to say."""
        text, logprobs = self._echo(chunk)
        text += chunk.text
        if self._builder is not None and chunk.logprobs:
            logprobs = join(logprobs, self._builder.build(chunk.logprobs))
        if not text and logprobs is None and chunk.finish is None and not chunk.fields:
            return None
        self.constraint = chunk.constraint
        part = CompletionChoice(
            index=self.index,
            text=text,
            logprobs=logprobs,
            finish_reason=None if chunk.finish is None else finish_name(chunk.finish),
            matched_stop=UNSET if chunk.finish is None else matched_stop(chunk.finish),
            constraint_valid=valid_or_unset(chunk.constraint),
            fields=chunk.fields or UNSET,
        )
        self.parts.append(part)
        return part

    def _echo(self, chunk: Chunk) -> tuple[str, CompletionLogprobs | None]:
        """The prompt's own text, once: with its logprobs, if they are wanted."""
        waiting = self._prompt.first is not None and chunk.prompt_logprobs is None
        if self._echoed or (waiting and chunk.finish is None):
            return "", None
        self._echoed = True
        logprobs = None
        if self._builder is not None and self._prompt.first is not None:
            logprobs = self._builder.build_echo(self._prompt.first, chunk.prompt_logprobs or [])
        return self._prompt.echo or "", logprobs

    def whole(self) -> CompletionChoice:
        logprobs = None
        for part in self.parts:
            logprobs = join(logprobs, part.logprobs)
        last = self.parts[-1]
        return CompletionChoice(
            index=self.index,
            text="".join(part.text for part in self.parts),
            logprobs=logprobs if self._builder is None else logprobs or self._builder.build([]),
            finish_reason=last.finish_reason,
            matched_stop=last.matched_stop,
            constraint_valid=last.constraint_valid,
        )


class CompletionAnswer:
    """All choices of one completion request, index = prompt index × n + choice."""

    def __init__(
        self,
        head: ReplyHead,
        prompts: Sequence[Prompt],
        n: int,
        *,
        logprobs: int | None,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self._head = head
        self._choices = [
            _Choice(p * n + i, prompt, logprobs)
            for p, prompt in enumerate(prompts)
            for i in range(n)
        ]
        self._usage = UsageCounter(n)
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def add(self, index: int, chunk: Chunk) -> None:
        self._usage.add(index, chunk)
        self._choices[index].add(chunk)

    def whole(self) -> Completion:
        return self._completion(
            [choice.whole() for choice in self._choices],
            self._usage.usage(),
            outcome_of_all([choice.constraint for choice in self._choices]),
        )

    def frames(self, index: int, chunk: Chunk) -> Iterator[Completion]:
        self._usage.add(index, chunk)
        part = self._choices[index].add(chunk)
        if part is not None:
            usage = self._usage.usage() if self._continuous_usage else UNSET
            yield self._completion([part], usage, outcome_of_all([chunk.constraint]))

    def closing(self) -> Iterator[Completion]:
        if self._include_usage:
            yield self._completion([], self._usage.usage())

    def _completion(
        self,
        choices: list[CompletionChoice],
        usage: Usage | UnsetType,
        constraint: ConstraintOutcome | UnsetType = UNSET,
    ) -> Completion:
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=choices,
            usage=usage,
            constraint=constraint,
        )


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")

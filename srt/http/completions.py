"""Text completions: engine chunks → a whole `text_completion`, or the chunks of a streamed one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from phloem.srt.generation import Chunk, ConstraintOutcome
from phloem.srt.http.completion_prompts import Prompt
from phloem.srt.http.logprobs import CompletionLogprobsBuilder, join, prompt_logprobs
from phloem.srt.http.replies import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptLogprobs,
    ReplyHead,
    Usage,
    finish_name,
    outcome_of_all,
    valid_or_unset,
)
from phloem.srt.http.reply_options import ReplyOptions
from phloem.srt.http.stopwatch import Stopwatch
from phloem.srt.http.usage import UsageCounter


class _Choice:
    """One choice as it grows."""

    def __init__(
        self,
        index: int,
        prompt: Prompt,
        builder: CompletionLogprobsBuilder | None,
        options: ReplyOptions,
    ) -> None:
        self.index = index
        self.parts: list[CompletionChoice] = []
        self.constraint: ConstraintOutcome | None = None
        self._prompt = prompt
        self._echoed = prompt.echo is None
        self._builder = builder
        self._options = options
        self._watch = Stopwatch()
        self._logprob = 0.0
        self._tokens = 0

    @property
    def mean_logprob(self) -> float:
        """Of the tokens of the answer, if their logprobs were asked for."""
        return self._logprob / self._tokens if self._tokens else float("-inf")

    def add(self, chunk: Chunk) -> CompletionChoice | None:
        """The piece that a chunk adds; None when there is nothing to say."""
        self._watch.see(chunk)
        for one in chunk.logprobs or ():
            self._logprob += one.logprob
            self._tokens += 1
        options = self._options
        text, logprobs = self._echo(chunk)
        text += chunk.text
        if self._builder is not None and chunk.logprobs:
            logprobs = join(logprobs, self._builder.build(chunk.logprobs))
        ids = chunk.token_ids if options.token_ids else []
        scored = options.prompt_logprobs is not None and chunk.prompt_logprobs is not None
        said = text or logprobs is not None or chunk.fields or ids or scored
        if not said and chunk.finish is None:
            return None
        self.constraint = chunk.constraint
        part = CompletionChoice(
            index=self.index,
            text=text,
            logprobs=logprobs,
            finish_reason=None if chunk.finish is None else finish_name(chunk.finish),
            matched_stop=UNSET if chunk.finish is None else chunk.finish.matched,
            constraint_valid=valid_or_unset(chunk.constraint),
            fields=chunk.fields or UNSET,
            prompt_logprobs=self._of_prompt(chunk),
            prompt_token_ids=self._prompt.ids if options.token_ids and not self.parts else UNSET,
            token_ids=ids if options.token_ids else UNSET,
            metrics=self._watch.metrics() if options.metrics and chunk.finish else UNSET,
        )
        self.parts.append(part)
        return part

    def _of_prompt(self, chunk: Chunk) -> PromptLogprobs | UnsetType:
        top = self._options.prompt_logprobs
        if top is None or chunk.prompt_logprobs is None:
            return UNSET
        return prompt_logprobs(chunk.prompt_logprobs, top)

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
        last, options = self.parts[-1], self._options
        scores = [part.prompt_logprobs for part in self.parts if part.prompt_logprobs]
        return CompletionChoice(
            index=self.index,
            text="".join(part.text for part in self.parts),
            logprobs=logprobs if self._builder is None else logprobs or self._builder.build([]),
            finish_reason=last.finish_reason,
            matched_stop=last.matched_stop,
            constraint_valid=last.constraint_valid,
            prompt_logprobs=scores[0] if scores else UNSET,
            prompt_token_ids=self._prompt.ids if options.token_ids else UNSET,
            token_ids=[i for part in self.parts for i in part.token_ids or ()]
            if options.token_ids
            else UNSET,
            metrics=last.metrics,
        )


class CompletionAnswer:
    """All choices of one completion request, index = prompt index × n + choice.

    Of each prompt's `best_of` sequences the whole reply has the `n` with the highest mean logprob,
    best first.
    """

    def __init__(
        self,
        head: ReplyHead,
        prompts: Sequence[Prompt],
        n: int,
        options: ReplyOptions,
        *,
        best_of: int | None = None,
        logprobs: int | None = None,
        chosen: bool = False,
    ) -> None:
        self._head = head
        self._n = n
        self._per_prompt = best_of or n
        self._choices = [
            _Choice(p * self._per_prompt + i, prompt, _builder(logprobs, chosen, options), options)
            for p, prompt in enumerate(prompts)
            for i in range(self._per_prompt)
        ]
        self._unfinished = len(self._choices)
        self._usage = UsageCounter(self._per_prompt)
        self._options = options

    def add(self, index: int, chunk: Chunk) -> None:
        self._usage.add(index, chunk)
        self._options.warnings.see(chunk)
        self._choices[index].add(chunk)

    def whole(self) -> Completion:
        kept = [
            choice
            for start in range(0, len(self._choices), self._per_prompt)
            for choice in self._best(self._choices[start : start + self._per_prompt])
        ]
        return msgspec.structs.replace(
            self._completion(
                [
                    msgspec.structs.replace(choice.whole(), index=index)
                    for index, choice in enumerate(kept)
                ],
                self._usage.usage(),
                outcome_of_all([choice.constraint for choice in kept]),
            ),
            warnings=self._options.warnings.told,
        )

    def _best(self, choices: list[_Choice]) -> list[_Choice]:
        if len(choices) == self._n:
            return choices
        return sorted(choices, key=lambda choice: -choice.mean_logprob)[: self._n]

    def frames(self, index: int, chunk: Chunk) -> Iterator[Completion]:
        options = self._options
        self._usage.add(index, chunk)
        options.warnings.see(chunk)
        self._unfinished -= chunk.finish is not None
        part = self._choices[index].add(chunk)
        if part is None:
            return
        usage = self._usage.usage() if options.continuous_usage else UNSET
        frame = self._completion([part], usage, outcome_of_all([chunk.constraint]))
        if not self._unfinished and not options.include_usage:
            frame = msgspec.structs.replace(frame, warnings=options.warnings.told)
        yield frame

    def closing(self) -> Iterator[Completion]:
        if self._options.include_usage:
            last = self._completion([], self._usage.usage())
            yield msgspec.structs.replace(last, warnings=self._options.warnings.told)

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


def _builder(
    logprobs: int | None, chosen: bool, options: ReplyOptions
) -> CompletionLogprobsBuilder | None:
    if logprobs is None:
        return None
    return CompletionLogprobsBuilder(logprobs, as_ids=options.tokens_as_ids, chosen=chosen)

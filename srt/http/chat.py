"""Chat answers: engine chunks → a whole `chat.completion`, or the chunks of a streamed one.

role and "" → content and tool-call pieces → finish_reason → (usage, with no choices)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from phloem.srt.generation import Chunk, ConstraintOutcome, FieldValue
from phloem.srt.http.choice import Choice
from phloem.srt.http.logprobs import chat_logprobs, prompt_logprobs
from phloem.srt.http.replies import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FunctionCall,
    FunctionDelta,
    PromptLogprobs,
    ReplyHead,
    ToolCall,
    ToolCallDelta,
    Usage,
    finish_name,
    outcome_of_all,
    valid_or_unset,
)
from phloem.srt.http.reply_options import ReplyOptions
from phloem.srt.http.stopwatch import AnswerMetrics, Stopwatch
from phloem.srt.http.tool_parser import (
    AnswerParser,
    Piece,
    Reasoning,
    ToolArguments,
)
from phloem.srt.http.usage import UsageCounter


class ChatAnswer:
    """All choices of one chat request. `echo` is the assistant's text that they go on with, if it
    is to be repeated; `prompt` are the ids of the prompt."""

    def __init__(
        self,
        head: ReplyHead,
        n: int,
        parser: Callable[[], AnswerParser],
        options: ReplyOptions,
        *,
        prompt: Sequence[int] = (),
        echo: str = "",
    ) -> None:
        self._head = head
        self._choices = [Choice(i, parser()) for i in range(n)]
        self._watches = [Stopwatch() for _ in range(n)]
        self._ids: list[list[int]] = [[] for _ in range(n)]
        self._prompt = list(prompt)
        self._prompt_logprobs: PromptLogprobs | UnsetType = UNSET
        self._echo = echo
        self._greeted: set[int] = set()
        self._unfinished = n
        self._usage = UsageCounter(n)
        self._options = options

    def add(self, index: int, chunk: Chunk) -> None:
        """Take one engine chunk in, for `whole`."""
        self._see(index, chunk)
        self._choices[index].add(chunk)

    def _see(self, index: int, chunk: Chunk) -> None:
        self._usage.add(index, chunk)
        self._options.warnings.see(chunk)
        self._watches[index].see(chunk)
        if self._options.token_ids:
            self._ids[index] += chunk.token_ids
        if chunk.prompt_logprobs is not None and self._options.prompt_logprobs is not None:
            top = self._options.prompt_logprobs
            self._prompt_logprobs = prompt_logprobs(chunk.prompt_logprobs, top)
        self._unfinished -= chunk.finish is not None

    def whole(self) -> ChatCompletion:
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._whole(choice) for choice in self._choices],
            usage=self._usage.usage(),
            constraint=outcome_of_all([choice.constraint for choice in self._choices]),
            prompt_logprobs=self._prompt_logprobs,
            prompt_token_ids=self._prompt if self._options.token_ids else UNSET,
            warnings=self._options.warnings.told,
        )

    def _whole(self, choice: Choice) -> ChatChoice:
        options, index = self._options, choice.index
        finish = choice.ended()
        content = self._echo + choice.content
        calls = [
            ToolCall(id=start.id, function=FunctionCall(start.name, arguments))
            for start, arguments in choice.calls
        ]
        return ChatChoice(
            index=index,
            message=AnswerMessage(
                content=content if content or not calls else None,
                reasoning_content=choice.reasoning or UNSET,
                tool_calls=calls or UNSET,
            ),
            logprobs=chat_logprobs(choice.logprobs, as_ids=options.tokens_as_ids),
            finish_reason=finish_name(finish, called_tools=choice.chose_to_call),
            matched_stop=finish.matched,
            constraint_valid=valid_or_unset(choice.constraint),
            token_ids=self._ids[index] if options.token_ids else UNSET,
            metrics=self._watches[index].metrics() if options.metrics else UNSET,
        )

    def frames(self, index: int, chunk: Chunk) -> Iterator[ChatChunk]:
        """Take one engine chunk in, and give the frames that it makes."""
        self._see(index, chunk)
        options, choice = self._options, self._choices[index]
        if index not in self._greeted:
            yield from self._greeting(index)
        deltas = [_delta(piece) for piece in choice.add(chunk)]
        logprobs = chat_logprobs(chunk.logprobs or None, as_ids=options.tokens_as_ids)
        fields: list[FieldValue] | UnsetType = chunk.fields or UNSET
        ids: list[int] | UnsetType = UNSET
        if options.token_ids and chunk.token_ids:
            ids = chunk.token_ids
        if (logprobs is not None or fields or ids) and not deltas:
            deltas = [Delta(content="")]  # a token whose text is held back
        for delta in deltas:
            yield self._frame(index, delta, logprobs=logprobs, fields=fields, token_ids=ids)
            logprobs, fields, ids = None, UNSET, UNSET
        if chunk.finish is not None:
            reason = finish_name(chunk.finish, called_tools=choice.chose_to_call)
            last = self._frame(
                index,
                Delta(),
                finish_reason=reason,
                matched=chunk.finish.matched,
                constraint=chunk.constraint,
                metrics=self._watches[index].metrics() if options.metrics else UNSET,
            )
            if not self._unfinished and not options.include_usage:
                last = msgspec.structs.replace(last, warnings=options.warnings.told)
            yield last

    def _greeting(self, index: int) -> Iterator[ChatChunk]:
        """The first frames of a choice."""
        first = self._frame(index, Delta(role="assistant", content=""))
        if self._options.token_ids and not self._greeted:
            first = msgspec.structs.replace(first, prompt_token_ids=self._prompt)
        self._greeted.add(index)
        yield first
        if self._echo:
            yield self._frame(index, Delta(content=self._echo))

    def closing(self) -> Iterator[ChatChunk]:
        if self._options.include_usage:
            yield ChatChunk(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[],
                usage=self._usage.usage(),
                warnings=self._options.warnings.told,
            )

    def _frame(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
        matched: str | int | UnsetType | None = UNSET,
        fields: list[FieldValue] | UnsetType = UNSET,
        constraint: ConstraintOutcome | None = None,
        token_ids: list[int] | UnsetType = UNSET,
        metrics: AnswerMetrics | UnsetType = UNSET,
    ) -> ChatChunk:
        continuous = self._options.continuous_usage
        usage: Usage | UnsetType = self._usage.usage() if continuous else UNSET
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish_reason,
            matched_stop=matched,
            constraint_valid=valid_or_unset(constraint),
            fields=fields,
            token_ids=token_ids,
            metrics=metrics,
        )
        return ChatChunk(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[choice],
            usage=usage,
            constraint=outcome_of_all([constraint]),
        )


def _delta(piece: Piece) -> Delta:
    if isinstance(piece, str):
        return Delta(content=piece)
    if isinstance(piece, Reasoning):
        return Delta(reasoning_content=piece.text)
    if isinstance(piece, ToolArguments):
        function = FunctionDelta(arguments=piece.text)
        return Delta(tool_calls=[ToolCallDelta(index=piece.index, function=function)])
    function = FunctionDelta(name=piece.name, arguments="")
    call = ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)
    return Delta(tool_calls=[call])

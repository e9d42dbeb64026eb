"""Chat answers: engine chunks → a whole `chat.completion`, or the chunks of a streamed one.

role and "" → content and tool-call pieces → finish_reason → (usage, with no choices)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import UNSET, UnsetType

from phloem.srt.generation import Chunk, ConstraintOutcome, FieldValue
from phloem.srt.http.choice import Choice
from phloem.srt.http.logprobs import chat_logprobs
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
    ReplyHead,
    ToolCall,
    ToolCallDelta,
    Usage,
    finish_name,
    matched_stop,
    outcome_of_all,
    valid_or_unset,
)
from phloem.srt.http.tool_parser import (
    AnswerParser,
    Piece,
    Reasoning,
    ToolArguments,
)
from phloem.srt.http.usage import UsageCounter


class ChatAnswer:
    """All choices of one chat request."""

    def __init__(
        self,
        head: ReplyHead,
        n: int,
        parser: Callable[[], AnswerParser],
        *,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self._head = head
        self._choices = [Choice(i, parser()) for i in range(n)]
        self._greeted: set[int] = set()
        self._usage = UsageCounter(n)
        self._include_usage = include_usage
        self._continuous_usage = continuous_usage

    def add(self, index: int, chunk: Chunk) -> None:
        """Take one engine chunk in, for `whole`."""
        self._usage.add(index, chunk)
        self._choices[index].add(chunk)

    def whole(self) -> ChatCompletion:
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[_whole(choice) for choice in self._choices],
            usage=self._usage.usage(),
            constraint=outcome_of_all([choice.constraint for choice in self._choices]),
        )

    def frames(self, index: int, chunk: Chunk) -> Iterator[ChatChunk]:
        """Take one engine chunk in, and give the frames that it makes."""
        self._usage.add(index, chunk)
        choice = self._choices[index]
        if index not in self._greeted:
            self._greeted.add(index)
            yield self._frame(index, Delta(role="assistant", content=""))
        deltas = [_delta(piece) for piece in choice.add(chunk)]
        logprobs = chat_logprobs(chunk.logprobs or None)
        fields: list[FieldValue] | UnsetType = chunk.fields or UNSET
        if (logprobs is not None or fields) and not deltas:
            deltas = [Delta(content="")]  # a token whose text is held back
        for delta in deltas:
            yield self._frame(index, delta, logprobs=logprobs, fields=fields)
            logprobs, fields = None, UNSET
        if chunk.finish is not None:
            reason = finish_name(chunk.finish, called_tools=choice.called)
            yield self._frame(
                index,
                Delta(),
                finish_reason=reason,
                matched=matched_stop(chunk.finish),
                constraint=chunk.constraint,
            )

    def closing(self) -> Iterator[ChatChunk]:
        if self._include_usage:
            yield ChatChunk(
                id=self._head.id,
                created=self._head.created,
                model=self._head.model,
                choices=[],
                usage=self._usage.usage(),
            )

    def _frame(
        self,
        index: int,
        delta: Delta,
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
        matched: str | int | UnsetType = UNSET,
        fields: list[FieldValue] | UnsetType = UNSET,
        constraint: ConstraintOutcome | None = None,
    ) -> ChatChunk:
        usage: Usage | UnsetType = self._usage.usage() if self._continuous_usage else UNSET
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=logprobs,
            finish_reason=finish_reason,
            matched_stop=matched,
            constraint_valid=valid_or_unset(constraint),
            fields=fields,
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


def _whole(choice: Choice) -> ChatChoice:
    finish = choice.ended()
    content = choice.content
    calls = [
        ToolCall(id=start.id, function=FunctionCall(start.name, arguments))
        for start, arguments in choice.calls
    ]
    return ChatChoice(
        index=choice.index,
        message=AnswerMessage(
            content=content if content or not calls else None,
            reasoning_content=choice.reasoning or UNSET,
            tool_calls=calls or UNSET,
        ),
        logprobs=chat_logprobs(choice.logprobs),
        finish_reason=finish_name(finish, called_tools=choice.called),
        matched_stop=matched_stop(finish),
        constraint_valid=valid_or_unset(choice.constraint),
    )

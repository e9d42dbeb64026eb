"""Chat answers: engine chunks → a whole `chat.completion`, or the chunks of a streamed one.

role and "" → content and tool-call pieces → finish_reason → (usage, with no choices)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from msgspec import UNSET, UnsetType

from phloem.srt.generation import Chunk, ConstraintOutcome, FieldValue, Finish, Logprob
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
from phloem.srt.http.tool_parser import AnswerParser, Piece, ToolArguments, ToolStart
from phloem.srt.http.usage import UsageCounter


class _Choice:
    """One choice as it grows."""

    def __init__(self, index: int, parser: AnswerParser) -> None:
        self.index = index
        self.parser = parser
        self.content: list[str] = []
        self.calls: list[tuple[ToolStart, list[str]]] = []
        self.logprobs: list[Logprob] | None = None
        self.finish: Finish | None = None
        self.constraint: ConstraintOutcome | None = None

    def add(self, chunk: Chunk) -> list[Piece]:
        """Take the chunk in; the pieces that are certain with it."""
        pieces = self.parser.feed(chunk.text)
        if chunk.finish is not None:
            pieces += self.parser.finish()
            self.finish = chunk.finish
            self.constraint = chunk.constraint
        for piece in pieces:
            if isinstance(piece, str):
                self.content.append(piece)
            elif isinstance(piece, ToolStart):
                self.calls.append((piece, []))
            else:
                self.calls[piece.index][1].append(piece.text)
        if chunk.logprobs is not None:
            self.logprobs = (self.logprobs or []) + chunk.logprobs
        return pieces

    def whole(self) -> ChatChoice:
        finish = _ended(self.finish)
        content = "".join(self.content)
        return ChatChoice(
            index=self.index,
            message=AnswerMessage(
                content=content if content or not self.calls else None,
                tool_calls=[_tool_call(*call) for call in self.calls] or UNSET,
            ),
            logprobs=chat_logprobs(self.logprobs),
            finish_reason=finish_name(finish, called_tools=bool(self.calls)),
            matched_stop=matched_stop(finish),
            constraint_valid=valid_or_unset(self.constraint),
        )


class ChatAnswer:
    """All choices of one chat request."""

    def __init__(
        self,
        head: ReplyHead,
        n: int,
        parser: Callable[[], AnswerParser],
        *,
        continuous_usage: bool = False,
    ) -> None:
        self._head = head
        self._choices = [_Choice(i, parser()) for i in range(n)]
        self._greeted: set[int] = set()
        self._usage = UsageCounter(n)
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
            choices=[choice.whole() for choice in self._choices],
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
            reason = finish_name(chunk.finish, called_tools=bool(choice.calls))
            yield self._frame(
                index,
                Delta(),
                finish_reason=reason,
                matched=matched_stop(chunk.finish),
                constraint=chunk.constraint,
            )

    def usage_frame(self) -> ChatChunk:
        return ChatChunk(
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
    if isinstance(piece, ToolArguments):
        function = FunctionDelta(arguments=piece.text)
        return Delta(tool_calls=[ToolCallDelta(index=piece.index, function=function)])
    function = FunctionDelta(name=piece.name, arguments="")
    call = ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)
    return Delta(tool_calls=[call])


def _tool_call(start: ToolStart, arguments: list[str]) -> ToolCall:
    return ToolCall(id=start.id, function=FunctionCall(start.name, "".join(arguments)))


def _ended(finish: Finish | None) -> Finish:
    """Streams end in a finish: `fanout` checks it."""
    assert finish is not None
    return finish

"""Answers of the Messages API: engine chunks → content blocks, whole or as events.

The blocks of a whole reply are made of the same pieces, in the same order, as those of a stream,
so a client that joins the events has the whole reply.
"""

from __future__ import annotations

import hashlib
from base64 import b64encode
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, Raw

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import Chunk
from phloem.srt.http.anthropic.replies import (
    AnswerBlock,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    OutputTokensDetails,
    SignatureDelta,
    Stop,
    StopReason,
    StreamEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from phloem.srt.http.choice import Choice
from phloem.srt.http.tool_parser import AnswerParser, Piece, Reasoning, ToolArguments, ToolStart
from phloem.srt.http.usage import UsageCounter
from phloem.srt.http.warning import Warnings
from phloem.srt.messages import FinishReason

_NO_INPUT: Final = Raw(b"{}")


class MessageAnswer:
    """One message. `message_start` waits for the first token, with which it is known how much of
    the prompt was cached. Without `show_thinking`, thinking is told of, but not what it was."""

    def __init__(
        self,
        id_: str,
        model: str,
        parser: AnswerParser,
        warnings: Warnings,
        *,
        max_tokens: int,
        show_thinking: bool,
    ) -> None:
        self._id = id_
        self._model = model
        self._choice = Choice(0, parser)
        self._blocks = _Blocks(show_thinking=show_thinking)
        self._counter = UsageCounter()
        self._warnings = warnings
        self._max_tokens = max_tokens
        self._started = False

    def add(self, index: int, chunk: Chunk) -> None:
        """Take one engine chunk in, for `whole`."""
        for _ in self._taken(index, chunk):
            continue

    def whole(self) -> MessageReply:
        """Raises `InvalidRequest` for an answer that was aborted: it has no stop reason."""
        stop = self._stop()
        return self._message(self._blocks.ended, stop)

    def frames(self, index: int, chunk: Chunk) -> Iterator[StreamEvent]:
        """Take one engine chunk in, and give the events that it makes. Raises as `whole` does."""
        events = list(self._taken(index, chunk))
        if not self._started and (events or chunk.completion_tokens or chunk.finish):
            self._started = True
            yield MessageStart(message=self._message([], None))
        yield from events
        if chunk.finish is not None:
            yield MessageDelta(
                delta=self._stop(),
                usage=self._usage(),
                constraint=self._choice.constraint or UNSET,
                warnings=self._warnings.told,
            )
            yield MessageStop()

    def closing(self) -> Iterator[StreamEvent]:
        """`message_stop` was the last event."""
        yield from ()

    def _taken(self, index: int, chunk: Chunk) -> Iterator[StreamEvent]:
        self._counter.add(index, chunk)
        self._warnings.see(chunk)
        for piece in self._choice.add(chunk):
            yield from self._blocks.put(piece)
        if chunk.finish is not None:
            yield from self._blocks.close()

    def _message(self, content: list[AnswerBlock], stop: Stop | None) -> MessageReply:
        return MessageReply(
            id=self._id,
            model=self._model,
            content=content,
            stop_reason=None if stop is None else stop.stop_reason,
            stop_sequence=None if stop is None else stop.stop_sequence,
            usage=self._usage(),
            constraint=UNSET if stop is None else self._choice.constraint or UNSET,
            warnings=UNSET if stop is None else self._warnings.told,
        )

    def _usage(self) -> MessageUsage:
        usage = self._counter.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        thought = usage.completion_tokens_details.reasoning_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(thought) if thought else UNSET,
        )

    def _stop(self) -> Stop:
        finish = self._choice.ended()
        if finish.reason is FinishReason.ABORT:
            raise InvalidRequest("The request was aborted by its id.", code="aborted")
        if finish.reason is FinishReason.LENGTH:
            full = self._counter.usage().completion_tokens < self._max_tokens
            reason: StopReason = "model_context_window_exceeded" if full else "max_tokens"
            return Stop(stop_reason=reason, stop_sequence=None)
        if isinstance(finish.matched, str):
            return Stop(stop_reason="stop_sequence", stop_sequence=finish.matched)
        called = self._choice.called
        return Stop(stop_reason="tool_use" if called else "end_turn", stop_sequence=None)


class _Blocks:
    """The content as it grows: blocks that have ended, and one that is open."""

    def __init__(self, *, show_thinking: bool) -> None:
        self.ended: list[AnswerBlock] = []
        self._open: _Open | None = None
        self._show_thinking = show_thinking

    def put(self, piece: Piece) -> Iterator[StreamEvent]:
        """The events of one more piece."""
        if self._open is None or not self._open.goes_on_with(piece):
            yield from self.close()
            self._open = self._opened(piece)
            yield BlockStart(index=len(self.ended), content_block=self._open.begun())
        delta = self._open.add(piece)
        if delta is not None:
            yield BlockDelta(index=len(self.ended), delta=delta)

    def close(self) -> Iterator[StreamEvent]:
        """End the open block, if there is one."""
        if self._open is None:
            return
        block = self._open.whole()
        if isinstance(block, ThinkingBlock):
            yield BlockDelta(index=len(self.ended), delta=SignatureDelta(block.signature))
        yield BlockStop(index=len(self.ended))
        self.ended.append(block)
        self._open = None

    def _opened(self, piece: Piece) -> _Open:
        match piece:
            case str():
                return _Text()
            case Reasoning():
                return _Thinking(show=self._show_thinking)
            case ToolStart():
                return _Call(piece)
            case ToolArguments():
                raise AssertionError("a parser starts a call before it gives arguments")


class _Open(Protocol):
    """A block that is being written."""

    def goes_on_with(self, piece: Piece) -> bool: ...

    def begun(self) -> AnswerBlock:
        """The block as its start announces it."""
        ...

    def add(self, piece: Piece) -> TextDelta | ThinkingDelta | InputJsonDelta | None: ...

    def whole(self) -> AnswerBlock: ...


class _Text:
    def __init__(self) -> None:
        self._texts: list[str] = []

    def goes_on_with(self, piece: Piece) -> bool:
        return isinstance(piece, str)

    def begun(self) -> TextBlock:
        return TextBlock(text="")

    def add(self, piece: Piece) -> TextDelta:
        assert isinstance(piece, str)
        self._texts.append(piece)
        return TextDelta(piece)

    def whole(self) -> TextBlock:
        return TextBlock(text="".join(self._texts))


class _Thinking:
    """Its signature is a digest of the thinking: clients want one, and send it back."""

    def __init__(self, *, show: bool) -> None:
        self._texts: list[str] = []
        self._show = show

    def goes_on_with(self, piece: Piece) -> bool:
        return isinstance(piece, Reasoning)

    def begun(self) -> ThinkingBlock:
        return ThinkingBlock(thinking="", signature="")

    def add(self, piece: Piece) -> ThinkingDelta | None:
        assert isinstance(piece, Reasoning)
        self._texts.append(piece.text)
        return ThinkingDelta(piece.text) if self._show else None

    def whole(self) -> ThinkingBlock:
        text = "".join(self._texts)
        digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        signature = b64encode(digest).decode()
        return ThinkingBlock(thinking=text if self._show else "", signature=signature)


class _Call:
    def __init__(self, start: ToolStart) -> None:
        self._start = start
        self._texts: list[str] = []

    def goes_on_with(self, piece: Piece) -> bool:
        return isinstance(piece, ToolArguments)

    def begun(self) -> ToolUseBlock:
        return self._block(_NO_INPUT)

    def add(self, piece: Piece) -> InputJsonDelta | None:
        if not isinstance(piece, ToolArguments):
            return None  # the start itself
        self._texts.append(piece.text)
        return InputJsonDelta(piece.text)

    def whole(self) -> ToolUseBlock:
        """A call that was cut off has no input: half of one must not be taken for it."""
        text = "".join(self._texts).strip()
        try:
            msgspec.json.decode(text, type=dict[str, Raw])
        except msgspec.DecodeError:
            return self._block(_NO_INPUT)
        return self._block(Raw(text.encode()))

    def _block(self, input_: Raw) -> ToolUseBlock:
        return ToolUseBlock(
            id=f"toolu_{self._start.id.removeprefix('call_')}", name=self._start.name, input=input_
        )

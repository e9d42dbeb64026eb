"""Pieces of an answer → output items, and the events that tell of them.

Items follow one another; at most one is open. Neighbouring pieces of one kind are one item, and
each kind of item has its events: added, its deltas, done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from phloem.srt.http.replies import TokenLogprobEntry
from phloem.srt.http.responses.items import (
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
)
from phloem.srt.http.responses.replies import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from phloem.srt.http.tool_parser import Piece, Reasoning, ToolArguments, ToolStart

Logprobs = list[TokenLogprobEntry]
Number = Callable[[], int]


class _Open(Protocol):
    """The item that is being written, at `place` in the output."""

    def item(self, status: ItemStatus) -> OutputItem: ...

    def begin(self) -> Iterator[Event]: ...

    def end(self) -> Iterator[Event]: ...


class _OpenMessage:
    def __init__(self, id_: str, place: int, number: Number) -> None:
        self._id, self._place, self._number = id_, place, number
        self._texts: list[str] = []
        self._logprobs: Logprobs = []

    def item(self, status: ItemStatus) -> MessageItem:
        content = [] if status == "in_progress" else [self._part()]
        return MessageItem(id=self._id, status=status, role="assistant", content=[*content])

    def begin(self) -> Iterator[Event]:
        yield PartAdded(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            part=OutputText(text=""),
        )

    def delta(self, text: str, logprobs: Logprobs) -> Event:
        self._texts.append(text)
        self._logprobs += logprobs
        return TextDelta(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            delta=text,
            logprobs=logprobs,
        )

    def end(self) -> Iterator[Event]:
        part = self._part()
        yield TextDone(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            text=part.text,
            logprobs=part.logprobs,
        )
        yield PartDone(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            part=part,
        )

    def _part(self) -> OutputText:
        return OutputText(text="".join(self._texts), logprobs=self._logprobs)


class _OpenReasoning:
    def __init__(self, id_: str, place: int, number: Number) -> None:
        self._id, self._place, self._number = id_, place, number
        self._texts: list[str] = []

    def item(self, status: ItemStatus) -> ReasoningItem:
        content = [] if status == "in_progress" else [self._part()]
        return ReasoningItem(id=self._id, status=status, content=content)

    def begin(self) -> Iterator[Event]:
        yield PartAdded(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            part=ReasoningText(""),
        )

    def delta(self, text: str) -> Event:
        self._texts.append(text)
        return ReasoningDelta(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            delta=text,
        )

    def end(self) -> Iterator[Event]:
        part = self._part()
        yield ReasoningDone(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            text=part.text,
        )
        yield PartDone(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            part=part,
        )

    def _part(self) -> ReasoningText:
        return ReasoningText("".join(self._texts))


class _OpenCall:
    def __init__(self, id_: str, place: int, number: Number, start: ToolStart) -> None:
        self._id, self._place, self._number = id_, place, number
        self._start = start
        self._texts: list[str] = []

    def item(self, status: ItemStatus) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._id,
            status=status,
            call_id=self._start.id,
            name=self._start.name,
            arguments="" if status == "in_progress" else "".join(self._texts),
        )

    def begin(self) -> Iterator[Event]:
        return iter(())

    def delta(self, text: str) -> Event:
        self._texts.append(text)
        return ArgumentsDelta(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            delta=text,
        )

    def end(self) -> Iterator[Event]:
        yield ArgumentsDone(
            sequence_number=self._number(),
            item_id=self._id,
            output_index=self._place,
            name=self._start.name,
            arguments="".join(self._texts),
        )


class Output:
    """The items of one answer. Their ids are made of `key`, so that they are the same however often
    they are told; `number` gives each event its number."""

    def __init__(self, key: str, number: Number) -> None:
        self._key = key
        self._number = number
        self._done: list[OutputItem] = []
        self._open: _Open | None = None
        self._pending: Logprobs = []

    def items(self) -> list[OutputItem]:
        """All items so far; the one that is not done is `incomplete`."""
        opened = [] if self._open is None else [self._open.item("incomplete")]
        return [*self._done, *opened]

    def feed(self, pieces: Sequence[Piece], logprobs: Logprobs) -> Iterator[Event]:
        """Take in pieces, with the logprobs of the tokens that they came with. A message has those
        of the tokens that its text is made of, also of tokens whose text was held back."""
        if pieces or self._open is None or isinstance(self._open, _OpenMessage):
            self._pending += logprobs
        for piece in pieces:
            match piece:
                case str():
                    yield from self._text(piece)
                case Reasoning(text):
                    self._pending = []
                    yield from self._reasoning(text)
                case ToolStart():
                    self._pending = []
                    yield from self._start_call(piece)
                case ToolArguments(_, text):
                    self._pending = []
                    assert isinstance(self._open, _OpenCall)
                    yield self._open.delta(text)

    def close(self, status: ItemStatus) -> Iterator[Event]:
        """No piece follows; the last item ended as `status` says. A complete answer without any
        item has one message without text."""
        if status == "completed" and not self._done and self._open is None:
            yield from self._begin_message()
        if self._pending and isinstance(self._open, _OpenMessage):
            yield from self._text("")
        yield from self._end(status)

    def _text(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _OpenMessage):
            yield from self._begin_message()
        assert isinstance(self._open, _OpenMessage)
        logprobs, self._pending = self._pending, []
        yield self._open.delta(text, logprobs)

    def _reasoning(self, text: str) -> Iterator[Event]:
        if not isinstance(self._open, _OpenReasoning):
            yield from self._begin(_OpenReasoning(self._id("rs"), self._place(), self._number))
        assert isinstance(self._open, _OpenReasoning)
        yield self._open.delta(text)

    def _start_call(self, start: ToolStart) -> Iterator[Event]:
        return self._begin(_OpenCall(self._id("fc"), self._place(), self._number, start))

    def _begin_message(self) -> Iterator[Event]:
        return self._begin(_OpenMessage(self._id("msg"), self._place(), self._number))

    def _begin(self, opened: _Open) -> Iterator[Event]:
        place = self._place()
        yield from self._end("completed")
        self._open = opened
        yield ItemAdded(
            sequence_number=self._number(), output_index=place, item=opened.item("in_progress")
        )
        yield from opened.begin()

    def _end(self, status: ItemStatus) -> Iterator[Event]:
        if self._open is None:
            return
        yield from self._open.end()
        item = self._open.item(status)
        self._done.append(item)
        self._open = None
        yield ItemDone(sequence_number=self._number(), output_index=len(self._done) - 1, item=item)

    def _place(self) -> int:
        """The index of the item that begins next."""
        return len(self._done) + (self._open is not None)

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._key}{self._place():04x}"

"""The stream of a response on the wire: named events, of which an error is one, too."""

from __future__ import annotations

import msgspec

from phloem.srt.errors import PhloemError
from phloem.srt.http.errors import ErrorShape
from phloem.srt.http.framing import NamedFrames, on_one_line
from phloem.srt.http.responses.replies import ErrorEvent, Event


class _Head(msgspec.Struct):
    type: str
    sequence_number: int


_head_decoder = msgspec.json.Decoder(_Head)


class ResponseFrames(NamedFrames):
    """One stream's: it keeps count of the events, so that an error has the next number."""

    def __init__(self) -> None:
        super().__init__(ErrorShape.OPENAI)
        self._next = 0

    def frame(self, event: msgspec.Struct) -> bytes:
        if isinstance(event, Event):
            self._next = event.sequence_number + 1
        return super().frame(event)

    def encoded(self, event: bytes) -> bytes:
        """A frame of an event that is JSON already."""
        head = _head_decoder.decode(event)
        self._next = head.sequence_number + 1
        return b"event: " + head.type.encode() + b"\ndata: " + on_one_line(event) + b"\n\n"

    def error(self, error: PhloemError) -> bytes:
        return self.frame(
            ErrorEvent(
                sequence_number=self._next,
                code=error.code or error.kind,
                message=error.message,
                param=error.param,
            )
        )

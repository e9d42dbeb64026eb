"""How a stream of events looks on the wire: the only place that writes `data:`.

`SSE`, OpenAI's:    data: {…}⏎⏎ an event, data: [DONE]⏎⏎ the end, also after an error
`NamedFrames`:      event: NAME⏎data: {…}⏎⏎ and no end mark; NAME is the event's tag
`NDJSON`, Ollama's: {…}⏎, one line an event

In the first two, `: keep-alive⏎⏎` is a comment, sent after a while of silence; a protocol with
named events may have one for that, instead.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from phloem.srt.errors import PhloemError
from phloem.srt.http.errors import ErrorShape, error_body

_EVENT_STREAM: Final = "text/event-stream; charset=utf-8"
_KEEPALIVE: Final = b": keep-alive\n\n"
_encoder = msgspec.json.Encoder()

_BREAKS: Final = tuple((one.encode(), b"\\u%04x" % ord(one)) for one in "\x85\u2028\u2029")


def on_one_line(text: bytes) -> bytes:
    """JSON in which nothing but a line feed would be one to any reader: Python's `splitlines`, and
    clients that use it, break lines at three characters more, which are escaped here."""
    if not text.isascii():
        for character, escaped in _BREAKS:
            text = text.replace(character, escaped)
    return text


def named(name: str, event: msgspec.Struct) -> bytes:
    """One event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + _encode(event) + b"\n\n"


def _encode(event: msgspec.Struct) -> bytes:
    return on_one_line(_encoder.encode(event))


class Framing(Protocol):
    """Bytes of events. `keepalive` is empty where silence cannot be filled."""

    @property
    def content_type(self) -> str: ...

    @property
    def keepalive(self) -> bytes: ...

    @property
    def end(self) -> bytes: ...

    def frame(self, event: msgspec.Struct) -> bytes: ...

    def error(self, error: PhloemError) -> bytes: ...


class _DataFrames:
    content_type: Final = _EVENT_STREAM
    keepalive: Final = _KEEPALIVE
    end: Final = b"data: [DONE]\n\n"

    def frame(self, event: msgspec.Struct) -> bytes:
        return b"data: " + _encode(event) + b"\n\n"

    def error(self, error: PhloemError) -> bytes:
        return self.frame(error_body(error, ErrorShape.OPENAI))


class NamedFrames:
    """Events are tagged structs, and named by their tag; errors look as `shape` has them. `ping` is
    what silence is filled with, in place of a comment."""

    content_type: Final = _EVENT_STREAM
    end: Final = b""

    def __init__(self, shape: ErrorShape, *, ping: msgspec.Struct | None = None) -> None:
        self._shape = shape
        self.keepalive = _KEEPALIVE if ping is None else self.frame(ping)

    def frame(self, event: msgspec.Struct) -> bytes:
        return named(str(event.__struct_config__.tag), event)

    def error(self, error: PhloemError) -> bytes:
        return named("error", error_body(error, self._shape))


class _Lines:
    content_type: Final = "application/x-ndjson"
    keepalive: Final = b""
    end: Final = b""

    def frame(self, event: msgspec.Struct) -> bytes:
        return _encode(event) + b"\n"

    def error(self, error: PhloemError) -> bytes:
        return self.frame(error_body(error, ErrorShape.OLLAMA))


SSE: Final[Framing] = _DataFrames()
NDJSON: Final[Framing] = _Lines()

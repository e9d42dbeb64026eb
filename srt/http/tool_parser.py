"""Answers as they stream in → pieces of content and of tool calls.

One parser serves streamed and whole replies, so both say the same. Pieces come as early as they
are certain: text that might still become a call's marker is held back, arguments flow as they are
written. A parser never fails: what turns out to be no call is text.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

CALL_BEGIN: Final = "<tool_call>"
CALL_END: Final = "</tool_call>"

_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*(?P<name>"(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
    r"(?=\S)"
)


@dataclass(frozen=True)
class ToolStart:
    """A call begins: its index in the message, its id and the function's name."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """More of the arguments' JSON text of call `index`."""

    index: int
    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thinks before it answers, apart from the answer."""

    text: str


Piece = str | Reasoning | ToolStart | ToolArguments


class AnswerParser(Protocol):
    """Text in, pieces out. `finish` gives what was held back, when no more text comes."""

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class TextParser:
    """No tools: all is content."""

    def feed(self, text: str) -> list[Piece]:
        return [text] if text else []

    def finish(self) -> list[Piece]:
        return []


class NamedParser:
    """The whole answer is the arguments of one function."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        pieces: list[Piece] = []
        if not self._started:
            self._started = True
            pieces.append(ToolStart(0, new_call_id(), self._name))
        pieces.append(ToolArguments(0, text))
        return pieces

    def finish(self) -> list[Piece]:
        return []


class _JsonEnd:
    """Finds where a JSON value inside an object ends, fed in parts."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """Index just behind the value's end within `text`; None while it goes on."""
        for i, char in enumerate(text):
            if self._in_string:
                self._inside_string(char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                if self._depth == 0:
                    return i  # of what surrounds a plain value
                self._depth -= 1
                if self._depth == 0:
                    return i + 1
        return None

    def _inside_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


class _CallParser:
    """One call object, `{"name": …, "arguments": …}`. `rest` is what follows its arguments."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._end = _JsonEnd()
        self.head = ""  # text before the arguments, while it is incomplete
        self.rest: str | None = None
        self._started = False

    @property
    def started(self) -> bool:
        return self._started

    def feed(self, text: str) -> list[Piece]:
        if self.rest is not None:
            self.rest += text
            return []
        if self._started:
            return self._arguments(text)
        self.head += text
        match = _HEAD.match(self.head)
        if match is None:
            return []
        self._started = True
        name = msgspec.json.decode(match["name"], type=str)
        pieces: list[Piece] = [ToolStart(self._index, new_call_id(), name)]
        return pieces + self._arguments(self.head[match.end() :])

    def _arguments(self, text: str) -> list[Piece]:
        end = self._end.feed(text)
        if end is not None:
            text, self.rest = text[:end], text[end:]
        return [ToolArguments(self._index, text)] if text else []


class RequiredParser:
    """The whole answer is one call. One that was cut off before its arguments is no call."""

    def __init__(self) -> None:
        self._call = _CallParser(0)

    def feed(self, text: str) -> list[Piece]:
        return self._call.feed(text)

    def finish(self) -> list[Piece]:
        return []


class AutoParser:
    """Text with calls between markers in it; blank text behind a call is dropped."""

    def __init__(self) -> None:
        self._held = ""  # text that is not yet certain
        self._call: _CallParser | None = None
        self._calls = 0
        self._after_call = False

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        while text:
            if self._call is None:
                text = self._feed_text(text, pieces)
            else:
                text = self._feed_call(self._call, text, pieces)
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._call is not None and not self._call.started:
            held = CALL_BEGIN + self._call.head
        return [] if not held or (self._after_call and held.isspace()) else [held]

    def _feed_text(self, text: str, pieces: list[Piece]) -> str:
        """Give out what is certain; returns what stands behind a marker."""
        before, marker, behind = (self._held + text).partition(CALL_BEGIN)
        uncertain = "" if marker else _held_back(before)
        said = before.removesuffix(uncertain)
        if self._after_call and (not said or said.isspace()):
            self._held = "" if marker else said + uncertain
        else:
            if said:
                pieces.append(said)
                self._after_call = False
            self._held = uncertain
        if marker:
            self._call = _CallParser(self._calls)
            self._calls += 1
        return behind

    def _feed_call(self, call: _CallParser, text: str, pieces: list[Piece]) -> str:
        """Give out the call's pieces; returns what stands behind its end marker."""
        pieces += call.feed(text)
        _, marker, behind = (call.rest or "").partition(CALL_END)
        if marker:
            self._call = None
            self._after_call = True
        return behind


def _held_back(text: str) -> str:
    """The longest end of `text` that could be the beginning of a marker."""
    for size in range(min(len(CALL_BEGIN) - 1, len(text)), 0, -1):
        if CALL_BEGIN.startswith(text[-size:]):
            return text[-size:]
    return ""

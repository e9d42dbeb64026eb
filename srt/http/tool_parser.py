"""Answers as they stream in → pieces of content and of tool calls.

One parser serves streamed and whole replies, so both say the same. Pieces come as early as they
are certain: text that might still become a call's marker is held back, arguments flow as they are
written. A parser never fails: what turns out to be no call is text.
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Protocol

import msgspec

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SPACE = " \t\r\n"
_SPACES = re.compile(r"[ \t\r\n]*")
MAX_HEAD: Final = 4096
"""Characters of a call before its arguments; what goes on for longer is no call."""


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
    """Text in, pieces out. `finish` gives what was held back, when no more text comes. `named`: the
    client chose the function that is called."""

    @property
    def named(self) -> bool: ...

    def feed(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


@dataclass(frozen=True)
class CallSyntax:
    """What shows that text is a call.

    Behind `begin` stand objects of a name and arguments, alone, in a row or in a list; with `end`
    each is followed by it. `bare`: they may also open the answer without `begin`. `named` is what
    stands between a name and its arguments where there is no object around them. Ids of calls have
    `id_length` letters and digits, 0 for our own form.
    """

    begin: str
    end: str = ""
    bare: bool = False
    named: str = ""
    id_length: int = 0

    def new_id(self) -> str:
        """A fresh id for a call."""
        if not self.id_length:
            return new_call_id()
        letters = string.ascii_letters + string.digits
        return "".join(secrets.choice(letters) for _ in range(self.id_length))


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class TextParser:
    """No tools: all is content."""

    named = False

    def feed(self, text: str) -> list[Piece]:
        return [text] if text else []

    def finish(self) -> list[Piece]:
        return []


class NamedParser:
    """The whole answer is the arguments of one function."""

    named = True

    def __init__(self, name: str, new_id: Callable[[], str] = new_call_id) -> None:
        self._name = name
        self._new_id = new_id
        self._started = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        pieces: list[Piece] = []
        if not self._started:
            self._started = True
            pieces.append(ToolStart(0, self._new_id(), self._name))
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


@dataclass(frozen=True)
class _Head:
    """What stands before a call's arguments, `size` characters. `wrapped`: in an object."""

    name: str
    size: int
    wrapped: bool


class _Scan:
    """Reads fixed parts of a text that may not be whole yet. `open` is set when it ended before
    it contradicted, `wrong` when it did."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.open = False
        self.wrong = False

    def space(self) -> None:
        space = _SPACES.match(self.text, self.at)
        assert space is not None
        self.at = space.end()

    def take(self, *options: str) -> None:
        """One of some fixed texts."""
        if self.open or self.wrong:
            return
        for option in options:
            if self.text.startswith(option, self.at):
                self.at += len(option)
                return
        rest = self.text[self.at :]
        self.open = any(option.startswith(rest) for option in options)
        self.wrong = not self.open

    def string(self) -> str:
        """A JSON string."""
        begin = self.at
        self.take('"')
        if self.open or self.wrong:
            return ""
        while (end := self.text.find('"', self.at)) >= 0:
            self.at = end + 1
            try:
                return msgspec.json.decode(self.text[begin : end + 1], type=str)
            except msgspec.DecodeError:
                continue  # an escaped quote, or an error that the length ends
        self.open = True
        return ""


def _read_head(text: str, named: str) -> _Head | bool:
    """The head of a call at the beginning of `text`; False for none, True if it may become one."""
    scan = _Scan(text)
    scan.space()
    if not text[scan.at :]:
        return len(text) <= MAX_HEAD
    if named and text[scan.at] != "{":
        return _read_named(text, scan.at, named)
    for part in ("{", '"name"', ":"):
        scan.take(part)
        scan.space()
    name = "" if scan.open or scan.wrong else scan.string()
    scan.space()
    scan.take(",")
    scan.space()
    scan.take('"arguments"', '"parameters"')
    scan.space()
    scan.take(":")
    scan.space()
    if scan.wrong or scan.at > MAX_HEAD:
        return False
    if scan.open or scan.at == len(text):
        return len(text) <= MAX_HEAD
    return _Head(name, scan.at, wrapped=True)


def _read_named(text: str, at: int, separator: str) -> _Head | bool:
    name = _NAME.match(text, at)
    if name is None:
        return False
    rest = text[name.end() :]
    if rest.startswith(separator):
        size = len(text) - len(rest[len(separator) :].lstrip(_SPACE))
        if size < len(text):
            return _Head(name[0], size, wrapped=False) if size <= MAX_HEAD else False
        return len(text) <= MAX_HEAD
    return separator.startswith(rest)


class _State(Enum):
    START = auto()  # nothing but white space yet
    TEXT = auto()
    HEAD = auto()  # of a call, before its arguments
    ARGUMENTS = auto()
    CLOSING = auto()  # of the object around them
    BEHIND = auto()  # a call


class CallsParser:
    """Text with calls in it; blank text behind a call is dropped, and before one that must come.

    `must_call`: the answer is calls. One that was cut off before its arguments is then nothing, not
    text, and calls need no marker.
    """

    named = False

    def __init__(self, syntax: CallSyntax, *, must_call: bool = False) -> None:
        self._syntax = syntax
        self._must_call = must_call
        self._bare = syntax.bare or must_call
        self._state = _State.START
        self._held = ""  # text that is not yet certain
        self._opening = ""  # what was taken for the beginning of the call at hand
        self._wrapped = False
        self._marked = False  # the calls at hand stand behind a marker
        self._calls = 0
        self._drop_blank = must_call
        self._end = _JsonEnd()
        self._pieces: list[Piece] = []
        self._steps: dict[_State, Callable[[str], str | None]] = {
            _State.START: self._start,
            _State.TEXT: self._text,
            _State.HEAD: self._head,
            _State.ARGUMENTS: self._arguments,
            _State.CLOSING: self._closing,
            _State.BEHIND: self._behind,
        }

    def feed(self, text: str) -> list[Piece]:
        self._pieces = []
        rest: str | None = self._held + text if text else None
        while rest:
            self._held = ""
            rest = self._steps[self._state](rest)
        return self._pieces

    def finish(self) -> list[Piece]:
        self._pieces = []
        held, self._held = self._held, ""
        if self._state is _State.HEAD and not self._must_call:
            self._say(self._opening + held)
        elif self._state in (_State.START, _State.TEXT):
            self._say(held)
        return self._pieces

    def _start(self, text: str) -> str | None:
        """Whether the answer begins with a call."""
        found = text.lstrip(_SPACE)
        if not found:
            self._held = text
            return None
        self._state = _State.TEXT
        if self._bare and found[0] in "{[":
            self._begin_call(text[: len(text) - len(found)], marked=False)
            return found
        return text

    def _text(self, text: str) -> str | None:
        """Give out what is certain; what stands behind a marker is the beginning of a call."""
        before, marker, behind = text.partition(self._syntax.begin)
        uncertain = "" if marker else held_back(before, self._syntax.begin)
        said = before.removesuffix(uncertain)
        if self._drop_blank and (not said or said.isspace()):
            self._held = "" if marker else said + uncertain
        else:
            self._say(said)
            self._held = uncertain
        if not marker:
            return None
        self._begin_call(marker, marked=True)
        return behind or None

    def _begin_call(self, opening: str, *, marked: bool) -> None:
        self._state = _State.HEAD
        self._opening = opening
        self._marked = marked

    def _head(self, text: str) -> str | None:
        listed = len(text) - len(text.lstrip(_SPACE))
        if not self._syntax.end and text[listed : listed + 1] == "[":
            listed += 1
        else:
            listed = 0
        head = _read_head(text[listed:], self._syntax.named)
        if head is True:
            self._held = text
            return None
        if head is False:
            self._state = _State.TEXT
            self._say(self._opening)
            return text
        self._pieces.append(ToolStart(self._calls, self._syntax.new_id(), head.name))
        self._calls += 1
        self._wrapped = head.wrapped
        self._end = _JsonEnd()
        self._state = _State.ARGUMENTS
        return text[listed + head.size :]

    def _arguments(self, text: str) -> str | None:
        end = self._end.feed(text)
        own = text if end is None else text[:end]
        if own:
            self._pieces.append(ToolArguments(self._calls - 1, own))
        if end is None:
            return None
        self._drop_blank = True
        self._state = _State.CLOSING if self._wrapped else _State.BEHIND
        return text[end:]

    def _closing(self, text: str) -> str | None:
        """The object's own end."""
        found = text.lstrip(_SPACE)
        if not found:
            return None
        self._state = _State.BEHIND
        return found[1:] if found[0] == "}" else found

    def _behind(self, text: str) -> str | None:
        """What separates calls, or ends them."""
        found = text.lstrip(_SPACE)
        end = self._syntax.end if self._marked else ""
        if not found or (end and end.startswith(found) and found != end):
            self._held = text
            return None
        self._state = _State.TEXT
        if end:
            return found.removeprefix(end) if found.startswith(end) else text
        if found[0] in ",;":
            self._begin_call(found[0], marked=self._marked)
            return found[1:]
        if found[0] == "{":
            self._begin_call("", marked=self._marked)
            return found
        return found[1:] if found[0] == "]" else text

    def _say(self, text: str) -> None:
        if not text or (self._drop_blank and text.isspace()):
            return
        self._drop_blank = False
        self._pieces.append(text)


def held_back(text: str, marker: str) -> str:
    """The longest end of `text` that could be the beginning of a marker."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-size:]):
            return text[-size:]
    return ""

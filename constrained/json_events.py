"""JSON text as it is written → each value as soon as it is complete.

A value is a scalar or an empty array or object; what is not empty is told by its parts. So the
events of a document, put together, are the document, and only the value under way is held. Fed in
any pieces, the events are the same.
"""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any, Final

MAX_DEPTH: Final = 1_000

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?\Z")
_WORDS: Final = frozenset({"true", "false", "null"})
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})')

_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY, _COLON, _NEXT, _END = range(7)
# What comes next: a value; in a new container a value or its end, or a key or its end; a key; the
# colon behind one; a comma or the container's end; nothing.


@dataclasses.dataclass(frozen=True, slots=True)
class Field:
    """A finished value: its place as a JSON pointer, and its own text."""

    path: str
    raw: str

    @property
    def value(self) -> Any:
        return json.loads(self.raw)


class JsonEvents:
    """The values of one document, or with `lines` of one document a line, each below its number.

    Raises `ValueError` for what is not JSON, and for more than `MAX_DEPTH` open containers; then
    it is of no more use.
    """

    def __init__(self, *, lines: bool = False) -> None:
        self._lines = lines
        self._state = _VALUE
        self._stack: list[int | str] = []  # the open containers: an index, or a member's key
        self._line = 0
        self._token: list[str] = []  # the scalar or key under way, in pieces
        self._quoted = False
        self._escape = ""  # an escape under way inside a string

    def feed(self, text: str) -> list[Field]:
        """The values that are complete with `text`."""
        found: list[Field] = []
        at = 0
        while at < len(text):
            if self._quoted:
                at = self._string(text, at, found)
            elif self._token:
                at = self._scalar(text, at, found)
            elif self._lines and self._state == _END and text[at] == "\n":
                self._line += 1
                self._state = _VALUE
                at += 1
            else:
                at = self._structure(text, at, found)
        return found

    def finish(self) -> list[Field]:
        """No more text comes: a number at the root ends here. A document that was cut off is told
        as far as it was complete."""
        found: list[Field] = []
        if self._token and not self._quoted and not self._stack:
            self._end_scalar(found)
        return found

    @property
    def complete(self) -> bool:
        """Whether what was fed is a whole document (or whole lines)."""
        return self._state == _END and not self._token

    # ------------------------------------------------------------------ text

    def _structure(self, text: str, at: int, found: list[Field]) -> int:
        if text[at] in " \t\r\n":
            return self._skip(text, at)
        char = text[at]
        if char == '"' and self._state in (_VALUE, _FIRST_ITEM, _FIRST_KEY, _KEY):
            self._quoted = True
            self._token = [char]
        elif char in "[{" and self._state in (_VALUE, _FIRST_ITEM):
            self._open(char)
        elif char in "]}":
            self._close(char, found)
        elif char == ":" and self._state == _COLON:
            self._state = _VALUE
        elif char == "," and self._state == _NEXT:
            self._comma()
        elif self._state in (_VALUE, _FIRST_ITEM) and _SCALAR.fullmatch(char):
            return self._scalar(text, at, found)
        else:
            raise ValueError(f"{char!r} cannot stand there in JSON")
        return at + 1

    def _skip(self, text: str, at: int) -> int:
        match = _SPACE.match(text, at)
        assert match is not None
        if self._lines and "\n" in match[0]:
            line_end = text.index("\n", at)
            if self._state != _END:
                raise ValueError("a line ends within its document")
            return line_end if line_end > at else at
        return match.end()

    def _string(self, text: str, at: int, found: list[Field]) -> int:
        if self._escape:
            return self._in_escape(text, at)
        match = _PLAIN.match(text, at)
        assert match is not None
        self._token.append(match[0])
        at = match.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._escape = "\\"
            return at + 1
        if text[at] != '"':
            raise ValueError("a control character in a JSON string")
        self._token.append('"')
        self._quoted = False
        raw, self._token = "".join(self._token), []
        if self._state in (_FIRST_KEY, _KEY):
            self._stack[-1] = json.loads(raw)
            self._state = _COLON
        else:
            self._done(raw, found)
        return at + 1

    def _in_escape(self, text: str, at: int) -> int:
        wanted = 6 if (self._escape + text[at])[1:2] == "u" else 2
        more = text[at : at + wanted - len(self._escape)]
        self._escape += more
        if len(self._escape) == wanted:
            if _ESCAPE.fullmatch(self._escape) is None:
                raise ValueError("a wrong escape in a JSON string")
            self._token.append(self._escape)
            self._escape = ""
        return at + len(more)

    def _scalar(self, text: str, at: int, found: list[Field]) -> int:
        match = _SCALAR.match(text, at)
        assert match is not None
        if match[0]:
            self._token.append(match[0])
        if match.end() < len(text):
            self._end_scalar(found)
        return match.end()

    def _end_scalar(self, found: list[Field]) -> None:
        raw, self._token = "".join(self._token), []
        if raw not in _WORDS and _NUMBER.match(raw) is None:
            raise ValueError("neither a number nor true, false or null")
        self._done(raw, found)

    # ------------------------------------------------------------------ structure

    def _open(self, char: str) -> None:
        if len(self._stack) == MAX_DEPTH:
            raise ValueError(f"the JSON nests more than {MAX_DEPTH} levels")
        self._stack.append(0 if char == "[" else "")
        self._state = _FIRST_ITEM if char == "[" else _FIRST_KEY

    def _close(self, char: str, found: list[Field]) -> None:
        is_array = char == "]"
        if not self._stack or isinstance(self._stack[-1], int) is not is_array:
            raise ValueError(f"{char!r} closes nothing")
        if self._state not in (_NEXT, _FIRST_ITEM if is_array else _FIRST_KEY):
            raise ValueError(f"{char!r} comes too early")
        self._stack.pop()
        if self._state == _NEXT:
            self._state = _NEXT if self._stack else _END
        else:
            self._done("[]" if is_array else "{}", found)

    def _comma(self) -> None:
        top = self._stack[-1]
        if isinstance(top, int):
            self._stack[-1] = top + 1
            self._state = _VALUE
        else:
            self._state = _KEY

    def _done(self, raw: str, found: list[Field]) -> None:
        steps = [self._line, *self._stack] if self._lines else self._stack
        path = "".join("/" + str(s).replace("~", "~0").replace("/", "~1") for s in steps)
        found.append(Field(path, raw))
        self._state = _NEXT if self._stack else _END

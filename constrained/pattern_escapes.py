"""Reading characters, escapes and classes of regular expressions.

Where engines differ in what a shorthand class holds (`\\d`, `\\w` and `\\s` are ASCII or Unicode)
the narrower meaning is taken, and the wider one under a negation: whatever matches here also
matches in `re`.
"""

from __future__ import annotations

import enum

from phloem.constrained import charset, unicode_sets
from phloem.constrained.base import MalformedConstraint, UnsupportedKeyword
from phloem.constrained.charset import CharSet

Pair = tuple[CharSet, CharSet]


class Dialect(enum.Enum):
    """PYTHON is `re` on text, ECMA is ECMA-262 with the `u` flag."""

    PYTHON = "python"
    ECMA = "ecma"


_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}


_CONDITIONS = ("(?=", "(?!", "(?<=", "(?<!", "\\b", "\\B")


class CharReader:
    """A cursor over a pattern, and what stands for one character of a set."""

    def __init__(self, text: str, dialect: Dialect) -> None:
        self._text = text
        self._dialect = dialect
        self._at = 0
        self._depth = 0
        self._doubtful = dialect is Dialect.PYTHON or any(sign in text for sign in _CONDITIONS)
        """Whether engines may take shorthand classes for Unicode ones. For patterns with conditions
        validators fall back on engines that do, whatever ECMA-262 says."""
        self._negative = False
        """Inside a negative look-around: what matches there is what does not match in all."""

    def _malformed(self, what: str) -> MalformedConstraint:
        return MalformedConstraint(
            f"invalid regular expression: {what} at position {self._at}", code="invalid_regex"
        )

    def _unsupported(self, what: str) -> UnsupportedKeyword:
        return UnsupportedKeyword(
            f"regular expression: {what} is not supported (position {self._at})",
            code="unsupported_regex",
        )

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _take(self, text: str) -> bool:
        if not self._peek(text):
            return False
        self._at += len(text)
        return True

    def _next(self, what: str) -> str:
        if self._at >= len(self._text):
            raise self._malformed(what)
        self._at += 1
        return self._text[self._at - 1]

    def _character(self, char: str) -> CharSet:
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self._malformed("a surrogate is not a character")
        return charset.of(char)

    def _class_escape(self) -> CharSet:
        """The set that an escape stands for, the backslash being read already."""
        char = self._next("a trailing backslash")
        if char in "dDwWsS":
            return self._pick(*self._shorthand(char))
        if char in "pP" and self._dialect is Dialect.ECMA:
            return self._property(negated=char == "P")
        if char == "c" and self._dialect is Dialect.ECMA:
            return self._control()
        if char in _HEX_ESCAPES and (char != "U" or self._dialect is Dialect.PYTHON):
            return self._code_point(char)
        if char == "0" and self._at < len(self._text) and self._text[self._at].isdigit():
            raise self._unsupported("the octal escape \\0…")
        if char in _SIMPLE_ESCAPES and (char != "a" or self._dialect is Dialect.PYTHON):
            return charset.of(_SIMPLE_ESCAPES[char])
        if char.isalnum():
            raise self._malformed(f"bad escape \\{char}" if char.isascii() else "bad escape")
        return self._character(char)

    def _code_point(self, kind: str) -> CharSet:
        if kind == "u" and self._dialect is Dialect.ECMA and self._take("{"):
            end = self._text.find("}", self._at)
            digits = self._text[self._at : max(end, self._at)]
            self._at = end + 1
        else:
            digits = self._text[self._at : self._at + _HEX_ESCAPES[kind]]
            self._at += _HEX_ESCAPES[kind]
            if len(digits) != _HEX_ESCAPES[kind]:
                digits = ""
        try:
            value = int(digits, 16) if digits.isalnum() else -1
        except ValueError:
            value = -1
        if not 0 <= value <= 0x10FFFF:
            raise self._malformed(f"incomplete escape \\{kind}")
        if 0xD800 <= value < 0xDC00 and self._dialect is Dialect.ECMA:
            value = self._low_surrogate(value)
        if 0xD800 <= value <= 0xDFFF:
            raise self._malformed("a lone surrogate is not a character")
        return ((value, value),)

    def _low_surrogate(self, high: int) -> int:
        digits = self._text[self._at + 2 : self._at + 6]
        if not self._peek("\\u") or len(digits) != 4 or not digits.isalnum():
            return high
        try:
            low = int(digits, 16)
        except ValueError:
            return high
        if not 0xDC00 <= low <= 0xDFFF:
            return high
        self._at += 6
        return 0x10000 + ((high - 0xD800) << 10) + (low - 0xDC00)

    def _control(self) -> CharSet:
        letter = self._next("a trailing \\c")
        if not (letter.isascii() and letter.isalpha()):
            raise self._malformed("\\c without a letter")
        return ((ord(letter) & 31, ord(letter) & 31),)

    def _property(self, *, negated: bool) -> CharSet:
        end = self._text.find("}", self._at)
        if not self._peek("{") or end < 0:
            raise self._malformed("\\p without {…}")
        name = self._text[self._at + 1 : end]
        found = unicode_sets.named(name)
        if found is None:
            raise self._unsupported(f"the Unicode property {name[:40]!r}")
        self._at = end + 1
        return charset.negate(found) if negated else found

    def _pick(self, sure: CharSet, perhaps: CharSet) -> CharSet:
        """What is meant where engines differ: the fewer strings match, the better."""
        return perhaps if self._negative else sure

    def _shorthand(self, char: str) -> Pair:
        """What a shorthand class surely matches in every engine, and what it may match."""
        match char.lower():
            case "d":
                digits = charset.unicode_digits()
                return self._either_case(char, charset.DIGIT, digits)
            case "w":
                return self._word(char == "W")
            case _ if self._dialect is Dialect.ECMA:
                return self._either_case(char, charset.ECMA_SPACE, charset.SPACE)
            case _:
                return self._either_case(char, charset.ASCII_SPACE, charset.SPACE)

    def _word(self, negated: bool) -> Pair:
        more = charset.union(charset.WORD, charset.NON_ASCII)
        return self._either_case("W" if negated else "w", charset.WORD, more)

    def _either_case(self, char: str, sure: CharSet, perhaps: CharSet) -> Pair:
        if not self._doubtful and char not in "sS":
            perhaps = sure
        return (
            (sure, perhaps) if char.islower() else (charset.negate(perhaps), charset.negate(sure))
        )

    def _class(self) -> CharSet:
        negated = self._take("^")
        if self._peek("]") and self._dialect is Dialect.ECMA:
            self._at += 1
            return charset.ANY if negated else charset.EMPTY
        sure: list[CharSet] = []
        perhaps: list[CharSet] = []
        first = True
        while first or not self._peek("]"):
            first = False
            if self._peek("[:") or self._peek("[=") or self._peek("[."):
                raise self._unsupported("a POSIX class [:…:]")
            inside, outside = self._class_item()
            sure.append(inside)
            perhaps.append(outside)
        self._at += 1
        surely, maybe = charset.union(*sure), charset.union(*perhaps)
        if negated:
            surely, maybe = charset.negate(maybe), charset.negate(surely)
        return self._pick(surely, maybe)

    def _class_item(self) -> Pair:
        """A character, range or shorthand: (what is surely in it, what may be)."""
        start = self._at
        low = self._class_member()
        if self._is_set(start):
            return low
        if not self._peek("-") or self._text.startswith("]", self._at + 1):
            return low
        self._at += 1
        start = self._at
        high = self._class_member()
        if self._is_set(start) or low[0][0][0] > high[0][0][0]:
            raise self._malformed("bad character range")
        chars = charset.char_set([(low[0][0][0], high[0][0][0])])
        return chars, chars

    def _class_member(self) -> Pair:
        char = self._next("unterminated character class")
        if char != "\\":
            chars = self._character(char)
            return chars, chars
        if self._take("b"):
            return charset.of("\b"), charset.of("\b")
        following = self._text[self._at : self._at + 1]
        if following and following in "123456789":
            raise self._unsupported("an octal escape in a class")
        if following and following in "dDwWsS":
            self._at += 1
            return self._shorthand(following)
        chars = self._class_escape()
        return chars, chars

    def _is_set(self, start: int) -> bool:
        """Whether the class member that begins at `start` stands for a set."""
        return self._text[start] == "\\" and self._text[start + 1] in "dDwWsSpP"

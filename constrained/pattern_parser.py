"""Regular expressions as trees of character sets: parsed, simplified, stripped of anchors.

Two dialects share one parser. PYTHON is for `regex` constraints (`re.fullmatch`), ECMA for the
`pattern` of JSON Schema (search semantics). What a finite automaton cannot hold, or what differs
between engines, is refused by name: look-around, back-references, word boundaries, inline flags,
`\\p`, possessive and atomic groups. Laziness is accepted, since it does not change the language.

Shorthand classes in PYTHON are ASCII (`\\d` is `[0-9]`, and so on), their negations exclude the
Unicode meaning too: whatever matches here also matches in `re`.
"""

from __future__ import annotations

import enum

from phloem.constrained import charset
from phloem.constrained.base import LimitExceeded, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.charset import CharSet
from phloem.constrained.pattern import Alt, Anchor, At, Chars, Node, Repeat, Seq

MAX_PATTERN_CHARS = 2048
MAX_GROUP_DEPTH = 64
MAX_REPEAT_PRODUCT = 10_000


class Dialect(enum.Enum):
    PYTHON = "python"
    ECMA = "ecma"


def parse(pattern: str, dialect: Dialect) -> Node:
    """A pattern's tree, anchors included.

    Raises:
        MalformedConstraint: not a regular expression.
        UnsupportedKeyword: a construct that is not supported, by name.
        LimitExceeded: too long, too deep, or the product of nested repeats is too large.
    """
    if len(pattern) > MAX_PATTERN_CHARS:
        raise LimitExceeded(
            f"the pattern has {len(pattern)} characters; at most {MAX_PATTERN_CHARS} are allowed"
        )
    node = _Parser(pattern, dialect).parse()
    product = _repeat_product(node)
    if product > MAX_REPEAT_PRODUCT:
        raise LimitExceeded(
            f"the product of nested repeat counts is {product};"
            f" at most {MAX_REPEAT_PRODUCT} is allowed"
        )
    return node


def _repeat_product(node: Node) -> int:
    match node:
        case Repeat(item, low, high):
            return max(low, high or 1, 1) * _repeat_product(item)
        case Seq(items) | Alt(items):
            return max((_repeat_product(i) for i in items), default=1)
        case _:
            return 1


_SIMPLE_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0", "a": "\a"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_REFUSED_GROUPS = {
    "=": "look-ahead (?=…)",
    "!": "look-ahead (?!…)",
    "<=": "look-behind (?<=…)",
    "<!": "look-behind (?<!…)",
    "P=": "back-reference (?P=…)",
    ">": "atomic group (?>…)",
    "(": "conditional group (?(…)…)",
    "#": "comment (?#…)",
    "|": "branch reset (?|…)",
}


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, text: str, dialect: Dialect) -> None:
        self._text = text
        self._dialect = dialect
        self._at = 0
        self._depth = 0

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._malformed("unbalanced )")
        return node

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

    def _alternatives(self) -> Node:
        branches = [self._sequence()]
        while self._take("|"):
            branches.append(self._sequence())
        return branches[0] if len(branches) == 1 else Alt(tuple(branches))

    def _sequence(self) -> Node:
        items: list[Node] = []
        while self._at < len(self._text) and not self._peek("|") and not self._peek(")"):
            items.append(self._quantified())
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _quantified(self) -> Node:
        node = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return node
        if isinstance(node, At):
            raise self._malformed("an anchor cannot be repeated")
        if self._take("+"):
            raise self._unsupported("the possessive quantifier")
        self._take("?")  # lazy: the same language
        if self._bounds() is not None:
            raise self._malformed("multiple repeat")
        low, high = bounds
        if high is not None and high < low:
            raise self._malformed("the repeat's bounds are out of order")
        return Repeat(node, low, high)

    def _bounds(self) -> tuple[int, int | None] | None:
        """A quantifier at the cursor, consumed; None when there is none."""
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        end = self._text.find("}", self._at)
        if not self._peek("{") or end < 0:
            return None
        low, comma, high = self._text[self._at + 1 : end].partition(",")
        if not (low or high) or not all(
            p == "" or (p.isascii() and p.isdigit()) for p in (low, high)
        ):
            return None
        if low == "" and self._dialect is Dialect.ECMA:
            return None
        if len(low) > 9 or len(high) > 9:
            raise LimitExceeded("a repeat count has more than 9 digits; at most 9 are allowed")
        self._at = end + 1
        count = int(low or 0)
        return count, (count if not comma else int(high) if high else None)

    def _atom(self) -> Node:
        char = self._next("nothing to read")
        match char:
            case "(":
                return self._group()
            case "[":
                return Chars(self._class())
            case ".":
                newlines = "\n" if self._dialect is Dialect.PYTHON else "\n\r\u2028\u2029"
                return Chars(charset.negate(charset.of(newlines)))
            case "^":
                return At(Anchor.BEGIN)
            case "$":
                return At(Anchor.END)
            case "\\":
                return self._escape()
            case "*" | "+" | "?":
                raise self._malformed("nothing to repeat")
            case "{" if self._quantifier_like():
                raise self._malformed("nothing to repeat")
        return Chars(self._character(char))

    def _quantifier_like(self) -> bool:
        self._at -= 1
        found = self._bounds() is not None
        if not found:
            self._at += 1
        return found

    def _character(self, char: str) -> CharSet:
        if 0xD800 <= ord(char) <= 0xDFFF:
            raise self._malformed("a surrogate is not a character")
        return charset.of(char)

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise LimitExceeded(
                f"regular expression groups nest deeper than {MAX_GROUP_DEPTH} levels"
            )
        if self._take("?"):
            self._group_kind()
        node = self._alternatives()
        if not self._take(")"):
            raise self._malformed("missing ), unterminated group")
        self._depth -= 1
        return node

    def _group_kind(self) -> None:
        if self._take(":"):
            return
        for sign in sorted(_REFUSED_GROUPS, key=len, reverse=True):
            if self._peek(sign):
                raise self._unsupported(_REFUSED_GROUPS[sign])
        if self._take("P<") or self._take("<"):
            end = self._text.find(">", self._at)
            if end < 0 or not self._text[self._at : end].isidentifier():
                raise self._malformed("bad group name")
            self._at = end + 1
            return
        if self._at < len(self._text) and (self._text[self._at].isalpha() or self._peek("-")):
            raise self._unsupported("the inline flag (?…)")
        raise self._malformed("unknown extension (?")

    def _escape(self) -> Node:
        char = self._next("a trailing backslash")
        if char in "bB":
            raise self._unsupported(f"the word boundary \\{char}")
        if char in "123456789k":
            raise self._unsupported(f"the back-reference \\{char}")
        if self._dialect is Dialect.PYTHON and char in "AZz":
            return At(Anchor.BEGIN if char == "A" else Anchor.END)
        self._at -= 1
        return Chars(self._class_escape())

    def _class_escape(self) -> CharSet:
        """The set that an escape stands for, the backslash being read already."""
        char = self._next("a trailing backslash")
        if char in "dDwWsS":
            return self._shorthand(char)
        if char in "pP":
            raise self._unsupported(f"the Unicode property \\{char}")
        if char == "c" and self._dialect is Dialect.ECMA:
            raise self._unsupported("the control escape \\c")
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

    def _shorthand(self, char: str) -> CharSet:
        sure = {"d": charset.DIGIT, "w": charset.WORD, "s": charset.ASCII_SPACE}[char.lower()]
        if char.islower():
            return sure
        if char == "S":
            return charset.negate(charset.SPACE)
        if self._dialect is Dialect.ECMA:
            return charset.negate(sure)
        perhaps = charset.unicode_digits() if char == "D" else charset.NON_ASCII
        return charset.negate(charset.union(sure, perhaps))

    def _class(self) -> CharSet:
        negated = self._take("^")
        if self._peek("]") and self._dialect is Dialect.ECMA:
            raise self._unsupported("the empty class")
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
        chars = charset.negate(charset.union(*perhaps)) if negated else charset.union(*sure)
        if not chars:
            raise self._malformed("a class that no character is in")
        return chars

    def _class_item(self) -> tuple[CharSet, CharSet]:
        """A character, range or shorthand: (what is surely in it, what may be)."""
        start = self._at
        low = self._class_member()
        if self._is_shorthand(start):
            return low, charset.negate(self._opposite(start))
        if not self._peek("-") or self._text.startswith("]", self._at + 1):
            return low, low
        self._at += 1
        start = self._at
        high = self._class_member()
        if self._is_shorthand(start) or low[0][0] > high[0][0]:
            raise self._malformed("bad character range")
        chars = charset.char_set([(low[0][0], high[0][0])])
        return chars, chars

    def _class_member(self) -> CharSet:
        char = self._next("unterminated character class")
        if char != "\\":
            return self._character(char)
        if self._take("b"):
            return charset.of("\b")
        if self._at < len(self._text) and self._text[self._at] in "123456789":
            raise self._unsupported("an octal escape in a class")
        return self._class_escape()

    def _is_shorthand(self, start: int) -> bool:
        return self._text[start] == "\\" and self._text[start + 1] in "dDwWsS"

    def _opposite(self, start: int) -> CharSet:
        """What is surely outside the shorthand at `start`."""
        return self._shorthand(self._text[start + 1].swapcase())

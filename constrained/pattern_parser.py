"""Regular expressions as trees of character sets, anchors and look-around included.

Two dialects share one parser. PYTHON is for `regex` constraints (`re.fullmatch`), ECMA for the
`pattern` of JSON Schema (search semantics, the `u` flag). What a finite automaton cannot hold, or
what differs between engines, is refused by name and position: back-references, inline flags,
possessive and atomic groups. Laziness is accepted, since it does not change the language.
"""

from __future__ import annotations

from phloem.constrained import charset
from phloem.constrained.base import LimitExceeded
from phloem.constrained.pattern import (
    Alt,
    Anchor,
    At,
    Chars,
    Look,
    Node,
    Repeat,
    Seq,
    max_length,
    min_length,
)
from phloem.constrained.pattern_escapes import CharReader, Dialect

__all__ = ["Dialect", "parse"]

MAX_PATTERN_CHARS = 2048
MAX_GROUP_DEPTH = 64
MAX_REPEAT_PRODUCT = 10_000


def parse(pattern: str, dialect: Dialect, *, limited: bool = True) -> Node:
    """A pattern's tree, anchors included. Patterns of our own need not be `limited` in length.

    Raises:
        MalformedConstraint: not a regular expression.
        UnsupportedKeyword: a construct that is not supported, by name.
        LimitExceeded: too long, too deep, or the product of nested repeats is too large.
    """
    if limited and len(pattern) > MAX_PATTERN_CHARS:
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
        case Look(item):
            return _repeat_product(item)
        case _:
            return 1


_REFUSED_GROUPS = {
    "P=": "back-reference (?P=…)",
    ">": "atomic group (?>…)",
    "(": "conditional group (?(…)…)",
    "#": "comment (?#…)",
    "|": "branch reset (?|…)",
}


_ANCHORS = ("^", "$", "\\b", "\\B", "\\A", "\\Z", "\\z")
_LOOKS = {"=": (True, False), "!": (True, True), "<=": (False, False), "<!": (False, True)}


class _Parser(CharReader):
    """Recursive descent over one pattern."""

    def parse(self) -> Node:
        node = self._alternatives()
        if self._at < len(self._text):
            raise self._malformed("unbalanced )")
        return node

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
        bare = self._text.startswith(_ANCHORS, self._at)
        node = self._atom()
        bounds = self._bounds()
        if bounds is None:
            return node
        if bare:
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
                # To Python, and to validators that are not ECMA's, only a line feed ends a line.
                wide = self._dialect is Dialect.PYTHON or self._negative
                newlines = "\n" if wide else "\n\r\u2028\u2029"
                return Chars(charset.negate(charset.of(newlines)))
            case "^":
                return At(Anchor.BEGIN)
            case "$":
                return At(Anchor.END if self._dialect is Dialect.ECMA else Anchor.LAST)
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

    def _group(self) -> Node:
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise LimitExceeded(
                f"regular expression groups nest deeper than {MAX_GROUP_DEPTH} levels"
            )
        look = self._group_kind() if self._take("?") else None
        turned = look is not None and look[1]
        self._negative ^= turned
        node = self._alternatives()
        self._negative ^= turned
        if not self._take(")"):
            raise self._malformed("missing ), unterminated group")
        self._depth -= 1
        if look is None:
            return node
        fixed = look[0] or min_length(node) == max_length(node)
        if self._dialect is Dialect.PYTHON and not fixed:
            raise self._malformed("look-behind requires a fixed width")
        return Look(node, *look)

    def _group_kind(self) -> tuple[bool, bool] | None:
        """What follows `(?`: the two flags of a look-around, or None for a plain group."""
        if self._take(":"):
            return None
        for sign, look in _LOOKS.items():
            if self._take(sign):
                return look
        for sign in sorted(_REFUSED_GROUPS, key=len, reverse=True):
            if self._peek(sign):
                raise self._unsupported(_REFUSED_GROUPS[sign])
        if self._take("P<") or self._take("<"):
            end = self._text.find(">", self._at)
            if end < 0 or not self._text[self._at : end].isidentifier():
                raise self._malformed("bad group name")
            self._at = end + 1
            return None
        if self._at < len(self._text) and (self._text[self._at].isalpha() or self._peek("-")):
            raise self._unsupported("the inline flag (?…)")
        raise self._malformed("unknown extension (?")

    def _escape(self) -> Node:
        char = self._next("a trailing backslash")
        if char in "bB":
            return self._boundary(negative=char == "B")
        if char in "123456789k":
            raise self._unsupported(f"the back-reference \\{char}")
        if self._dialect is Dialect.PYTHON and char in "AZz":
            return At(Anchor.BEGIN if char == "A" else Anchor.END)
        self._at -= 1
        return Chars(self._class_escape())

    def _boundary(self, *, negative: bool) -> Node:
        """`\\b` or `\\B` by look-around. Where the text's edge counts as no word character."""
        word, other = Chars(self._pick(*self._word(False))), Chars(self._pick(*self._word(True)))
        after, before = Look(word, True, False), Look(word, False, False)
        start = Alt((At(Anchor.BEGIN), Look(other, False, False)))
        stop = Alt((At(Anchor.END), Look(other, True, False)))
        if not negative:
            return Alt((Seq((before, stop)), Seq((start, after))))
        if self._dialect is Dialect.ECMA or self._negative:
            return Alt((Seq((before, after)), Seq((start, stop))))
        # In `re`, \\B does not match in the empty string before Python 3.14.
        inside = Seq((Look(other, False, False), stop))
        at_start = Seq((At(Anchor.BEGIN), Look(other, True, False)))
        return Alt((Seq((before, after)), inside, at_start))

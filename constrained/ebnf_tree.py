"""Grammars as trees: the nodes, the parser of the GBNF dialect, and the way back to text.

Sources are users' grammars (`phloem.constrained.ebnf` says what the dialect is) and the grammars
that `phloem.constrained.grammar_text` writes, for engines that want another notation.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from phloem.constrained import charset
from phloem.constrained.base import LimitExceeded, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.charset import CharSet
from phloem.constrained.grammar_text import char_class, choice, quote, repeat, sequence

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<define>::=)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<class>\[(?:[^\]\\\n]|\\.)*\])
    |(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]*)
    |(?P<count>\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    |(?P<sign>[()|*+?.])""",
    re.VERBOSE,
)
_MEMBER = re.compile(
    r"\\x(?P<x>[0-9A-Fa-f]{2})|\\u(?P<u>[0-9A-Fa-f]{4})|\\U(?P<U>[0-9A-Fa-f]{8})"
    r"|\\(?P<short>[nrt])|\\(?P<sign>[^0-9A-Za-z])|(?P<plain>[^\\])"
)
_SHORT = {"n": "\n", "r": "\r", "t": "\t"}
_EXTENSIONS = {"TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken", "AnyTokens"}


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """At most so many rules, levels of groups, and turns of a counted loop."""

    rules: int
    depth: int
    repeats: int


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this text, which may be empty."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Class:
    """One character of a set."""

    chars: CharSet


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A reference to a rule."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Sequence:
    items: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    items: tuple[Expression, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """`low` to `high` times; `high` None is without bound."""

    item: Expression
    low: int
    high: int | None


Expression = Literal | Class | Rule | Sequence | Choice | Loop
Rules = dict[str, Expression]


def parts(body: Expression) -> tuple[Expression, ...]:
    """The expressions directly inside."""
    match body:
        case Sequence(items) | Choice(items):
            return items
        case Loop(item):
            return (item,)
        case _:
            return ()


def references(body: Expression) -> Iterator[str]:
    """The rules that are named inside, each as often as it is."""
    pending = [body]
    while pending:
        part = pending.pop()
        if isinstance(part, Rule):
            yield part.name
        elif isinstance(part, Sequence | Choice):
            pending.extend(reversed(part.items))
        elif isinstance(part, Loop):
            pending.append(part.item)


# --------------------------------------------------------------------------- parsing


_QUANTIFIERS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


def parse_rules(text: str, limits: Limits) -> Rules:
    """The rules by name, in their order.

    Raises:
        MalformedConstraint: not a grammar; the message names the line.
        UnsupportedKeyword: an engine's own extension.
        LimitExceeded: too many rules, groups too deep, or a repeat count too large.
    """
    return _Parser(text, limits).rules()


def malformed(what: str, line: int) -> MalformedConstraint:
    return MalformedConstraint(f"invalid grammar: {what} (line {line})", code="invalid_grammar")


class _Parser:
    def __init__(self, text: str, limits: Limits) -> None:
        self._tokens = list(_tokens(text))
        line = self._tokens[-1][2] if self._tokens else 1
        self._tokens += [("end", "", line)] * 2  # one may be looked ahead
        self._classes: dict[str, Class] = {}
        self._limits = limits
        self._at = 0
        self._depth = 0

    def rules(self) -> Rules:
        found: Rules = {}
        while self._kind() != "end":
            kind, name, line = self._tokens[self._at]
            if kind != "name" or self._kind(1) != "define":
                raise malformed("expected a rule, name ::= …", line)
            self._at += 2
            if name in found:
                raise malformed(f"rule {name!r} is defined twice", line)
            if len(found) >= self._limits.rules:
                raise LimitExceeded(f"the grammar has more than {self._limits.rules} rules")
            found[name] = self._choice()
        return found

    def _kind(self, ahead: int = 0) -> str:
        return self._tokens[self._at + ahead][0]

    def _sign(self, sign: str) -> bool:
        if self._tokens[self._at][1] == sign and self._kind() == "sign":
            self._at += 1
            return True
        return False

    def _choice(self) -> Expression:
        items = [self._sequence()]
        while self._sign("|"):
            items.append(self._sequence())
        return items[0] if len(items) == 1 else Choice(tuple(items))

    def _sequence(self) -> Expression:
        items: list[Expression] = []
        while (item := self._quantified()) is not None:
            items.append(item)
        if not items:
            line = self._tokens[self._at][2]
            raise malformed('an empty alternative; write "" for the empty string', line)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _quantified(self) -> Expression | None:
        item = self._atom()
        while item is not None:
            kind, text, _ = self._tokens[self._at]
            if kind == "count":
                item = self._counted_loop(item)
            elif kind == "sign" and text in _QUANTIFIERS:
                self._at += 1
                item = Loop(item, *_QUANTIFIERS[text])
            else:
                break
        return item

    def _counted_loop(self, item: Expression) -> Expression:
        _, text, line = self._tokens[self._at]
        self._at += 1
        low_text, comma, high_text = "".join(text[1:-1].split()).partition(",")
        most = self._limits.repeats
        digits = max(len(low_text), len(high_text))
        low = int(low_text) if digits < 12 else most + 1
        high = low if not comma or digits >= 12 else int(high_text) if high_text else None
        if max(low, high or 0) > most:
            raise LimitExceeded(f"a repeat count is above {most} (line {line})")
        if high is not None and high < low:
            raise malformed("the repeat's bounds are out of order", line)
        return Loop(item, low, high)

    def _atom(self) -> Expression | None:
        kind, text, line = self._tokens[self._at]
        match kind:
            case "literal":
                self._at += 1
                return Literal(_unescape(text[1:-1], line))
            case "class":
                self._at += 1
                known = self._classes.get(text)
                if known is None:
                    known = self._classes[text] = Class(_members(text[1:-1], line))
                return known
            case "name" if self._kind(1) == "define":
                return None
            case "name":
                self._at += 1
                if text in _EXTENSIONS:
                    raise UnsupportedKeyword(f"the grammar extension {text} is not supported")
                return Rule(text)
        if self._sign("."):
            return Class(charset.ANY)
        if self._sign("("):
            return self._group(line)
        if kind == "define":
            raise malformed("unexpected ::=", line)
        if kind == "count" or text in ("*", "+", "?"):
            raise malformed("nothing to repeat", line)
        return None

    def _group(self, line: int) -> Expression:
        self._depth += 1
        if self._depth > self._limits.depth:
            raise LimitExceeded(f"groups nest deeper than {self._limits.depth} levels")
        inside = self._choice()
        if not self._sign(")"):
            raise malformed("missing )", line)
        self._depth -= 1
        return inside


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    line = 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise malformed(_unexpected(text, at), line)
        kind = match.lastgroup or ""
        if kind == "space":
            line += match.group().count("\n")
        else:
            yield kind, match.group(), line
        at = match.end()


def _unexpected(text: str, at: int) -> str:
    if text[at] == "/":
        return "a /regular expression/ is not GBNF; write literals and classes"
    if text[at] in ":=":
        return "a rule is defined by ::="
    return {"'": 'a literal is quoted by "', '"': "an unclosed literal"}.get(
        text[at], "an unclosed class" if text[at] == "[" else f"unexpected character {text[at]!r}"
    )


def _characters(text: str, line: int) -> Iterator[tuple[str, bool]]:
    """The characters that `text` spells, and whether each was written as it is."""
    at = 0
    while at < len(text):
        match = _MEMBER.match(text, at)
        if match is None:
            raise malformed(f"unknown escape {text[at : at + 2]}", line)
        at = match.end()
        kind, found = match.lastgroup, match.group(match.lastgroup or 0)
        if kind in ("x", "u", "U"):
            code = int(found, 16)
            if code > 0x10FFFF:
                raise malformed(f"\\{kind}{found} is no character", line)
            yield chr(code), False
        elif kind == "short":
            yield _SHORT[found], False
        else:
            yield found, kind == "plain"


def _unescape(text: str, line: int) -> str:
    if text.isascii() and "\\" not in text:
        return text
    found = "".join(char for char, _ in _characters(text, line))
    if any(0xD800 <= ord(char) <= 0xDFFF for char in found):
        raise malformed("a surrogate is no character", line)
    return found


def _members(text: str, line: int) -> CharSet:
    """A class; surrogates, which are no characters, may be named in it and are in none."""
    negated = text.startswith("^")
    members = list(_characters(text[negated:], line))
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(members):
        low = high = ord(members[at][0])
        at += 1
        if members[at : at + 1] == [("-", True)] and at + 1 < len(members):
            high = ord(members[at + 1][0])
            at += 2
        if high < low:
            raise malformed("a class has a range that is out of order", line)
        ranges.append((low, high))
    chars = charset.char_set(ranges)
    chars = charset.negate(chars) if negated else chars
    if not chars:
        raise malformed("a class that no character is in", line)
    return chars


# --------------------------------------------------------------------------- writing


def write_rules(rules: Rules, root: str) -> str:
    """The rules as text, the root as `root`, the others as `r1`, `r2`, …"""
    names = {name: f"r{i}" for i, name in enumerate(rules)} | {root: "root"}
    ordered = [root, *(name for name in rules if name != root)]
    return "".join(f"{names[name]} ::= {_write(rules[name], names)}\n" for name in ordered)


def _write(body: Expression, names: dict[str, str]) -> str:
    match body:
        case Literal(text):
            return quote(text)
        case Class(chars):
            return char_class(chars)
        case Rule(name):
            return names[name]
        case Sequence(items):
            return sequence(*(_atom(i, names) for i in items))
        case Choice(items):
            return choice([_write(i, names) for i in items])
        case Loop(item, low, high):
            return repeat(_atom(item, names), low, high)


def _atom(body: Expression, names: dict[str, str]) -> str:
    text = _write(body, names)
    grouped = isinstance(body, Choice) and text.startswith("(")
    return text if grouped or isinstance(body, Literal | Class | Rule) else f"({text})"

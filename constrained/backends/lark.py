"""Grammars in llguidance's notation, such that the language stays the same.

llguidance splits text into terminals before it parses, and a terminal is as long as any terminal
that is possible here can be made. That keeps the language only where the end of a terminal is never
in doubt, which is so in the three forms written here:

- a grammar without recursion is one terminal, from beginning to end;
- JSON is split into its tokens. Strings end at the first quote that is not escaped. Numbers and
  words, and runs of white space, are never next to their like, which is checked;
- any other grammar has a terminal for each character.
"""

from __future__ import annotations

import functools

from phloem.constrained import charset
from phloem.constrained.backends.regular import RegularRules, loop, seq
from phloem.constrained.base import UnsupportedKeyword
from phloem.constrained.charset import CharSet
from phloem.constrained.ebnf_tree import (
    Choice,
    Class,
    Expression,
    Literal,
    Loop,
    Rule,
    Rules,
    Sequence,
    parts,
)

# Whoever reads the masks chooses the tokens: no token is forced because its bytes are.
_HEADER = '%llguidance {"no_forcing": true}\n'
_NOT_EMPTY = "/(?s:.+)/"


def write_lark(rules: Rules, root: str, *, by_character: bool) -> str:
    """The grammar, in the third form only if `by_character`: it makes long texts of JSON dear.

    Raises:
        UnsupportedKeyword: neither of the other forms fits.
    """
    regular = RegularRules(rules)
    pattern = regular.pattern(Rule(root))
    terminals = Terminals(regular)
    if pattern is not None:
        written = {root: terminals.of(pattern)}
    else:
        from phloem.constrained.backends.json_tokens import JsonTokens

        try:
            written = JsonTokens(rules, regular, terminals).split(root)
        except UnsupportedKeyword:
            if not by_character:
                raise
            terminals = Terminals(regular)
            written = {name: _characters(body, terminals) for name, body in rules.items()}
    return terminals.write(written, root)


class Terminals:
    """The terminals of one grammar, each pattern once. Where rules refer to one, its name is a
    number, as no rule's is."""

    def __init__(self, regular: RegularRules) -> None:
        self._regular = regular
        self._numbers: dict[Expression, str] = {}
        self._refers: dict[int, bool] = {}
        """By the identity of a part of a pattern that is kept here: whether it has references."""

    def of(self, pattern: Expression) -> Expression:
        """A reference to a terminal for `pattern`, optional if the pattern may be empty."""
        if pattern == Literal(""):
            return pattern
        number = self._numbers.setdefault(pattern, f"#{len(self._numbers)}")
        return Loop(Rule(number), 0, 1) if self._regular.nullable(pattern) else Rule(number)

    def write(self, rules: Rules, root: str) -> str:
        """The whole grammar."""
        names = {name: f"r{i}" for i, name in enumerate(rules)}
        names |= {number: f"T{number[1:]}" for number in self._numbers.values()}
        lines = [f"start: {names[root]}"]
        lines += [f"{names[name]}: {_rule(body, names)}" for name, body in rules.items()]
        shared: dict[str, str] = {}
        for pattern, number in self._numbers.items():
            text = self._terminal(pattern, shared)
            if self._regular.nullable(pattern):
                text = f"({text}) & {_NOT_EMPTY}"
            lines.append(f"{names[number]}: {text}")
        written = 0
        while written < len(shared):
            name, short = list(shared.items())[written]
            lines.append(f"{short}: {self._terminal(self._regular.named[name], shared)}")
            written += 1
        return _HEADER + "\n".join(lines) + "\n"

    def _terminal(self, pattern: Expression, shared: dict[str, str]) -> str:
        """A terminal's definition; `shared` takes up the named patterns that it refers to."""
        if not self._has_references(pattern):
            return f"/{_regex(pattern)}/"
        match pattern:
            case Rule(name):
                return shared.setdefault(name, f"N{len(shared)}")
            case Sequence(items):
                return " ".join(self._terminal(i, shared) for i in items)
            case Choice(items):
                return "(" + " | ".join(self._terminal(i, shared) for i in items) + ")"
            case Loop(item, low, high):
                return f"({self._terminal(item, shared)}){_count(low, high)}"
            case _:
                raise AssertionError("literals and classes refer to nothing")

    def _has_references(self, pattern: Expression) -> bool:
        known = self._refers.get(id(pattern))
        if known is None:
            known = isinstance(pattern, Rule) or any(map(self._has_references, parts(pattern)))
            self._refers[id(pattern)] = known
        return known


def _characters(body: Expression, terminals: Terminals) -> Expression:
    """`body` with a terminal for each character."""
    match body:
        case Literal(text):
            return seq(tuple(terminals.of(Class(charset.of(c))) for c in text))
        case Class():
            return terminals.of(body)
        case Sequence(items):
            return Sequence(tuple(_characters(i, terminals) for i in items))
        case Choice(items):
            return Choice(tuple(_characters(i, terminals) for i in items))
        case Loop(item, low, high):
            return loop(_characters(item, terminals), low, high)
        case Rule():
            return body


# --------------------------------------------------------------------------- text


def _rule(body: Expression, names: dict[str, str]) -> str:
    match body:
        case Rule(name):
            return names[name]
        case Sequence(items):
            return " ".join(_rule(i, names) for i in items) or '""'
        case Choice(items):
            return "(" + " | ".join(_rule(i, names) for i in items) + ")"
        case Loop(item, low, high):
            return f"({_rule(item, names)}){_count(low, high)}"
        case _:
            return '""'


def _count(low: int, high: int | None) -> str:
    short = {(0, 1): "?", (0, None): "*", (1, None): "+"}.get((low, high))
    return short or f"{{{low},{'' if high is None else high}}}"


def _regex(pattern: Expression) -> str:
    """A pattern that binds tighter than `|`, in the syntax of llguidance's regular expressions."""
    match pattern:
        case Literal(text):
            return "".join(map(_char, text)) or "(?:)"
        case Class(chars):
            return _class(chars)
        case Sequence(items):
            return "".join(map(_regex, items)) or "(?:)"
        case Choice(items):
            return "(?:" + "|".join(map(_regex, items)) + ")"
        case Loop(Class() as item, low, high):
            return _regex(item) + _count(low, high)
        case Loop(item, low, high):
            return f"(?:{_regex(item)}){_count(low, high)}"
        case Rule():
            raise AssertionError("references are written outside of regular expressions")


@functools.lru_cache(maxsize=1024)
def _class(chars: CharSet) -> str:
    return "[" + "".join(_range(low, high) for low, high in chars) + "]"


def _range(low: int, high: int) -> str:
    return _char(chr(low)) if low == high else f"{_char(chr(low))}-{_char(chr(high))}"


def _char(char: str) -> str:
    return char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}"

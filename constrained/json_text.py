"""JSON's own grammar, and strings whose content is a pattern, as grammar expressions.

Whitespace, where it is allowed at all, is at most one space, or one line break and an indentation
of at most 16 (eight levels of two), so that nothing can run away. Characters of a string may be
escaped: a character that a pattern wants is written raw where JSON allows it, else by its short
escape or as `\\u00XX`; where any character may stand, every escape may stand (surrogate pairs
included, lone surrogates not).
"""

from __future__ import annotations

import json
from typing import Any

from phloem.constrained import charset
from phloem.constrained.automaton import Automaton
from phloem.constrained.base import LimitExceeded
from phloem.constrained.charset import CharSet
from phloem.constrained.grammar_text import (
    COUNTED_LETTERS,
    GrammarWriter,
    char_class,
    choice,
    quote,
    sequence,
    write_pattern,
)
from phloem.constrained.pattern import Node as Pattern
from phloem.constrained.spec import Whitespace

MAX_INDENT = 16
MAX_COUNTED_CHARS = 2_000

_CONTROL: CharSet = ((0, 0x1F),)
_PLAIN = charset.subtract(charset.negate(_CONTROL), charset.of('"\\'))
_SHORT = {"\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
_CLOSE = quote('"')
_HEX = "[0-9A-Fa-f]"
# After a backslash: a short escape, or a code unit that is no surrogate, or a surrogate pair.
_ESCAPES = (
    '["\\\\/bfnrt]',
    f'"u" [0-9A-Ca-cEFef] {_HEX} {_HEX} {_HEX}',
    f'"u" [Dd] [0-7] {_HEX} {_HEX}',
    f'"u" [Dd] [89ABab] {_HEX} {_HEX} "\\\\u" [Dd] [C-Fc-f] {_HEX} {_HEX}',
)
_BACKSLASH = quote("\\")


class JsonText:
    """Writes JSON expressions into one grammar, in one style of whitespace."""

    def __init__(self, whitespace: Whitespace) -> None:
        self.writer = GrammarWriter()
        self.space = ""
        if whitespace is Whitespace.BOUNDED:
            self.space = self.writer.rule(f'" "? | "\\n" [ \\t]{{0,{MAX_INDENT}}}', "ws")
        self._value = ""
        self._rest = ""
        self._keys: dict[Automaton, str] = {}

    # ----------------------------------------------------------------- any JSON

    def value(self) -> str:
        """Any JSON value."""
        if not self._value:
            self._value = self.writer.reserve("value")
            number = '"-"? ("0" | [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+\\-]? [0-9] [0-9]?)?'
            options = [
                self.string(),
                number,
                '"true"',
                '"false"',
                '"null"',
                self.array(self._value),
                self.object(),
            ]
            self.writer.define(self._value, " | ".join(options))
        return self._value

    def string(self) -> str:
        """Any JSON string."""
        return self.writer.rule(sequence(_CLOSE, self._rest_of_string()), "string")

    def _rest_of_string(self) -> str:
        """Any characters up to the closing quote. Engines run this right-recursive form on cached
        masks; a loop over a choice that refers to a rule costs tens of milliseconds a token."""
        if not self._rest:
            self._rest = self.writer.reserve("chars")
            options = [_CLOSE, *(sequence(o, self._rest) for o in self._any_char())]
            self.writer.define(self._rest, " | ".join(options))
        return self._rest

    def _any_char(self) -> list[str]:
        """One character of a string, in any spelling."""
        return [char_class(_PLAIN), sequence(_BACKSLASH, self._escape())]

    def _escape(self) -> str:
        return self.writer.rule(" | ".join(_ESCAPES), "escape")

    def array(self, item: str) -> str:
        """Any array of `item`."""
        body = sequence(
            '"["', self.space, f"({item} ({self.comma()} {item})* {self.space})?", '"]"'
        )
        return self.writer.rule(body, "array")

    def object(self) -> str:
        """Any JSON object."""
        member = self.writer.rule(self.member(self.string(), self.value()), "member")
        return self.writer.rule(self.braces(f"{member} ({self.comma()} {member})*"), "object")

    def braces(self, members: str, *, optional: bool = True) -> str:
        """Members in braces; without `optional` there is at least one."""
        inside = sequence(members, self.space)
        return sequence('"{"', self.space, f"({inside})?" if optional else inside, '"}"')

    def comma(self) -> str:
        return sequence(self.space, '","', self.space)

    def member(self, key: str, value: str) -> str:
        return sequence(key, self.space, '":"', self.space, value)

    def literal(self, value: Any) -> str:
        """Exactly this value; whitespace is free inside arrays and objects, keys in its order."""
        match value:
            case list() if value:
                items = f" {self.comma()} ".join(self.literal(v) for v in value)
                return sequence('"["', self.space, items, self.space, '"]"')
            case dict() if value:
                members = f" {self.comma()} ".join(
                    self.member(self.literal(k), self.literal(v)) for k, v in value.items()
                )
                return self.braces(members, optional=False)
            case list() | dict():
                return sequence(quote(str(value)[0]), self.space, quote(str(value)[1]))
            case _:
                return quote(json.dumps(value, ensure_ascii=False))

    # ----------------------------------------------------------------- strings with content

    def leaf(self, chars: CharSet) -> str:
        """One character of `chars` inside a string, as one expression."""
        if chars == charset.ANY:
            # Flat on purpose: a group inside would become a rule, and loops over rules are slow.
            return choice([char_class(_PLAIN), *(f"{_BACKSLASH} {e}" for e in _ESCAPES)])
        return choice(self._options(chars))

    def _options(self, chars: CharSet) -> list[str]:
        if chars == charset.ANY:
            return self._any_char()
        options: list[str] = []
        plain = charset.intersect(chars, _PLAIN)
        if plain:
            options.append(char_class(plain))
        options += [quote("\\" + c) for c in '"\\' if charset.contains(chars, c)]
        options += [quote("\\" + e) for c, e in _SHORT.items() if charset.contains(chars, c)]
        rest = charset.subtract(charset.intersect(chars, _CONTROL), charset.of("".join(_SHORT)))
        codes = [c for low, high in rest for c in range(low, high + 1)]
        for row in (0, 1):
            digits = "".join(f"{c & 15:x}" for c in codes if c >> 4 == row)
            if digits:
                either = "".join(dict.fromkeys(digits + digits.upper()))
                options.append(sequence(quote(f"\\u00{row}"), char_class(charset.of(either))))
        return options

    def string_of(self, pattern: Pattern) -> str:
        """A string whose content matches the pattern."""
        content = write_pattern(pattern, self.leaf, self.writer)
        return self.writer.rule(sequence(_CLOSE, content, _CLOSE), "text")

    def string_of_length(self, low: int, high: int | None) -> str:
        """A string of `low` to `high` characters, an escape counting as one.

        Beyond the first 2,000 characters of a longer string, no escapes are possible.

        Raises:
            LimitExceeded: `low` is above 2,000.
        """
        if low > MAX_COUNTED_CHARS:
            raise LimitExceeded(f"minLength is {low}; at most {MAX_COUNTED_CHARS} is allowed")
        writer, escape = self.writer, self._escape()
        plain = char_class(_PLAIN)
        count = low if high is None else min(high, MAX_COUNTED_CHARS)
        if high is None:
            tail = self._rest_of_string()
        elif high > count:
            tail = writer.rule(f"{plain}{{0,{high - count}}} {_CLOSE}", "text")
        else:
            tail = writer.rule(_CLOSE, "text")
        for done in range(count - 1, -1, -1):
            end = f"{_CLOSE} | " if done >= low else ""
            tail = writer.rule(f"{end}{plain} {tail} | {_BACKSLASH} {escape} {tail}", "text")
        writer.counted += count * COUNTED_LETTERS
        return sequence(_CLOSE, tail)

    def string_in(self, machine: Automaton) -> str:
        """A string whose content the automaton accepts (it accepts something)."""
        known = self._keys.get(machine)
        if known is None:
            names = [self.writer.reserve("state") for _ in machine.edges]
            for state, name in enumerate(names):
                self.writer.define(name, self._state(machine, state, names))
            self.writer.counted += 2 * len(names)
            known = self.writer.rule(sequence(_CLOSE, names[0]), "text")
            self._keys[machine] = known
        return known

    def _state(self, machine: Automaton, state: int, names: list[str]) -> str:
        targets: dict[int, list[CharSet]] = {}
        for chars, target in machine.edges[state]:
            targets.setdefault(target, []).append(chars)
        options = [_CLOSE] if state in machine.accepting else []
        for target, sets in targets.items():
            options += [sequence(o, names[target]) for o in self._options(charset.union(*sets))]
        return " | ".join(options)

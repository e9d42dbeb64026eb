"""JSON's own grammar, and strings whose content is a pattern, as grammar expressions.

Whitespace is as the layout says, and always bounded: an indentation has at most 63 columns, and 31
where nobody asked for indented text.
Characters of a string may be escaped: a character that a pattern wants is written raw where JSON
allows it, else by its short escape or as `\\u00XX`; where any character may stand, every escape may
stand (surrogate pairs included, lone surrogates not).
"""

from __future__ import annotations

import json
from typing import Any

from phloem.constrained import charset
from phloem.constrained.automaton import Automaton, from_pattern
from phloem.constrained.base import LimitExceeded
from phloem.constrained.charset import CharSet
from phloem.constrained.grammar_text import (
    COUNTED_LETTERS,
    MAX_UNROLLED,
    GrammarWriter,
    char_class,
    choice,
    quote,
    rich_states,
    sequence,
    write_machine,
    write_pattern,
)
from phloem.constrained.pattern import Node as Pattern
from phloem.constrained.pattern import counts
from phloem.constrained.spec import Whitespace

# Columns in eights: engines keep a mask for each count, so 63 single ones would cost megabytes.
_FEW_COLUMNS = "([ \\t]{8}){0,3} [ \\t]{0,7}"
_COLUMNS = "([ \\t]{8}){0,7} [ \\t]{0,7}"
_EVEN_COLUMNS = '"        "{0,7} "  "{0,3}'
_SPACE = {
    Whitespace.COMPACT: "",
    Whitespace.BOUNDED: f'" "? | "\\n" {_FEW_COLUMNS}',
    Whitespace.SPACED: "",
    Whitespace.INDENTED: f'("\\n" {_EVEN_COLUMNS})?',
    Whitespace.ANY: f'[ \\t]{{0,8}} ("\\r"? "\\n" {_COLUMNS}){{0,2}}',
}
"""What may stand inside brackets next to them and, unless the layout fixes it, around commas and
colons."""
MAX_COUNTED_CHARS = 2_000
MAX_RICH = 8
MANY_CHARS = 100_000

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
    """Writes JSON expressions into one grammar, in one layout."""

    def __init__(self, whitespace: Whitespace) -> None:
        self.writer = GrammarWriter()
        space = _SPACE[whitespace]
        self.space = self.writer.rule(space, "ws") if space else ""
        self._comma = sequence(self.space, '","', self.space)
        self._colon = sequence(self.space, '":"', self.space)
        if whitespace is Whitespace.SPACED:
            self._comma, self._colon = '", "', '": "'
        elif whitespace is Whitespace.INDENTED:
            self._comma = sequence('","', self.writer.rule(f'"\\n" {_EVEN_COLUMNS}', "line"))
            self._colon = '": "'
        self._value = ""
        self._rest = ""
        self._keys: dict[Automaton, str] = {}
        self._spellings: dict[CharSet, list[str]] = {}

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
        return self._comma

    def member(self, key: str, value: str) -> str:
        return sequence(key, self._colon, value)

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
        known = self._spellings.get(chars)
        if known is None:
            known = self._spellings[chars] = self._spell(chars)
        return known

    def _spell(self, chars: CharSet) -> list[str]:
        """The ways to write one character of `chars`."""
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
        machine = _small_machine(pattern)
        if machine is not None:
            return self.string_in(machine)
        content = write_pattern(pattern, self.leaf, self.writer)
        return self.writer.rule(sequence(_CLOSE, content, _CLOSE), "text")

    def string_of_length(self, low: int, high: int | None) -> str:
        """A string of `low` to `high` characters, an escape counting as one.

        2,000 characters are counted one by one. What must come before those has no escapes; of
        what may come after them each escape takes up to a sixteenth, or of a very long string, a
        2,048th.
        """
        writer, escape = self.writer, self._escape()
        plain = char_class(_PLAIN)
        lead = max(low - MAX_COUNTED_CHARS, 0)
        low, high = low - lead, None if high is None else high - lead
        count = low if high is None else min(high, MAX_COUNTED_CHARS)
        tail = self._rest_of_string() if high is None else self._room(high - count)
        for done in range(count - 1, -1, -1):
            end = f"{_CLOSE} | " if done >= low else ""
            tail = writer.rule(f"{end}{plain} {tail} | {_BACKSLASH} {escape} {tail}", "text")
        writer.counted += count * COUNTED_LETTERS
        return sequence(_CLOSE, f"{plain}{{{lead}}}" if lead else "", tail)

    def _room(self, room: int) -> str:
        """At most `room` characters and the closing quote. A run of plain characters with the
        escape after it counts as a whole number of steps."""
        if room > MANY_CHARS:
            return self._much_room(room)
        plain, step = char_class(_PLAIN), max(-(-room // 16), 1)
        rules: list[str] = []
        for steps in range(room // step + 1):
            left = room if steps == room // step else steps * step
            options = [f"{plain}{{0,{left}}} {_CLOSE}" if left else _CLOSE]
            for whole in range(steps):
                run = (whole * step, whole * step + step - 1)
                characters = f"{plain}{{{run[0]},{run[1]}}}" if run[1] else ""
                rest = rules[steps - whole - 1]
                options.append(sequence(characters, _BACKSLASH, self._escape(), rest))
            rules.append(self.writer.rule(" | ".join(options), "room"))
        return rules[-1]

    def _much_room(self, room: int) -> str:
        """As `_room`: 1,024 escapes, each after at most a 2,048th of the room."""
        plain = char_class(_PLAIN)
        run = sequence(f"{plain}{{0,{room // 2048 - 1}}}", _BACKSLASH, self._escape())
        runs = f"{self.writer.rule(run, 'run')}{{0,1024}}"
        return self.writer.rule(
            f"{plain}{{0,{room}}} {_CLOSE} | {runs} {plain}{{0,{room // 2}}} {_CLOSE}", "room"
        )

    def string_in(self, machine: Automaton) -> str:
        """A string whose content the automaton accepts (it accepts something)."""
        known = self._keys.get(machine)
        if known is None:
            first = write_machine(machine, self._options, self.writer, _CLOSE)
            known = self.writer.rule(sequence(_CLOSE, first), "text")
            self._keys[machine] = known
        return known


def _small_machine(pattern: Pattern) -> Automaton | None:
    """The pattern's automaton, unless it is large or a pattern that engines count themselves.
    Masks of a deterministic grammar cost least, but each of its states has one of its own."""
    if isinstance(pattern, Automaton):
        return pattern
    if counts(pattern) > MAX_UNROLLED:
        return None
    try:
        machine = from_pattern(pattern)
    except LimitExceeded:
        return None
    return machine if rich_states(machine) <= MAX_RICH else None

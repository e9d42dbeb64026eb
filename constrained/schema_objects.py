"""Objects as grammar rules: declared members in their order, then other members.

A declared member comes at its place or, when it is optional, not at all; so no key can return as
an extra one. Keys of other members are any string but the declared names, in every spelling, and
are told apart by the `patternProperties` that they match. That such a key is not repeated cannot
be expressed; where it would matter (`minProperties` above what is required plus one) the schema
is refused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from phloem.constrained import automaton
from phloem.constrained.automaton import Automaton
from phloem.constrained.base import LimitExceeded, UnsupportedKeyword
from phloem.constrained.grammar_text import EMPTY, choice, sequence
from phloem.constrained.json_text import JsonText
from phloem.constrained.pattern import ANY_TEXT
from phloem.constrained.schema_shapes import Analysis
from phloem.constrained.shape_relations import member, pattern_automaton, text_automaton
from phloem.constrained.shapes import Conj, Object, Text, Value, conj

MAX_KEY_CLASSES = 64
MAX_LISTED_NAMES = 64
MAX_LISTED_STEPS = 4_096


@dataclasses.dataclass(frozen=True, slots=True)
class Extra:
    """Members that are not declared: keys in `keys` (None: any) with values in `value`."""

    keys: Automaton | None
    value: Conj


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """An object's members worked out: declared ones that may appear, in order, and others."""

    declared: tuple[tuple[str, Conj], ...]
    required: frozenset[str]
    extras: tuple[Extra, ...]
    low: int
    high: int | None
    impossible: bool
    path: str


def lay_out(shape: Object, analysis: Analysis) -> Layout:
    """Work out a shape's members.

    Raises:
        UnsupportedKeyword: a keyword of the members' schemas is refused.
        LimitExceeded: too many classes of keys.
    """
    names = key_language(shape.names, shape.path, analysis)
    declared: list[tuple[str, Conj]] = []
    impossible = False
    for name in shape.declared():
        value = analysis.canonical(member(shape, name))
        if analysis.shapes(value) and (names is None or names.accepts(name)):
            declared.append((name, value))
        else:
            impossible |= name in shape.required
    extras = _extras(shape, names, analysis)
    if shape.low > len(shape.required) + 1:
        listed = _listed(extras)
        if listed is not None:  # each at its place, so that none comes twice
            declared, extras = declared + listed, ()
    return Layout(
        declared=tuple(declared),
        required=frozenset(shape.required),
        extras=extras,
        low=shape.low,
        high=shape.high,
        impossible=impossible,
        path=shape.path,
    )


def _listed(extras: tuple[Extra, ...]) -> list[tuple[str, Conj]] | None:
    """The members of finitely many other names; None when there are many."""
    found: list[tuple[str, Conj]] = []
    for extra in extras:
        names = None if extra.keys is None else _words(extra.keys)
        if names is None or len(found) + len(names) > MAX_LISTED_NAMES:
            return None
        found += [(name, extra.value) for name in names]
    return found


def _words(machine: Automaton) -> list[str] | None:
    """All strings of a language, by length; None when there are many."""
    found: list[str] = []
    pending = [(0, "")]
    for state, text in pending:
        if state in machine.accepting:
            found.append(text)
        for chars, target in machine.edges[state]:
            letters = [
                chr(c) for low, high in chars for c in range(low, high + 1)[: MAX_LISTED_NAMES + 1]
            ]
            pending += [(target, text + letter) for letter in letters]
        if len(pending) > MAX_LISTED_STEPS or len(found) > MAX_LISTED_NAMES:
            return None
    return found


def key_language(names: tuple[Conj, ...], path: str, analysis: Analysis) -> Automaton | None:
    """The keys that satisfy all of `names`; None when any key does.

    Raises:
        LimitExceeded: they need too many states.
    """
    found: Automaton | None = None
    for nodes in names:
        strings = analysis.shapes(analysis.canonical(nodes))
        if Text() in strings:
            continue
        words = [s.value for s in strings if isinstance(s, Value) and isinstance(s.value, str)]
        machine = automaton.words(words)
        for text in strings:
            if isinstance(text, Text):
                machine = _union(machine, text_automaton(text))
        found = machine if found is None else automaton.intersection(found, machine)
    return found


def _union(left: Automaton, right: Automaton) -> Automaton:
    if left.is_empty or right.is_empty:
        return right if left.is_empty else left
    anything = automaton.from_pattern(ANY_TEXT)
    neither = automaton.difference(automaton.difference(anything, left), right)
    return automaton.difference(anything, neither)


def _extras(shape: Object, names: Automaton | None, analysis: Analysis) -> tuple[Extra, ...]:
    rest = conj(n for layer in shape.layers for n in layer.rest)
    patterns = [(i, p, c) for i, layer in enumerate(shape.layers) for p, c in layer.patterns]
    if names is not None and names.is_empty:
        return ()
    if not patterns and not analysis.shapes(analysis.canonical(rest)):
        return ()
    declared = shape.declared()
    if not patterns and not declared:
        return (Extra(names, analysis.canonical(rest)),)
    language = names if names is not None else automaton.from_pattern(ANY_TEXT)
    if declared:
        language = automaton.difference(language, automaton.words(declared))
    classes: list[tuple[Automaton, tuple[tuple[int, Conj], ...]]] = [(language, ())]
    for layer, pattern, value in patterns:
        machine, others = pattern_automaton(pattern.matched), pattern_automaton(pattern.unmatched)
        split: list[tuple[Automaton, tuple[tuple[int, Conj], ...]]] = []
        for keys, matched in classes:
            split.append((automaton.intersection(keys, machine), (*matched, (layer, value))))
            split.append((automaton.intersection(keys, others), matched))
        classes = [c for c in split if not c[0].is_empty]
        if len(classes) > MAX_KEY_CLASSES:
            raise LimitExceeded(
                f"patternProperties make more than {MAX_KEY_CLASSES} classes of keys",
                path=shape.path,
            )
    found: list[Extra] = []
    for keys, matched in classes:
        value = _class_value(shape, matched, analysis)
        if not keys.is_empty and analysis.shapes(value):
            found.append(Extra(keys, value))
    return tuple(found)


def _class_value(shape: Object, matched: tuple[tuple[int, Conj], ...], analysis: Analysis) -> Conj:
    nodes: list[Conj] = []
    for i, layer in enumerate(shape.layers):
        own = [value for index, value in matched if index == i]
        nodes += own or [layer.rest]
    return analysis.canonical(conj(n for c in nodes for n in c))


def needed_members(layout: Layout) -> int:
    """How many members have to be counted; 0 where the required ones are enough.

    Raises:
        UnsupportedKeyword: undeclared members have to meet `minProperties`.
    """
    if layout.low <= len(layout.required):
        return 0
    if layout.extras and layout.low > len(layout.required) + 1:
        raise UnsupportedKeyword(
            "minProperties that undeclared members have to meet is not supported",
            path=layout.path + "/minProperties",
        )
    return layout.low


class ObjectWriter:
    """Writes one layout. `write_value` writes the values of members."""

    def __init__(self, text: JsonText, layout: Layout, write_value: Callable[[Conj], str]) -> None:
        self._text = text
        self._layout = layout
        write = text.writer
        self._members = [
            write.rule(text.member(text.literal(name), write_value(value)), "member")
            for name, value in layout.declared
        ]
        extras = [
            text.member(
                text.string() if extra.keys is None else text.string_in(extra.keys),
                write_value(extra.value),
            )
            for extra in layout.extras
        ]
        self._extra = write.rule(choice(extras), "extra") if extras else ""
        self._needed = needed_members(layout)
        self._tails: dict[tuple[int, int], str] = {}

    def write(self) -> str:
        """The object; the caller has made sure that it is possible."""
        high = self._layout.high
        if high is None or (high >= len(self._members) and not self._extra):
            high = None
        body = self._first(high)
        if body is None:
            return sequence('"{"', self._text.space, '"}"')
        optional = not self._layout.required and self._needed == 0
        return self._text.braces(body, optional=optional)

    def _first(self, high: int | None) -> str | None:
        """All members from the first on; None when there may be none but the empty object."""
        if high == 0:
            return None
        # From the last member on, so that no tail waits for all behind it on the stack.
        for index in range(len(self._members), 0, -1):
            for count in range(1, min(index, max(self._needed, 1) if high is None else high) + 1):
                self._tail(index, count, high)
        options: list[str] = []
        for i, one in enumerate(self._members):
            options.append(sequence(one, self._tail(i + 1, 1, high)))
            if self._layout.declared[i][0] in self._layout.required:
                break
        else:
            if self._extra:
                options.append(sequence(self._extra, self._tail(len(self._members), 1, high)))
        options = [o for o in options if _IMPOSSIBLE not in o]
        return choice(options) if options else None

    def _tail(self, index: int, count: int, high: int | None) -> str:
        """What may follow when members before `index` are decided and `count` were written."""
        if high is None:
            count = min(count, max(self._needed, 1))
        known = self._tails.get((index, count))
        if known is None:
            body = self._tail_body(index, count, high)
            known = body if body in (EMPTY, _IMPOSSIBLE) else self._text.writer.rule(body, "rest")
            self._tails[index, count] = known
        return known

    def _tail_body(self, index: int, count: int, high: int | None) -> str:
        comma = self._text.comma()
        full = high is not None and count >= high
        if index == len(self._members):
            return self._extras_body(count, high)
        required = self._layout.declared[index][0] in self._layout.required
        one = sequence(comma, self._members[index])
        if high is None and count >= self._needed:
            rest = self._tail(index + 1, count, high)
            return sequence(one if required else f"({one})?", rest)
        options = []
        if not full:
            taken = self._tail(index + 1, count + 1, high)
            options += [] if taken == _IMPOSSIBLE else [sequence(one, taken)]
        if not required:
            left = self._tail(index + 1, count, high)
            options += [] if left == _IMPOSSIBLE else [left]
        return choice(options) if options else _IMPOSSIBLE

    def _extras_body(self, count: int, high: int | None) -> str:
        missing = max(self._needed - count, 0)
        room = None if high is None else high - count
        if not self._extra or room == 0:
            return EMPTY if missing == 0 else _IMPOSSIBLE
        one = self._text.writer.rule(sequence(self._text.comma(), self._extra), "extra")
        if room is None:
            return (
                f"{one}*" if missing == 0 else f"{one}+" if missing == 1 else f"{one}{{{missing},}}"
            )
        return _IMPOSSIBLE if room < missing else f"{one}{{{missing},{room}}}"


_IMPOSSIBLE = "<impossible>"

"""Writing grammars: the EBNF text that engines compile, built rule by rule.

The dialect is the common GBNF one: `name ::= expression`, quoted literals, `[…]` classes,
`( )`, `|`, `* + ? {m,n}`. Bodies that are written twice become one rule.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from phloem.constrained import charset
from phloem.constrained.base import LimitExceeded
from phloem.constrained.charset import CharSet
from phloem.constrained.pattern import Alt, Automaton, Chars, Node, Repeat, Seq

MAX_RULES = 20_000
MAX_GRAMMAR_CHARS = 4 << 20
MAX_UNROLLED = 8
COUNTED_LETTERS = 8
"""Weight of one count of a class that holds many letters, against 1 for digits or signs: nearly
every token of a vocabulary has to be tried in that state."""
POOR_STATES = 32
"""States of an automaton that weigh as much as one count of a class of digits: few tokens have to
be tried in them, if they do not hold many letters."""

EMPTY = '""'
Leaf = Callable[[CharSet], str]
"""Writes one character of a set, as an expression that binds tighter than `|`."""
MANY_LETTERS = 10
_LETTERS = ((ord("a"), ord("z")),)


def quote(text: str) -> str:
    """A literal that matches exactly `text`."""
    return '"' + "".join(_escape(c, '"\\') for c in text) + '"'


def char_class(chars: CharSet) -> str:
    """A class that matches one character of `chars`. Never a negated one: xgrammar reads that as
    all code points but these, surrogates included."""
    return "[" + "".join(_class_range(low, high) for low, high in chars) + "]"


def _class_range(low: int, high: int) -> str:
    first, last = (_escape(chr(c), '\\]-^["') for c in (low, high))
    if low == high:
        return first
    return first + last if high == low + 1 else f"{first}-{last}"


def _escape(char: str, special: str) -> str:
    code = ord(char)
    if 0x20 <= code < 0x7F and char not in special:
        return char
    # Not \xHH: engines differ in how many digits they read after it.
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def sequence(*parts: str) -> str:
    """Parts one after the other; empty ones vanish. Each part must bind tighter than `|`."""
    return " ".join(p for p in parts if p and p != EMPTY) or EMPTY


def choice(options: list[str]) -> str:
    """One of the options, in parentheses when there are several."""
    unique = list(dict.fromkeys(options))
    return unique[0] if len(unique) == 1 else "(" + " | ".join(unique) + ")"


def repeat(item: str, low: int, high: int | None) -> str:
    """`item`, an atom, `low` to `high` times."""
    match (low, high):
        case (_, 0):
            return EMPTY
        case (1, 1):
            return item
        case (0, 1):
            return item + "?"
        case (0, None):
            return item + "*"
        case (1, None):
            return item + "+"
        case (_, None):
            return f"{item}{{{low},}}"
        case _:
            return f"{item}{{{low}}}" if low == high else f"{item}{{{low},{high}}}"


@dataclasses.dataclass(frozen=True, slots=True)
class Deferral:
    """Free text that comes first (see `phloem.constrained.spec.Deferred`)."""

    end: str
    begin: str = ""
    budget: int | None = None
    seen: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class LoweredGrammar:
    """A grammar and the name of its root rule. `counted` weighs its counted repetitions: many of
    them make an eager compile slow."""

    text: str
    counted: int
    root: str = "root"
    is_tag: bool = False
    """The text is a structural tag, as JSON."""
    ambiguous: str = ""
    """Why each token of a text may cost more than the one before, if it may."""
    prefix: str = ""
    """What the derived texts begin with and the output does not: it is there already."""
    deferral: Deferral | None = None
    """The free text before it. Without a `text`, what follows is free, too."""


class GrammarWriter:
    """Collects rules and gives each body one name."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        self._rules: dict[str, str] = {}
        self._chars = 0
        self.counted = 0
        """States that counted repeats make, each of which an engine has to compile."""
        self.machines: dict[tuple[Automaton, Leaf], str] = {}
        """Rules of automata inside patterns, by how their characters are written."""

    @property
    def rules(self) -> int:
        """How many rules there are."""
        return len(self._rules)

    def rule(self, body: str, hint: str = "r") -> str:
        """The name of a rule with this body, new or known.

        Raises:
            LimitExceeded: the grammar became too large.
        """
        known = self._names.get(body)
        if known is not None:
            return known
        name = self.reserve(hint)
        self.define(name, body)
        self._names[body] = name
        return name

    def reserve(self, hint: str = "r") -> str:
        """A fresh name, to be defined later (for recursion)."""
        name = f"{hint}{len(self._rules)}"
        self._rules[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Set the body of a reserved name."""
        self._rules[name] = body
        self._chars += len(body)
        if len(self._rules) > MAX_RULES or self._chars > MAX_GRAMMAR_CHARS:
            raise LimitExceeded(
                f"the constraint expands to more than {MAX_RULES} rules"
                f" or {MAX_GRAMMAR_CHARS} characters of grammar"
            )

    def finish(self, root: str) -> LoweredGrammar:
        """The whole grammar; `root` is an expression."""
        lines = [f"root ::= {root}"]
        lines += [f"{name} ::= {body}" for name, body in self._rules.items()]
        return LoweredGrammar("\n".join(lines) + "\n", self.counted)


def write_pattern(node: Node, leaf: Leaf, writer: GrammarWriter) -> str:
    """A closed pattern as an expression that binds tighter than `|`."""
    match node:
        case Chars(chars):
            return leaf(chars)
        case Seq(items):
            return sequence(*(write_pattern(i, leaf, writer) for i in items))
        case Alt(items):
            return choice([write_pattern(i, leaf, writer) for i in items])
        case Repeat(item, low, high):
            body = write_pattern(item, leaf, writer)
            return _write_repeat(item, body, low, high, writer)
        case Automaton():
            known = writer.machines.get((node, leaf))
            if known is None:
                known = write_machine(node, lambda chars: [leaf(chars)], writer)
                writer.machines[node, leaf] = known
            return known
        case _:
            raise AssertionError("anchors are gone once a pattern is closed")


def write_machine(
    machine: Automaton,
    options: Callable[[CharSet], list[str]],
    writer: GrammarWriter,
    end: str = EMPTY,
) -> str:
    """The name of a rule for what an automaton accepts, and then `end`, an atom. `options` are
    the ways to write one character of a set."""
    names = [writer.reserve("state") for _ in machine.edges]
    for state, row in enumerate(machine.edges):
        ways = [end] if state in machine.accepting else []
        ways += [sequence(o, names[target]) for chars, target in row for o in options(chars)]
        writer.define(names[state], " | ".join(ways))
    writer.counted += rich_states(machine) * COUNTED_LETTERS + len(names) // POOR_STATES
    return names[0]


def rich_states(machine: Automaton) -> int:
    """How many states go on with many letters: those in which most tokens have to be tried."""
    return sum(any(_many_letters(chars) for chars, _ in row) for row in machine.edges)


def _write_repeat(item: Node, body: str, low: int, high: int | None, writer: GrammarWriter) -> str:
    if (low, high) == (0, 1) or (high is None and low < 2):
        return repeat(_atom(body), low, high)
    writer.counted += (high or low) * (COUNTED_LETTERS if _has_letters(item) else 1)
    if body.startswith("[") and body.endswith("]") and body.count("]") == 1:
        return repeat(body, low, high)
    if not isinstance(item, Chars) and (high or low) > MAX_UNROLLED:
        return repeat(writer.rule(body, "p"), low, high)
    body = writer.rule(body, "p") if not isinstance(item, Chars) else body
    # Engines count a choice of characters slowly: a chain of rules has cached masks instead.
    rest = repeat(_atom(body), 0, None) if high is None else EMPTY
    for _ in range(high - low if high is not None else 0):
        rest = writer.rule(f"{EMPTY} | {sequence(body, rest)}", "p")
    for _ in range(low):
        rest = writer.rule(sequence(body, rest), "p")
    return rest


def _has_letters(item: Node) -> bool:
    return isinstance(item, Chars) and _many_letters(item.chars)


def _many_letters(chars: CharSet) -> bool:
    letters = charset.intersect(chars, _LETTERS)
    return sum(high - low + 1 for low, high in letters) > MANY_LETTERS


def _atom(body: str) -> str:
    """`body` such that a quantifier binds to all of it."""
    return body if body.isalnum() else f"({body})"

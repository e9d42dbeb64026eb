"""Checks of a user's grammar before an engine sees it.

The dialect is GBNF: `name ::= expression`, literals, `[…]` classes, groups, `|`, `* + ? {m,n}`,
`#` comments. The text itself goes to the engine unchanged; here it is parsed to refuse, with a
reason, what is broken (undefined rules, no root, unclosed literals), what can never end, what
makes an Earley parser slower with every token (loops over the empty string, a rule that is itself
again without reading anything), engine extensions, and what is too large.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from phloem.constrained.base import LimitExceeded, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.grammar_text import COUNTED_LETTERS, LoweredGrammar

MAX_GRAMMAR_BYTES = 64 << 10
MAX_RULES = 2_000
MAX_DEPTH = 64
MAX_REPEAT = 10_000

_TOKEN = re.compile(
    r"""(?P<space>(?:\s|\#[^\n]*)+)
    |(?P<define>::=)
    |(?P<literal>"(?:[^"\\\n]|\\.)*")
    |(?P<class>\[\^?(?:[^\]\\\n]|\\.)*\])
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    |(?P<count>\{\s*[0-9]+\s*(?:,\s*[0-9]*\s*)?\})
    |(?P<sign>[()|*+?])""",
    re.VERBOSE,
)
_EXTENSIONS = {"TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken", "AnyTokens"}


@dataclasses.dataclass(frozen=True, slots=True)
class Terminal:
    """A literal or a class; `empty` for the literal that matches nothing."""

    empty: bool


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
    item: Expression
    low: int
    high: int | None


Expression = Terminal | Rule | Sequence | Choice | Loop


def check_ebnf(text: str, root: str = "root") -> LoweredGrammar:
    """The grammar, checked.

    Raises:
        ConstraintError: see the module.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise LimitExceeded(
            f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
        )
    rules = _Parser(text).rules()
    if root not in rules:
        raise MalformedConstraint(f"the grammar has no rule {root!r}", code="no_root")
    for name, body in rules.items():
        for reference in _references(body):
            if reference not in rules:
                raise MalformedConstraint(
                    f"rule {name!r} refers to {reference!r}, which is not defined",
                    code="undefined_rule",
                )
    _check_endings(rules, root)
    nullable = _nullable_rules(rules)
    for name, body in rules.items():
        _check_loops(name, body, nullable)
    _check_cycles(rules, nullable)
    counted = COUNTED_LETTERS * sum(_counted(body) for body in rules.values())
    return LoweredGrammar(text, counted, root)


# --------------------------------------------------------------------------- parsing


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._depth = 0

    def rules(self) -> dict[str, Expression]:
        found: dict[str, Expression] = {}
        while self._at < len(self._tokens):
            kind, name, line = self._tokens[self._at]
            if kind != "name" or self._kind(1) != "define":
                raise _malformed("expected a rule, name ::= …", line)
            self._at += 2
            if name in found:
                raise _malformed(f"rule {name!r} is defined twice", line)
            if len(found) >= MAX_RULES:
                raise LimitExceeded(f"the grammar has more than {MAX_RULES} rules")
            found[name] = self._choice()
        return found

    def _kind(self, ahead: int = 0) -> str:
        index = self._at + ahead
        return self._tokens[index][0] if index < len(self._tokens) else "end"

    def _sign(self, sign: str) -> bool:
        if self._kind() == "sign" and self._tokens[self._at][1] == sign:
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
            line = self._tokens[min(self._at, len(self._tokens) - 1)][2]
            raise _malformed('an empty alternative; write "" for the empty string', line)
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _quantified(self) -> Expression | None:
        item = self._atom()
        while item is not None:
            if self._sign("*"):
                item = Loop(item, 0, None)
            elif self._sign("+"):
                item = Loop(item, 1, None)
            elif self._sign("?"):
                item = Loop(item, 0, 1)
            elif self._kind() == "count":
                item = self._counted_loop(item)
            else:
                break
        return item

    def _counted_loop(self, item: Expression) -> Expression:
        _, text, line = self._tokens[self._at]
        self._at += 1
        low_text, comma, high_text = text[1:-1].replace(" ", "").partition(",")
        if len(low_text) > 6 or len(high_text) > 6:
            raise LimitExceeded(f"a repeat count is above {MAX_REPEAT} (line {line})")
        low = int(low_text)
        high = low if not comma else int(high_text) if high_text else None
        if max(low, high or 0) > MAX_REPEAT:
            raise LimitExceeded(f"a repeat count is above {MAX_REPEAT} (line {line})")
        if high is not None and high < low:
            raise _malformed("the repeat's bounds are out of order", line)
        return Loop(item, low, high)

    def _atom(self) -> Expression | None:
        kind, text, line = self._tokens[self._at] if self._kind() != "end" else ("end", "", 0)
        if kind in ("literal", "class"):
            self._at += 1
            return Terminal(text == '""')
        if kind == "name":
            if self._kind(1) == "define":
                return None
            self._at += 1
            if text in _EXTENSIONS:
                raise UnsupportedKeyword(f"the grammar extension {text} is not supported")
            return Rule(text)
        if not self._sign("("):
            if kind in ("count", "define") or text in ("*", "+", "?"):
                raise _malformed(
                    "nothing to repeat" if kind != "define" else "unexpected ::=", line
                )
            return None
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise LimitExceeded(f"groups nest deeper than {MAX_DEPTH} levels")
        inside = self._choice()
        if not self._sign(")"):
            raise _malformed("missing )", line)
        self._depth -= 1
        return inside


def _tokens(text: str) -> Iterator[tuple[str, str, int]]:
    at = 0
    line = 1
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            what = {'"': "an unclosed literal", "[": "an unclosed class"}.get(
                text[at], f"unexpected character {text[at]!r}"
            )
            raise _malformed(what, line)
        kind = match.lastgroup or ""
        if kind != "space":
            yield kind, match.group(), line
        line += match.group().count("\n")
        at = match.end()


def _malformed(what: str, line: int) -> MalformedConstraint:
    return MalformedConstraint(f"invalid grammar: {what} (line {line})", code="invalid_grammar")


# --------------------------------------------------------------------------- analysis


def _parts(body: Expression) -> tuple[Expression, ...]:
    match body:
        case Sequence(items) | Choice(items):
            return items
        case Loop(item):
            return (item,)
        case _:
            return ()


def _references(body: Expression) -> Iterator[str]:
    if isinstance(body, Rule):
        yield body.name
    for part in _parts(body):
        yield from _references(part)


def _counted(body: Expression) -> int:
    own = max(body.low, body.high or 0) if isinstance(body, Loop) else 0
    return (own if own > 1 else 0) + sum(map(_counted, _parts(body)))


def _ends(body: Expression, known: set[str]) -> bool:
    """Whether `body` derives some finite string, given rules that do."""
    match body:
        case Rule(name):
            return name in known
        case Sequence(items):
            return all(_ends(i, known) for i in items)
        case Choice(items):
            return any(_ends(i, known) for i in items)
        case Loop(item, low):
            return low == 0 or _ends(item, known)
        case _:
            return True


def _nullable(body: Expression, known: set[str]) -> bool:
    """Whether `body` derives the empty string, given rules that do."""
    match body:
        case Terminal(empty):
            return empty
        case Rule(name):
            return name in known
        case Sequence(items):
            return all(_nullable(i, known) for i in items)
        case Choice(items):
            return any(_nullable(i, known) for i in items)
        case Loop(item, low):
            return low == 0 or _nullable(item, known)


def _check_endings(rules: dict[str, Expression], root: str) -> None:
    known: set[str] = set()
    while grown := {n for n, body in rules.items() if n not in known and _ends(body, known)}:
        known |= grown
    if root not in known:
        raise MalformedConstraint(f"rule {root!r} can never end", code="unsatisfiable")


def _nullable_rules(rules: dict[str, Expression]) -> set[str]:
    known: set[str] = set()
    while grown := {n for n, body in rules.items() if n not in known and _nullable(body, known)}:
        known |= grown
    return known


def _check_loops(name: str, body: Expression, nullable: set[str]) -> None:
    if isinstance(body, Loop) and body.high is None and _nullable(body.item, nullable):
        raise UnsupportedKeyword(
            f"rule {name!r} repeats without bound something that may be empty",
            code="ambiguous_grammar",
        )
    for part in _parts(body):
        _check_loops(name, part, nullable)


def _alone(body: Expression, nullable: set[str]) -> Iterator[str]:
    """Rules that `body` may be, all else being empty."""
    match body:
        case Rule(name):
            yield name
        case Sequence(items):
            for i, item in enumerate(items):
                if all(_nullable(o, nullable) for j, o in enumerate(items) if j != i):
                    yield from _alone(item, nullable)
        case Choice(items):
            for item in items:
                yield from _alone(item, nullable)
        case Loop(item, low):
            if low <= 1 or _nullable(item, nullable):
                yield from _alone(item, nullable)
        case _:
            return


def _check_cycles(rules: dict[str, Expression], nullable: set[str]) -> None:
    edges = {name: set(_alone(body, nullable)) for name, body in rules.items()}
    for name in rules:
        seen: set[str] = set()
        pending = list(edges[name])
        while pending:
            target = pending.pop()
            if target == name:
                raise UnsupportedKeyword(
                    f"rule {name!r} may be itself without reading anything",
                    code="ambiguous_grammar",
                )
            if target not in seen:
                seen.add(target)
                pending.extend(edges[target])

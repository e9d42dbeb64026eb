"""The regular parts of a grammar as patterns, shared through names where they are large.

llguidance reads terminals as regular expressions and matches them by derivatives: a counted loop
costs it nothing, whereas rules cost Earley items. So rules that no recursion needs are folded into
patterns: a rule that ends in itself becomes a loop, and a chain of rules that counts (as
`grammar_text` writes them for engines that count slowly) becomes a counted loop again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from phloem.constrained import charset, graphs
from phloem.constrained.ebnf_tree import (
    Choice,
    Class,
    Expression,
    Literal,
    Loop,
    Rule,
    Rules,
    Sequence,
    references,
)

NAMED_SIZE = 24
MAX_NESTING = 400
MAX_ELIMINATED = 2_000


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """`turn` up to `count` times and then `rest`, or, unless `end` is None, fewer times and then
    `end`."""

    turn: Expression
    end: Expression | None
    count: int
    rest: Expression

    def pattern(self) -> Expression:
        whole = seq((loop(self.turn, self.count, self.count), self.rest))
        if self.end is None:
            return whole
        if self.end == self.rest:
            return seq((loop(self.turn, 0, self.count), self.end))
        return Choice((seq((loop(self.turn, 0, self.count - 1), self.end)), whole))


def seq(items: tuple[Expression, ...]) -> Expression:
    """One after the other, nested sequences flattened."""
    flat: list[Expression] = []
    for item in items:
        flat += item.items if isinstance(item, Sequence) else (item,)
    return flat[0] if len(flat) == 1 else Sequence(tuple(flat))


def loop(item: Expression, low: int, high: int | None) -> Expression:
    """`low` to `high` times, which may be no time or once."""
    if high == 0:
        return Literal("")
    return item if (low, high) == (1, 1) else Loop(item, low, high)


class RegularRules:
    """Which rules are regular, and their patterns. `named` holds the shared ones by name."""

    def __init__(self, rules: Rules) -> None:
        self.named: dict[str, Expression] = {}
        self._patterns: dict[str, Expression | None] = {}
        self._sizes: dict[str, tuple[int, int, bool]] = {}
        self._runs: dict[str, _Run] = {}
        named = {name: dict.fromkeys(references(body)) for name, body in rules.items()}
        for component in graphs.components(rules, named.__getitem__):
            if len(component) == 1 and component[0] not in named[component[0]]:
                name = component[0]
                self._keep(name, self._chain(name, rules[name]) or self.pattern(rules[name]))
            else:
                self._solve(component, rules)

    def pattern(self, body: Expression) -> Expression | None:
        """The pattern of an expression; None if it needs recursion."""
        match body:
            case Literal() | Class():
                return body
            case Rule(name):
                return self._patterns.get(name)
            case Sequence(items) | Choice(items):
                found = [self.pattern(i) for i in items]
                inside = tuple(f for f in found if f is not None)
                if len(inside) < len(found):
                    return None
                return seq(inside) if isinstance(body, Sequence) else _alt(inside)
            case Loop(item, low, high):
                turn = self.pattern(item)
                return None if turn is None else loop(turn, low, high)

    def nullable(self, node: Expression) -> bool:
        """Whether the empty string matches."""
        match node:
            case Literal(text):
                return not text
            case Class():
                return False
            case Rule(name):
                return self._sizes[name][2]
            case Sequence(items):
                return all(self.nullable(i) for i in items)
            case Choice(items):
                return any(self.nullable(i) for i in items)
            case Loop(item, low, _):
                return low == 0 or self.nullable(item)

    def _measure(self, node: Expression) -> tuple[int, int]:
        """(size, how deep named patterns nest)."""
        match node:
            case Literal() | Class():
                return 1, 0
            case Rule(name):
                return 1, self._sizes[name][1]
            case Sequence(items) | Choice(items):
                inside = [self._measure(i) for i in items]
                return 1 + sum(s for s, _ in inside), max((d for _, d in inside), default=0)
            case Loop(item):
                size, depth = self._measure(item)
                return size + 1, depth

    def _keep(self, name: str, pattern: Expression | None) -> None:
        if pattern is not None:
            size, depth = self._measure(pattern)
            if size > NAMED_SIZE:
                self._sizes[name] = (size, depth + 1, self.nullable(pattern))
                self.named[name] = pattern
                pattern = Rule(name) if depth < MAX_NESTING else None
        self._patterns[name] = pattern

    def _chain(self, name: str, body: Expression) -> Expression | None:
        """The pattern of a rule that counts one turn and leaves the rest to another rule."""
        ends, turns, following = _split(body)
        if following is None or self._patterns.get(following) is None:
            return None
        turn = self.pattern(Choice(tuple(turns)) if len(turns) > 1 else turns[0])
        end = self.pattern(Choice(tuple(ends)) if len(ends) > 1 else ends[0]) if ends else None
        if turn is None or (ends and end is None):
            return None
        before = self._runs.get(following)
        rest = self._patterns[following]
        assert rest is not None
        if before is not None and (before.turn, before.end) == (turn, end):
            run = _Run(turn, end, before.count + 1, before.rest)
        else:
            run = _Run(turn, end, 1, rest)
        self._runs[name] = run
        return run.pattern()

    def _solve(self, names: list[str], rules: Rules) -> None:
        """Rules that refer to each other, where each does so last only: by elimination."""
        rows: dict[str, dict[str | None, Expression]] = {}
        members = set(names)
        for name in names:
            row = self._equation(rules[name], members)
            if row is None:
                self._patterns.update(dict.fromkeys(names))
                return
            rows[name] = row
        order = sorted(names, key=lambda n: sum(n in row for row in rows.values()))
        for i, name in enumerate(order):
            row = rows[name]
            again = row.pop(name, None)
            if again is not None:
                for key, path in row.items():
                    row[key] = seq((Loop(again, 0, None), path))
            self._substitute(name, [rows[o] for o in order[i + 1 :]], row)
            if sum(self._measure(p)[0] for r in rows.values() for p in r.values()) > MAX_ELIMINATED:
                self._patterns.update(dict.fromkeys(names))
                return
        for name in reversed(order):
            found = [
                path if key is None else seq((path, self._known(key)))
                for key, path in rows[name].items()
            ]
            self._keep(name, _alt(tuple(found)))
            if self._patterns[name] is None:
                self._patterns.update(dict.fromkeys(names))
                return

    def _known(self, name: str) -> Expression:
        known = self._patterns[name]
        assert known is not None
        return known

    @staticmethod
    def _substitute(
        name: str,
        rows: list[dict[str | None, Expression]],
        row: dict[str | None, Expression],
    ) -> None:
        for other in rows:
            path = other.pop(name, None)
            if path is None:
                continue
            for key, rest in row.items():
                longer = seq((path, rest))
                other[key] = _alt((other[key], longer)) if key in other else longer

    def _equation(self, body: Expression, members: set[str]) -> dict[str | None, Expression] | None:
        """What to read before each member of the component, or (None) before the end; None if a
        member stands elsewhere than last."""
        row: dict[str | None, Expression] = {}
        for way in _ways(body):
            items = _items(way)
            last = items[-1] if items else None
            key = last.name if isinstance(last, Rule) and last.name in members else None
            path = self.pattern(Sequence(items[:-1] if key else items))
            if path is None:
                return None
            row[key] = _alt((row[key], path)) if key in row else path
        return row


def _alt(items: tuple[Expression, ...]) -> Expression:
    flat: list[Expression] = []
    for item in items:
        flat += item.items if isinstance(item, Choice) else (item,)
    unique = list(dict.fromkeys(flat))
    chars = [i.chars for i in unique if isinstance(i, Class)]
    if len(chars) > 1:
        merged: list[Expression] = [Class(charset.union(*chars))]
        unique = merged + [i for i in unique if not isinstance(i, Class)]
    return unique[0] if len(unique) == 1 else Choice(tuple(unique))


def _ways(body: Expression) -> tuple[Expression, ...]:
    return body.items if isinstance(body, Choice) else (body,)


def _items(way: Expression) -> tuple[Expression, ...]:
    return way.items if isinstance(way, Sequence) else (way,)


def _split(
    body: Expression,
) -> tuple[list[Expression], list[Expression], str | None]:
    """Alternatives without the rule that the others end in, those others without it, and it."""
    following: str | None = None
    ends: list[Expression] = []
    turns: list[Expression] = []
    for way in _ways(body):
        items = _items(way)
        last = items[-1]
        if len(items) > 1 and isinstance(last, Rule) and following in (None, last.name):
            following = last.name
            turns.append(Sequence(items[:-1]) if len(items) > 2 else items[0])
        else:
            ends.append(way)
    return ends, turns, following


def components(rules: Rules) -> Iterator[list[str]]:
    """Rules that refer to each other, together; what they refer to comes before them."""
    return graphs.components(rules, lambda name: references(rules[name]))

"""A grammar of JSON texts split into JSON tokens, or found not to be made of them.

Tokens are strings, numbers and words, runs of white space, and punctuation. They differ in their
first character, strings end at the first quote that is not escaped, and `_check` sees to it that
no number or word and no white space stands next to its like: so there is one way to split a text.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from phloem.constrained import charset
from phloem.constrained.backends.lark import Terminals
from phloem.constrained.backends.regular import RegularRules, components, loop, seq
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
    references,
)

# Where a scan of JSON text may stand, as sets of bits.
OUTSIDE, INSIDE, ESCAPE, CLOSED, ELSEWHERE = 1, 2, 4, 8, 16
# What kinds of characters an expression has, as sets of bits.
WORD, BLANK, OTHER = 1, 2, 4

_QUOTE = charset.of('"')
_BACKSLASH = charset.of("\\")
_PLAIN = charset.negate(charset.of('"\\'))
_BLANKS = charset.of(" \t\n\r")
_WORDS = charset.char_set([(48, 57), (65, 90), (97, 122), (43, 43), (45, 46)])
_SIGNS = charset.of("{}[],:")
_LOOKS = 6


def _not_json() -> UnsupportedKeyword:
    return UnsupportedKeyword(
        "the grammar is not made of whole JSON tokens", code="unsupported_grammar"
    )


class JsonTokens:
    """Writes rules anew over the terminals of JSON tokens."""

    def __init__(self, rules: Rules, regular: RegularRules, terminals: Terminals) -> None:
        self._rules = rules
        self._regular = regular
        self._terminals = terminals
        self._kinds: dict[str, int] = {}
        self._scans: dict[tuple[str, int], int] = {}
        self._blank: set[str] = set()
        self._word: set[str] = set()
        for component in components(rules):
            self._analyse(component)

    def split(self, root: str) -> Rules:
        """The rules from `root` on, over terminals.

        Raises:
            UnsupportedKeyword: the texts are not made of whole tokens.
        """
        written: Rules = {}
        pending = [root]
        while pending:
            name = pending.pop()
            if name not in written:
                written[name] = self._outer(self._rules[name])
                pending += [r for r in references(written[name]) if r in self._rules]
        self._check(written)
        return written

    # ----------------------------------------------------------------- analysis

    def _analyse(self, names: list[str]) -> None:
        alone = len(names) == 1 and names[0] not in references(self._rules[names[0]])
        for name in names:
            self._kinds[name] = 0
            for state in (OUTSIDE, INSIDE, ESCAPE):
                self._scans[name, state] = 0
        grown = True
        while grown:
            grown = False
            for name in names:
                body = self._rules[name]
                kinds = self._kind(body)
                scans = {s: self.scan(body, s) for s in (OUTSIDE, INSIDE, ESCAPE)}
                if kinds != self._kinds[name] or any(
                    found != self._scans[name, s] for s, found in scans.items()
                ):
                    grown = not alone
                    self._kinds[name] = kinds
                    self._scans.update({(name, s): found for s, found in scans.items()})

    def _kind(self, body: Expression) -> int:
        match body:
            case Literal(text):
                return _join(_kinds(((ord(c), ord(c)),)) for c in text)
            case Class(chars):
                return _kinds(chars)
            case Rule(name):
                return self._kinds[name]
            case Sequence(items) | Choice(items):
                return _join(self._kind(i) for i in items)
            case Loop(item):
                return self._kind(item)

    def scan(self, body: Expression, states: int) -> int:
        """Where a scan may stand after `body`, having stood in one of `states`."""
        match body:
            case Literal(text):
                for char in text:
                    states = _step(states, ((ord(char), ord(char)),))
                return states
            case Class(chars):
                return _step(states, chars)
            case Rule(name):
                return _join(
                    self._scans.get((name, s), s if s == ELSEWHERE else ELSEWHERE)
                    for s in (OUTSIDE, INSIDE, ESCAPE, CLOSED, ELSEWHERE)
                    if s & states
                )
            case Sequence(items):
                for item in items:
                    states = self.scan(item, states)
                return states
            case Choice(items):
                return _join(self.scan(i, states) for i in items)
            case Loop(item, low):
                for _ in range(min(low, _LOOKS)):
                    states = self.scan(item, states)
                while (more := states | self.scan(item, states)) != states:
                    states = more
                return states

    # ----------------------------------------------------------------- splitting

    def _outer(self, body: Expression) -> Expression:
        """`body`, which begins and ends between tokens, over terminals."""
        whole = self._token(body)
        if whole is not None:
            return whole
        match body:
            case Rule():
                return body
            case Choice(items):
                return self._choice(items)
            case Loop(item, low, high):
                return loop(self._outer(item), low, high)
            case Sequence(items):
                return self._sequence(items)
            case Literal(text) if len(text) > 1:
                return self._sequence((body,))
            case _:
                raise _not_json()

    def _token(self, body: Expression) -> Expression | None:
        """A terminal, if `body` is one token."""
        if body == Literal(""):
            return body
        kinds = self._kind(body)
        if kinds == WORD:
            return self._terminal(body, self._word)
        if kinds == BLANK:
            return self._terminal(body, self._blank)
        if self.scan(body, OUTSIDE) == CLOSED:
            return self._terminal(body)
        sign = charset.of(body.text) if isinstance(body, Literal) and len(body.text) == 1 else ()
        sign = body.chars if isinstance(body, Class) else sign
        if sign and not charset.subtract(sign, _SIGNS):
            return self._terminal(body)
        return None

    def _terminal(self, body: Expression, group: set[str] | None = None) -> Expression:
        pattern = self._regular.pattern(body)
        if pattern is None:
            raise _not_json()
        found = self._terminals.of(pattern)
        if group is not None:
            group.update(references(found))
        return found

    def _choice(self, items: Iterable[Expression]) -> Expression:
        """Alternatives; those that are tokens of one kind are one terminal."""
        merged: dict[int, list[Expression]] = {}
        others: list[Expression] = []
        for item in items:
            kind = self._kind(item)
            if self.scan(item, OUTSIDE) == CLOSED:
                merged.setdefault(0, []).append(item)
            elif kind in (WORD, BLANK):
                merged.setdefault(kind, []).append(item)
            else:
                others.append(self._outer(item))
        tokens = [self._token(Choice(tuple(group))) for group in merged.values()]
        ways = [*(t for t in tokens if t is not None), *others]
        return ways[0] if len(ways) == 1 else Choice(tuple(ways))

    def _sequence(self, items: Iterable[Expression]) -> Expression:
        written: list[Expression] = []
        run: list[Expression] = []
        states = OUTSIDE
        kind = 0
        for piece in _pieces(items):
            if states != OUTSIDE:  # within a string that several pieces make up
                run.append(piece)
                states = self.scan(piece, states)
            else:
                found = self._kind(piece)
                if run and found != kind:
                    written.append(self._outer(Sequence(tuple(run))))
                    run = []
                opened = self.scan(piece, OUTSIDE)
                if found in (WORD, BLANK):
                    run.append(piece)
                    kind = found
                elif opened and not opened & ~(INSIDE | ESCAPE):
                    run = [piece]
                    states = opened
                elif piece != Literal(""):
                    written.append(self._outer(piece))
            if states == CLOSED:
                written.append(self._terminal(Sequence(tuple(run))))
                run, states = [], OUTSIDE
        if states != OUTSIDE:
            raise _not_json()
        if run:
            written.append(self._outer(Sequence(tuple(run))))
        return seq(tuple(written))

    # ----------------------------------------------------------------- the check

    def _check(self, rules: Rules) -> None:
        """Words are not next to words, nor blanks to blanks.

        Raises:
            UnsupportedKeyword: some are.
        """
        edges = _Edges(rules, lambda name: self._group(name))
        for body in rules.values():
            if edges.clash(body):
                raise _not_json()

    def _group(self, name: str) -> int:
        return WORD * (name in self._word) + BLANK * (name in self._blank)


class _Edges:
    """The kinds of tokens that may be first and last in rules, and whether a rule may be empty."""

    def __init__(self, rules: Rules, group: Callable[[str], int]) -> None:
        self._group = group
        self._known: dict[str, tuple[int, int, bool]] = {}
        for component in components({n: _only(rules, body) for n, body in rules.items()}):
            self._known.update(dict.fromkeys(component, (0, 0, False)))
            while True:
                found = {name: self.of(rules[name]) for name in component}
                if all(self._known[name] == edge for name, edge in found.items()):
                    break
                self._known.update(found)

    def of(self, body: Expression) -> tuple[int, int, bool]:
        match body:
            case Rule(name):
                kind = self._group(name)
                return self._known.get(name, (kind, kind, False))
            case Sequence(items):
                first = last = 0
                empty = True
                for item in items:
                    begin, end, skipped = self.of(item)
                    first |= begin if empty else 0
                    last = end | (last if skipped else 0)
                    empty = empty and skipped
                return first, last, empty
            case Choice(items):
                found = [self.of(i) for i in items]
                return (
                    _join(f for f, _, _ in found),
                    _join(e for _, e, _ in found),
                    any(skipped for _, _, skipped in found),
                )
            case Loop(item, low):
                begin, end, skipped = self.of(item)
                return begin, end, skipped or low == 0
            case _:
                return 0, 0, True

    def clash(self, body: Expression) -> bool:
        """Whether tokens of a kind may stand next to each other inside."""
        match body:
            case Sequence(items):
                last = 0
                for item in items:
                    begin, end, skipped = self.of(item)
                    if begin & last or self.clash(item):
                        return True
                    last = end | (last if skipped else 0)
                return False
            case Choice(items):
                return any(self.clash(i) for i in items)
            case Loop(item, _, high):
                begin, end, _ = self.of(item)
                return self.clash(item) or (high != 1 and bool(begin & end))
            case _:
                return False


def _only(rules: Rules, body: Expression) -> Expression:
    """The references to rules, as `components` wants them."""
    return Sequence(tuple(Rule(n) for n in references(body) if n in rules))


def _pieces(items: Iterable[Expression]) -> Iterable[Expression]:
    """The items, sequences among them opened and literals taken apart."""
    for item in items:
        if isinstance(item, Sequence):
            yield from _pieces(item.items)
        elif isinstance(item, Literal):
            yield from (Literal(c) for c in item.text)
        else:
            yield item


@functools.lru_cache(maxsize=4096)
def _step(states: int, chars: CharSet) -> int:
    quote = bool(charset.intersect(chars, _QUOTE))
    backslash = bool(charset.intersect(chars, _BACKSLASH))
    plain = bool(charset.intersect(chars, _PLAIN))
    found = 0
    if states & OUTSIDE:
        found |= INSIDE * quote | ELSEWHERE * (plain or backslash)
    if states & INSIDE:
        found |= CLOSED * quote | ESCAPE * backslash | INSIDE * plain
    if states & ESCAPE:
        found |= INSIDE
    if states & (CLOSED | ELSEWHERE):
        found |= ELSEWHERE
    return found


@functools.lru_cache(maxsize=4096)
def _kinds(chars: CharSet) -> int:
    rest = charset.subtract(chars, charset.union(_WORDS, _BLANKS))
    return (
        WORD * bool(charset.intersect(chars, _WORDS))
        | BLANK * bool(charset.intersect(chars, _BLANKS))
        | OTHER * bool(rest)
    )


def _join(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found

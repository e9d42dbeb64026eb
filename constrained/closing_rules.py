"""A grammar text as expressions over bytes, each with the length of its shortest text.

Reads the dialect of `phloem.constrained.grammar_text` and of checked user grammars. A rule keeps
its nodes in a list, children before parents, so that what is computed about them takes one pass and
nothing recurses, however deep the groups nest.
"""

from __future__ import annotations

import functools
import re

from phloem.constrained.closing_utf8 import RANK, Ranges, Trie, byte_trie, merge, negate
from phloem.constrained.grammar_text import LoweredGrammar
from phloem.constrained.graphs import components

NEVER = 1 << 60
"""The length of what has no text at all."""

_TOKEN = re.compile(
    r"""(?:\s|\#[^\n]*)*(?:
    (?P<rule>[A-Za-z_][A-Za-z0-9_.-]*)\s*::=
    |(?P<name>[A-Za-z_][A-Za-z0-9_.-]*)
    |"(?P<literal>(?:[^"\\\n]|\\.)*)"
    |\[(?P<class>\^?(?:[^\]\\\n]|\\.)*)\]
    |\{\s*(?P<low>[0-9]+)\s*(?P<comma>,?)\s*(?P<high>[0-9]*)\s*\}
    |(?P<sign>[()|*+?]))(?:\s|\#[^\n]*)*""",
    re.VERBOSE,
)
_CHARACTER = re.compile(r"\\x[0-9A-Fa-f]+|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8}|\\.|[^\\]", re.DOTALL)
_NAMED = {"n": 10, "t": 9, "r": 13, "a": 7, "b": 8, "f": 12, "v": 11, "0": 0, "e": 27}
_LOOPS: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Unreadable(Exception):
    """A grammar text that this reader does not understand, or that has no finite text."""


class Expression:
    """`least` is the number of bytes of the shortest text, and `least_at(index)` that of the rest
    of a text that was begun. `height` bounds it: see `phloem.constrained.closing_heights`."""

    __slots__ = ("height", "least")

    def __init__(self, least: int = NEVER) -> None:
        self.least = least
        self.height = least

    def measure(self) -> None:
        """Compute `least` from the parts."""

    def least_at(self, index: int) -> int:
        return self.least


class Literal(Expression):
    """Exactly these bytes; `index` counts those that were read."""

    __slots__ = ("data", "usable")

    def __init__(self, data: bytes, usable: frozenset[int]) -> None:
        self.data = data
        self.usable = usable.issuperset(data)
        super().__init__(len(data) if self.usable else NEVER)

    def least_at(self, index: int) -> int:
        return len(self.data) - index if self.usable else NEVER


class Chars(Expression):
    """One character as a trie of byte ranges; `index` is a node of it, 0 the root.

    `shortest[i]` is the number of bytes to the nearest end and `best[i]` the byte to take for it.
    """

    __slots__ = ("best", "shortest", "trie")

    def __init__(self, trie: Trie, usable: frozenset[int]) -> None:
        self.trie = trie
        self.shortest = [NEVER] * len(trie)
        self.best = [-1] * len(trie)
        for node in reversed(range(len(trie))):  # children come after their parents
            for low, high, child in trie[node]:
                length = 1 if child < 0 else 1 + self.shortest[child]
                bytes_ = usable.intersection(range(low, high + 1))
                byte = min(bytes_, key=RANK.__getitem__, default=-1)
                old = (self.shortest[node], RANK[self.best[node]])
                if byte >= 0 and (length, RANK[byte]) < old:
                    self.shortest[node], self.best[node] = length, byte
        super().__init__(self.shortest[0])
        self.height = max((s for s in self.shortest if s < NEVER), default=NEVER)

    def least_at(self, index: int) -> int:
        return self.shortest[index]


class Reference(Expression):
    """Another rule's body."""

    __slots__ = ("name", "rule")

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.rule: Rule | None = None

    def target(self) -> Rule:
        assert self.rule is not None, "linked by read_grammar"
        return self.rule

    def measure(self) -> None:
        self.least = self.target().body.least


class Sequence(Expression):
    """All items, one after the other."""

    __slots__ = ("items",)

    def __init__(self, items: list[Expression]) -> None:
        super().__init__()
        self.items = items

    def measure(self) -> None:
        self.least = min(sum(i.least for i in self.items), NEVER)


class Choice(Expression):
    """One of the items."""

    __slots__ = ("items",)

    def __init__(self, items: list[Expression]) -> None:
        super().__init__()
        self.items = items

    def measure(self) -> None:
        self.least = min(i.least for i in self.items)


class Loop(Expression):
    """`index` counts the items that were begun, up to `low` when there is no upper bound."""

    __slots__ = ("high", "item", "low")

    def __init__(self, item: Expression, low: int, high: int | None) -> None:
        super().__init__()
        self.item = item
        self.low = low
        self.high = high

    def measure(self) -> None:
        self.least = self.least_at(0)

    def least_at(self, index: int) -> int:
        missing = self.low - index
        return min(missing * self.item.least, NEVER) if missing > 0 else 0


class Rule:
    """A rule's body, and the nodes of it, children before parents."""

    __slots__ = ("body", "nodes")

    def __init__(self, body: Expression, nodes: list[Expression]) -> None:
        self.body = body
        self.nodes = nodes

    def callees(self) -> list[Rule]:
        return [n.target() for n in self.nodes if isinstance(n, Reference)]


def read_grammar(grammar: LoweredGrammar, usable: frozenset[int]) -> list[list[Rule]]:
    """The rules that the root calls, in groups of rules that call each other, callees first. The
    last rule of the last group is the root. Shortest texts are made of `usable` bytes.

    Raises:
        Unreadable: see there.
    """
    rules = _Reader(grammar.text, usable).rules()
    root = rules.get(grammar.root)
    if root is None:
        raise Unreadable("no root")
    groups = [group[::-1] for group in components([root], Rule.callees)]
    for group in groups:
        _measure(group)
    return groups


def _measure(group: list[Rule]) -> None:
    """The least fixed point of `least`; a rule that calls no rule of its group takes one pass."""
    while True:
        before = [rule.body.least for rule in group]
        for rule in group:
            for node in rule.nodes:
                node.measure()
        if len(group) == 1 and group[0] not in group[0].callees():
            return
        if before == [rule.body.least for rule in group]:
            return


# --------------------------------------------------------------------------- reading


class _Frame:
    """A group that is being read: its finished alternatives, and the one in progress."""

    __slots__ = ("alternatives", "items")

    def __init__(self) -> None:
        self.alternatives: list[Expression] = []
        self.items: list[Expression] = []


class _Reader:
    def __init__(self, text: str, usable: frozenset[int]) -> None:
        self._text = text
        self._usable = usable
        self._leaves: dict[str, Expression] = {}
        self._nodes: list[Expression] = []
        self._stack: list[_Frame] = []
        self._references: list[Reference] = []

    def rules(self) -> dict[str, Rule]:
        rules: dict[str, Rule] = {}
        name = ""
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None:
                raise Unreadable(f"unexpected text at {at}")
            at = match.end()
            if match["rule"]:
                if name:
                    rules[name] = self._finish()
                name = match["rule"]
                self._stack = [_Frame()]
                self._nodes = []
            elif not self._stack:
                raise Unreadable("no rule")
            else:
                self._take(match)
        if name:
            rules[name] = self._finish()
        for reference in self._references:
            reference.rule = rules.get(reference.name)
            if reference.rule is None:
                raise Unreadable(f"no rule {reference.name}")
        return rules

    def _take(self, match: re.Match[str]) -> None:
        kind = match.lastgroup
        items = self._stack[-1].items
        if kind == "literal" or kind == "class":
            items.append(self._leaf(match[0].strip(), match[kind], kind))
        elif kind == "name":
            reference = Reference(match["name"])
            self._references.append(reference)
            items.append(self._node(reference))
        elif kind == "sign":
            self._sign(match["sign"])
        else:
            low, high = int(match["low"]), int(match["high"]) if match["high"] else None
            self._loop(low, high if match["comma"] else low)

    def _sign(self, sign: str) -> None:
        if sign == "(":
            self._stack.append(_Frame())
        elif sign == "|":
            frame = self._stack[-1]
            frame.alternatives.append(self._sequence(frame.items))
            frame.items = []
        elif sign == ")":
            if len(self._stack) < 2:
                raise Unreadable("unexpected )")
            inside = self._close()
            self._stack[-1].items.append(inside)
        else:
            self._loop(*_LOOPS[sign])

    def _loop(self, low: int, high: int | None) -> None:
        items = self._stack[-1].items
        if not items:
            raise Unreadable("nothing to repeat")
        items[-1] = self._node(Loop(items[-1], low, high))

    def _finish(self) -> Rule:
        if len(self._stack) != 1:
            raise Unreadable("missing )")
        body = self._close()
        return Rule(body, self._nodes)

    def _close(self) -> Expression:
        frame = self._stack.pop()
        last = self._sequence(frame.items)
        if not frame.alternatives:
            return last
        return self._node(Choice([*frame.alternatives, last]))

    def _sequence(self, items: list[Expression]) -> Expression:
        return items[0] if len(items) == 1 else self._node(Sequence(items))

    def _node(self, node: Expression) -> Expression:
        self._nodes.append(node)
        return node

    def _leaf(self, key: str, inside: str, kind: str) -> Expression:
        known = self._leaves.get(key)
        if known is None:
            if kind == "literal":
                data = "".join(map(chr, _characters(inside)))
                known = Literal(data.encode("utf-8", "surrogatepass"), self._usable)
            else:
                known = Chars(byte_trie(_class_ranges(inside)), self._usable)
            self._leaves[key] = known
        return known


def _characters(text: str) -> list[int]:
    """Code points of a literal or class, escapes resolved."""
    if "\\" not in text:
        return [ord(c) for c in text]
    return [_character(m) for m in _CHARACTER.findall(text)]


def _character(text: str) -> int:
    if text[0] != "\\":
        return ord(text)
    if len(text) > 2:
        code = int(text[2:], 16)
        if code > 0x10FFFF:
            raise Unreadable("an escape is above U+10FFFF")
        return code
    return _NAMED.get(text[1], ord(text[1]))


@functools.lru_cache(maxsize=4096)
def _class_ranges(text: str) -> Ranges:
    """The ranges of a class, without its brackets."""
    negated = text.startswith("^")
    parts = _CHARACTER.findall(text[negated:])
    found: list[tuple[int, int]] = []
    at = 0
    while at < len(parts):
        low = high = _character(parts[at])
        at += 1
        if at + 1 < len(parts) and parts[at] == "-":
            high = _character(parts[at + 1])
            at += 2
        if low > high:
            raise Unreadable("a class has a range that is out of order")
        found.append((low, high))
    ranges = merge(found)
    return negate(ranges) if negated else ranges

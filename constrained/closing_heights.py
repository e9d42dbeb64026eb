"""How long a completion can become: bounds that tell when a budget need not be looked at.

The height of an expression bounds the length in bytes of the shortest completion, up to the
expression's end, at any point inside it. Where no recursion adds to what is still to be closed
it is the maximum over all points. Elsewhere there is no such maximum, and the height holds for the
points that one token can reach: each level of recursion costs bytes. A rule that calls itself
without reading anything has no bound at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from phloem.constrained.closing_rules import (
    NEVER,
    Choice,
    Expression,
    Loop,
    Reference,
    Rule,
    Sequence,
)

MAX_WORK = 40_000
"""Steps spent on one group of recursive rules; larger groups get looser bounds."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    """A call within a group of rules: bytes read before it in its rule at least, and bytes needed
    after it."""

    rule: Rule
    before: int
    after: int


def set_heights(groups: Iterable[list[Rule]], token_bytes: int) -> bool:
    """Set the height of every node, for tokens of at most `token_bytes` bytes, groups as from
    `read_grammar`. True when the heights hold for any number of tokens."""
    flat = True
    for group in groups:
        if len(group) > 1 or group[0] in group[0].callees():
            flat &= _set_bodies(group, token_bytes)
        for rule in group:
            own = rule.body.height
            for node in rule.nodes:
                node.height = min(_height(node), NEVER)
            if len(group) > 1:
                rule.body.height = own
    return flat


def _set_bodies(group: list[Rule], token_bytes: int) -> bool:
    """Set the heights of the rules' bodies, whose calls into other groups have theirs."""
    members = set(group)
    heights: dict[Rule, int] = {}
    calls: dict[Rule, list[_Call]] = {}
    for rule in group:
        heights[rule], calls[rule] = _survey(rule, members)
    count = sum(map(len, calls.values()))
    most = max((c.after for cs in calls.values() for c in cs), default=0)
    if most == 0:
        highest = max(heights.values())
        for rule in group:
            rule.body.height = highest
        return True
    reach = max(min(token_bytes, MAX_WORK // count), 1)
    pieces = -(-token_bytes // reach)
    grown = _grow(group, heights, calls, reach)
    for rule in group:
        # What lies further is reached in pieces, with one call between two of them.
        highest = max(grown.values()) + most if pieces > 1 else 0
        rule.body.height = min(grown[rule] + (pieces - 1) * highest, NEVER)
    return False


def _survey(rule: Rule, members: set[Rule]) -> tuple[int, list[_Call]]:
    """The height of a rule without its calls of members, and these calls."""
    height = 0
    calls: dict[_Call, None] = {}
    pending: list[tuple[Expression, int, int]] = [(rule.body, 0, 0)]
    while pending:
        node, before, after = pending.pop()
        height = max(height, node.least + after)
        match node:
            case Reference() if node.target() in members:
                calls[_Call(node.target(), before, after)] = None
            case Choice(items=items):
                pending += [(item, before, after) for item in items]
            case Loop(item=item, low=low):
                pending.append((item, before, after + max(low - 1, 0) * item.least))
            case Sequence(items=items):
                after += sum(i.least for i in items)
                for item in items:
                    after -= item.least
                    pending.append((item, before, after))
                    before += item.least
            case Reference():
                height = max(height, node.target().body.height + after)
            case _:
                height = max(height, node.height + after)
    return min(height, NEVER), list(calls)


def _grow(
    group: list[Rule], heights: dict[Rule, int], calls: dict[Rule, list[_Call]], reach: int
) -> dict[Rule, int]:
    """Heights when `reach` bytes may be read; NEVER for all when some rule has no bound."""
    grown: list[dict[Rule, int]] = []
    for spent in range(reach + 1):
        now = dict(heights if not grown else grown[-1])
        grown.append(now)
        for _ in range(len(group) + 1):
            changed = False
            for rule in group:
                for call in calls[rule]:
                    if call.before <= spent:
                        height = grown[spent - call.before][call.rule] + call.after
                        if height > now[rule]:
                            now[rule] = height
                            changed = True
            if not changed:
                break
        else:
            return dict.fromkeys(group, NEVER)
    return grown[-1]


def _height(node: Expression) -> int:
    """From the heights of the parts."""
    match node:
        case Reference():
            return node.target().body.height
        case Choice(items=items):
            return max(i.height for i in items)
        case Loop(item=item, low=low):
            return item.height + max(low - 1, 0) * item.least
        case Sequence(items=items):
            after = sum(i.least for i in items)
            height = after if after < NEVER else NEVER
            for item in items:
                after -= item.least
                height = max(height, item.height + after)
            return height
        case _:
            return node.height

"""Checks of a user's grammar before an engine sees it.

The dialect is GBNF, as llama.cpp's users write it, which takes in plain EBNF with `::=`: literals
with the escapes n, r, t, x41, u0041 and U00000041, classes with ranges and `^`, `.` for any
character, groups, `|`, `* + ? {m} {m,} {m,n}`, `#` comments, line breaks anywhere. It is parsed
into a tree, and an engine gets a text written from the tree, so that no escape means different
things to different engines.

Refused, with a reason and a line: what is broken (undefined rules, no root, unclosed literals),
what can never end, engine extensions, and what is too large. A grammar that makes an Earley parser
slower with every token (loops over the empty string, a rule that is itself again without reading
anything) says so in
`LoweredGrammar.ambiguous`.
"""

from __future__ import annotations

from collections.abc import Iterator

from phloem.constrained.base import LimitExceeded, MalformedConstraint
from phloem.constrained.ebnf_tree import (
    Choice,
    Expression,
    Limits,
    Literal,
    Loop,
    Rule,
    Rules,
    Sequence,
    parse_rules,
    parts,
    references,
    write_rules,
)
from phloem.constrained.grammar_text import COUNTED_LETTERS, LoweredGrammar

MAX_GRAMMAR_BYTES = 64 << 10
LIMITS = Limits(rules=2_000, depth=64, repeats=10_000)


def check_ebnf(text: str, root: str = "root") -> LoweredGrammar:
    """The grammar, checked and written anew.

    Raises:
        ConstraintError: see the module.
    """
    rules = read_ebnf(text, root)
    counted = COUNTED_LETTERS * sum(_counted(body) for body in rules.values())
    return LoweredGrammar(write_rules(rules, root), counted, ambiguous=ambiguity(rules))


def read_ebnf(text: str, root: str = "root") -> Rules:
    """The grammar's rules, checked but for ambiguity.

    Raises:
        ConstraintError: see the module.
    """
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_GRAMMAR_BYTES:
        raise LimitExceeded(
            f"the grammar has {size} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"
        )
    rules = parse_rules(text, LIMITS)
    if root not in rules:
        raise MalformedConstraint(f"the grammar has no rule {root!r}", code="no_root")
    for name, body in rules.items():
        for reference in references(body):
            if reference not in rules:
                raise MalformedConstraint(
                    f"rule {name!r} refers to {reference!r}, which is not defined",
                    code="undefined_rule",
                )
    return _ending(rules, root)


def ambiguity(rules: Rules) -> str:
    """Why each token of this grammar may cost an Earley parser more than the one before; empty if
    nothing is found."""
    nullable = _nullable_rules(rules)
    for name, body in rules.items():
        if _loops_over_nothing(body, nullable):
            return f"rule {name!r} repeats without bound something that may be empty"
    name = _circular(rules, nullable)
    return f"rule {name!r} may be itself without reading anything" if name else ""


# --------------------------------------------------------------------------- analysis


def _counted(body: Expression) -> int:
    own = max(body.low, body.high or 0) if isinstance(body, Loop) else 0
    return (own if own > 1 else 0) + sum(map(_counted, parts(body)))


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
        case Literal(text):
            return not text
        case Rule(name):
            return name in known
        case Sequence(items):
            return all(_nullable(i, known) for i in items)
        case Choice(items):
            return any(_nullable(i, known) for i in items)
        case Loop(item, low):
            return low == 0 or _nullable(item, known)
        case _:
            return False


def _ending(rules: Rules, root: str) -> Rules:
    """The rules without what can never end: an engine that took that turn would be lost."""
    known: set[str] = set()
    while grown := {n for n, body in rules.items() if n not in known and _ends(body, known)}:
        known |= grown
    if root not in known:
        raise MalformedConstraint(f"rule {root!r} can never end", code="unsatisfiable")
    return {name: _ending_part(body, known) for name, body in rules.items() if name in known}


def _ending_part(body: Expression, known: set[str]) -> Expression:
    """`body`, which can end, without alternatives that cannot."""
    match body:
        case Sequence(items):
            return Sequence(tuple(_ending_part(i, known) for i in items))
        case Choice(items):
            return Choice(tuple(_ending_part(i, known) for i in items if _ends(i, known)))
        case Loop(item, low, high):
            if not _ends(item, known):
                return Literal("")
            return Loop(_ending_part(item, known), low, high)
        case _:
            return body


def _nullable_rules(rules: Rules) -> set[str]:
    known: set[str] = set()
    while grown := {n for n, body in rules.items() if n not in known and _nullable(body, known)}:
        known |= grown
    return known


def _loops_over_nothing(body: Expression, nullable: set[str]) -> bool:
    if isinstance(body, Loop) and body.high is None and _nullable(body.item, nullable):
        return True
    return any(_loops_over_nothing(part, nullable) for part in parts(body))


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


def _circular(rules: Rules, nullable: set[str]) -> str:
    edges = {name: set(_alone(body, nullable)) for name, body in rules.items()}
    for name in rules:
        seen: set[str] = set()
        pending = list(edges[name])
        while pending:
            target = pending.pop()
            if target == name:
                return name
            if target not in seen:
                seen.add(target)
                pending.extend(edges[target])
    return ""

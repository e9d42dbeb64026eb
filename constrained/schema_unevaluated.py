"""`unevaluatedProperties` and `unevaluatedItems` beside schemas that evaluate members themselves.

What a member or element still has to satisfy depends on which branches hold. A schema becomes
cases: shapes, with what was evaluated on the way to them. A branch of `anyOf` is taken or left, and
where it is left it may hold all the same: that case then only asks more than it has to, and the
case where the branch is taken does not. So no complements are needed, and the union is exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from phloem.constrained.base import LimitExceeded, UnsupportedKeyword
from phloem.constrained.schema_document import Node
from phloem.constrained.schema_keywords import (
    APPLICATORS,
    key_pattern,
    subschema,
    typed_shapes,
    without,
)
from phloem.constrained.schema_sharing import absorb
from phloem.constrained.shapes import (
    UNIVERSE,
    Array,
    Conj,
    Items,
    Keys,
    Members,
    Object,
    Shape,
    unique,
    unique_values,
)

if TYPE_CHECKING:
    from phloem.constrained.schema_shapes import Analysis

MAX_CASES = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluated:
    """Members by name or pattern, or all; elements up to an index, those that satisfy one of
    `found`, or all."""

    names: tuple[str, ...] = ()
    patterns: tuple[Keys, ...] = ()
    all_members: bool = False
    length: int = 0
    found: tuple[Conj, ...] = ()
    all_elements: bool = False

    def join(self, other: Evaluated) -> Evaluated:
        return Evaluated(
            unique(self.names + other.names),
            unique(self.patterns + other.patterns),
            self.all_members or other.all_members,
            max(self.length, other.length),
            unique(self.found + other.found),
            self.all_elements or other.all_elements,
        )


NOTHING = Evaluated()


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """Values of these shapes have at least this evaluated."""

    shapes: tuple[Shape, ...]
    evaluated: Evaluated = NOTHING


Cases = list[Case]


def depends_on_branches(schema: dict[str, Any]) -> bool:
    """Whether `unevaluated*` is about more than the keywords beside it."""
    keys = ("unevaluatedProperties", "unevaluatedItems")
    return any(schema.get(key, True) is not True for key in keys) and any(
        key in schema for key in APPLICATORS
    )


def cases(analysis: Analysis, base: tuple[Shape, ...], node: Node) -> Cases:
    """What of `base` satisfies a node, by what the node evaluates.

    Raises:
        ConstraintError: a keyword is refused.
    """
    if isinstance(node.schema, bool) or node.negated:
        return _kept([Case(analysis.within(base, node))], analysis, node)
    with analysis.entering(node):
        return branch_cases(analysis, base, node, analysis.checked(node))


def branch_cases(
    analysis: Analysis, base: tuple[Shape, ...], node: Node, schema: dict[str, Any]
) -> Cases:
    """The cases of a node that is being expanded, by these of its keywords."""
    if "enum" in schema or "const" in schema:
        plain = {k: v for k, v in schema.items() if k in ("enum", "const")}
        return _kept([Case(analysis.within_keywords(base, node, plain))], analysis, node)
    found = [
        Case(analysis.intersect([base, typed_shapes(node, schema)]), _own(node, schema)),
    ]

    def then(step: Callable[[tuple[Shape, ...]], Iterable[Case]]) -> None:
        nonlocal found
        more = (
            Case(after.shapes, case.evaluated.join(after.evaluated))
            for case in found
            for after in step(case.shapes)
        )
        found = _kept(more, analysis, node)

    for target in analysis.targets(node, schema):
        then(lambda shapes, target=target: cases(analysis, shapes, target))  # type: ignore[misc]
    for i in range(len(schema.get("allOf", ()))):
        child = node.child("allOf", i)
        then(lambda shapes, child=child: cases(analysis, shapes, child))  # type: ignore[misc]
    for key, rule in _RULES.items():
        if key in schema:
            then(lambda shapes, rule=rule: rule(analysis, shapes, node))  # type: ignore[misc]
    if "not" in schema:
        refused = node.child("not").complement()
        then(lambda shapes: [Case(analysis.within(shapes, refused))])
    for key in ("dependentRequired", "dependentSchemas", "dependencies"):
        for name in schema.get(key, ()):
            then(
                lambda shapes, key=key, name=name: _dependent(  # type: ignore[misc]
                    analysis, shapes, node, key, name
                )
            )
    return _kept((_restricted(analysis, case, node, schema) for case in found), analysis, node)


def _kept(found: Iterable[Case], analysis: Analysis, node: Node) -> Cases:
    """Without empty cases, and one case for all that evaluate the same."""
    merged: dict[Evaluated, list[Shape]] = {}
    for case in found:
        shapes = tuple(analysis.settled(case.shapes))
        if shapes:
            merged.setdefault(case.evaluated, []).extend(shapes)
    if len(merged) > MAX_CASES:
        raise LimitExceeded(f"unevaluated* has more than {MAX_CASES} cases", path=node.pointer)
    return [
        Case(absorb(unique_values(shapes), analysis.canonical), evaluated)
        for evaluated, shapes in merged.items()
    ]


# --------------------------------------------------------------------------- branches


def _any_of(analysis: Analysis, base: tuple[Shape, ...], node: Node) -> Cases:
    assert isinstance(node.schema, dict)
    untaken: Cases = [Case(base)]
    taken: Cases = []
    for i in range(len(node.schema["anyOf"])):
        branch = node.child("anyOf", i)
        more = [
            Case(after.shapes, case.evaluated.join(after.evaluated))
            for case in (*untaken, *taken)
            for after in cases(analysis, case.shapes, branch)
        ]
        taken = _kept([*taken, *more], analysis, node)
    return taken


def _one_of(analysis: Analysis, base: tuple[Shape, ...], node: Node) -> Cases:
    found: Cases = []
    for i, alone in enumerate(analysis.exactly(node, base)):
        found += cases(analysis, alone, node.child("oneOf", i))
    return found


def _if(analysis: Analysis, base: tuple[Shape, ...], node: Node) -> Cases:
    assert isinstance(node.schema, dict)
    condition = node.child("if")
    held = cases(analysis, base, condition)
    if "then" not in node.schema and "else" not in node.schema:
        return [*held, Case(base)]
    failed = [Case(analysis.within(base, condition.complement()))]
    if "then" in node.schema:
        held = _after(analysis, held, node.child("then"))
    if "else" in node.schema:
        failed = _after(analysis, failed, node.child("else"))
    return held + failed


def _after(analysis: Analysis, found: Cases, node: Node) -> Cases:
    return [
        Case(after.shapes, case.evaluated.join(after.evaluated))
        for case in found
        for after in cases(analysis, case.shapes, node)
    ]


def _dependent(
    analysis: Analysis, base: tuple[Shape, ...], node: Node, key: str, name: str
) -> Cases:
    assert isinstance(node.schema, dict)
    wanted = node.schema[key][name]
    others = tuple(s for s in UNIVERSE if not isinstance(s, Object))
    absent = Case(analysis.intersect([base, (without(name), *others)]))
    needed = (name, *wanted) if isinstance(wanted, list) else (name,)
    present = analysis.intersect([base, (Object(required=unique(needed)),)])
    if isinstance(wanted, list):
        return [absent, Case(present)]
    if key == "dependencies":  # no draft says what this one evaluates
        return [absent, Case(analysis.within(present, node.child(key, name)))]
    return [absent, *cases(analysis, present, node.child(key, name))]


_RULES: dict[str, Callable[[Analysis, tuple[Shape, ...], Node], Cases]] = {
    "anyOf": _any_of,
    "oneOf": _one_of,
    "if": _if,
}

# --------------------------------------------------------------------------- what is evaluated


def _own(node: Node, schema: dict[str, Any]) -> Evaluated:
    """What the keywords beside the branches evaluate."""
    items = schema.get("items")
    if isinstance(items, list):
        length, every = len(items), "additionalItems" in schema
    else:
        length, every = len(schema.get("prefixItems", ())), items is not None
    found: tuple[Conj, ...] = ()
    if "contains" in schema:
        found = (subschema(node, "contains"),)
    return Evaluated(
        names=tuple(schema.get("properties", ())),
        patterns=tuple(key_pattern(node, text) for text in schema.get("patternProperties", ())),
        all_members="additionalProperties" in schema,
        length=length,
        found=found,
        all_elements=every,
    )


def _restricted(analysis: Analysis, case: Case, node: Node, schema: dict[str, Any]) -> Case:
    """The case with what `unevaluated*` says of the rest, after which all is evaluated."""
    shapes, evaluated = case.shapes, case.evaluated
    if "unevaluatedProperties" in schema:
        if not evaluated.all_members and depends_on_branches(schema):
            members = Members(
                properties=tuple((name, ()) for name in evaluated.names),
                patterns=tuple((keys, ()) for keys in evaluated.patterns),
                rest=subschema(node, "unevaluatedProperties"),
            )
            shapes = _narrowed(analysis, shapes, Object(layers=(members,), path=node.pointer))
        evaluated = dataclasses.replace(evaluated, all_members=True)
    if "unevaluatedItems" in schema:
        if not (evaluated.all_elements or () in evaluated.found) and depends_on_branches(schema):
            items = Items(((),) * evaluated.length, _rest(node, schema, evaluated))
            shapes = _narrowed(analysis, shapes, Array(layers=(items,), path=node.pointer))
        evaluated = dataclasses.replace(evaluated, all_elements=True)
    return Case(shapes, evaluated)


def _narrowed(analysis: Analysis, shapes: tuple[Shape, ...], to: Shape) -> tuple[Shape, ...]:
    others = (s for s in UNIVERSE if type(s) is not type(to))
    return analysis.intersect([shapes, (to, *others)])


def _rest(node: Node, schema: dict[str, Any], evaluated: Evaluated) -> Conj:
    """What elements satisfy that were not evaluated by their place: those that `contains` finds
    are evaluated too."""
    wanted = subschema(node, "unevaluatedItems")
    if not evaluated.found or not wanted:
        return wanted
    if schema["unevaluatedItems"] is False and len(evaluated.found) == 1:
        return evaluated.found[0]
    raise UnsupportedKeyword(
        "unevaluatedItems beside contains is not supported", path=node.at("unevaluatedItems")
    )

"""From schema nodes to shapes: every keyword is either expressed in full or refused by path.

`Analysis.shapes(conj)` is the union of shapes that satisfies all nodes of a conjunction. `allOf`,
`$ref` and sibling keywords intersect; `anyOf` unites; `oneOf` unites what is provably disjoint and
otherwise subtracts; `not`, `if` and `dependent*` are rewritten where the complement has a shape.
`enum` and `const` give single values, and each is then put to the validator with the whole
conjunction, so they combine with any keyword at all.

Unknown keywords are annotations, as JSON Schema says, unless they look like a misspelt assertion.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

from phloem.constrained.base import LimitExceeded, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.schema_document import Node, SchemaDocument, finite
from phloem.constrained.schema_keywords import typed_shapes, without
from phloem.constrained.shape_relations import ShapeRelations
from phloem.constrained.shapes import (
    UNIVERSE,
    Array,
    Boolean,
    Conj,
    Members,
    Null,
    Number,
    Object,
    Shape,
    Text,
    Value,
    conj,
    meet,
    unique_values,
)

MAX_CONJUNCTIONS = 8_000
MAX_UNION = 512
MAX_SUBTRACTED_BRANCHES = 6

_BY_TYPE: dict[str, Shape] = {
    "null": Null(),
    "boolean": Boolean(),
    "number": Number(),
    "integer": Number(integer=True),
    "string": Text(),
    "array": Array(),
    "object": Object(),
}
_REFUSED = ("$dynamicRef", "$recursiveRef")
_ASSERTIONS = (
    "type enum const multipleOf maximum exclusiveMaximum minimum exclusiveMinimum maxLength"
    " minLength pattern maxItems minItems uniqueItems maxContains minContains maxProperties"
    " minProperties required dependentRequired format allOf anyOf oneOf not if then else"
    " dependentSchemas prefixItems items contains properties patternProperties"
    " additionalProperties propertyNames unevaluatedItems unevaluatedProperties additionalItems"
    " dependencies"
).split()
_MISSPELT = {a.lower(): a for a in _ASSERTIONS}


class _Pending(Exception):
    """The shapes asked for depend on those being worked out."""


class Analysis:
    """The shapes of one document, memoised by conjunction."""

    def __init__(self, document: SchemaDocument) -> None:
        self.document = document
        self.relations = ShapeRelations(self.peek)
        self._known: dict[Conj, tuple[Shape, ...]] = {}
        self._expanding: list[Node] = []
        self._outer: list[Node] = []
        self._checked: set[Node] = set()

    def shapes(self, nodes: Conj) -> tuple[Shape, ...]:
        """The union that satisfies every node; empty when nothing does.

        Raises:
            ConstraintError: a keyword is refused, with its path.
        """
        known = self._known.get(nodes)
        if known is not None:
            return known
        if len(self._known) >= MAX_CONJUNCTIONS:
            raise LimitExceeded(f"the schema expands to more than {MAX_CONJUNCTIONS} subschemas")
        union: Iterable[Shape] = UNIVERSE
        for node in nodes:
            union = self._meet(union, self._expand(node))
        kept = unique_values(
            shape
            for shape in union
            if not isinstance(shape, Value)
            or all(self.document.admits(node, shape.value) for node in nodes)
        )
        self._known[nodes] = kept
        return kept

    def peek(self, nodes: Conj) -> tuple[Shape, ...] | None:
        """`shapes`, or None when that depends on what is being expanded right now."""
        saved = self._expanding
        self._outer, self._expanding = self._outer + saved, []
        try:
            return self.shapes(self.canonical(nodes))
        except _Pending:
            return None
        finally:
            self._expanding = saved
            del self._outer[len(self._outer) - len(saved) :]

    def canonical(self, nodes: Conj) -> Conj:
        """`nodes` with plain references followed, so that equal subschemas are one."""
        return conj(self._follow(node) for node in nodes if node.schema is not True or node.negated)

    def _follow(self, node: Node) -> Node:
        seen: set[Node] = set()
        while not node.negated and isinstance(node.schema, dict) and "$ref" in node.schema:
            beside = any(k in node.schema for k in _ASSERTIONS)
            if node in seen or (beside and not self.document.ref_alone):
                break
            seen.add(node)
            node = self.document.resolve(str(node.schema["$ref"]), node)
        return node

    def _meet(self, left: Iterable[Shape], right: Iterable[Shape]) -> tuple[Shape, ...]:
        """The intersection of two unions. A value stays as long as the other side has anything:
        `shapes` puts it to the validator in the end."""
        ours, theirs = tuple(left), tuple(right)
        if not ours or not theirs:
            return ()
        values = [s for s in (*ours, *theirs) if isinstance(s, Value)]
        met = [
            meet(a, b)
            for a in ours
            if not isinstance(a, Value)
            for b in theirs
            if not isinstance(b, Value)
        ]
        if len(met) > MAX_UNION:
            raise LimitExceeded(f"a subschema expands to more than {MAX_UNION} alternatives")
        return unique_values((*values, *(s for s in met if s is not None)))

    def _expand(self, node: Node) -> tuple[Shape, ...]:
        if isinstance(node.schema, bool):
            return UNIVERSE if node.schema is not node.negated else ()
        if node in self._outer:
            raise _Pending
        if node in self._expanding:
            raise MalformedConstraint(
                "the schema refers to itself without progress", path=node.pointer, code="ref_cycle"
            )
        self._expanding.append(node)
        try:
            if node.negated:
                schema = node.schema
                if self.document.ref_alone and "$ref" in schema:
                    schema = {"$ref": schema["$ref"]}
                return self._complement(node.complement(), schema)
            if self.document.ref_alone and "$ref" in node.schema:
                return self._expand(self.document.resolve(str(node.schema["$ref"]), node))
            self._check_keywords(node, node.schema)
            return self._expand_schema(node, node.schema)
        finally:
            self._expanding.pop()

    def _check_keywords(self, node: Node, schema: dict[str, Any]) -> None:
        if node in self._checked:
            return
        self._checked.add(node)
        for key in schema:
            if key in _REFUSED:
                raise UnsupportedKeyword(f"{key} is not supported", path=node.at(key))
            meant = _MISSPELT.get(key.replace("_", "").replace("-", "").lower())
            if meant is not None and meant != key and not key.startswith("_"):
                raise UnsupportedKeyword(
                    f"unknown keyword {key}; did you mean {meant}?", path=node.at(key)
                )
        if node.pointer and ("$id" in schema or "id" in schema) and "$ref" in repr(schema):
            key = "$id" if "$id" in schema else "id"
            if isinstance(schema[key], str):
                raise UnsupportedKeyword(
                    "$id below the root beside references is not supported", path=node.at(key)
                )

    def _expand_schema(self, node: Node, schema: dict[str, Any]) -> tuple[Shape, ...]:
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            if not all(finite(v) for v in values):
                raise MalformedConstraint("a number in enum or const is too large", path=node.pointer)
            return unique_values(Value(v) for v in values)
        union = typed_shapes(node, schema)
        if "$ref" in schema:
            union = self._meet(union, self._expand(self.document.resolve(str(schema["$ref"]), node)))
        for i in range(len(schema.get("allOf", ()))):
            union = self._meet(union, self._expand(node.child("allOf", i)))
        if "anyOf" in schema:
            branches = [self._expand(node.child("anyOf", i)) for i in range(len(schema["anyOf"]))]
            union = self._meet(union, itertools.chain.from_iterable(branches))
        if "oneOf" in schema:
            union = self._one_of(node, union, len(schema["oneOf"]))
        if "not" in schema:
            union = self._meet(union, self._expand(node.child("not").complement()))
        if "if" in schema and ("then" in schema or "else" in schema):
            union = self._meet(union, self._conditional(node, schema))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name in schema.get(key, ()):
                union = self._meet(union, self._dependent(node, schema, key, name))
        return union

    # ----------------------------------------------------------------- combinations

    def _one_of(self, node: Node, base: tuple[Shape, ...], count: int) -> tuple[Shape, ...]:
        nodes = [node.child("oneOf", i) for i in range(count)]
        branches = [self._meet(base, self._expand(n)) for n in nodes]
        if all(
            self._apart(a, b, branches[a], branches[b], nodes)
            for a, b in itertools.combinations(range(count), 2)
        ):
            return unique_values(itertools.chain.from_iterable(branches))
        path = node.at("oneOf")
        if count > MAX_SUBTRACTED_BRANCHES:
            raise UnsupportedKeyword("oneOf with branches that may overlap", path=path)
        union: list[Shape] = []
        try:
            for i, branch in enumerate(branches):
                for j in range(count):
                    if j != i and not self._apart(i, j, branch, branches[j], nodes):
                        branch = self._meet(branch, self._expand(nodes[j].complement()))
                union.extend(branch)
        except UnsupportedKeyword as error:
            raise UnsupportedKeyword(
                f"oneOf with branches that may overlap: {error.message}", path=path
            ) from error
        return unique_values(union)

    def _apart(
        self, a: int, b: int, left: tuple[Shape, ...], right: tuple[Shape, ...], nodes: list[Node]
    ) -> bool:
        """Whether two branches surely share no value."""
        for one, other in itertools.product(left, right):
            if isinstance(one, Value):
                if self.document.admits(nodes[b], one.value):
                    return False
            elif isinstance(other, Value):
                if self.document.admits(nodes[a], other.value):
                    return False
            elif not self.relations.disjoint(one, other):
                return False
        return True

    def _conditional(self, node: Node, schema: dict[str, Any]) -> tuple[Shape, ...]:
        condition = node.child("if")
        held = self._expand(condition)
        failed = self._expand(condition.complement())
        if "then" in schema:
            held = self._meet(held, self._expand(node.child("then")))
        if "else" in schema:
            failed = self._meet(failed, self._expand(node.child("else")))
        return unique_values((*held, *failed))

    def _dependent(
        self, node: Node, schema: dict[str, Any], key: str, name: str
    ) -> tuple[Shape, ...]:
        """Either the member is absent, or what depends on it holds."""
        absent = without(name)
        others = tuple(s for s in UNIVERSE if not isinstance(s, Object))
        wanted = schema[key][name]
        if isinstance(wanted, list):
            needs: tuple[Shape, ...] = (Object(required=tuple(dict.fromkeys((name, *wanted)))),)
        else:
            needs = self._meet((Object(required=(name,)),), self._expand(node.child(key, name)))
        return (absent, *needs, *others)

    # ----------------------------------------------------------------- complements

    def _complement(self, node: Node, schema: Any) -> tuple[Shape, ...]:
        """What the schema at `node` refuses: the union of what each keyword refuses."""
        self._check_keywords(node, schema)
        union: list[Shape] = []
        for key in schema:
            rule = self._COMPLEMENTS.get(key)
            if rule is not None:
                union.extend(rule(self, node, schema[key]))
            elif key in _ASSERTIONS and key not in ("then", "else", "minContains", "maxContains"):
                raise UnsupportedKeyword(
                    f"{key} under not, if or an overlapping oneOf is not supported",
                    path=node.at(key),
                )
        return unique_values(union)

    def _not_type(self, node: Node, types: Any) -> Iterable[Shape]:
        named = {types} if isinstance(types, str) else set(types)
        if "integer" in named and "number" not in named:
            raise UnsupportedKeyword("not type integer is not supported", path=node.at("type"))
        if "number" in named:
            named.add("integer")
        return tuple(s for t, s in _BY_TYPE.items() if t not in named and t != "integer")

    def _not_values(self, node: Node, values: list[Any]) -> Iterable[Shape]:
        strings = frozenset(v for v in values if isinstance(v, str))
        union: list[Shape] = [Text(excluded=strings), Array(), Object()]
        if any(isinstance(v, list | dict) for v in values):
            raise UnsupportedKeyword(
                "not with arrays or objects as values is not supported", path=node.pointer
            )
        union += [] if None in values else [Null()]
        booleans = [v for v in values if isinstance(v, bool)]
        union += [Boolean()] if not booleans else [Value(b) for b in (True, False) if b not in booleans]
        numbers = sorted({Fraction(repr(v)) for v in values if _is_number(v)})
        edges: list[Fraction | None] = [None, *numbers, None]
        union += [
            Number(low=a, low_open=a is not None, high=b, high_open=b is not None)
            for a, b in itertools.pairwise(edges)
        ]
        return union

    def _not_const(self, node: Node, value: Any) -> Iterable[Shape]:
        return self._not_values(node, [value])

    def _not_required(self, node: Node, names: list[str]) -> Iterable[Shape]:
        return tuple(without(name) for name in names)

    def _not_properties(self, node: Node, properties: dict[str, Any]) -> Iterable[Shape]:
        for name in properties:
            child = node.child("properties", name).complement()
            members = Members(properties=((name, (child,)),))
            yield Object(layers=(members,), required=(name,), path=node.pointer)

    def _not_minimum(self, node: Node, bound: Any) -> Iterable[Shape]:
        return (Number(high=Fraction(repr(bound)), high_open=True),)

    def _not_maximum(self, node: Node, bound: Any) -> Iterable[Shape]:
        return (Number(low=Fraction(repr(bound)), low_open=True),)

    def _not_min_length(self, node: Node, bound: Any) -> Iterable[Shape]:
        return (Text(high=int(bound) - 1),) if bound > 0 else ()

    def _not_max_length(self, node: Node, bound: Any) -> Iterable[Shape]:
        return (Text(low=int(bound) + 1),)

    def _not_all_of(self, node: Node, branches: list[Any]) -> Iterable[Shape]:
        for i in range(len(branches)):
            yield from self._expand(node.child("allOf", i).complement())

    def _not_any_of(self, node: Node, branches: list[Any]) -> Iterable[Shape]:
        union: tuple[Shape, ...] = UNIVERSE
        for i in range(len(branches)):
            union = self._meet(union, self._expand(node.child("anyOf", i).complement()))
        return union

    def _not_not(self, node: Node, _: Any) -> Iterable[Shape]:
        return self._expand(node.child("not"))

    def _not_ref(self, node: Node, ref: Any) -> Iterable[Shape]:
        return self._expand(self.document.resolve(str(ref), node).complement())

    _COMPLEMENTS: dict[str, Callable[[Analysis, Node, Any], Iterable[Shape]]] = {
        "type": _not_type,
        "enum": _not_values,
        "const": _not_const,
        "required": _not_required,
        "minimum": _not_minimum,
        "maximum": _not_maximum,
        "minLength": _not_min_length,
        "maxLength": _not_max_length,
        "properties": _not_properties,
        "allOf": _not_all_of,
        "anyOf": _not_any_of,
        "not": _not_not,
        "$ref": _not_ref,
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

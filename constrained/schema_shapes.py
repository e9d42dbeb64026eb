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
from collections.abc import Iterable
from typing import Any

from phloem.constrained.base import LimitExceeded, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.schema_complement import complement
from phloem.constrained.schema_document import Node, SchemaDocument, finite
from phloem.constrained.schema_keywords import ASSERTIONS, typed_shapes, without
from phloem.constrained.shape_relations import ShapeRelations
from phloem.constrained.shapes import (
    UNIVERSE,
    Conj,
    Object,
    Shape,
    Value,
    conj,
    meet,
    unique_values,
)

MAX_CONJUNCTIONS = 8_000
MAX_UNION = 512
MAX_SUBTRACTED_BRANCHES = 6

_REFUSED = ("$dynamicRef", "$recursiveRef")
_MISSPELT = {a.lower(): a for a in ASSERTIONS}


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
            union = self._meet(union, self.expand(node))
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
            beside = any(k in node.schema for k in ASSERTIONS)
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

    def expand(self, node: Node) -> tuple[Shape, ...]:
        """The shapes of one node, values not checked yet; raises on a cycle without progress."""
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
                positive = node.complement()
                self._check_keywords(positive, schema)
                return complement(self, positive, schema)
            if self.document.ref_alone and "$ref" in node.schema:
                return self.expand(self.document.resolve(str(node.schema["$ref"]), node))
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
            if not values:
                raise MalformedConstraint("enum without values", path=node.at("enum"))
            if not all(finite(v) for v in values):
                raise MalformedConstraint(
                    "a number in enum or const is too large", path=node.pointer
                )
            return unique_values(Value(v) for v in values)
        union = typed_shapes(node, schema)
        if "$ref" in schema:
            union = self._meet(union, self.expand(self.document.resolve(str(schema["$ref"]), node)))
        for i in range(len(schema.get("allOf", ()))):
            union = self._meet(union, self.expand(node.child("allOf", i)))
        if "anyOf" in schema:
            branches = [self.expand(node.child("anyOf", i)) for i in range(len(schema["anyOf"]))]
            union = self._meet(union, itertools.chain.from_iterable(branches))
        if "oneOf" in schema:
            union = self._one_of(node, union, len(schema["oneOf"]))
        if "not" in schema:
            union = self._meet(union, self.expand(node.child("not").complement()))
        if "if" in schema and ("then" in schema or "else" in schema):
            union = self._meet(union, self._conditional(node, schema))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name in schema.get(key, ()):
                union = self._meet(union, self._dependent(node, schema, key, name))
        return union

    # ----------------------------------------------------------------- combinations

    def _one_of(self, node: Node, base: tuple[Shape, ...], count: int) -> tuple[Shape, ...]:
        nodes = [node.child("oneOf", i) for i in range(count)]
        branches = [self._meet(base, self.expand(n)) for n in nodes]
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
                        branch = self._meet(branch, self.expand(nodes[j].complement()))
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
        held = self.expand(condition)
        failed = self.expand(condition.complement())
        if "then" in schema:
            held = self._meet(held, self.expand(node.child("then")))
        if "else" in schema:
            failed = self._meet(failed, self.expand(node.child("else")))
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
            needs = self._meet((Object(required=(name,)),), self.expand(node.child(key, name)))
        return (absent, *needs, *others)

    def intersect(self, unions: Iterable[Iterable[Shape]]) -> tuple[Shape, ...]:
        """What is in all of these unions."""
        met: tuple[Shape, ...] = UNIVERSE
        for union in unions:
            met = self._meet(met, union)
        return met

"""From schema nodes to shapes: every keyword is either expressed in full or refused by path.

`Analysis.shapes(conj)` is the union of shapes that satisfies all nodes of a conjunction. `allOf`,
`$ref` and sibling keywords intersect; `anyOf` unites; `oneOf` unites what is provably disjoint and
otherwise subtracts; `not`, `if` and `dependent*` are rewritten where the complement has a shape.
`enum` and `const` give single values, and each is then put to the validator with the whole
conjunction, so they combine with any keyword at all.

Unknown keywords are annotations, as JSON Schema says, unless they look like a misspelt assertion.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from phloem.constrained.base import LimitExceeded, MalformedConstraint, UnsupportedKeyword
from phloem.constrained.schema_complement import complement
from phloem.constrained.schema_document import Node, SchemaDocument, finite
from phloem.constrained.schema_keywords import ASSERTIONS, typed_shapes, without
from phloem.constrained.schema_sharing import Sharing, absorb, spelling
from phloem.constrained.schema_unevaluated import branch_cases, depends_on_branches
from phloem.constrained.shape_relations import ShapeRelations
from phloem.constrained.shapes import (
    UNIVERSE,
    Conj,
    Object,
    Shape,
    Value,
    conj,
    given,
    is_given,
    meet,
    unique_values,
    value_key,
)

MAX_CONJUNCTIONS = 8_000
MAX_VISITS = 10_000
"""Times that a subschema is worked out, in whatever surroundings: levels that each name the next
one twice double it."""
MAX_UNION = 512
MAX_SUBTRACTIONS = 2_000
MAX_PEEKS = 4

_NEW = {"minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"}
_MISSPELT = {a.lower(): a for a in ASSERTIONS}


class _Pending(Exception):
    """The shapes asked for depend on those being worked out."""


class Analysis:
    """The shapes of one document, memoised by conjunction."""

    def __init__(self, document: SchemaDocument) -> None:
        self.document = document
        self.relations = ShapeRelations(self.peek)
        self._sharing = Sharing(document)
        self._known: dict[Conj, tuple[Shape, ...]] = {}
        self._visits = 0
        self._expanding: list[Node] = []
        self._outer: list[Node] = []
        self._depth = 0
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
        union = UNIVERSE
        contradictory = any(node.negated and node.complement() in nodes for node in nodes)
        for node in nodes:
            union = () if contradictory else self.within(union, node)
        if any(isinstance(shape, Object) and shape.demands for shape in union):
            union = tuple(self.settled(union))
        kept = unique_values(
            shape
            for shape in union
            if not isinstance(shape, Value) or all(self.admits(node, shape.value) for node in nodes)
        )
        self._known[nodes] = kept
        return kept

    def admits(self, node: Node, value: Any) -> bool:
        """Whether a node accepts a value."""
        if is_given(node):
            return (value_key(value) == value_key(given(node))) is not node.negated
        return self.document.admits(node, value)

    def peek(self, nodes: Conj) -> tuple[Shape, ...] | None:
        """`shapes`, or None when that depends on what is being expanded right now, is deep, or is
        refused."""
        if self._depth == MAX_PEEKS:
            return None
        saved = self._expanding
        self._outer, self._expanding = self._outer + saved, []
        self._depth += 1
        try:
            return self.shapes(self.canonical(nodes))
        except (_Pending, UnsupportedKeyword, LimitExceeded):
            return None
        finally:
            self._depth -= 1
            self._expanding = saved
            del self._outer[len(self._outer) - len(saved) :]

    def canonical(self, nodes: Conj) -> Conj:
        """`nodes` with plain references followed, so that equal subschemas are one."""
        return conj(self._follow(node) for node in nodes if node.schema is not True or node.negated)

    def _follow(self, node: Node) -> Node:
        seen: set[Node] = set()
        while not node.negated and isinstance(node.schema, dict) and "$ref" in node.schema:
            beside = any(k in node.schema for k in (*ASSERTIONS, "$dynamicRef", "$recursiveRef"))
            if node in seen or (beside and not self.document.ref_alone):
                break
            seen.add(node)
            node = self.document.resolve(str(node.schema["$ref"]), node)
        return self._sharing.representative(node)

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
        shapes = unique_values(s for s in met if s is not None)
        if len(shapes) > MAX_UNION:
            shapes = absorb(self.settled(shapes), self.canonical)
        if len(shapes) > MAX_UNION:
            raise LimitExceeded(f"a subschema expands to more than {MAX_UNION} alternatives")
        return unique_values((*values, *shapes))

    def expand(self, node: Node) -> tuple[Shape, ...]:
        """The shapes of one node, values not checked yet; raises on a cycle without progress."""
        return self.within(UNIVERSE, node)

    def within(self, base: tuple[Shape, ...], node: Node) -> tuple[Shape, ...]:
        """What is in `base` and has a shape of the node: branches that overlap elsewhere may be
        apart there."""
        if isinstance(node.schema, bool):
            return base if node.schema is not node.negated else ()
        self._visits += 1
        if self._visits > MAX_VISITS:
            raise LimitExceeded(f"subschemas are looked at more than {MAX_VISITS} times in all")
        with self.entering(node):
            if node.negated:
                positive = node.complement()
                return self._meet(base, complement(self, positive, self.checked(positive)))
            return self.within_keywords(base, node, self.checked(node))

    @contextlib.contextmanager
    def entering(self, node: Node) -> Iterator[None]:
        """While the node is expanded; raises on a cycle without progress."""
        if node in self._outer:
            raise _Pending
        if node in self._expanding:
            raise MalformedConstraint(
                "the schema refers to itself without progress", path=node.pointer, code="ref_cycle"
            )
        self._expanding.append(node)
        try:
            yield
        finally:
            self._expanding.pop()

    def checked(self, node: Node) -> dict[str, Any]:
        """The keywords of a node that mean something.

        Raises:
            UnsupportedKeyword: one is refused, or looks misspelt.
        """
        schema = node.schema
        assert isinstance(schema, dict)
        if self.document.ref_alone:  # before draft 2019-09
            if "$ref" in schema:
                return {"$ref": schema["$ref"]}
            schema = {key: value for key, value in schema.items() if key not in _NEW}
        if node not in self._checked:
            self._checked.add(node)
            self._check_keywords(node, schema)
        return schema

    def _check_keywords(self, node: Node, schema: dict[str, Any]) -> None:
        for key in schema:
            meant = _MISSPELT.get(key.replace("_", "").replace("-", "").lower())
            if meant is not None and meant != key and not key.startswith("_"):
                raise UnsupportedKeyword(
                    f"unknown keyword {key}; did you mean {meant}?", path=node.at(key)
                )

    def targets(self, node: Node, schema: dict[str, Any]) -> Iterator[Node]:
        """Where the references of a node lead.

        Raises:
            ConstraintError: out of the document, or to where the way there decides.
        """
        references = self.document.references
        if "$ref" in schema:
            yield self.document.resolve(str(schema["$ref"]), node)
        if "$dynamicRef" in schema:
            yield references.resolve_dynamic(str(schema["$dynamicRef"]), node)
        if "$recursiveRef" in schema:
            target = references.resolve(str(schema["$recursiveRef"]), node, "$recursiveRef")
            anchored = isinstance(target.schema, dict) and target.schema.get("$recursiveAnchor")
            if anchored is True and target != self.document.root:
                raise UnsupportedKeyword(
                    "$recursiveRef below the root is not supported", path=node.at("$recursiveRef")
                )
            yield target

    def within_keywords(
        self, base: tuple[Shape, ...], node: Node, schema: dict[str, Any]
    ) -> tuple[Shape, ...]:
        """What is in `base` and satisfies these keywords of a node."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values is not None:
            if not values:
                raise MalformedConstraint("enum without values", path=node.at("enum"))
            if not all(finite(v) for v in values):
                raise MalformedConstraint(
                    "a number in enum or const is too large", path=node.pointer
                )
            return self._meet(base, unique_values(Value(v) for v in values))
        if depends_on_branches(schema):
            found = branch_cases(self, base, node, schema)
            return unique_values(shape for case in found for shape in case.shapes)
        union = self._meet(base, typed_shapes(node, schema))
        for target in self.targets(node, schema):
            union = self.within(union, target)
        for i in range(len(schema.get("allOf", ()))):
            union = self.within(union, node.child("allOf", i))
        return self._in_branches(union, node, schema)

    def _in_branches(
        self, union: tuple[Shape, ...], node: Node, schema: dict[str, Any]
    ) -> tuple[Shape, ...]:
        if "anyOf" in schema:
            branches = [self.expand(node.child("anyOf", i)) for i in range(len(schema["anyOf"]))]
            union = self._meet(union, itertools.chain.from_iterable(branches))
        if "oneOf" in schema:
            alone = self.exactly(node, union)
            union = unique_values(itertools.chain.from_iterable(alone))
        if "not" in schema:
            union = self.within(union, node.child("not").complement())
        if "if" in schema and ("then" in schema or "else" in schema):
            union = self._meet(union, self._conditional(node, schema))
        for key in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name in schema.get(key, ()):
                union = self._meet(union, self._dependent(node, schema, key, name))
        return union

    # ----------------------------------------------------------------- combinations

    def exactly(self, node: Node, base: tuple[Shape, ...]) -> list[tuple[Shape, ...]]:
        """For each branch of `oneOf`, what is in `base` and in this branch alone."""
        assert isinstance(node.schema, dict)
        nodes = [node.child("oneOf", i) for i in range(len(node.schema["oneOf"]))]
        branches = [self.within(base, n) for n in nodes]
        twins = collections.Counter(spelling(n) for n in nodes)
        found: list[tuple[Shape, ...]] = []
        subtractions = 0
        for i, branch in enumerate(branches):
            alone: list[Shape] = []
            for shape in branch if twins[spelling(nodes[i])] == 1 else ():
                left: tuple[Shape, ...] = (shape,)
                for j, rival in enumerate(branches):
                    if j == i or not left or self._apart(shape, rival, nodes[i]):
                        continue
                    subtractions += 1
                    left = self._subtract(left, nodes[j], node.at("oneOf"))
                    if subtractions > MAX_SUBTRACTIONS or len(alone) > MAX_UNION:
                        raise UnsupportedKeyword(
                            "oneOf with that many branches that may overlap", path=node.at("oneOf")
                        )
                alone.extend(left)
            found.append(unique_values(alone))
        return found

    def _subtract(self, left: tuple[Shape, ...], node: Node, path: str) -> tuple[Shape, ...]:
        try:
            met = self._meet(left, self.expand(node.complement()))
        except UnsupportedKeyword as error:
            raise UnsupportedKeyword(
                f"oneOf with branches that may overlap: {error.message}", path=path
            ) from error
        return absorb(self.settled(met), self.canonical)

    def settled(self, union: Iterable[Shape]) -> Iterator[Shape]:
        """The union in plainer words, without shapes that surely nothing has."""
        for shape in union:
            plain = self.relations.settle(shape) if isinstance(shape, Object) else shape
            if plain is not None and not self.relations.empty(plain):
                yield plain

    def _apart(self, shape: Shape, rival: tuple[Shape, ...], node: Node) -> bool:
        """Whether a shape of the branch `node` surely shares no value with another branch. Single
        values are left to the validator, which gets the whole schema."""
        if isinstance(shape, Value):
            return True
        return all(
            not self.admits(node, other.value)
            if isinstance(other, Value)
            else self.relations.disjoint(shape, other)
            for other in rival
        )

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

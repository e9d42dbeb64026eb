"""JSON Schema → grammar: the whole schema is enforced, or it is refused by keyword and path.

The engine's own schema conversion is not used: it ignores or approximates about a third of the
keywords. Instead the schema becomes a union of shapes (`schema_shapes`), and the shapes become
rules of a grammar (here and in `schema_objects`) that any engine can run.

What is exact: type, enum, const, numeric bounds, multipleOf, lengths, pattern and the formats of
`formats` (alone and combined), items, prefixItems, minItems, maxItems, contains with its counts,
uniqueItems where elements have few values or cannot be equal, properties, required,
additionalProperties, patternProperties, propertyNames, min/maxProperties, references within the
document with recursion, allOf, anyOf, oneOf, not, if/then/else, dependentRequired,
dependentSchemas, and unevaluated* with all of these. Drafts 4 to 2020-12.

What is refused: uniqueItems over many values, minProperties that undeclared members have to meet,
unevaluated* and uniqueItems under a negation, $dynamicRef to one of several anchors, references
out of the document, complements of formats whose strings are not known well enough.

What the text looks like, beyond what the schema says: keys come in declared order (so a value with
other key order is not produced), an object is open unless the schema closes it, integers have no
fraction, bounded numbers have no exponent, enum and const values have one spelling. Keys of
undeclared members may repeat (JSON Schema sees only the last one).
"""

from __future__ import annotations

import dataclasses

from phloem.constrained import automaton
from phloem.constrained.base import (
    ConstraintError,
    LimitExceeded,
    MalformedConstraint,
)
from phloem.constrained.grammar_text import (
    LoweredGrammar,
    char_class,
    choice,
    sequence,
    write_pattern,
)
from phloem.constrained.json_text import JsonText
from phloem.constrained.numerals import numeral
from phloem.constrained.pattern import Node as Pattern
from phloem.constrained.pattern import max_length, min_length
from phloem.constrained.pattern_parser import Dialect, parse
from phloem.constrained.schema_arrays import ArrayPlan, plan_array, write_array
from phloem.constrained.schema_document import SchemaDocument
from phloem.constrained.schema_members import MemberPlan, write_object
from phloem.constrained.schema_objects import Layout, ObjectWriter, lay_out
from phloem.constrained.schema_shapes import Analysis
from phloem.constrained.shape_relations import text_automaton
from phloem.constrained.shapes import (
    UNIVERSE,
    Array,
    Boolean,
    Conj,
    Null,
    Number,
    Object,
    Shape,
    Text,
    Value,
)
from phloem.constrained.spec import Whitespace

MAX_EXACT = 2**53
_SHORT = parse(r"-?(0|[1-9][0-9]{0,8})(\.[0-9]{1,6})?", Dialect.ECMA)


def lower_schema(text: str, whitespace: Whitespace) -> LoweredGrammar:
    """The grammar of all JSON documents that satisfy the schema `text`.

    Raises:
        ConstraintError: refused, with the keyword's path.
    """
    document = SchemaDocument(text)
    try:
        writer = _SchemaWriter(document, whitespace)
        root = writer.write((document.root,))
        return writer.text.writer.finish(root)
    except RecursionError as error:
        raise LimitExceeded("the schema's references nest too deep") from error


def lower_json_object(whitespace: Whitespace) -> LoweredGrammar:
    """The grammar of all JSON objects."""
    text = JsonText(whitespace)
    return text.writer.finish(text.object())


class _SchemaWriter:
    def __init__(self, document: SchemaDocument, whitespace: Whitespace) -> None:
        self.text = JsonText(whitespace)
        self._document = document
        self._analysis = Analysis(document)
        self._layouts: dict[Object, Layout] = {}
        self._member_plans: dict[Object, MemberPlan] = {}
        self._plans: dict[Array, ArrayPlan | None] = {}
        self._possible: set[Conj] = set()
        self._names: dict[Conj, str] = {}
        self._open: dict[Conj, str | None] = {}

    def write(self, root: Conj) -> str:
        root = self._analysis.canonical(root)
        self._find_possible(root)
        if root not in self._possible:
            raise MalformedConstraint("nothing satisfies the schema", code="unsatisfiable")
        return self._conj(root)

    # ----------------------------------------------------------------- what is possible

    def _find_possible(self, root: Conj) -> None:
        """Which conjunctions have a finite instance: the least fixed point."""
        reachable: dict[Conj, tuple[Shape, ...]] = {}
        pending = [root]
        while pending:
            nodes = pending.pop()
            if nodes in reachable:
                continue
            reachable[nodes] = self._analysis.shapes(nodes)
            for shape in reachable[nodes]:
                pending.extend(self._children(shape))
        grown = True
        while grown:
            grown = False
            for nodes, shapes in reachable.items():
                if nodes not in self._possible and any(map(self._is_possible, shapes)):
                    self._possible.add(nodes)
                    grown = True

    def _layout(self, shape: Object) -> Layout:
        if shape not in self._layouts:
            self._layouts[shape] = lay_out(shape, self._analysis)
        return self._layouts[shape]

    def _plan(self, shape: Array) -> ArrayPlan | None:
        if shape not in self._plans:
            self._plans[shape] = plan_array(shape, self._analysis)
        return self._plans[shape]

    def _members(self, shape: Object) -> MemberPlan | None:
        if not shape.demands:
            return None
        if shape not in self._member_plans:
            self._member_plans[shape] = MemberPlan(shape, self._layout(shape), self._analysis)
        return self._member_plans[shape]

    def _children(self, shape: Shape) -> list[Conj]:
        match shape:
            case Array():
                plan = self._plan(shape)
                if plan is not None:
                    return plan.children()
                return [self._item(shape, i) for i in range(shape.prefix_length() + 1)]
            case Object():
                members = self._members(shape)
                if members is not None:
                    return members.children()
                layout = self._layout(shape)
                return [v for _, v in layout.declared] + [e.value for e in layout.extras]
            case _:
                return []

    def _item(self, shape: Array, index: int) -> Conj:
        return self._analysis.canonical(shape.at(index))

    def _is_possible(self, shape: Shape) -> bool:
        match shape:
            case Number():
                return _numeral(shape) is not None
            case Array():
                plan = self._plan(shape)
                if plan is not None:
                    return plan.start in plan.viable(self._possible.__contains__)
                wanted = min(shape.low, shape.prefix_length() + 1)
                return all(self._item(shape, i) in self._possible for i in range(wanted))
            case Object():
                members = self._members(shape)
                if members is not None:
                    return members.start in members.viable(self._possible.__contains__)
                return self._object_possible(self._layout(shape))
            case _:
                return not self._analysis.relations.empty(shape)

    def _object_possible(self, layout: Layout) -> bool:
        if layout.impossible:
            return False
        usable = self._usable(layout)
        names = {name for name, _ in usable.declared}
        most = None if usable.extras else len(names)
        if layout.high is not None:
            most = layout.high if most is None else min(most, layout.high)
        least = max(layout.low, len(layout.required))
        return layout.required <= names and (most is None or least <= most)

    def _usable(self, layout: Layout) -> Layout:
        """Without the members that no finite value can have."""
        return dataclasses.replace(
            layout,
            declared=tuple(d for d in layout.declared if d[1] in self._possible),
            extras=tuple(e for e in layout.extras if e.value in self._possible),
        )

    # ----------------------------------------------------------------- rules

    def _conj(self, nodes: Conj) -> str:
        """The expression, one atom, of a possible conjunction."""
        known = self._names.get(nodes)
        if known is not None:
            return known
        writer = self.text.writer
        if nodes in self._open:  # recursion: the name is needed before the body is known
            name = self._open[nodes] or writer.reserve("node")
            self._open[nodes] = name
            return name
        self._open[nodes] = None
        body = self._union(nodes)
        reserved = self._open.pop(nodes)
        if reserved is None:
            reserved = writer.rule(body, "node")
        else:
            writer.define(reserved, body)
        self._names[nodes] = reserved
        return reserved

    def _union(self, nodes: Conj) -> str:
        shapes = self._analysis.shapes(nodes)
        if shapes == UNIVERSE:
            return self.text.value()
        path = nodes[0].pointer if nodes else ""
        return choice([self._shape(s, path) for s in shapes if self._is_possible(s)])

    def _shape(self, shape: Shape, path: str) -> str:
        try:
            return self._write_shape(shape)
        except ConstraintError as error:
            if error.path:
                raise
            raise type(error)(error.message, path=path, code=error.reason) from error

    def _write_shape(self, shape: Shape) -> str:
        match shape:
            case Value(float() as value) if value.is_integer() and abs(value) < MAX_EXACT:
                return choice([self.text.literal(value), self.text.literal(int(value))])
            case Value(value):
                return self.text.literal(value)
            case Null():
                return '"null"'
            case Boolean():
                return '("true" | "false")'
            case Number():
                pattern = _numeral(shape)
                assert pattern is not None
                return self.text.writer.rule(
                    write_pattern(pattern, char_class, self.text.writer), "number"
                )
            case Text():
                return self._string(shape)
            case Array():
                return self._array(shape)
            case Object():
                members = self._members(shape)
                if members is not None:
                    possible = self._possible.__contains__
                    return write_object(members, self.text, possible, self._conj)
                layout = self._usable(self._layout(shape))
                return self.text.writer.rule(
                    ObjectWriter(self.text, layout, self._conj).write(), "object"
                )

    def _string(self, shape: Text) -> str:
        if not shape.patterns and not shape.excluded and not shape.without:
            if shape.low == 0 and shape.high is None:
                return self.text.string()
            return self.text.string_of_length(shape.low, shape.high)
        if len(shape.patterns) == 1 and not shape.excluded and not shape.without:
            pattern = shape.patterns[0]
            longest = max_length(pattern)
            if min_length(pattern) >= shape.low and (
                shape.high is None or (longest is not None and longest <= shape.high)
            ):
                return self.text.string_of(pattern)
        return self.text.string_in(text_automaton(shape))

    def _array(self, shape: Array) -> str:
        plan = self._plan(shape)
        if plan is not None:
            return write_array(plan, self.text, self._possible.__contains__, self._conj)
        prefix = shape.prefix_length()
        high = shape.high
        for index in range(prefix + 1):
            if self._item(shape, index) not in self._possible:
                high = index if high is None else min(high, index)
                break
        body = self._elements(shape, 0, high) if high != 0 else ""
        if not body:
            return sequence('"["', self.text.space, '"]"')
        inside = sequence(body, self.text.space)
        inside = inside if shape.low > 0 else f"({inside})?"
        return self.text.writer.rule(sequence('"["', self.text.space, inside, '"]"'), "array")

    def _elements(self, shape: Array, index: int, high: int | None) -> str:
        """Element `index` and those after it, of which there is one at least."""
        comma, writer = self.text.comma(), self.text.writer
        item = self._conj(self._item(shape, index))
        if index < shape.prefix_length():
            if high is not None and index + 1 >= high:
                return item
            rest = sequence(comma, self._elements(shape, index + 1, high))
            return sequence(item, rest if index + 1 < shape.low else f"({rest})?")
        more = writer.rule(sequence(comma, item), "item")
        low = max(shape.low - index - 1, 0)
        if high is None:
            return sequence(item, f"{more}{{{low},}}" if low > 1 else more + "*+"[low])
        most = high - index - 1
        return sequence(item, f"{more}{{{low},{most}}}" if most else "")


def _numeral(shape: Number) -> Pattern | None:
    """The pattern of a number; None when there is none. One that is not to be a multiple is short
    enough for its distance to the next multiple to survive in a double."""
    pattern = numeral(shape)
    if pattern is None or not shape.indivisible:
        return pattern
    machine = automaton.intersection(
        automaton.from_pattern(pattern), automaton.from_pattern(_SHORT)
    )
    return None if machine.is_empty else machine

"""Arrays whose elements are counted or compared: a small automaton over elements.

Its states say how many elements there were (as far as that matters), how many of them met each
demand (`contains`, or what the complement of `items` asks for), and which of finitely many values
were used (`uniqueItems`). An element that meets a demand and one that does not are two steps; only
where too many may meet it (`maxContains`) must the second step rule the demand out, so only there
the demand's complement is needed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from phloem.constrained.base import UnsupportedKeyword
from phloem.constrained.grammar_text import choice, sequence
from phloem.constrained.graphs import reaching
from phloem.constrained.json_text import JsonText
from phloem.constrained.numerals import integer_bounds
from phloem.constrained.schema_shapes import Analysis
from phloem.constrained.shapes import (
    Array,
    Boolean,
    Conj,
    Null,
    Number,
    Shape,
    Some,
    Value,
    conj,
    unique_values,
    value_key,
)

MAX_STATES = 1_100
MAX_LISTED_INTEGERS = 64

Element = Conj | Value


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Elements so far, how many of them met each demand, which values were used, and whether one
    was used twice; all of them only as far as it matters."""

    index: int
    hits: tuple[int, ...]
    used: frozenset[object] = frozenset()
    repeated: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One more element, and the state after it."""

    element: Element
    target: State


class ArrayPlan:
    """The states of one array shape that has demands, or whose elements differ."""

    def __init__(self, shape: Array, analysis: Analysis) -> None:
        """Look at the places.

        Raises:
            UnsupportedKeyword: elements that have to differ and cannot be told apart.
        """
        self._shape = shape
        self._analysis = analysis
        self._some = tuple(
            dataclasses.replace(s, nodes=analysis.canonical(s.nodes))
            for s in shape.some
            if s.low or s.high is not None
        )
        self._length = max(shape.prefix_length(), *(s.start for s in self._some), 0)
        compared = shape.unique is not None or shape.repeats is not None
        self._domains = self._find_domains() if compared else {}
        self.start = State(0, (0,) * len(self._some))
        self.steps: dict[State, tuple[Step, ...]] = {}
        self._known: dict[tuple[int, tuple[str, ...]], list[tuple[Conj, tuple[int, ...]]]] = {}

    @property
    def needed(self) -> bool:
        """False when counting elements says all there is to say."""
        return bool(self._some or self._domains or self._shape.repeats)

    def explore(self) -> None:
        """Find all states.

        Raises:
            UnsupportedKeyword: there are too many.
        """
        pending = [self.start]
        while pending:
            state = pending.pop()
            if state in self.steps:
                continue
            if len(self.steps) >= MAX_STATES:
                self._refuse(f"an array needs more than {MAX_STATES} states")
            self.steps[state] = tuple(self._steps_from(state))
            pending.extend(step.target for step in self.steps[state])

    def _refuse(self, message: str) -> None:
        compared = self._shape.unique or self._shape.repeats
        path = compared or self._shape.path
        what = "uniqueItems" if compared else "contains, or its like"
        raise UnsupportedKeyword(f"{what}: {message}", path=path)

    # ----------------------------------------------------------------- elements that differ

    def _find_domains(self) -> dict[int, tuple[Any, ...]]:
        """The values of each place that may hold what another place holds too."""
        shape, analysis = self._shape, self._analysis
        last = self._length if shape.high is None else min(self._length, shape.high - 1)
        unions: list[tuple[Shape, ...]] = []
        for index in range(last + 1):
            unions.append(analysis.shapes(analysis.canonical(shape.at(index))))
            if not unions[-1]:
                break
        found: dict[int, tuple[Any, ...]] = {}
        for i, union in enumerate(unions):
            others = [u for j, u in enumerate(unions) if j != i]
            if i == self._length and (shape.high is None or shape.high > i + 1):
                others.append(union)
            if all(self._apart(union, other) for other in others):
                continue
            values = _finite(union)
            if values is None:
                self._refuse("only elements of finitely many values can be told apart")
            else:
                found[i] = values
        return found

    def _apart(self, left: tuple[Shape, ...], right: tuple[Shape, ...]) -> bool:
        mine, theirs = _finite(left), _finite(right)
        if mine is not None and theirs is not None:
            return not {value_key(v) for v in mine} & {value_key(v) for v in theirs}
        return not any(
            isinstance(a, Value)
            or isinstance(b, Value)
            or not self._analysis.relations.disjoint(a, b)
            for a, b in itertools.product(left, right)
        )

    # ----------------------------------------------------------------- steps

    def _steps_from(self, state: State) -> Iterator[Step]:
        shape = self._shape
        index = min(state.index, self._length)
        if shape.high is not None and state.index >= shape.high:
            return
        bound = max(shape.low, self._length) if shape.high is None else shape.high
        after = min(state.index + 1, bound)
        if index in self._domains:
            for value in self._domains[index]:
                key = value_key(value)
                hits = self._hits_of(value, state, index)
                twice = key in state.used
                if hits is None or (twice and shape.unique is not None):
                    continue
                if state.repeated or twice:
                    yield Step(Value(value), State(after, hits, repeated=True))
                else:
                    yield Step(Value(value), State(after, hits, state.used | {key}))
            return
        kinds = tuple(self._kind(some, hits, index) for some, hits in self._demands(state))
        for nodes, met in self._elements(index, kinds):
            hits = tuple(n + m for n, m in zip(state.hits, met, strict=True))
            yield Step(nodes, State(after, hits, state.used, state.repeated))

    def _demands(self, state: State) -> Iterator[tuple[Some, int]]:
        return zip(self._some, state.hits, strict=True)

    def _kind(self, some: Some, hits: int, index: int) -> str:
        """What an element is to a demand."""
        if index < some.start or (some.high is None and hits == some.low):
            return "any"
        if some.high is None:
            return "may"
        return "told" if hits < some.high else "not"

    def _elements(self, index: int, kinds: tuple[str, ...]) -> list[tuple[Conj, tuple[int, ...]]]:
        """The elements that may stand at a place, each with the demands that it meets."""
        known = self._known.get((index, kinds))
        if known is not None:
            return known
        canonical, shapes = self._analysis.canonical, self._analysis.shapes
        item = canonical(self._shape.at(index))
        found: list[tuple[Conj, tuple[int, ...]]] = []
        options = [_options(s, k, item) for s, k in zip(self._some, kinds, strict=True)]
        for chosen in itertools.product(*options):
            nodes = canonical(conj((*item, *(n for c, _ in chosen for n in c))))
            if shapes(nodes):
                found.append((nodes, tuple(n for _, n in chosen)))
        self._known[index, kinds] = found
        return found

    def _hits_of(self, value: Any, state: State, index: int) -> tuple[int, ...] | None:
        found: list[int] = []
        for some, hits in self._demands(state):
            met = index >= some.start and all(self._analysis.admits(n, value) for n in some.nodes)
            if met and hits == some.high:
                return None
            found.append(hits + met if some.high is not None else min(hits + met, some.low))
        return tuple(found)

    # ----------------------------------------------------------------- what the writer asks

    def children(self) -> list[Conj]:
        """The conjunctions that elements may be of."""
        steps = (step for steps in self.steps.values() for step in steps)
        return list(dict.fromkeys(s.element for s in steps if not isinstance(s.element, Value)))

    def final(self, state: State) -> bool:
        """Whether the array may end here."""
        if state.index < self._shape.low or (self._shape.repeats and not state.repeated):
            return False
        return all(n >= s.low for s, n in self._demands(state))

    def viable(self, possible: Callable[[Conj], bool]) -> set[State]:
        """The states from which the array can end, with elements that are possible."""
        edges = (
            (state, step.target)
            for state, steps in self.steps.items()
            for step in steps
            if isinstance(step.element, Value) or possible(step.element)
        )
        return reaching(edges, (state for state in self.steps if self.final(state)))


def _options(some: Some, kind: str, item: Conj) -> list[tuple[Conj, int]]:
    """What one demand may ask of an element, and whether that meets it."""
    if kind == "any":
        return [((), 0)]
    if set(some.nodes) <= set(item):
        return [] if kind == "not" else [((), 1)]
    missed: list[tuple[Conj, int]] = [((node.complement(),), 0) for node in some.nodes]
    match kind:
        case "may":
            return [(some.nodes, 1), ((), 0)]
        case "told":
            return [(some.nodes, 1), *missed]
        case _:
            return missed


def write_array(
    plan: ArrayPlan,
    text: JsonText,
    possible: Callable[[Conj], bool],
    write_value: Callable[[Conj], str],
) -> str:
    """The rule of an array whose start is viable."""
    viable = plan.viable(possible)
    names = {state: text.writer.reserve("items") for state in plan.steps if state in viable}

    def element(step: Step) -> str:
        if isinstance(step.element, Value):
            return text.literal(step.element.value)
        return write_value(step.element)

    def following(state: State, lead: str, close: str) -> str:
        """The rest of the array: its end, or `lead` and an element and what comes after it."""
        groups: dict[State, list[str]] = {}
        for step in plan.steps[state]:
            usable = isinstance(step.element, Value) or possible(step.element)
            if usable and step.target in viable:
                groups.setdefault(step.target, []).append(element(step))
        options = [close] if plan.final(state) else []
        options += [sequence(lead, choice(e), names[target]) for target, e in groups.items()]
        return " | ".join(options)

    for state, name in names.items():
        text.writer.define(name, following(state, text.comma(), sequence(text.space, '"]"')))
    body = following(plan.start, "", '"]"')
    return text.writer.rule(sequence('"["', text.space, f"({body})"), "array")


def _finite(union: tuple[Shape, ...]) -> tuple[Any, ...] | None:
    """All values of a union; None when there are many."""
    values: list[Value] = []
    for shape in union:
        match shape:
            case Value():
                values.append(shape)
            case Null():
                values.append(Value(None))
            case Boolean():
                values += [Value(False), Value(True)]
            case Number(integer=True, multiples=(), indivisible=()):
                low, high = integer_bounds(shape)
                if low is None or high is None or high - low >= MAX_LISTED_INTEGERS:
                    return None
                values += [Value(i) for i in range(low, high + 1)]
            case _:
                return None
    return tuple(v.value for v in unique_values(values) if isinstance(v, Value))


def plan_array(shape: Array, analysis: Analysis) -> ArrayPlan | None:
    """The states of an array; None where there is nothing to count but its elements.

    Raises:
        UnsupportedKeyword: too many states, or values that cannot be told apart.
    """
    if not shape.some and shape.unique is None and shape.repeats is None:
        return None
    plan = ArrayPlan(shape, analysis)
    if not plan.needed:
        return None
    plan.explore()
    return plan

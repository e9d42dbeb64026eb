"""Objects of which more is asked than each member by itself can tell: what the complements of
`properties`, `required`, `additionalProperties`, `patternProperties` and `propertyNames` ask for.

The members are steps of an automaton whose states say which demands are met. A member that is not
declared may come again with the same key, and then the last one counts: so once a demand is met by
the value of such a member, all later members of its class of keys meet it too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from phloem.constrained import automaton
from phloem.constrained.automaton import Automaton
from phloem.constrained.base import UnsupportedKeyword
from phloem.constrained.grammar_text import EMPTY, choice, sequence
from phloem.constrained.graphs import reaching
from phloem.constrained.json_text import JsonText
from phloem.constrained.pattern import ANY_TEXT
from phloem.constrained.schema_objects import Layout, key_language, needed_members
from phloem.constrained.schema_shapes import Analysis
from phloem.constrained.shape_relations import text_automaton
from phloem.constrained.shapes import Conj, Has, HasSome, Lacks, Object, Text, conj

MAX_STATES = 4_000
MAX_CLASSES = 64

MAX_FREE_CHOICES = 3
MAX_CHOICES = 64
"""Alternatives for one member: clauses about it that it may meet or not."""


Asked = tuple[tuple[int, Conj], ...]
"""What demands may ask of a value: a demand's number, and the nodes that meet it."""


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Before declared member `index` (or among the others), after `count` members as far as that
    matters; `met` has the numbers of demands, `kept` what later members of a class satisfy."""

    index: int
    count: int
    started: bool
    met: frozenset[int]
    kept: frozenset[tuple[int, Conj]] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One member: a declared one (`key` is None) or one of a class of keys; or no member, where
    `value` is None."""

    target: State
    key: int | None = None
    value: Conj | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Keys:
    """Undeclared keys with one schema for their values, and what demands may ask of those."""

    language: Automaton | None
    value: Conj
    asked: Asked


class MemberPlan:
    """The states of one object shape with demands."""

    def __init__(self, shape: Object, layout: Layout, analysis: Analysis) -> None:
        """Find all states.

        Raises:
            ConstraintError: too many of them, or keys that are no language.
        """
        self._analysis = analysis
        self._layout = layout
        self._all = frozenset(range(len(shape.demands)))
        self._needed = needed_members(layout)
        languages = {
            clause: _language(clause, shape.path, analysis)
            for demand in shape.demands
            for clause in demand
            if isinstance(clause, HasSome)
        }
        self._asked = [self._canonical(_asked_of(shape, n, languages)) for n, _ in layout.declared]
        self._lacking = [
            frozenset(i for i, demand in enumerate(shape.demands) if Lacks(name) in demand)
            for name, _ in layout.declared
        ]
        names = {name for name, _ in layout.declared}
        lacked = frozenset(
            i
            for i, demand in enumerate(shape.demands)
            if any(isinstance(c, Lacks) and c.name not in names for c in demand)
        )
        self.classes = [
            dataclasses.replace(keys, asked=self._canonical(keys.asked))
            for keys in _split(shape, layout, languages)
        ]
        if len(self.classes) > MAX_CLASSES:
            self._refuse()
        self.start = State(0, 0, False, lacked)
        self.steps: dict[State, tuple[Step, ...]] = {}
        pending = [self.start] if not layout.impossible else []
        while pending:
            state = pending.pop()
            if state not in self.steps:
                if len(self.steps) >= MAX_STATES:
                    self._refuse()
                self.steps[state] = tuple(dict.fromkeys(self._steps_from(state)))
                pending.extend(step.target for step in self.steps[state])

    def _canonical(self, asked: Asked) -> Asked:
        return tuple((demand, self._analysis.canonical(nodes)) for demand, nodes in asked)

    def _refuse(self) -> None:
        raise UnsupportedKeyword(
            "the complement of an object schema is too large", path=self._layout.path
        )

    def _steps_from(self, state: State) -> Iterator[Step]:
        layout, full = self._layout, self._layout.high
        room = full is None or state.count < full
        count = min(state.count + 1, self._needed) if full is None else state.count + 1
        if state.index == len(layout.declared):
            for number, keys in enumerate(self.classes) if room else ():
                kept = [n for c, nodes in state.kept if c == number for n in nodes]
                value = conj((*keys.value, *kept))
                for nodes, met, used in self._options(state.met, value, keys.asked):
                    later = state.kept | {(number, u) for u in used}
                    yield Step(State(state.index, count, True, met, later), number, nodes)
            return
        name, value = layout.declared[state.index]
        after = state.index + 1
        if room:
            for nodes, met, _ in self._options(state.met, value, self._asked[state.index]):
                yield Step(State(after, count, True, met), None, nodes)
        if name not in layout.required:
            lacking = state.met | self._lacking[state.index]
            yield Step(dataclasses.replace(state, index=after, met=lacking))

    def _options(
        self, met: frozenset[int], value: Conj, asked: Asked
    ) -> Iterator[tuple[Conj, frozenset[int], tuple[Conj, ...]]]:
        """What a member's value may be, with the demands met after it, and what was added."""
        open_ = [(demand, nodes) for demand, nodes in asked if demand not in met]
        choices = [c for c in dict.fromkeys(n for _, n in open_) if not set(c) <= set(value)]
        found: list[tuple[Conj, tuple[Conj, ...]]] = [(self._analysis.canonical(value), ())]
        for choice_ in choices:
            missed = self._missed(choice_) if len(choices) > MAX_FREE_CHOICES else ()
            more = [(conj((*nodes, *choice_)), (*used, choice_)) for nodes, used in found]
            more += [(conj((*nodes, *missed)), used) for nodes, used in found]
            found = [(nodes, used) for nodes, used in more if self._some(nodes)]
            if len(found) > MAX_CHOICES:
                self._refuse()
        for nodes, used in found:
            hit = {demand for demand, wanted in open_ if set(wanted) <= set(nodes)}
            yield nodes, met | hit, used

    def _missed(self, choice_: Conj) -> Conj:
        """What holds of a value that does not meet a clause, where that is one node: to say so
        rules combinations out."""
        return (choice_[0].complement(),) if len(choice_) == 1 and choice_[0].negated else ()

    def _some(self, nodes: Conj) -> bool:
        analysis = self._analysis
        return any(not analysis.relations.empty(s) for s in analysis.shapes(nodes))

    # ----------------------------------------------------------------- what the writer asks

    def children(self) -> list[Conj]:
        """The conjunctions that values of members may be of."""
        steps = (step for steps in self.steps.values() for step in steps)
        return list(dict.fromkeys(s.value for s in steps if s.value is not None))

    def final(self, state: State) -> bool:
        """Whether the object may end here."""
        return (
            state.index == len(self._layout.declared)
            and state.met == self._all
            and state.count >= self._needed
        )

    def viable(self, possible: Callable[[Conj], bool]) -> set[State]:
        """The states from which the object can end, with members that are possible."""
        edges = (
            (state, step.target)
            for state, steps in self.steps.items()
            for step in steps
            if step.value is None or possible(step.value)
        )
        return reaching(edges, (state for state in self.steps if self.final(state)))

    def name(self, state: State) -> str:
        """The name of the declared member that comes next."""
        return self._layout.declared[state.index][0]


def write_object(
    plan: MemberPlan,
    text: JsonText,
    possible: Callable[[Conj], bool],
    write_value: Callable[[Conj], str],
) -> str:
    """The rule of an object whose start is viable."""
    viable = plan.viable(possible)
    order = [state for state in plan.steps if state in viable]
    names = {state: text.writer.reserve("members") for state in order}

    def member(state: State, step: Step) -> str:
        assert step.value is not None
        if step.key is None:
            key = text.literal(plan.name(state))
        else:
            language = plan.classes[step.key].language
            key = text.string() if language is None else text.string_in(language)
        one = text.member(key, write_value(step.value))
        return sequence(text.comma() if state.started else "", one, names[step.target])

    for state in order:
        options = [EMPTY] if plan.final(state) else []
        for step in plan.steps[state]:
            if step.target not in viable:
                continue
            if step.value is None:
                options.append(names[step.target])
            elif possible(step.value):
                options.append(member(state, step))
        text.writer.define(names[state], choice(options))
    body = sequence('"{"', text.space, names[plan.start], text.space, '"}"')
    return text.writer.rule(body, "object")


Languages = dict[HasSome, Automaton | None]


def _language(clause: HasSome, path: str, analysis: Analysis) -> Automaton | None:
    keys = text_automaton(clause.keys) if clause.keys != Text() else None
    names = key_language((clause.names,) if clause.names else (), path, analysis)
    if keys is None or names is None:
        return names if keys is None else keys
    return automaton.intersection(keys, names)


def _asked_of(shape: Object, name: str, languages: Languages) -> Asked:
    """What demands may ask of the value of a declared member."""
    found: list[tuple[int, Conj]] = []
    for i, demand in enumerate(shape.demands):
        for clause in demand:
            match clause:
                case Has(own, nodes) if own == name:
                    found.append((i, nodes))
                case HasSome(_, _, nodes):
                    language = languages[clause]
                    if language is None or language.accepts(name):
                        found.append((i, nodes))
    return tuple(found)


def _split(shape: Object, layout: Layout, languages: Languages) -> Iterable[_Keys]:
    """The classes of undeclared keys, told apart by what demands ask of them."""
    asked = [
        (i, clause)
        for i, demand in enumerate(shape.demands)
        for clause in demand
        if isinstance(clause, HasSome)
    ]
    for extra in layout.extras:
        parts: list[tuple[Automaton | None, frozenset[HasSome]]] = [(extra.keys, frozenset())]
        for clause, keys in languages.items():
            if keys is None:
                parts = [(language, able | {clause}) for language, able in parts]
                continue
            split: list[tuple[Automaton | None, frozenset[HasSome]]] = []
            for language, able in parts:
                known = language or automaton.from_pattern(ANY_TEXT)
                split.append((automaton.intersection(known, keys), able | {clause}))
                split.append((automaton.difference(known, keys), able))
            parts = [p for p in split if p[0] is not None and not p[0].is_empty]
        for language, able in parts:
            wanted = tuple((i, clause.nodes) for i, clause in asked if clause in able)
            yield _Keys(language, extra.value, wanted)

"""Patterns with conditions (anchors inside, look-around, word boundaries) as automata, exactly.

The automaton runs the pattern with all that is pending. A look-ahead becomes an obligation that
the thread which met it carries: the states of what has to match (or must not) from there on. A
look-behind is run beside the pattern from the first character; whether it has just matched is
known when it is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from phloem.constrained.alphabet import split
from phloem.constrained.automaton import build
from phloem.constrained.nfa import Condition, Nfa
from phloem.constrained.pattern import Automaton, Node

MAX_LOOK_STATES = 4_000

Threads = frozenset["Thread"]


@dataclasses.dataclass(frozen=True, slots=True)
class _Obligation:
    """`threads` must (or, if `negative`, must not) come to `end` some day."""

    negative: bool
    end: int
    threads: Threads


@dataclasses.dataclass(frozen=True, slots=True)
class Thread:
    """A state of the pattern and what has to hold of the rest of the text."""

    state: int
    obligations: frozenset[_Obligation]


@dataclasses.dataclass(frozen=True, slots=True)
class _Moment:
    """All that is known between two characters. `behinds` are the states of each look-behind."""

    begin: bool
    behinds: tuple[frozenset[int], ...]
    threads: Threads


_FREE: frozenset[_Obligation] = frozenset()


def resolve(node: Node) -> Automaton:
    """The automaton of the strings that match `node` as a whole, conditions and all.

    Raises:
        LimitExceeded: it would have too many states.
        UnsupportedKeyword: look-ahead inside look-behind.
    """
    return _Resolver(Nfa(node)).automaton()


class _Resolver:
    def __init__(self, nfa: Nfa) -> None:
        self._nfa = nfa
        # Whatever else is pending, a thread that accepts every text decides.
        self._everything = frozenset(Thread(s, _FREE) for s in (*list(nfa.universal)[:1], nfa.end))

    def automaton(self) -> Automaton:
        """Explore from the first moment."""
        nfa = self._nfa
        first = self._moment(True, [set() for _ in nfa.behinds], [(nfa.start, _FREE)])
        return build(first, self._successors, self._final, nfa.alphabet, MAX_LOOK_STATES)

    def _successors(self, moment: _Moment) -> list[tuple[int, _Moment]]:
        masks: list[int] = []
        self._collect(moment.threads, masks)
        for states in moment.behinds:
            masks += (mask for s in states for mask, _ in self._nfa.edges[s])
        found = []
        for part in split(masks, self._nfa.alphabet.full):
            after = self._step(moment, part)
            if after.threads:
                found.append((part, after))
        return found

    def _collect(self, threads: Threads, masks: list[int]) -> None:
        for thread in threads:
            masks += (mask for mask, _ in self._nfa.edges[thread.state])
            for obligation in thread.obligations:
                self._collect(obligation.threads, masks)

    def _step(self, moment: _Moment, part: int) -> _Moment:
        behinds = [
            {to for s in states for mask, to in self._nfa.edges[s] if mask & part}
            for states in moment.behinds
        ]
        context = self._behinds(False, behinds)
        threads = self._advance(moment.threads, part, None, context)
        return _Moment(False, context.behinds, threads)

    def _moment(
        self, begin: bool, behinds: list[set[int]], seeds: list[tuple[int, frozenset[_Obligation]]]
    ) -> _Moment:
        context = self._behinds(begin, behinds)
        return _Moment(begin, context.behinds, self._closure(seeds, context))

    # ----------------------------------------------------------------- looking behind

    def _behinds(self, begin: bool, states: list[set[int]]) -> _Moment:
        """The look-behinds after empty moves; a new match of each may begin here."""
        context = _Moment(begin, (), frozenset())
        for condition, reached in zip(self._nfa.behinds, states, strict=True):
            closed = self._plain_closure({*reached, condition.start}, context)
            context = _Moment(begin, (*context.behinds, closed), frozenset())
        return context

    def _plain_closure(self, states: set[int], context: _Moment) -> frozenset[int]:
        found, pending = set(states), list(states)
        while pending:
            state = pending.pop()
            targets = list(self._nfa.empty[state])
            for condition, target in self._nfa.conditions.get(state, ()):
                if self._known(condition, context):
                    targets.append(target)
            pending += (t for t in targets if t not in found)
            found.update(targets)
        return frozenset(found)

    def _known(self, condition: Condition, context: _Moment) -> bool:
        """A condition on what came before."""
        if condition.behind is None:
            return context.begin
        return (condition.end in context.behinds[condition.behind]) is not condition.negative

    # ----------------------------------------------------------------- looking ahead

    def _closure(
        self, seeds: Iterable[tuple[int, frozenset[_Obligation]]], context: _Moment
    ) -> Threads:
        """Threads after empty moves, without those that say no more than another."""
        found = set(seeds)
        pending = list(found)
        while pending:
            state, obligations = pending.pop()
            targets = [(to, obligations) for to in self._nfa.empty[state]]
            for condition, to in self._nfa.conditions.get(state, ()):
                more = self._meet(condition, context)
                if more is not None:
                    targets.append((to, obligations | more))
            pending += (t for t in targets if t not in found)
            found.update(targets)
        for state in self._nfa.universal:
            if (state, _FREE) in found:
                return self._everything
        by_state: dict[int, list[frozenset[_Obligation]]] = {}
        for state, obligations in found:
            by_state.setdefault(state, []).append(obligations)
        return frozenset(
            Thread(state, o)
            for state, sets in by_state.items()
            if self._matters(state)
            for o in sets
            if not any(other < o for other in sets)
        )

    def _matters(self, state: int) -> bool:
        """Whether a state does anything but pass on by empty moves."""
        nfa = self._nfa
        return bool(nfa.edges[state]) or not (nfa.empty[state] or state in nfa.conditions)

    def _meet(self, condition: Condition, context: _Moment) -> frozenset[_Obligation] | None:
        """What a thread takes on that passes this condition; None when it cannot."""
        if condition.begin or condition.behind is not None:
            return _FREE if self._known(condition, context) else None
        threads = self._closure([(condition.start, _FREE)], context)
        return self._settle(condition.negative, condition.end, threads)

    def _settle(self, negative: bool, end: int, threads: Threads) -> frozenset[_Obligation] | None:
        """An obligation, or nothing when it is met already, or None when it never will be."""
        if Thread(end, _FREE) in threads:
            return None if negative else _FREE
        if not threads:
            return _FREE if negative else None
        return frozenset((_Obligation(negative, end, threads),))

    def _advance(self, threads: Threads, part: int, end: int | None, context: _Moment) -> Threads:
        """Threads after a character; those of an obligation stay at its `end` once there."""
        seeds: list[tuple[int, frozenset[_Obligation]]] = []
        for thread in threads:
            targets = [to for mask, to in self._nfa.edges[thread.state] if mask & part]
            if thread.state == end:
                targets.append(thread.state)
            if not targets:
                continue
            pending = self._pending(thread.obligations, part, context)
            if pending is not None:
                seeds += ((to, pending) for to in targets)
        return self._closure(seeds, context)

    def _pending(
        self, obligations: frozenset[_Obligation], part: int, context: _Moment
    ) -> frozenset[_Obligation] | None:
        found: frozenset[_Obligation] = _FREE
        for obligation in obligations:
            threads = self._advance(obligation.threads, part, obligation.end, context)
            settled = self._settle(obligation.negative, obligation.end, threads)
            if settled is None:
                return None
            found |= settled
        return found

    def _final(self, moment: _Moment) -> bool:
        return self._arrived(moment.threads, self._nfa.end)

    def _arrived(self, threads: Threads, end: int) -> bool:
        """Whether, if the text ends here, some thread is at `end` with nothing owed."""
        return any(
            thread.state == end
            and all(self._arrived(o.threads, o.end) is not o.negative for o in thread.obligations)
            for thread in threads
        )

"""What may follow a text: a recogniser that runs a grammar byte by byte.

A generalised LL parser. A `State` is what a text has led to; texts that have the same continuations
nearly always lead to the same object, so that states, and all that is found out about them, are
shared by every request with the grammar. Its items are points of rules, each with a `Frame`: where
to go on when the point's rule ends. A call at the end of a rule keeps the frame of its caller, so
loops written as right recursion do not pile frames up; calls of one rule in one state share a
frame, so ambiguous grammars take polynomial time.

Everything here is lazy, and single-threaded.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from typing import TypeVar

from phloem.constrained.closing_rules import (
    NEVER,
    Chars,
    Choice,
    Expression,
    Literal,
    Loop,
    Reference,
    Rule,
    Sequence,
)

MAX_ITEMS = 20_000
MAX_STATES = 20_000
STATE_BYTES = 2_000

_Result = TypeVar("_Result")


class TooAmbiguous(Exception):
    """A text has more than 20,000 readings in progress, or too many have been in all."""


class Point:
    """A place in a rule: `index` into `expression`, then `next`; the rule's end has neither.

    `least` is the length in bytes of the shortest way to the rule's end, `height` a bound of it
    after one more token (see `closing_heights`).
    """

    __slots__ = ("expression", "height", "index", "least", "next")

    def __init__(self, expression: Expression | None, index: int, after: Point | None) -> None:
        self.expression = expression
        self.index = index
        self.next = after
        if expression is None or after is None:
            self.least = self.height = 0
        else:
            self.least = min(expression.least_at(index) + after.least, NEVER)
            self.height = max(expression.height + after.least, after.height)


class Frame:
    """Where to go on when a rule ends: points, each with the frame it goes on in."""

    __slots__ = ("height", "least", "returns")

    def __init__(self) -> None:
        self.returns: tuple[Item, ...] = ()
        self.least = NEVER
        self.height = 0

    def shorten(self) -> bool:
        """Compute `least` from the returns; whether it became less."""
        before = self.least
        self.least = min((p.least + f.least for p, f in self.returns), default=NEVER)
        return self.least < before

    def raise_height(self) -> bool:
        """Compute `height` from the returns; whether it became more."""
        before = self.height
        self.height = max(max(p.height + f.least, f.height) for p, f in self.returns)
        return self.height > before


Item = tuple[Point, Frame]


class State:
    """`least` is the length in bytes of the shortest completion (0 when the text is complete), and
    `height` bounds it after any one token."""

    __slots__ = ("best", "complete", "cost", "height", "items", "least", "moves", "steps", "token")

    def __init__(self, items: list[Item], *, complete: bool) -> None:
        self.items = items
        self.complete = complete
        self.least = 0 if complete else NEVER
        self.height = 0
        for point, frame in items:
            self.least = min(self.least, point.least + frame.least)
            self.height = max(self.height, point.height + frame.least, frame.height)
        self.moves: _Moves | None = None
        self.steps: dict[int, State | None] = {}
        # Found by closing_costs: the first byte of the chosen completion and what follows it, the
        # number of tokens it takes, and the first of them.
        self.best: tuple[int, State] | None = None
        self.cost = -1
        self.token = -1


@dataclasses.dataclass(slots=True)
class _Moves:
    """A state's items by the bytes they read."""

    single: dict[int, list[Item]]
    ranges: list[tuple[int, int, Item]]


class _Call(Frame):
    """A frame that is still being built: a rule called in the state at hand."""

    __slots__ = ("empty", "wanted")

    def __init__(self) -> None:
        super().__init__()
        self.wanted: dict[Item, None] = {}
        self.empty = False
        """The rule has already ended without reading anything."""


class Recogniser:
    """The states of one grammar; the graph is dropped and begun anew when it grows too large."""

    def __init__(self, root: Rule) -> None:
        self._points: dict[tuple[Expression, int, Point], Point] = {}
        self._end = Point(None, 0, None)
        self._bottom = Frame()
        self._bottom.least = 0
        self._root = root
        self._states: dict[frozenset[Item], State] = {}
        self._frames: dict[frozenset[Item], Frame] = {}
        self.work = 0
        """Items of all states made so far."""
        self.generation = 0
        """How often the graph was dropped."""
        self._most_work = NEVER

    @property
    def start(self) -> State:
        return self._state({(self._point(self._root.body, 0, self._end), self._bottom): None})

    def limited(self, work: int, action: Callable[[], _Result]) -> _Result:
        """What `action` gives.

        Raises:
            TooAmbiguous: it needed new states of more than `work` items, or see there.
        """
        self._most_work = self.work + work
        try:
            return action()
        finally:
            self._most_work = NEVER

    @property
    def memory_bytes(self) -> int:
        """Approximate size of the states that are remembered."""
        return STATE_BYTES * len(self._states)

    def step(self, state: State, byte: int) -> State | None:
        """The state after one more byte, if there is any.

        Raises:
            TooAmbiguous: see there.
        """
        if byte in state.steps:
            return state.steps[byte]
        moves = self._moves(state)
        kernel = dict.fromkeys(moves.single.get(byte, ()))
        for low, high, item in moves.ranges:
            if low <= byte <= high:
                kernel[item] = None
        after = self._state(kernel) if kernel else None
        state.steps[byte] = after
        return after

    def read(self, state: State, text: bytes) -> State | None:
        """The state after some more bytes, if there is any.

        Raises:
            TooAmbiguous: see there.
        """
        following: State | None = state
        for byte in text:
            if following is None:
                return None
            following = self.step(following, byte)
        return following

    def step_all(self, state: State) -> list[tuple[int, int, State]]:
        """All successors, as (first byte, last byte, state)."""
        moves = self._moves(state)
        edges = {0, 256}
        for byte in moves.single:
            edges.update((byte, byte + 1))
        for low, high, _ in moves.ranges:
            edges.update((low, high + 1))
        ordered = sorted(edges)
        found: list[tuple[int, int, State]] = []
        for first, end in itertools.pairwise(ordered):
            after = self.step(state, first)
            if after is not None:
                found.append((first, end - 1, after))
        return found

    def _moves(self, state: State) -> _Moves:
        if state.moves is None:
            moves = state.moves = _Moves({}, [])
            for point, frame in state.items:
                expression, after = point.expression, point.next
                assert after is not None
                if isinstance(expression, Literal):
                    index = point.index + 1
                    if index < len(expression.data):
                        after = self._point(expression, index, after)
                    moves.single.setdefault(expression.data[index - 1], []).append((after, frame))
                    continue
                assert isinstance(expression, Chars)
                for low, high, child in expression.trie[point.index]:
                    then = after if child < 0 else self._point(expression, child, after)
                    if low == high:
                        moves.single.setdefault(low, []).append((then, frame))
                    else:
                        moves.ranges.append((low, high, (then, frame)))
        return state.moves

    def _point(self, expression: Expression, index: int, after: Point) -> Point:
        key = (expression, index, after)
        point = self._points.get(key)
        if point is None:
            point = self._points[key] = Point(expression, index, after)
        return point

    # ----------------------------------------------------------------- states

    def _state(self, kernel: dict[Item, None]) -> State:
        key = frozenset(kernel)
        state = self._states.get(key)
        if state is None:
            if len(self._states) >= MAX_STATES:
                self._states.clear()
                self._frames.clear()
                self.generation += 1
            state = self._states[key] = self._close(kernel)
        return state

    def _close(self, kernel: dict[Item, None]) -> State:
        """Follow everything that reads nothing."""
        seen = dict(kernel)
        pending = list(kernel)
        calls: dict[Rule, _Call] = {}
        wanted: list[Item] = []
        complete = False
        while pending:
            item = pending.pop()
            point, frame = item
            match point.expression:
                case None:
                    complete |= frame is self._bottom
                    found = self._ended(frame)
                case Reference() as reference:
                    found = self._called(reference.target(), point, frame, calls)
                case Literal(data=b"") | Sequence() | Choice() | Loop():
                    found = [(p, frame) for p in self._unfold(point)]
                case _:
                    wanted.append(item)
                    continue
            for following in found:
                if following not in seen:
                    seen[following] = None
                    pending.append(following)
            if len(seen) > MAX_ITEMS or self.work + len(seen) > self._most_work:
                raise TooAmbiguous
        self.work += len(seen)
        if calls:
            finished = self._finish_calls(calls.values())
            wanted = list(dict.fromkeys((p, finished.get(f, f)) for p, f in wanted))
        return State(wanted, complete=complete)

    @staticmethod
    def _ended(frame: Frame) -> list[Item]:
        if isinstance(frame, _Call):
            frame.empty = True
            return list(frame.wanted)
        return list(frame.returns)

    def _called(
        self, rule: Rule, point: Point, frame: Frame, calls: dict[Rule, _Call]
    ) -> list[Item]:
        after = point.next
        assert after is not None
        if after is self._end:
            return [(self._point(rule.body, 0, self._end), frame)]
        call = calls.get(rule)
        if call is None:
            call = calls[rule] = _Call()
        call.wanted[after, frame] = None
        found: list[Item] = [(self._point(rule.body, 0, self._end), call)]
        if call.empty:
            found.append((after, frame))
        return found

    def _unfold(self, point: Point) -> list[Point]:
        """The points that one which reads nothing itself stands for."""
        after = point.next
        assert after is not None
        match point.expression:
            case Sequence(items=items):
                for item in reversed(items):
                    after = self._point(item, 0, after)
                return [after]
            case Choice(items=items):
                return [self._point(item, 0, after) for item in items]
            case Loop(item=item, low=low, high=high) as loop:
                index = point.index
                found = [after] if index >= low else []
                if high is None or index < high:
                    begun = index + 1 if high is not None else min(index + 1, low)
                    found.append(self._point(item, 0, self._point(loop, begun, after)))
                return found
            case _:
                return [after]

    def _finish_calls(self, calls: Iterable[_Call]) -> dict[Frame, Frame]:
        """The frames of a state's calls; equal ones of other states are taken again."""
        finished: dict[Frame, Frame] = {}
        pending = list(calls)
        progress = True
        while pending and progress:
            progress = False
            for call in list(pending):
                if all(f in finished or not isinstance(f, _Call) for _, f in call.wanted):
                    returns = tuple((p, finished.get(f, f)) for p, f in call.wanted)
                    finished[call] = self._frame(returns)
                    pending.remove(call)
                    progress = True
        # What is left is left recursion: frames that return into each other.
        for call in pending:
            finished[call] = Frame()
        frames = [finished[call] for call in pending]
        for call, frame in zip(pending, frames, strict=True):
            frame.returns = tuple((p, finished.get(f, f)) for p, f in call.wanted)
        while any(frame.shorten() for frame in frames):
            continue
        while any(frame.raise_height() for frame in frames):
            continue
        return finished

    def _frame(self, returns: tuple[Item, ...]) -> Frame:
        key = frozenset(returns)
        frame = self._frames.get(key)
        if frame is None:
            frame = self._frames[key] = Frame()
            frame.returns = returns
            frame.shorten()
            frame.raise_height()
        return frame

"""Free text first, then the constraint: what a model thinks before it answers.

A matcher around another one. Until the end marker all text is legal but tokens that would run over
the marker's end; behind it the inner matcher takes over. A budget bounds the free text in tokens:
when it is used up, only the marker is legal. A begin marker is the model's to write or not: without
it the constraint holds at once. With nothing inside, what follows is free as well.

What is done with a token depends on the place in the text only (`Markers.step`), so that the
matcher and the closing beside it always agree.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.base import CompiledGrammar, Matcher, MatcherRejected
from phloem.constrained.bitmask import pack_mask
from phloem.constrained.closing import Closing, ClosingGrammar, ClosingVocabulary
from phloem.constrained.closing_rules import NEVER
from phloem.constrained.grammar_text import Deferral
from phloem.constrained.overlap import Overlap

MAX_GAP = 2
"""Line feeds between the marker and what is constrained."""

_Mask = NDArray[np.int32]


class _Phase(IntEnum):
    BEFORE = 0  # `at` bytes of the begin marker are written
    FREE = 1  # the text ends with `at` bytes of the end marker
    GAP = 2  # `at` line feeds behind it
    INNER = 3
    OVER = 4  # of a text with nothing inside: an end token was accepted


class Place(NamedTuple):
    """Where a text is; `spent` tokens of it are free text, with its end marker."""

    phase: _Phase
    at: int = 0
    spent: int = 0


class Markers:
    """The markers of one deferral, token by token. `free` says that nothing is inside."""

    def __init__(self, deferral: Deferral, vocabulary: ClosingVocabulary, *, free: bool) -> None:
        self.free = free
        self.begin = _Spelling(deferral.begin.encode(), vocabulary) if deferral.begin else None
        self.end = deferral.end.encode()
        self.budget = deferral.budget
        self.tables = _tables(vocabulary, self.end)
        self.start = self._start(deferral.seen.encode())

    def _start(self, seen: bytes) -> Place:
        if self.begin and not seen:
            return Place(_Phase.BEFORE)
        state, _ = self.tables.read(0, seen)
        return Place(_Phase.FREE, state)

    def is_forced(self, place: Place) -> bool:
        """Whether nothing but the end marker may follow."""
        return place.phase is _Phase.FREE and self.budget is not None and place.spent >= self.budget

    def step(self, place: Place, token: int) -> Place | None:
        """The place after one more token; None when it is not legal there. At a place inside, the
        inner matcher has its say as well."""
        tables = self.tables
        stops = token in tables.stops
        data = b"" if stops else tables.text_of(token)
        match place.phase:
            case _Phase.BEFORE if self.begin is not None and self.begin.takes(place.at, data):
                at = place.at + len(data)
                over = at == len(self.begin.text)
                return Place(_Phase.FREE) if over else Place(_Phase.BEFORE, at)
            case _Phase.BEFORE if place.at:
                return None
            case _Phase.FREE:
                return self._step_free(place, data, stops)
            case _Phase.GAP if data and place.at + len(data) <= MAX_GAP and not data.strip(b"\n"):
                return Place(_Phase.GAP, place.at + len(data), place.spent)
            case _Phase.OVER:
                return None
        if self.free and not data:
            return Place(_Phase.OVER, 0, place.spent) if stops else None
        return Place(_Phase.INNER, 0, place.spent)

    def _step_free(self, place: Place, data: bytes, stops: bool) -> Place | None:
        if self.is_forced(place) and not self.tables.spelling.takes(place.at, data):
            return None
        if not data:
            return Place(_Phase.OVER, 0, place.spent) if stops and self.free else None
        state, left = self.tables.read(place.at, data)
        spent = place.spent + 1
        if state < len(self.end):
            return Place(_Phase.FREE, state, spent)
        if self.free:
            return Place(_Phase.INNER, 0, spent)
        return None if left else Place(_Phase.GAP, 0, spent)


class _Tables:
    """What tokens are to one end marker; shared by all that is deferred behind it."""

    def __init__(self, vocabulary: ClosingVocabulary, end: bytes) -> None:
        self._vocabulary = vocabulary
        self.end = end
        self._overlap = Overlap(end)
        texts = vocabulary.tokens
        self.text = pack_mask((i for i, t in enumerate(texts) if t), vocabulary.size)
        self.stop_mask = vocabulary.stops
        flags = np.unpackbits(vocabulary.stops.view(np.uint8), bitorder="little")
        self.stops = frozenset(int(i) for i in np.flatnonzero(flags))
        self.spelling = _Spelling(end, vocabulary)
        suffixes = tuple(end[s:] for s in range(1, len(end)))
        near = [i for i, t in enumerate(texts) if t and (t.startswith(suffixes) or end in t)]
        self.inside = [self._inside(state, near) for state in range(len(end))]
        ids = vocabulary.ids
        self.gaps = [
            pack_mask(
                [ids[gap] for n in range(1, left + 1) if (gap := b"\n" * n) in ids], vocabulary.size
            )
            for left in range(MAX_GAP, -1, -1)
        ]

    def _inside(self, state: int, near: Sequence[int]) -> _Mask:
        """The tokens that do not run over the marker's end."""
        over = [i for i in near if self.read(state, self._vocabulary.tokens[i])[1]]
        return self.text & ~pack_mask(over, self._vocabulary.size)

    def text_of(self, token: int) -> bytes:
        """What a token adds to the text; nothing if it is beyond the table, or a control token."""
        texts = self._vocabulary.tokens
        return texts[token] if token < len(texts) else b""

    def read(self, state: int, data: bytes) -> tuple[int, int]:
        """How many bytes of the marker the text ends with (all: it is complete), and how many bytes
        of `data` stand behind it."""
        for i, byte in enumerate(data):
            state = self._overlap.after(state, byte)
            if state == len(self.end):
                return state, len(data) - i - 1
        return state, 0


@functools.lru_cache(maxsize=8)
def _tables(vocabulary: ClosingVocabulary, end: bytes) -> _Tables:
    return _Tables(vocabulary, end)


class _Spelling:
    """The ways to write one marker in tokens. Where it is a token of its own, that is the only one:
    `whole`. `costs[at]` is the fewest tokens that write the rest of it from `at` on, `masks[at]`
    has the tokens that may come there, and `shortest[at]` those of a shortest way."""

    def __init__(self, text: bytes, vocabulary: ClosingVocabulary) -> None:
        self.text = text
        self.whole = text in vocabulary.ids
        if self.whole:
            token = pack_mask([vocabulary.ids[text]], vocabulary.size)
            self.masks = self.shortest = [token] * len(text)
            self.costs = [1] * len(text) + [0]
            return
        self.costs = [0] * (len(text) + 1)
        self.masks, self.shortest = [], []
        for at in range(len(text) - 1, -1, -1):
            ends = [e for e in range(at + 1, len(text) + 1) if text[at:e] in vocabulary.ids]
            least = min((self.costs[e] for e in ends), default=NEVER)
            self.costs[at] = least + 1
            ids = {e: vocabulary.ids[text[at:e]] for e in ends}
            best = [ids[e] for e in ends if self.costs[e] == least]
            self.masks.insert(0, pack_mask(ids.values(), vocabulary.size))
            self.shortest.insert(0, pack_mask(best, vocabulary.size))

    def takes(self, at: int, data: bytes) -> bool:
        """Whether a token may come there."""
        if self.whole:
            return data == self.text
        return bool(data) and self.text.startswith(data, at)


class DeferredMatcher:
    """See `phloem.constrained.base.Matcher`. `inner` is None when nothing is inside."""

    def __init__(self, markers: Markers, inner: Matcher | None) -> None:
        self._markers = markers
        self._inner = inner
        self._places = [markers.start]

    def accept(self, token: int) -> None:
        place = self._markers.step(self._places[-1], token)
        if place is None:
            raise MatcherRejected(f"token {token} is not legal here")
        if place.phase is _Phase.INNER and self._inner is not None:
            self._inner.accept(token)
        self._places.append(place)

    def rollback(self, count: int) -> None:
        if not 0 <= count < len(self._places):
            raise ValueError(f"cannot roll back {count} of {len(self._places) - 1} tokens")
        kept = len(self._places) - count
        inside = sum(place.phase is _Phase.INNER for place in self._places[kept:])
        if self._inner is not None and inside:
            self._inner.rollback(inside)
        del self._places[kept:]

    def fill(self, row: _Mask) -> None:
        markers, place = self._markers, self._places[-1]
        tables = markers.tables
        match place.phase:
            case _Phase.BEFORE:
                self._fill_before(row, place.at)
            case _Phase.FREE if markers.is_forced(place):
                row[:] = tables.spelling.masks[place.at]
            case _Phase.FREE if markers.free:
                row[:] = tables.text | tables.stop_mask
            case _Phase.FREE:
                row[:] = tables.inside[place.at]
            case _Phase.GAP:
                self._fill_inner(row)
                row |= tables.gaps[place.at]
            case _Phase.INNER:
                self._fill_inner(row)
            case _Phase.OVER:
                row[:] = 0

    def _fill_before(self, row: _Mask, at: int) -> None:
        begin = self._markers.begin
        assert begin is not None
        row[:] = 0
        if at == 0:
            self._fill_inner(row)
        row |= begin.masks[at]

    def _fill_inner(self, row: _Mask) -> None:
        if self._inner is None:
            row[:] = self._markers.tables.text | self._markers.tables.stop_mask
        else:
            self._inner.fill(row)

    @property
    def is_complete(self) -> bool:
        place = self._places[-1]
        if self._inner is None:
            return not self._markers.is_forced(place) and not (
                place.phase is _Phase.BEFORE and place.at
            )
        outside = place.phase is _Phase.FREE or (place.phase is _Phase.BEFORE and place.at > 0)
        return not outside and self._inner.is_complete

    @property
    def is_terminated(self) -> bool:
        if self._inner is None:
            return self._places[-1].phase is _Phase.OVER
        return self._inner.is_terminated

    def forced_string(self) -> str:
        place = self._places[-1]
        if place.phase is _Phase.INNER and self._inner is not None:
            return self._inner.forced_string()
        begin, end = self._markers.begin, self._markers.tables.spelling
        if self._markers.is_forced(place) and not end.whole:
            return _whole_characters(end.text[place.at :])
        if place.phase is _Phase.BEFORE and place.at and begin is not None:
            return _whole_characters(begin.text[place.at :])
        return ""


def _whole_characters(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:  # it begins inside a character
        return ""


class DeferredClosing:
    """How far a text is from its end: see `phloem.constrained.closing.Closing`. The free text is
    ended while there is room for what must follow it."""

    def __init__(self, markers: Markers, inner: Closing) -> None:
        self._markers = markers
        self._inner = inner
        self._places: list[Place | None] = [markers.start]

    def advance(self, token: int) -> None:
        place = self._after(self._places[-1], token)
        self._places.append(place)
        if _is_inside(place):
            self._inner.advance(token)

    def rollback(self, count: int) -> None:
        kept = len(self._places) - count
        self._inner.rollback(sum(map(_is_inside, self._places[kept:])))
        del self._places[kept:]

    def cost(self) -> int | None:
        return self._cost(self._places[-1])

    def path(self) -> list[int] | None:
        """Known inside only."""
        place = self._places[-1]
        return None if place is None or place.phase is _Phase.FREE else self._inner.path()

    def fits(self, tokens: Sequence[int], remaining: int) -> bool:
        place, inside = self._places[-1], []
        for token in tokens:
            place = self._after(place, token)
            if _is_inside(place):
                inside.append(token)
        if inside:
            return self._inner.fits(inside, remaining - (len(tokens) - len(inside)))
        before, after = self.cost(), self._cost(place)
        if before is None or before > remaining or after is None:
            return True
        return after <= remaining - len(tokens)

    def narrow(self, row: _Mask, remaining: int) -> bool:
        place = self._places[-1]
        cost = None if place is None else self._cost(place)
        if place is None or cost is None or cost > remaining:
            return False
        tables, begin = self._markers.tables, self._markers.begin
        match place.phase:
            case _Phase.FREE:
                return self._hurry(tables.spelling, place.at, row, remaining, self._room())
            case _Phase.BEFORE if begin is not None and place.at:
                return self._hurry(begin, place.at, row, remaining, self._room() + self._free())
            case _Phase.BEFORE if begin is not None:
                wanted = max(begin.costs) + self._free() + self._room()
                taken = wanted >= remaining and _without(row, begin.masks[0])
            case _Phase.GAP:
                taken = cost + 1 > remaining and _without(row, tables.gaps[place.at])
            case _:
                taken = False
        return self._inner.narrow(row, remaining) or taken

    @staticmethod
    def _hurry(spelling: _Spelling, at: int, row: _Mask, remaining: int, room: int) -> bool:
        """Leave the shortest way to the marker's end only, once any other token would leave too
        little for the `room` tokens behind it."""
        if remaining > max(spelling.costs) + room:
            return False
        return _without(row, ~spelling.shortest[at])

    def _room(self) -> int:
        """Tokens of what is inside."""
        return self._inner.cost() or 0

    def _free(self) -> int:
        """Tokens of the end marker."""
        return max(self._markers.tables.spelling.costs)

    def _cost(self, place: Place | None) -> int | None:
        inner, begin = self._inner.cost(), self._markers.begin
        if place is None or inner is None:
            return None
        match place.phase:
            case _Phase.FREE:
                return self._markers.tables.spelling.costs[place.at] + inner
            case _Phase.BEFORE if begin is not None and place.at:
                return begin.costs[place.at] + self._free() + inner
            case _:
                return inner

    def _after(self, place: Place | None, token: int) -> Place | None:
        return None if place is None else self._markers.step(place, token)


def _is_inside(place: Place | None) -> bool:
    return place is not None and place.phase is _Phase.INNER


def _without(row: _Mask, taken: _Mask) -> bool:
    """Take tokens away, if others are left; whether some were."""
    kept = row & ~taken
    if not kept.any() or np.array_equal(kept, row):
        return False
    row[:] = kept
    return True


class DeferredGrammar:
    """See `phloem.constrained.base.CompiledGrammar`."""

    def __init__(self, markers: Markers, inner: CompiledGrammar | None) -> None:
        self._markers = markers
        self._inner = inner

    @property
    def engine(self) -> str:
        return "free" if self._inner is None else self._inner.engine

    @property
    def memory_bytes(self) -> int:
        return 0 if self._inner is None else self._inner.memory_bytes

    def matcher(self) -> DeferredMatcher:
        return DeferredMatcher(
            self._markers, None if self._inner is None else self._inner.matcher()
        )


class DeferredClosings:
    """The closing of requests whose constraint is deferred."""

    def __init__(self, markers: Markers, inner: ClosingGrammar) -> None:
        self._markers = markers
        self._inner = inner

    @property
    def memory_bytes(self) -> int:
        """Approximate size."""
        return self._inner.memory_bytes

    def closing(self, prefix: bytes = b"") -> DeferredClosing:
        """A request's text, at its beginning."""
        return DeferredClosing(self._markers, self._inner.closing(prefix))

"""How many tokens it takes to complete a text, and what each next token makes of that.

The completion of a state is its shortest in bytes, the first in an order of bytes among equals; so
after any beginning of it, what is left of it is the completion again. Its cost is the fewest
tokens that spell it. The first of these tokens therefore leads to a state that costs one less:
whoever keeps a budget of at least the cost can always go on keeping it.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.bitmask import words
from phloem.constrained.closing_rules import NEVER, Chars, Literal
from phloem.constrained.closing_states import Recogniser, State
from phloem.constrained.closing_tokens import ClosingVocabulary
from phloem.constrained.closing_utf8 import RANK

MAX_EXACT_BYTES = 16_384
"""A longer completion is spelled byte by byte until this much of it is left."""
MAX_PIECE_BYTES = 32
MAX_TABLE_ROWS = 2_048
MASK_CACHE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Limits:
    """Costs that tokens lead to, ascending, and for each the tokens that lead to no more."""

    costs: list[int]
    masks: NDArray[np.int32]

    def allowed(self, most: int) -> NDArray[np.int32] | None:
        """The packed mask of the tokens after which the cost is at most `most`; None when none
        is above it."""
        if most >= self.costs[-1]:
            return None
        mask: NDArray[np.int32] = self.masks[bisect.bisect_right(self.costs, most)]
        return mask


class Costs:
    """Costs of one grammar's states. `masks` are remembered for the states met last."""

    def __init__(self, recogniser: Recogniser, vocabulary: ClosingVocabulary) -> None:
        self._recogniser = recogniser
        self._vocabulary = vocabulary
        self._limits: OrderedDict[State, Limits] = OrderedDict()
        self._held_bytes = 0
        self._rows: dict[State, int] = {}
        self._states: list[State | None] = []
        self._table = np.zeros((0, 256), np.int32)
        self._filled = np.zeros(0, bool)

    @property
    def memory_bytes(self) -> int:
        return self._held_bytes + self._table.nbytes

    # ----------------------------------------------------------------- one state

    def cost(self, state: State) -> int:
        """Tokens to completion; NEVER when the vocabulary cannot spell one."""
        path: list[State] = []
        while state.cost < 0:
            if state.complete or state.least >= NEVER:
                state.cost = state.least
            else:
                byte, following = self._choose(state)
                if state.least > MAX_EXACT_BYTES:
                    state.cost = state.least
                    state.token = self._vocabulary.ids[bytes([byte])]
                else:
                    path.append(state)
                    state = following
        for state in reversed(path):
            self._spell(state)
        return path[0].cost if path else state.cost

    def _choose(self, state: State) -> tuple[int, State]:
        """The first byte of the completion, and the state after it."""
        if state.best is None:
            byte = -1
            for point, frame in state.items:
                if point.least + frame.least > state.least:
                    continue
                expression = point.expression
                if isinstance(expression, Literal):
                    own = expression.data[point.index]
                else:
                    assert isinstance(expression, Chars)
                    own = expression.best[point.index]
                if RANK[own] < RANK[byte]:
                    byte = own
            following = self._recogniser.step(state, byte)
            assert following is not None, "an item reads the byte"
            state.best = byte, following
        return state.best

    def _spell(self, state: State) -> None:
        """Set the cost; those of all states further on are known."""
        ids = self._vocabulary.ids
        piece = bytearray()
        at = state
        state.cost = NEVER
        while at.best is not None and len(piece) < MAX_PIECE_BYTES:
            byte, at = at.best
            piece.append(byte)
            if at.cost < state.cost:
                token = ids.get(bytes(piece))
                if token is not None:
                    state.cost = at.cost + 1
                    state.token = token

    def path(self, state: State) -> list[int]:
        """The tokens of the completion. The state's cost is known and not NEVER."""
        tokens: list[int] = []
        while not state.complete:
            self.cost(state)
            tokens.append(state.token)
            for _ in self._vocabulary.tokens[state.token]:
                _, state = self._choose(state)
        return tokens

    # ----------------------------------------------------------------- all next tokens

    def limits(self, state: State) -> Limits:
        """What each next token leads to.

        Raises:
            TooAmbiguous: see there.
        """
        known = self._limits.get(state)
        if known is not None:
            self._limits.move_to_end(state)
            return known
        if len(self._states) > MAX_TABLE_ROWS or not self._states:
            self._rows.clear()
            self._states = [None]
            self._grow()
            self._table[0] = 0
            self._filled[:] = False
            self._filled[0] = True
        tokens, after = self._vocabulary.walk(self._row(state), self._table_for)
        found = self._limits_of(tokens, after)
        self._limits[state] = found
        self._held_bytes += found.masks.nbytes
        while self._held_bytes > MASK_CACHE_BYTES and len(self._limits) > 1:
            _, dropped = self._limits.popitem(last=False)
            self._held_bytes -= dropped.masks.nbytes
        return found

    def _limits_of(self, tokens: NDArray[np.int32], after: NDArray[np.int32]) -> Limits:
        rows = np.flatnonzero(np.bincount(after, minlength=1))
        cost_of = np.zeros(len(self._states), np.int64)
        for row in rows:
            state = self._states[row]
            assert state is not None
            cost_of[row] = self.cost(state)
        costs = cost_of[after]
        levels = [int(c) for c in np.unique(cost_of[rows])]
        masks = np.empty((len(levels) + 1, words(self._vocabulary.size)), np.int32)
        masks[0] = self._vocabulary.stops
        flags = np.zeros(masks.shape[1] * 32, bool)
        for i, level in enumerate(levels, 1):
            flags[tokens[costs == level]] = True
            masks[i] = np.packbits(flags, bitorder="little").view(np.int32)
            masks[i] |= self._vocabulary.stops
        return Limits(levels or [0], masks)

    def _row(self, state: State) -> int:
        row = self._rows.get(state)
        if row is None:
            row = self._rows[state] = len(self._states)
            self._states.append(state)
        return row

    def _table_for(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        self._grow()
        step_all = self._recogniser.step_all
        for row in np.unique(rows[~self._filled[rows]]):
            state = self._states[row]
            assert state is not None
            moves = [(low, high, self._row(s)) for low, high, s in step_all(state)]
            self._grow()
            self._table[row] = 0
            for low, high, after in moves:
                self._table[row, low : high + 1] = after
            self._filled[row] = True
        return self._table

    def _grow(self) -> None:
        """Have a row of the table for every state."""
        have = len(self._filled)
        if have < len(self._states):
            more = max(len(self._states) - have, have, 64)
            self._table = np.concatenate([self._table, np.zeros((more, 256), np.int32)])
            self._filled = np.concatenate([self._filled, np.zeros(more, bool)])

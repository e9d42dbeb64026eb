"""Drafts: what probably comes next in a constrained text, from what came before in others.

Texts under one constraint are alike: the same enum values, the same openings of strings, the same
places where one ends. What a constraint forces is not asked of the model anyway (`jump.py`); of
what is left, the token that followed the same last few tokens the last time often follows again.
So tokens are remembered by the constraint and the `CONTEXT` tokens before them (an n-gram model of
one continuation, as prompt-lookup decoding has it), each with a counter of two bits, as branch
predictors keep it: right counts up, wrong down, and at zero another token takes the place. How
often a guess of each strength is right is counted as well: under one constraint nearly always,
under another, or at a high temperature, hardly ever.

A draft changes no token of an answer, since each is drawn anyway; it only says which draws are
worth having their logits computed ahead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

CONTEXT = 3
"""Tokens before the guessed one that have to be the same; fewer only where the text begins."""
STRONGEST = 3
EXPECTED = (0.0, 0.55, 0.65, 0.8)
"""By strength, how often a guess is right, before anything is known."""
SHARE = 1 / 16
"""What one more guess changes of that."""
LEAST_CHANCE = 0.5
"""What a draft's chance to be right has to be, as a whole. A token computed in vain costs a tenth
to a third of a step."""
MAX_REMEMBERED, MAX_SCOPES = 1 << 16, 1 << 10
"""Contexts, and constraints; those that were of no use for longest go first. Some 15 MiB."""


class Guess(NamedTuple):
    """A token, and the chance that it is what comes."""

    token: int
    chance: float


class Drafter:
    """Remembers what followed what, over all texts. Each call costs the same, however much is
    remembered."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[object, ...], tuple[int, int]] = OrderedDict()
        self._right: OrderedDict[object, list[float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, scope: object, text: Sequence[int], at: int) -> None:
        """`text[at]` followed the tokens before it, in a text of `scope` (a constraint, and whose
        texts under it may be known to each other)."""
        context = _context(scope, text, at)
        token = text[at]
        guess, strength = self._known.get(context, (token, 0))
        if strength:
            self._count(scope, strength, guess == token)
        if guess == token:
            strength = min(STRONGEST, strength + 1)
        elif strength > 1:
            strength -= 1
        else:
            guess, strength = token, 1
        self._known[context] = guess, strength
        self._known.move_to_end(context)
        if len(self._known) > self._limit:
            self._known.popitem(last=False)

    def _count(self, scope: object, strength: int, right: bool) -> None:
        """A guess of that strength would have been right, or not."""
        chances = self._right.setdefault(scope, list(EXPECTED))
        chances[strength] += SHARE * (right - chances[strength])
        self._right.move_to_end(scope)
        if len(self._right) > MAX_SCOPES:
            self._right.popitem(last=False)

    def guess(self, scope: object, text: Sequence[int]) -> Guess | None:
        """What may follow `text`; None when nothing is known of it."""
        known = self._known.get(_context(scope, text, len(text)))
        if known is None:
            return None
        return Guess(known[0], self._right.get(scope, EXPECTED)[known[1]])


def _context(scope: object, text: Sequence[int], at: int) -> tuple[object, ...]:
    return (scope, *text[max(0, at - CONTEXT) : at])

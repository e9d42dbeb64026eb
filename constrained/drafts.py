"""Drafts: what probably comes next in a constrained text, from what came before in others.

Texts under one constraint are alike: the same enum values, the same openings of strings, the same
places where one ends. What a constraint forces is not asked of the model anyway (`jump.py`); of
what is left, the token that followed the same last few tokens the last time often follows again.
So tokens are remembered by the constraint and the `CONTEXT` tokens before them (an n-gram model of
one continuation, as prompt-lookup decoding has it), each with a counter of two bits, as branch
predictors keep it: right counts up, wrong down, and at zero another token takes the place.

A draft changes no token of an answer, since each is drawn anyway; it only says which draws are
worth having their logits computed ahead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

CONTEXT = 3
"""Tokens before the guessed one that have to be the same; fewer only where the text begins."""
SURE, STRONGEST = 2, 3
MAX_REMEMBERED = 1 << 16
"""Contexts; those that were of no use for longest go first. Some 10 MiB."""


class Drafter:
    """Remembers what followed what, over all texts. Each call costs the same, however much is
    remembered."""

    def __init__(self, limit: int = MAX_REMEMBERED) -> None:
        self._limit = limit
        self._known: OrderedDict[tuple[object, ...], tuple[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, scope: object, text: Sequence[int], at: int) -> None:
        """`text[at]` followed the tokens before it, in a text of `scope` (a constraint, and whose
        texts under it may be known to each other)."""
        context = _context(scope, text, at)
        token = text[at]
        guess, strength = self._known.get(context, (token, 0))
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

    def guess(self, scope: object, text: Sequence[int], *, surely: bool = False) -> int | None:
        """What may follow `text`; None when nothing is known of it, or not `surely`: more than
        once."""
        guess, strength = self._known.get(_context(scope, text, len(text)), (None, 0))
        return None if surely and strength < SURE else guess


def _context(scope: object, text: Sequence[int], at: int) -> tuple[object, ...]:
    return (scope, *text[max(0, at - CONTEXT) : at])

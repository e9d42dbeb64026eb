"""Closing within a budget: a constrained text of at most so many tokens is complete by its end.

While the budget is far above what completion takes, every token that the constraint allows stays
allowed. Near it, those are taken away after which the text could no longer be completed in what is
left. Engines do not know how far a text is from its end, so the grammar is followed here a second
time, by a recogniser of its own; with any engine.

    closing = grammar.closing()            # one request
    matcher.fill(row); closing.narrow(row, remaining)
    matcher.accept(token); closing.advance(token)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.closing_costs import Costs
from phloem.constrained.closing_heights import set_heights
from phloem.constrained.closing_rules import NEVER, Unreadable, read_grammar
from phloem.constrained.closing_states import Recogniser, State, TooAmbiguous
from phloem.constrained.closing_tokens import ClosingVocabulary
from phloem.constrained.grammar_text import LoweredGrammar

__all__ = ["Closing", "ClosingGrammar", "ClosingVocabulary"]

MAX_WORK = 500_000
TOKEN_WORK = 500
"""Items of states (see `closing_states`) that one text may be the first to need: at first, and more
with each token. A million takes about a second."""
TEXT_WEIGHT = 16
"""Bytes that a character of grammar text takes once it is read."""
MAX_PENDING = 256
"""Tokens that are left unread while nothing depends on them."""

_Result = TypeVar("_Result")


class ClosingGrammar:
    """A grammar that requests can be closed in; None as `minimum` when they cannot, because the
    vocabulary cannot spell what it needs or the text is beyond the recogniser.

    Shared by requests; one thread at a time.
    """

    def __init__(self, grammar: LoweredGrammar, vocabulary: ClosingVocabulary) -> None:
        self.vocabulary = vocabulary
        self._text_bytes = len(grammar.text)
        self.minimum: int | None = None
        self.flat = False
        """Heights bound every text, and not only one more token."""
        try:
            groups = read_grammar(grammar, vocabulary.usable)
            self.flat = set_heights(groups, vocabulary.longest)
            self.recogniser = Recogniser(groups[-1][-1])
            self.costs = Costs(self.recogniser, vocabulary)
            cost = self.recogniser.limited(MAX_WORK, lambda: self.costs.cost(self.recogniser.start))
        except (Unreadable, TooAmbiguous):
            return
        if cost < NEVER:
            self.minimum = cost

    @property
    def memory_bytes(self) -> int:
        """Approximate size, as of now; it grows with the texts met, within bounds."""
        if self.minimum is None:
            return 0
        return (
            self._text_bytes * TEXT_WEIGHT + self.recogniser.memory_bytes + self.costs.memory_bytes
        )

    def closing(self, prefix: bytes = b"") -> Closing:
        """A request's text, at its beginning; or behind a prefix that it continues. The cost there
        is the least budget that the request can be kept in."""
        return Closing(self, prefix)


class Closing:
    """How far one request's text is from completion. Not thread-safe.

    A text that cannot be followed has no cost and is never narrowed: its grammar has no minimum,
    the grammar does not derive it, or following it takes too much work.
    """

    def __init__(self, grammar: ClosingGrammar, prefix: bytes) -> None:
        self._grammar = grammar
        self._tokens: list[int] = []
        self._work = 0
        start = None
        if grammar.minimum is not None:
            recogniser = grammar.recogniser
            start = self._limited(lambda: recogniser.read(recogniser.start, prefix))
        # After 0, 1, … tokens, as far as they were read; None: cannot be followed.
        self._states: list[State | None] = [start]

    def advance(self, token: int) -> None:
        """Add a token; one without text (an end token) changes nothing."""
        self._tokens.append(token)
        if len(self._tokens) - len(self._states) >= MAX_PENDING:
            self._read()

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens.

        Raises:
            ValueError: there are fewer.
        """
        if not 0 <= count <= len(self._tokens):
            raise ValueError(f"cannot roll back {count} of {len(self._tokens)} tokens")
        kept = len(self._tokens) - count
        del self._tokens[kept:]
        del self._states[kept + 1 :]

    def cost(self) -> int | None:
        """Tokens of a completion from here, 0 when the text is complete; beyond 16 KiB of text to
        come, its bytes. None: not known."""
        return self._cost(self._read())

    def path(self) -> list[int] | None:
        """The tokens of that completion."""
        state = self._read()
        if state is None or self._cost(state) is None:
            return None
        return self._limited(lambda: self._grammar.costs.path(state))

    def fits(self, tokens: Sequence[int], remaining: int) -> bool:
        """Whether, after these tokens (forced ones, say), the text can still be completed within
        what is then left of `remaining`. True for a text that cannot be followed, or whose cost is
        above `remaining` already."""
        if self._is_far(remaining - len(tokens)):
            return True
        state = self._read()
        before = self._cost(state)
        if before is None or before > remaining:
            return True
        for token in tokens:
            state = self._read_token(state, token)
        after = self._cost(state)
        return after is None or after <= remaining - len(tokens)

    def narrow(self, row: NDArray[np.int32], remaining: int) -> bool:
        """Take from a packed mask, filled by the engine, the tokens after which the text cannot be
        completed in the rest of `remaining` tokens; whether there were such.

        At least one token stays, if the cost is at most `remaining`; if it is above, nothing is
        taken. From a budget of at least `ClosingGrammar.minimum` on it is never above, provided
        that every mask was narrowed.
        """
        if self._is_far(remaining):
            return False
        costs = self._grammar.costs
        state = self._read()
        if state is None or state.height < remaining:
            return False
        cost = self._cost(state)
        if cost is None or cost > remaining:
            return False
        limits = self._limited(lambda: costs.limits(state))
        allowed = None if limits is None else limits.allowed(remaining - 1)
        if allowed is None:
            return False
        kept = row & allowed
        if not kept.any() or np.array_equal(kept, row):
            return False
        row[:] = kept
        return True

    def _is_far(self, remaining: int) -> bool:
        """No text of the grammar is so far from its end, or this one cannot be followed."""
        start = self._states[0]
        return start is None or (self._grammar.flat and start.height < remaining)

    def _cost(self, state: State | None) -> int | None:
        if state is None:
            return None
        cost = state.cost
        if cost < 0:
            found = self._limited(lambda: self._grammar.costs.cost(state))
            cost = NEVER if found is None else found
        return cost if cost < NEVER else None

    def _read(self) -> State | None:
        """The state after all tokens."""
        state = self._states[-1]
        for token in self._tokens[len(self._states) - 1 :]:
            state = self._read_token(state, token)
            self._states.append(state)
        return state

    def _read_token(self, state: State | None, token: int) -> State | None:
        texts = self._grammar.vocabulary.tokens
        if state is None or token >= len(texts):
            return state
        return self._limited(lambda: self._grammar.recogniser.read(state, texts[token]))

    def _limited(self, action: Callable[[], _Result]) -> _Result | None:
        """Do what may need new states, as far as this text may cause such work."""
        recogniser = self._grammar.recogniser
        before = recogniser.work
        allowance = MAX_WORK + TOKEN_WORK * len(self._tokens) - self._work
        try:
            return recogniser.limited(allowance, action)
        except TooAmbiguous:
            return None
        finally:
            self._work += recogniser.work - before

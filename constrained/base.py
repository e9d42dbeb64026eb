"""What a grammar engine is to the rest of Phloem, and how a constraint is refused.

A `Backend` builds a lowered constraint for one vocabulary; the `CompiledGrammar` is immutable and
shared; a `Matcher` is one request's position in it. Engines are listed by dotted name in
`phloem.constrained.backends`, so that importing this module loads none of them.
A constraint is lowered to a grammar first (`phloem.constrained.lowering`), for any engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from phloem.constrained.grammar_text import LoweredGrammar
    from phloem.constrained.spec import Constraint


class ConstraintError(Exception):
    """A constraint that cannot be enforced in full.

    `path` is a JSON pointer into the schema (empty for the whole constraint, or for one that has
    no inside); `code` is a short machine-readable reason. Messages name keywords, never values.
    """

    code: ClassVar[str] = "invalid_constraint"

    def __init__(self, message: str, *, path: str = "", code: str | None = None) -> None:
        super().__init__(f"{message} (at {path})" if path else message)
        self.message = message
        self.path = path
        self.reason = code or type(self).code


class UnsupportedKeyword(ConstraintError):
    """A keyword, or a combination of keywords, that no engine here enforces exactly."""

    code = "unsupported_keyword"


class LimitExceeded(ConstraintError):
    """The constraint is larger, deeper or dearer than is allowed; the message names the limit."""

    code = "limit_exceeded"


class MalformedConstraint(ConstraintError):
    """Not a schema, a regular expression or a grammar at all, or one that nothing can satisfy."""

    code = "malformed_constraint"


class MatcherRejected(Exception):
    """A token that the grammar does not allow here was offered to a matcher."""


class MatcherExhausted(Exception):
    """A text became dearer to follow than the engine's limits allow; its matcher is of no use."""


class Matcher(Protocol):
    """One request's position in a compiled grammar. Not thread-safe."""

    def accept(self, token: int) -> None:
        """Advance by one token.

        Raises:
            MatcherRejected: the token is not legal here; the state is unchanged.
            MatcherExhausted: see there; so may all other methods.
        """
        ...

    def rollback(self, count: int) -> None:
        """Undo the last `count` accepted tokens.

        Raises:
            ValueError: fewer than `count` tokens were accepted.
        """
        ...

    def fill(self, row: NDArray[np.int32]) -> None:
        """Write the legal next tokens into `row`, ceil(vocab/32) int32 words, bit = legal."""
        ...

    @property
    def is_complete(self) -> bool:
        """The text so far satisfies the constraint: an end token is legal now."""
        ...

    @property
    def is_terminated(self) -> bool:
        """An end token was accepted: nothing more is legal."""
        ...

    def forced_string(self) -> str:
        """The longest text that every continuation begins with; whole characters only."""
        ...


class CompiledGrammar(Protocol):
    """A constraint bound to a vocabulary. Thread-safe."""

    @property
    def engine(self) -> str:
        """The name of the backend that built it."""
        ...

    @property
    def memory_bytes(self) -> int:
        """Approximate size, for the cache's bound."""
        ...

    def matcher(self) -> Matcher:
        """A new matcher at the start, or behind the prefix that the constraint continues.

        Raises:
            MatcherRejected: the prefix is not legal.
        """
        ...


class Backend(Protocol):
    """A grammar engine for one vocabulary. `compile_grammar` may be called from several threads."""

    @property
    def name(self) -> str: ...

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Lower a constraint and build it, here and now.

        Raises:
            ConstraintError: it is refused, with the reason.
        """
        ...

    def compile_grammar(self, grammar: LoweredGrammar) -> CompiledGrammar:
        """Compile what `phloem.constrained.lowering.lower` gave; takes as long as it takes and
        cannot be interrupted.

        Raises:
            ConstraintError: the engine refuses the grammar, with the reason.
        """
        ...


def check_prefix(grammar: CompiledGrammar) -> None:
    """Have the first matcher of a grammar read its prefix.

    Raises:
        MalformedConstraint: no text of the grammar begins so.
    """
    try:
        grammar.matcher()
    except MatcherRejected as error:
        raise MalformedConstraint(
            "the prefix cannot begin a text that satisfies the constraint", code="prefix_rejected"
        ) from error

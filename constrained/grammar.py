"""A compiled constraint with all that a request needs of it."""

from __future__ import annotations

import dataclasses

from phloem.constrained.base import CompiledGrammar, Matcher
from phloem.constrained.closing import Closing, ClosingGrammar
from phloem.constrained.deferred import DeferredClosing, DeferredClosings


@dataclasses.dataclass(frozen=True, slots=True)
class Grammar:
    """An engine's grammar, and the same again for closing within a budget, where that can be.
    A text of it goes on from `prefix`, which the engine's matchers begin with by themselves."""

    compiled: CompiledGrammar
    closings: ClosingGrammar | DeferredClosings | None = None
    prefix: bytes = b""

    @property
    def memory_bytes(self) -> int:
        """Approximate size, for the cache's bound."""
        closings = 0 if self.closings is None else self.closings.memory_bytes
        return self.compiled.memory_bytes + closings

    @property
    def minimum(self) -> int | None:
        """Tokens that complete a text from its beginning; None when that is not known."""
        return None if self.closings is None else self.closings.closing(self.prefix).cost()

    def matcher(self) -> Matcher:
        return self.compiled.matcher()

    def closing(self) -> Closing | DeferredClosing | None:
        """How far a text is from its end, at its beginning."""
        return None if self.closings is None else self.closings.closing(self.prefix)

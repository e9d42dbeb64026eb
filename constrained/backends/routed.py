"""Each constraint to the engine that runs it best; both enforce the same language.

xgrammar computes masks when it compiles: best for grammars whose states are few, and the one that
knows structural tags. llguidance computes them from the text as it comes: best where something is
counted (a field of 20 characters has 20 states to compile, at 5 ms each), for
long lists of choices, and for ambiguous grammars, which it bounds by limits. What llguidance cannot
run exactly goes to xgrammar.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from phloem.constrained.base import Backend, CompiledGrammar, ConstraintError
from phloem.constrained.grammar_text import LoweredGrammar
from phloem.constrained.lowering import lower
from phloem.constrained.spec import Constraint
from phloem.constrained.vocab import Vocabulary

if TYPE_CHECKING:
    from phloem.constrained.backends.llguidance import LlguidanceBackend
    from phloem.constrained.backends.xgrammar import XGrammarBackend

MAX_COUNTED = 64
"""Weight of counted repetitions up to which xgrammar is better."""


class RoutedBackend:
    """Loads each engine when the first constraint needs it."""

    name = "routed"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._engines: dict[str, Backend] = {}

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        return self.compile_grammar(lower(constraint))

    def compile_grammar(self, grammar: LoweredGrammar) -> CompiledGrammar:
        if grammar.deferral is not None:
            raise ValueError("what is deferred is wrapped where both engines are known")
        if grammar.ambiguous:
            return self._llguidance().compile_grammar(grammar)
        if not grammar.is_tag and grammar.counted > MAX_COUNTED:
            try:
                return self._llguidance().compile_grammar(grammar)
            except ConstraintError as error:
                if error.reason == "prefix_rejected":
                    raise
                # It cannot be split, or is beyond the engine's limits.
        return self._xgrammar().compile_grammar(grammar)

    def _xgrammar(self) -> XGrammarBackend:
        from phloem.constrained.backends.xgrammar import XGrammarBackend

        with self._lock:
            engine = self._engines.get("xgrammar")
            if not isinstance(engine, XGrammarBackend):
                engine = self._engines["xgrammar"] = XGrammarBackend(self._vocabulary)
            return engine

    def _llguidance(self) -> LlguidanceBackend:
        from phloem.constrained.backends.llguidance import LlguidanceBackend

        with self._lock:
            engine = self._engines.get("llguidance")
            if not isinstance(engine, LlguidanceBackend):
                engine = self._engines["llguidance"] = LlguidanceBackend(self._vocabulary)
            return engine

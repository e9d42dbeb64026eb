"""xgrammar as a backend. The only module that imports it.

Every constraint reaches xgrammar as EBNF that Phloem wrote or checked; its own conversions of
JSON schemas and regular expressions are not used (see `phloem.constrained.lowering`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phloem.constrained.backends.bare_import import import_bare
from phloem.constrained.base import (
    MalformedConstraint,
    MatcherRejected,
    UnsupportedKeyword,
    check_prefix,
)
from phloem.constrained.bitmask import pack_mask
from phloem.constrained.grammar_text import LoweredGrammar
from phloem.constrained.lowering import lower
from phloem.constrained.spec import Constraint
from phloem.constrained.vocab import Vocabulary

xgrammar: Any = import_bare("xgrammar")

# A counted repetition of n characters has n states, and xgrammar computes a mask for each when it
# compiles (2 to 15 ms each for 50,000 tokens). Above this weight it does so when a state is met.
EAGER_COUNTED_STATES = 256


class XGrammarMatcher:
    """See `phloem.constrained.base.Matcher`."""

    def __init__(self, compiled: Any, legal: NDArray[np.int32], prefix: str = "") -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._legal = legal
        self._accepted = 0
        if prefix and not self._matcher.accept_string(prefix):
            raise MatcherRejected("the prefix is not legal")

    def accept(self, token: int) -> None:
        if self.is_terminated or not self._matcher.accept_token(token):
            raise MatcherRejected(f"token {token} is not legal here")
        self._accepted += 1

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self._accepted:
            raise ValueError(f"cannot roll back {count} of {self._accepted} tokens")
        if count:
            self._matcher.rollback(count)
            self._accepted -= count

    def fill(self, row: NDArray[np.int32]) -> None:
        if self.is_terminated:
            row[:] = 0
            return
        # xgrammar may leave the buffer alone when every token is legal, and never writes the bits
        # past the vocabulary.
        row[:] = -1
        self._matcher.fill_next_token_bitmask(row.reshape(1, -1))
        row &= self._legal

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_completed())

    @property
    def is_terminated(self) -> bool:
        return bool(self._matcher.is_terminated())

    def forced_string(self) -> str:
        return "" if self.is_terminated else str(self._matcher.find_jump_forward_string())


class XGrammarCompiled:
    """See `phloem.constrained.base.CompiledGrammar`."""

    engine = "xgrammar"

    def __init__(self, compiled: Any, legal: NDArray[np.int32], prefix: str) -> None:
        self._compiled = compiled
        self._legal = legal
        self._prefix = prefix

    @property
    def memory_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes)

    def matcher(self) -> XGrammarMatcher:
        return XGrammarMatcher(self._compiled, self._legal, self._prefix)


class XGrammarBackend:
    """Compiles for one vocabulary; `cache_bytes` bounds the rules xgrammar shares between
    grammars (eager and lazy compilation keep half each)."""

    name = "xgrammar"

    def __init__(self, vocabulary: Vocabulary, cache_bytes: int = 64 << 20) -> None:
        tokens = list(vocabulary.tokens)
        for token in vocabulary.special_ids:
            tokens[token] = b""
        texts = [i for i, data in enumerate(tokens) if data]
        self._legal = pack_mask([*texts, *vocabulary.stop_ids], vocabulary.size)
        info = xgrammar.TokenizerInfo(
            tokens,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.stop_ids),
        )
        self._eager, self._lazy = (
            xgrammar.GrammarCompiler(
                info,
                max_threads=1,
                cache_limit_bytes=cache_bytes // 2,
                enable_dynamic_compilation=lazy,
            )
            for lazy in (False, True)
        )

    def compile(self, constraint: Constraint) -> XGrammarCompiled:
        return self.compile_grammar(lower(constraint))

    def compile_grammar(self, grammar: LoweredGrammar) -> XGrammarCompiled:
        if grammar.ambiguous:  # each mask would take longer than the one before, without a limit
            raise UnsupportedKeyword(grammar.ambiguous, code="ambiguous_grammar")
        try:
            if grammar.is_tag:
                compiled = self._eager.compile_structural_tag(grammar.text)
            else:
                compiler = self._eager if grammar.counted <= EAGER_COUNTED_STATES else self._lazy
                compiled = compiler.compile_grammar(grammar.text, root_rule_name=grammar.root)
        except (RuntimeError, ValueError, TypeError) as error:
            if "bad_alloc" in str(error):
                raise MemoryError("xgrammar ran out of memory") from error
            raise MalformedConstraint(
                f"the grammar cannot be compiled: {_reason(error)}", code="invalid_grammar"
            ) from error
        built = XGrammarCompiled(compiled, self._legal, grammar.prefix)
        check_prefix(built)
        return built


def _reason(error: Exception) -> str:
    """The last line of xgrammar's message, without its time stamp and source position."""
    line = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return line.rpartition(".cc:")[2].partition(":")[2].strip()[:200] or line[:200]

"""llguidance as a backend. The only module that imports it.

Every constraint reaches it as a grammar that Phloem wrote or checked, in llguidance's notation (see
`phloem.constrained.backends.lark`); its own conversion of JSON schemas is not used here.
"""

from __future__ import annotations

import threading
from typing import Any

import llguidance
import numpy as np
from numpy.typing import NDArray

from phloem.constrained.backends.lark import write_lark
from phloem.constrained.base import (
    LimitExceeded,
    MalformedConstraint,
    MatcherExhausted,
    MatcherRejected,
    UnsupportedKeyword,
    check_prefix,
)
from phloem.constrained.bitmask import pack_mask
from phloem.constrained.ebnf import ambiguity, read_ebnf
from phloem.constrained.ebnf_tree import Limits, Rules, parse_rules
from phloem.constrained.grammar_text import MAX_RULES, LoweredGrammar
from phloem.constrained.lowering import lower
from phloem.constrained.spec import Constraint, Ebnf
from phloem.constrained.vocab import Vocabulary

# Some 100 ms of work when a grammar is compiled, 70 ms or 25 ms for a mask, 100 MB of states.
_INITIAL_FUEL = 5_000_000
_STEP_FUEL = 1_000_000
_STEP_ITEMS = 500_000
_MAX_STATES = 100_000
_MAX_ITEMS = 2_000
# The items of a row grow with an ambiguous text; so many cost 10 ms a token.
_MAX_AMBIGUOUS_ITEMS = 800
# Runs of ordinary characters: where a terminal admits a whole run, its tokens need no walk.
_SLICES = [
    r"[\x20\x0A\x0D\x09]+",
    r'[^"\\\x00-\x1F\x7F]{1,10}',
    r'[^"\\\x00-\x1F\x7F]{1,30}',
    r'[^"\\\x00-\x1F\x7F]+',
]
_BYTES_OF_STATE = 20
_MAX_WARM_TOKENS = 4_000
# Of a grammar that Phloem wrote: it has been limited in other ways.
_OWN = Limits(rules=MAX_RULES + 1, depth=150, repeats=10**9)


class LlguidanceMatcher:
    """See `phloem.constrained.base.Matcher`."""

    def __init__(self, matcher: Any, vocabulary: _Tokens) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._accepted = 0
        self._ended = False

    def begin(self, prefix: list[int]) -> None:
        """Read what is there already.

        Raises:
            MatcherRejected: it is not legal.
        """
        if self._matcher.try_consume_tokens(prefix) < len(prefix):
            raise MatcherRejected("the prefix is not legal")

    def accept(self, token: int) -> None:
        if self._ended or not 0 <= token < self._vocabulary.size:
            raise MatcherRejected(f"token {token} is not legal here")
        if token in self._vocabulary.stops:
            if not self.is_complete:
                raise MatcherRejected(f"token {token} is not legal here")
            self._ended = True
        elif token not in self._vocabulary.texts or not self._consume(token):
            raise MatcherRejected(f"token {token} is not legal here")
        self._accepted += 1

    def _consume(self, token: int) -> bool:
        taken = bool(self._matcher.try_consume_tokens([token]))
        self._check()
        return taken

    def rollback(self, count: int) -> None:
        if not 0 <= count <= self._accepted:
            raise ValueError(f"cannot roll back {count} of {self._accepted} tokens")
        if count == 0:
            return
        texts = count - self._ended
        self._ended = False
        self._accepted -= count
        if texts:
            self._matcher.rollback(texts)
            self._check()

    def fill(self, row: NDArray[np.int32]) -> None:
        if self._ended:
            row[:] = 0
            return
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        self._check()
        row &= self._vocabulary.legal

    @property
    def is_complete(self) -> bool:
        return self._ended or bool(self._matcher.is_accepting())

    @property
    def is_terminated(self) -> bool:
        return self._ended

    def forced_string(self) -> str:
        if self._ended or self._matcher.is_accepting():
            return ""
        forced = self._matcher.compute_ff_bytes()
        self._check()
        try:
            return str(forced, "utf-8")
        except UnicodeDecodeError as error:
            # It begins inside a character, or ends inside one.
            return str(forced[: error.start], "utf-8")

    def copy_at_start(self) -> Any:
        """The engine's matcher with the states it knows, at the start; None if it is worn out or
        in use by another thread."""
        if self._accepted > _MAX_WARM_TOKENS:
            return None
        try:
            copy = self._matcher.deep_copy()
        except RuntimeError:
            return None
        return copy if copy.reset() else None

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MatcherExhausted(_reason(self._matcher))


class LlguidanceCompiled:
    """See `phloem.constrained.base.CompiledGrammar`.

    A new matcher is a copy of the one before, set back to the start: with it come the states that
    the one before has met, whose masks are cheaper the second time.
    """

    engine = "llguidance"

    def __init__(self, first: Any, vocabulary: _Tokens, size: int, prefix: list[int]) -> None:
        self._first = first
        self._prefix = prefix
        self._last = LlguidanceMatcher(first, vocabulary)
        self._vocabulary = vocabulary
        self._size = size
        self._lock = threading.Lock()

    @property
    def memory_bytes(self) -> int:
        return self._size

    def matcher(self) -> LlguidanceMatcher:
        with self._lock:
            copy = self._last.copy_at_start() or self._first.deep_copy()
            self._last = LlguidanceMatcher(copy, self._vocabulary)
            self._last.begin(self._prefix)
            return self._last


class _Tokens:
    """What a matcher needs to know of the vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.size = vocabulary.size
        self.stops = frozenset(vocabulary.stop_ids)
        self.texts = frozenset(
            i
            for i, data in enumerate(vocabulary.tokens)
            if data and i not in vocabulary.special_ids and i not in self.stops
        )
        self.legal = pack_mask([*self.texts, *self.stops], vocabulary.size)


class _Table:
    """The vocabulary as llguidance asks for it. It never splits text itself, since nothing is
    forced by it (see `lark`)."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        rest = vocabulary.size - len(vocabulary.tokens)
        self.tokens = [*vocabulary.tokens, *[b""] * rest]
        self.special_token_ids = sorted({*vocabulary.special_ids, *vocabulary.stop_ids})
        for token in self.special_token_ids:
            self.tokens[token] = b""
        self.eos_token_id = vocabulary.stop_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        raise AssertionError("llguidance is never asked to split a text")


class LlguidanceBackend:
    """Compiles for one vocabulary, which has an end token."""

    name = "llguidance"

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._tokens = _Tokens(vocabulary)
        table: Any = _Table(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(
            table, eos_token=list(vocabulary.stop_ids), slices=_SLICES
        )

    def compile(self, constraint: Constraint) -> LlguidanceCompiled:
        if isinstance(constraint, Ebnf):
            rules = read_ebnf(constraint.grammar, constraint.root)
            return self.compile_rules(rules, constraint.root, ambiguous=bool(ambiguity(rules)))
        return self.compile_grammar(lower(constraint))

    def compile_grammar(self, grammar: LoweredGrammar) -> LlguidanceCompiled:
        """See `phloem.constrained.base.Backend`. A grammar is refused that can be split into
        nothing larger than characters: in long strings its masks would be dear."""
        if grammar.is_tag:
            raise UnsupportedKeyword("structural tags are not supported by this engine")
        ambiguous = bool(grammar.ambiguous)
        return self.compile_rules(
            parse_rules(grammar.text, _OWN),
            grammar.root,
            prefix=grammar.prefix,
            by_character=ambiguous,
            ambiguous=ambiguous,
        )

    def compile_rules(
        self,
        rules: Rules,
        root: str,
        *,
        prefix: str = "",
        by_character: bool = True,
        ambiguous: bool = False,
    ) -> LlguidanceCompiled:
        """Compile a grammar that is given as a tree. A text of an `ambiguous` one ends in an error
        when it becomes dear.

        Raises:
            ConstraintError: the engine cannot run it, or not within its limits.
        """
        text = write_lark(rules, root, by_character=by_character)
        grammar = llguidance.LLMatcher.grammar_from_lark(text)
        limits = llguidance.LLParserLimits(
            max_items_in_row=_MAX_AMBIGUOUS_ITEMS if ambiguous else _MAX_ITEMS,
            initial_lexer_fuel=_INITIAL_FUEL,
            step_lexer_fuel=_STEP_FUEL,
            step_max_items=_STEP_ITEMS,
            max_lexer_states=_MAX_STATES,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, limits=limits, log_level=0)
        if matcher.is_error():
            reason = _reason(matcher)
            if "limit" in reason or "fuel" in reason or "large" in reason:
                raise LimitExceeded(f"the grammar is too large for the engine: {reason}")
            raise MalformedConstraint(
                f"the grammar cannot be compiled: {reason}", code="invalid_grammar"
            )
        built = LlguidanceCompiled(
            matcher, self._tokens, len(text) * _BYTES_OF_STATE, self._split(prefix)
        )
        check_prefix(built)
        return built

    def _split(self, text: str) -> list[int]:
        """Some tokens that spell the text: any will do, since none of them is seen."""
        tokens: list[int] = self._tokenizer.greedy_tokenize(text) if text else []
        if self._tokenizer.decode_bytes(tokens) != text.encode():
            raise UnsupportedKeyword("no tokens of the vocabulary spell the prefix")
        return tokens


def _reason(matcher: Any) -> str:
    """The first line of llguidance's message, which without verbose errors names no content."""
    lines = str(matcher.get_error()).strip().splitlines()
    return lines[0][:200] if lines else "no reason is given"

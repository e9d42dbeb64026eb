"""The grammar engines with their own conversion of JSON schemas, to be measured beside Phloem's.

Names for `coverage.py --engine`: `xgrammar-own` (its spec-true mode), `llguidance-own` (its strict
mode), `llguidance-lenient`.
"""

from __future__ import annotations

import json
from typing import Any

from phloem.constrained.backends import load_backend
from phloem.constrained.base import MalformedConstraint, MatcherRejected, UnsupportedKeyword
from phloem.constrained.spec import JsonSchema
from phloem.constrained.vocab import Vocabulary


class _ByteMatcher:
    """What `coverage.py` needs of a matcher, over a vocabulary of bytes."""

    def __init__(self, matcher: Any, take: str, complete: str) -> None:
        self._take = getattr(matcher, take)
        self._complete = getattr(matcher, complete)
        self._listed = take == "consume_tokens"

    def accept(self, token: int) -> None:
        taken = self._take([token]) if self._listed else self._take(token)
        if not taken:
            raise MatcherRejected(f"token {token} is not legal here")

    @property
    def is_complete(self) -> bool:
        return bool(self._complete())


class _Compiled:
    def __init__(self, make: Any) -> None:
        self.matcher = make


class OwnXgrammar:
    """xgrammar, `strict_mode=False`: an object is open unless the schema closes it."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        from phloem.constrained.backends.xgrammar import xgrammar

        self._xgrammar = xgrammar
        info = xgrammar.TokenizerInfo(
            vocabulary.tokens,
            xgrammar.VocabType.RAW,
            vocab_size=vocabulary.size,
            stop_token_ids=list(vocabulary.stop_ids),
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def compile(self, constraint: JsonSchema) -> _Compiled:
        try:
            compiled = self._compiler.compile_json_schema(constraint.schema, strict_mode=False)
        except (RuntimeError, ValueError) as error:
            raise MalformedConstraint(str(error).splitlines()[-1][:120]) from error

        def make() -> _ByteMatcher:
            matcher = self._xgrammar.GrammarMatcher(compiled)
            return _ByteMatcher(matcher, "accept_token", "is_completed")

        return _Compiled(make)


class OwnLlguidance:
    """llguidance; `lenient` takes what it cannot enforce."""

    def __init__(self, vocabulary: Vocabulary, *, lenient: bool) -> None:
        import llguidance

        self._llguidance = llguidance
        self._lenient = lenient
        backend: Any = load_backend("llguidance", vocabulary)
        self._tokenizer = backend._tokenizer

    def compile(self, constraint: JsonSchema) -> _Compiled:
        schema = json.loads(constraint.schema)
        if self._lenient and isinstance(schema, dict):
            schema = schema | {"x-guidance": {"lenient": True}}
        matcher_class = self._llguidance.LLMatcher
        try:
            grammar = matcher_class.grammar_from_json_schema(json.dumps(schema))
        except ValueError as error:
            raise UnsupportedKeyword(str(error)[:120]) from error

        def make() -> _ByteMatcher:
            matcher = matcher_class(self._tokenizer, grammar, log_level=0)
            if matcher.is_error():
                raise UnsupportedKeyword(str(matcher.get_error())[:120])
            return _ByteMatcher(matcher, "consume_tokens", "is_accepting")

        make()
        return _Compiled(make)


def load(name: str, vocabulary: Vocabulary) -> Any:
    """A backend of Phloem's, or an engine by itself."""
    match name:
        case "xgrammar-own":
            return OwnXgrammar(vocabulary)
        case "llguidance-own":
            return OwnLlguidance(vocabulary, lenient=False)
        case "llguidance-lenient":
            return OwnLlguidance(vocabulary, lenient=True)
        case _:
            return load_backend(name, vocabulary)

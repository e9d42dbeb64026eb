"""A vocabulary of single bytes, and texts fed to compiled constraints byte by byte."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings

from phloem.constrained.backends import load_backend
from phloem.constrained.base import Backend, MatcherRejected
from phloem.constrained.spec import Constraint
from phloem.constrained.vocab import Vocabulary

# Examples are slow the first time (tables, imports); the per-test timeout guards against hangs.
settings.register_profile("constrained", deadline=None, max_examples=100)
settings.load_profile("constrained")

Judge = Callable[[Constraint], Callable[[str], bool]]


@pytest.fixture(scope="session")
def byte_vocabulary() -> Vocabulary:
    """256 bytes, an end token (256) and a control token (257)."""
    tokens = [bytes([b]) for b in range(256)] + [b"", b""]
    return Vocabulary(tokens, special_ids=frozenset({256, 257}), stop_ids=(256,))


@pytest.fixture(scope="session")
def backend(byte_vocabulary: Vocabulary) -> Backend:
    return load_backend("xgrammar", byte_vocabulary)


@pytest.fixture(scope="session")
def judge(backend: Backend) -> Judge:
    """`judge(constraint)(text)`: does the compiled constraint accept the whole text?"""

    def of(constraint: Constraint) -> Callable[[str], bool]:
        compiled = backend.compile(constraint)

        def accepts(text: str) -> bool:
            matcher = compiled.matcher()
            try:
                for byte in text.encode():
                    matcher.accept(byte)
            except MatcherRejected:
                return False
            return matcher.is_complete

        return accepts

    return of

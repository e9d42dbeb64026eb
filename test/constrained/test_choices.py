"""Choices: exactly the given strings, whatever beginnings they share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained.base import Backend, LimitExceeded
from phloem.constrained.spec import Choice, Constraint

Judge = Callable[[Constraint], Callable[[str], bool]]

WORDS = st.text(alphabet='ab"\\é\n ', min_size=1, max_size=5)


@given(words=st.lists(WORDS, min_size=1, max_size=12, unique=True), others=st.lists(WORDS))
def test_exactly_these(judge: Judge, words: list[str], others: list[str]) -> None:
    accepts = judge(Choice(choices=tuple(words)))
    for text in (*words, *others, *(w[:-1] for w in words), *(w + "a" for w in words)):
        assert accepts(text) == (text in words), text


def test_ten_thousand(backend: Backend, judge: Judge) -> None:
    words = tuple(f"SKU-{i:05d}-{i * 7919 % 65536:04x}" for i in range(10_000))
    assert backend.compile(Choice(choices=words)).memory_bytes < 64 << 20
    accepts = judge(Choice(choices=words))
    assert accepts(words[0])
    assert accepts(words[-1])
    assert not accepts("SKU-00001-0001")


def test_beginnings_of_one_another_have_a_limit(backend: Backend) -> None:
    with pytest.raises(LimitExceeded, match="100 deep"):
        backend.compile(Choice(choices=tuple("a" * n for n in range(1, 200))))

"""Cyclic garbage goes in a quiet moment, and what is alive is not looked at twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from phloem.srt.grammar.garbage import Garbage


class Knot:
    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)


def test_garbage_goes_when_nobody_waits() -> None:
    garbage = Garbage()
    assert garbage.waits is None
    knot = weakref.ref(Knot())
    garbage.collect()  # nothing was made, so nothing is looked at
    garbage.made()
    assert garbage.waits is not None
    garbage.collect()
    assert knot() is None
    assert garbage.waits is None


def test_what_is_alive_is_set_aside() -> None:
    garbage = Garbage()
    Garbage.begin()
    aside = gc.get_freeze_count()
    kept = [Knot() for _ in range(1000)]
    garbage.made()
    garbage.collect()
    assert gc.get_freeze_count() >= aside + len(kept)


def test_the_interpreter_does_not_look_at_everything_by_itself() -> None:
    Garbage.begin()
    knot = Knot()
    gc.collect(1)  # it is old now
    known = weakref.ref(knot)
    del knot
    full = gc.get_stats()[2]["collections"]
    for _ in range(200):
        _ = [[] for _ in range(2000)]
    assert gc.get_stats()[2]["collections"] == full
    assert known() is not None

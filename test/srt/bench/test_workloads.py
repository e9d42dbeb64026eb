"""Workloads: the shapes they promise, and the same text from the same seed."""

import pytest

from phloem.srt.bench.workloads import WORKLOADS, TextSource, Turn, Workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_fixes_every_word(name: str) -> None:
    assert WORKLOADS[name](5) == WORKLOADS[name](5)
    assert WORKLOADS[name](5) != WORKLOADS[name](6)
    assert WORKLOADS[name](5).name == name


@pytest.mark.parametrize(
    ("name", "requests", "concurrency"),
    [
        ("single", 4, 1),
        ("batch16", 64, 16),
        ("shared", 64, 16),
        ("multiturn", 40, 8),
        ("fork", 42, 32),
        ("json", 32, 8),
        ("long", 8, 8),
    ],
)
def test_shapes(name: str, requests: int, concurrency: int) -> None:
    workload = WORKLOADS[name](1)
    assert (workload.requests, workload.concurrency) == (requests, concurrency)


def everything_said(workload: Workload) -> list[str]:
    return [turn.user for first in workload.turns for turn in first.walk()]


@pytest.mark.parametrize("name", WORKLOADS)
def test_nobody_says_what_another_said(name: str) -> None:
    said = everything_said(WORKLOADS[name](1))
    assert len(set(said)) == len(said)


def test_seeds_share_no_beginning() -> None:
    first, second = WORKLOADS["shared"](1).turns[0], WORKLOADS["shared"](2).turns[0]
    assert first.system.split()[:5] != second.system.split()[:5]


def test_text_is_as_long_as_asked() -> None:
    text = TextSource(3).words(50)
    assert len(text.split()) == 50
    assert text.endswith(".")


def test_walk_meets_every_turn_once() -> None:
    leaf = [Turn(user=name, max_tokens=1) for name in "abc"]
    inner = Turn(user="d", max_tokens=1, then=(leaf[0], leaf[1]))
    root = Turn(user="e", max_tokens=1, then=(inner, leaf[2]))
    assert [turn.user for turn in root.walk()] == ["e", "d", "a", "b", "c"]

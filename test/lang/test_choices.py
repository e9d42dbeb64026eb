"""`select` in numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.lang.choices import ChoiceScore, ChoicesMethod, boundary, common_prefix_len, decide

TOKEN, GREEDY, UNCONDITIONAL = ChoicesMethod

LOGPROBS = st.lists(
    st.lists(st.floats(-30, 0, allow_nan=False), min_size=1, max_size=6), min_size=1, max_size=5
)


def scores(*logprobs: list[float]) -> list[ChoiceScore]:
    return [ChoiceScore(tuple("t" * len(row)), tuple(row)) for row in logprobs]


def test_long_predictable_tail() -> None:
    """A long choice whose tail is certain wins by mean and loses by the other two methods."""
    judged = scores([-2.0], [-8.1, *[0.0] * 8])
    alone = scores([-9.0], [-9.0, *[-0.1] * 8])
    assert decide(TOKEN, judged).index == 1
    assert decide(TOKEN, judged).values == pytest.approx((-2.0, -0.9))
    assert decide(GREEDY, judged).index == 0
    assert decide(UNCONDITIONAL, judged, alone).index == 0


def test_zero_logprobs_count_in_the_mean() -> None:
    assert decide(TOKEN, scores([-1.0, 0.0], [-0.6])).values == pytest.approx((-0.5, -0.6))


def test_greedy_goes_token_by_token() -> None:
    # equal first tokens up to rounding; the second decides, not the sums
    assert decide(GREEDY, scores([-1.0, -0.5, -9.0], [-1.0 - 1e-7, -0.4, -99.0])).index == 1
    # a choice that has ended stands with its mean
    assert decide(GREEDY, scores([-1.0], [-1.0, -0.5])).index == 1
    assert decide(GREEDY, scores([-1.0], [-1.0, -1.5])).index == 0


@given(LOGPROBS)
def test_first_of_equals_wins(rows: list[list[float]]) -> None:
    for method in ChoicesMethod:
        doubled = scores(*rows, *rows)
        assert decide(method, doubled, doubled).index < len(rows)


@given(LOGPROBS)
def test_order_of_choices_does_not_matter(rows: list[list[float]]) -> None:
    """Whatever the order, the same choice wins by mean, unless there is a tie."""
    means = [score.mean for score in scores(*rows)]
    if means.count(max(means)) > 1:
        return
    winner = rows[decide(TOKEN, scores(*rows)).index]
    turned = list(reversed(rows))
    assert turned[decide(TOKEN, scores(*turned)).index] == winner


@given(LOGPROBS, st.floats(-5, 0))
def test_a_choice_as_likely_as_ever_gains_nothing(rows: list[list[float]], shift: float) -> None:
    judged = scores(*rows)
    gains = decide(UNCONDITIONAL, judged, judged).values
    assert gains == pytest.approx([0.0] * len(rows))
    shifted = scores(*[[value + shift for value in row] for row in rows])
    assert decide(UNCONDITIONAL, shifted, judged).values == pytest.approx([shift] * len(rows))


@given(st.lists(st.floats(-30, 0, allow_nan=False), min_size=1, max_size=5))
def test_of_one_token_choices_the_likeliest_wins(values: list[float]) -> None:
    best = decide(TOKEN, scores(*[[value] for value in values])).index
    assert values[best] == max(values)
    by_column = decide(GREEDY, scores(*[[value] for value in values])).index
    assert values[by_column] == pytest.approx(max(values), abs=1e-4)


def test_what_is_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match="unconditional score"):
        decide(UNCONDITIONAL, scores([-1.0]))
    with pytest.raises(ValueError, match="nothing to choose"):
        decide(TOKEN, [])
    with pytest.raises(ValueError, match="2 tokens and 1 logprobs"):
        ChoiceScore(("a", "b"), (-1.0,))
    with pytest.raises(ValueError, match="0 tokens"):
        ChoiceScore((), ())


def test_boundary() -> None:
    assert boundary([1, 2, 3], [[1, 2, 3, 4], [1, 2, 3, 5, 6]]) == 3
    # one choice merges with the prompt's last token: all are judged from before it
    assert boundary([1, 2, 3], [[1, 2, 9], [1, 2, 3, 5]]) == 2
    with pytest.raises(ValueError, match="first token"):
        boundary([], [[4], [5]])
    with pytest.raises(ValueError, match=r"choices\[1\] adds no token"):
        boundary([1, 2], [[1, 2, 3], [1, 2]])


@given(st.lists(st.integers(0, 3)), st.lists(st.integers(0, 3)))
def test_common_prefix(a: list[int], b: list[int]) -> None:
    n = common_prefix_len(a, b)
    assert a[:n] == b[:n]
    assert a[n : n + 1] != b[n : n + 1] or n == len(a) == len(b)

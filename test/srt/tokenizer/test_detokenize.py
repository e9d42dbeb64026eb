"""Streams of text: incremental decoding, and stop strings."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phloem.srt.tokenizer import IncrementalDetokenizer, StopStrings, Tokenizer

shared = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def pieces_of(
    tokenizer: Tokenizer, ids: list[int], cuts: list[int], *, skip_special: bool
) -> list[str]:
    """Detokenise from the start of a text, fed in groups that end at `cuts`."""
    stream = IncrementalDetokenizer(tokenizer, skip_special=skip_special, at_start=True)
    ends = [*sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    starts = [0, *ends]
    out = [stream.feed(ids[a:b]) for a, b in zip(starts, ends, strict=False)]
    return [*out, stream.finish()]


@shared
@given(
    ids=st.lists(st.integers(0, 267), max_size=30),
    cuts=st.lists(st.integers(0, 30), max_size=10),
    skip_special=st.booleans(),
)
def test_any_tokens_in_any_groups_join_to_the_whole_decode(
    byte_level: Tokenizer, ids: list[int], cuts: list[int], skip_special: bool
) -> None:
    """Random ids are mostly broken UTF-8."""
    joined = "".join(pieces_of(byte_level, ids, cuts, skip_special=skip_special))
    assert joined == byte_level.decode(ids, skip_special)


@shared
@given(
    text=st.text("é日🙂\u200d a1<\n", max_size=30), cuts=st.lists(st.integers(0, 99), max_size=10)
)
def test_characters_are_never_split(byte_level: Tokenizer, text: str, cuts: list[int]) -> None:
    ids = byte_level.encode(text, special=False)
    pieces = pieces_of(byte_level, ids, cuts, skip_special=True)
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)


@shared
@given(text=st.text(" athe é", max_size=20), cuts=st.lists(st.integers(0, 30), max_size=5))
def test_sentencepiece(
    make_sentencepiece: Callable[..., Tokenizer], text: str, cuts: list[int]
) -> None:
    tokenizer = make_sentencepiece(["\u2581the", "th", "\u2581", *"athe"])
    ids = tokenizer.encode(text, special=False)
    assert "".join(pieces_of(tokenizer, ids, cuts, skip_special=True)) == text


def test_leading_space_is_kept_after_a_prompt(
    make_sentencepiece: Callable[..., Tokenizer],
) -> None:
    tokenizer = make_sentencepiece(["\u2581a", "\u2581", "a"])
    ids = tokenizer.encode("a")
    assert IncrementalDetokenizer(tokenizer).feed(ids) == " a"
    assert IncrementalDetokenizer(tokenizer, at_start=True).feed(ids) == "a"


def test_bytes_wait_and_turn_invalid_only_when_they_must(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("🙂")
    stream = IncrementalDetokenizer(byte_level)
    assert [stream.feed([i]) for i in ids] == ["", "", "", "🙂"]
    assert stream.feed(ids[:2]) == ""
    assert stream.feed(byte_level.encode("x")) == "\N{REPLACEMENT CHARACTER}x"
    assert stream.feed(ids[:3]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def first_end(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the stop string that is complete first ends, and which (the longest)."""
    found = [(at + len(stop), -len(stop), stop) for stop in stops if (at := text.find(stop)) >= 0]
    if not found:
        return None
    end, _, stop = min(found)
    return end, stop


@shared
@given(
    text=st.text("ab", max_size=40),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    include_stop=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_stop_strings_in_any_pieces(
    text: str, stops: list[str], include_stop: bool, seed: int
) -> None:
    rng = random.Random(seed)
    scanner = StopStrings(stops, include_stop=include_stop)
    given_out, at = "", 0
    while at < len(text):
        step = rng.randint(1, 6)
        given_out += scanner.feed(text[at : at + step])
        at += step
        seen = text[:at]
        end = first_end(seen, stops)
        if end is None:
            assert seen.startswith(given_out)
            held = seen[len(given_out) :]
            assert any(stop.startswith(held) for stop in stops) or not held
    given_out += scanner.finish()
    found = first_end(text, stops)
    if found is None:
        assert scanner.matched is None
        assert given_out == text
    else:
        end_at, stop = found
        assert scanner.matched == stop
        assert given_out == text[: end_at if include_stop else end_at - len(stop)]


@shared
@given(text=st.text("abc", max_size=30), stop=st.text("abc", min_size=1, max_size=4))
def test_one_stop_string_cuts_where_find_does(text: str, stop: str) -> None:
    scanner = StopStrings([stop])
    out = "".join(scanner.feed(character) for character in text) + scanner.finish()
    assert out == text.partition(stop)[0]


def test_nothing_comes_after_a_match() -> None:
    scanner = StopStrings(["END"])
    assert scanner.feed("text EN") == "text "
    assert scanner.feed("D more END") == ""
    assert scanner.feed("more") == ""
    assert scanner.finish() == ""
    assert scanner.matched == "END"


@pytest.mark.parametrize("stops", [[], [""], ["", ""]])
def test_no_stop_strings_and_empty_ones_hold_nothing_back(stops: list[str]) -> None:
    scanner = StopStrings(stops)
    assert scanner.feed("anything") == "anything"
    assert scanner.finish() == ""
    assert scanner.matched is None

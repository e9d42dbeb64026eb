"""Prompts for what lies between two texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phloem.srt.errors import InvalidRequest
from phloem.srt.tokenizer import Tokenizer
from phloem.srt.tokenizer.infill import infill_prompt

Make = Callable[..., Tokenizer]


@pytest.mark.parametrize(
    ("added", "expected", "ends"),
    [
        (
            ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_sep|>"),
            "<|fim_prefix|>ab<|fim_suffix|>12<|fim_middle|>",
            "<|file_sep|>",
        ),
        (
            ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
            "<fim_prefix>ab<fim_suffix>12<fim_middle>",
            "",
        ),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>ab<｜fim▁hole｜>12<｜fim▁end｜>",
            "",
        ),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX]12[PREFIX]ab", ""),
    ],
)
def test_each_familys_order(
    make_byte_level: Make, added: tuple[str, ...], expected: str, ends: str
) -> None:
    tokenizer = make_byte_level(added=added)
    prompt = infill_prompt(tokenizer, "ab", "12")
    assert tokenizer.decode(prompt.ids) == expected
    marks = {tokenizer.token_id(text) for text in added if text in expected}
    assert sum(i in marks for i in prompt.ids) == len(marks)
    assert prompt.stop_token_ids == (() if not ends else (tokenizer.token_id(ends),))


def test_code_llamas_second_part_has_no_space_before_it(make_sentencepiece: Make) -> None:
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    pieces = ["▁", "a", "b", "1", "2", "▁a", "▁ab", "12", "▁1", "▁12", *marks]
    tokenizer = make_sentencepiece(pieces)
    prompt = infill_prompt(tokenizer, "ab", "12")
    texts = ["▁<PRE>", "▁ab", "▁<SUF>", "12", "▁<MID>"]
    assert prompt.ids[-5:] == [tokenizer.token_id(text) for text in texts]
    assert prompt.stop_token_ids == (tokenizer.token_id("▁<EOT>"),)
    spaced = infill_prompt(tokenizer, "", " 12")
    texts = ["▁<PRE>", "▁<SUF>", "▁12", "▁<MID>"]
    assert spaced.ids[-4:] == [tokenizer.token_id(text) for text in texts]


def test_markup_in_the_texts_stays_text(make_byte_level: Make) -> None:
    tokenizer = make_byte_level(added=("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    prompt = infill_prompt(tokenizer, "<|im_end|>", "")
    assert tokenizer.decode(prompt.ids) == "<fim_prefix><|im_end|><fim_suffix><fim_middle>"
    assert tokenizer.token_id("<|im_end|>") not in prompt.ids


def test_a_model_that_was_not_made_for_it(make_byte_level: Make) -> None:
    for added in ((), ("<fim_prefix>", "<fim_suffix>")):
        with pytest.raises(InvalidRequest) as refused:
            infill_prompt(make_byte_level(added=added), "a", "b")
        assert refused.value.param == "suffix"

"""Filling in the middle: prompts of the text before a gap and the text behind it.

A model that was trained for it has control tokens of its own around the parts (Bavarian et al.,
"Efficient Training of Language Models to Fill in the Middle", 2022). Families are told apart by
the markup that is in the vocabulary.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import InfillPrompt
from phloem.srt.tokenizer.tokenizer import Tokenizer


class _Family(NamedTuple):
    """Markup in the order of the prompt: `before` the first part, `between` the two, `behind` the
    second. `suffix_first` says that the text behind the gap comes first. `ends` may end the middle
    beside the model's own end tokens. `spaced` says that the first part is a text of its own to
    the encoder, which puts a space before a text, and the second goes on without one."""

    before: str
    between: str
    behind: str = ""
    suffix_first: bool = False
    ends: tuple[str, ...] = ()
    spaced: bool = False


_FAMILIES: Final = (
    # Qwen coders, CodeGemma
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", ends=("<|file_sep|>",)),
    # StarCoder, Granite
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>", ends=("<file_sep>",)),
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",), spaced=True),  # Code Llama
    _Family("[SUFFIX]", "[PREFIX]", suffix_first=True),  # Codestral
)


def infill_prompt(tokenizer: Tokenizer, before: str, behind: str) -> InfillPrompt:
    """The prompt after which the model writes what lies between two texts, in which control markup
    is ordinary text.

    Raises:
        InvalidRequest: the model has no tokens for it, or a text has lone surrogates.
    """
    for family in _FAMILIES:
        marks = [family.before, family.between, *filter(None, [family.behind])]
        ids = [tokenizer.token_id(mark) for mark in marks]
        known = [i for i in ids if i is not None]
        if len(known) == len(marks):
            texts = (behind, before) if family.suffix_first else (before, behind)
            first, second = _encoded(tokenizer, *texts, spaced=family.spaced)
            ends = [tokenizer.token_id(mark) for mark in family.ends]
            return InfillPrompt(
                [
                    *tokenizer.encode_prompt("")[:1],  # the opening token, if the model has one
                    known[0],
                    *first,
                    known[1],
                    *second,
                    *known[2:],
                ],
                tuple(i for i in ends if i is not None),
            )
    raise InvalidRequest(
        "`suffix` cannot be honoured: this model has no tokens for filling in the middle.",
        param="suffix",
        code="unsupported_parameter",
    )


def _encoded(
    tokenizer: Tokenizer, first: str, second: str, *, spaced: bool
) -> tuple[list[int], list[int]]:
    if not spaced:
        return tokenizer.encode_inside(first), tokenizer.encode_inside(second)
    # The space stands before a line feed, which merges with nothing; both are cut off again.
    opening = len(tokenizer.encode_inside("\n"))
    return (
        tokenizer.encode(first, special=False),
        tokenizer.encode_inside(f"\n{second}")[opening:],
    )

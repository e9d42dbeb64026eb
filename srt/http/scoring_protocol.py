"""What `POST /v1/score` reads and writes: choices, or items with labels as SGLang has them."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from phloem.srt.http.body import ABSENT
from phloem.srt.http.gathering import RunFields
from phloem.srt.http.protocol import Message, ToolSpec
from phloem.srt.http.replies import PromptTokensDetails
from phloem.srt.http.scoring import Normalization

MAX_CHOICES: Final = 1024
MAX_ITEMS: Final = 1024
MAX_LABELS: Final = 1024

TokenIds = Annotated[list[int], Meta(min_length=1)]
Items = Annotated[list[str | list[int]], Meta(min_length=1, max_length=MAX_ITEMS)]


class ScoreRequest(RunFields, kw_only=True):
    """One of two: `choices` after a prompt, or `items` with `label_token_ids`."""

    prompt: str | None = None
    input_ids: TokenIds | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    continue_final_message: bool | None = None
    tools: Annotated[list[ToolSpec], Meta(min_length=1)] | None = None
    tool_choice: Raw = ABSENT
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    choices: Annotated[list[str], Meta(min_length=1, max_length=MAX_CHOICES)] | None = None
    normalization: Normalization | None = None

    query: str | list[int] | None = None
    items: str | Items | None = None
    label_token_ids: Annotated[list[int], Meta(min_length=1, max_length=MAX_LABELS)] | None = None
    apply_softmax: bool | None = None
    item_first: bool | None = None

    # Of servers of cross-encoders, which no model here is.
    text_1: Raw = ABSENT
    text_2: Raw = ABSENT
    data_1: Raw = ABSENT
    data_2: Raw = ABSENT
    queries: Raw = ABSENT


CHAT_FIELDS: Final = (
    "continue_final_message",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "documents",
)
CHOICE_FIELDS: Final = (
    "prompt",
    "input_ids",
    "messages",
    *CHAT_FIELDS,
    "choices",
    "normalization",
)
ITEM_FIELDS: Final = ("query", "items", "label_token_ids", "apply_softmax", "item_first")
CROSS_ENCODER_FIELDS: Final = ("text_1", "text_2", "data_1", "data_2", "queries")

UNSUPPORTED: Final[dict[str, tuple[object, ...]]] = {
    "add_generation_prompt": (None, True),
    "truncate_prompt_tokens": (None,),
    "stream": (None, False),
    "lora_path": (None, ""),
}


class ScoreUsage(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that choices share counts once."""

    prompt_tokens: int
    completion_tokens: int = 0
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class ChoiceScore(msgspec.Struct, frozen=True, kw_only=True):
    """A choice's tokens in the tokenizer's split of prompt and choice as one text, with their
    logprobs (nats); `value` is what the choice was judged by."""

    index: int
    text: str
    token_ids: list[int]
    tokens: list[str]
    logprobs: list[float]
    sum: float
    mean: float
    value: float


class ChoiceScores(msgspec.Struct, frozen=True, kw_only=True):
    """`choice` is the winner's text, `index` its place. The first `boundary` tokens of the prompt
    are what all choices were judged after."""

    id: str
    object: Literal["choice.scores"] = "choice.scores"
    created: int
    model: str
    choice: str
    index: int
    normalization: Normalization
    boundary: int
    choices: list[ChoiceScore]
    usage: ScoreUsage


class ItemScores(msgspec.Struct, frozen=True, kw_only=True):
    """Of each item, the probability of each label as the next token."""

    object: Literal["scoring"] = "scoring"
    scores: list[list[float]]
    model: str
    usage: ScoreUsage

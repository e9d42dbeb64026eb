"""The OpenAI replies as structs. Absent is absent: unset fields are left out, not sent as null,
except where the API has always sent null.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from phloem.srt.generation import ConstraintOutcome, FieldValue, Finish
from phloem.srt.http.stopwatch import AnswerMetrics
from phloem.srt.http.warning import ReplyWarning
from phloem.srt.messages import FinishReason


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    forced_tokens: int
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """`cached_tokens` of the prompt were not computed, since the radix tree had them;
    `forced_tokens` of the output were not sampled, since the constraint left no choice; of the
    others, `accepted_prediction_tokens` had been guessed (docs/constraints.md, Drafts), and
    `rejected_prediction_tokens` were guessed in vain."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprobEntry(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprobEntry]


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """`rank` among all tokens, best first, where it is known: of the best ones."""

    logprob: float
    rank: int | UnsetType = UNSET
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]
"""Of each prompt token: token id → logprob, its own first, then the best. The first is null."""


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    matched_stop: str | int | UnsetType | None = UNSET
    constraint_valid: bool | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    constraint: ConstraintOutcome | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[ReplyWarning] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, frozen=True, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    matched_stop: str | int | UnsetType | None = UNSET
    constraint_valid: bool | UnsetType = UNSET
    fields: list[FieldValue] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType = UNSET
    constraint: ConstraintOutcome | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    warnings: list[ReplyWarning] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    matched_stop: str | int | UnsetType | None = UNSET
    constraint_valid: bool | UnsetType = UNSET
    fields: list[FieldValue] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    metrics: AnswerMetrics | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole completion, or one chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType = UNSET
    constraint: ConstraintOutcome | UnsetType = UNSET
    warnings: list[ReplyWarning] | UnsetType = UNSET


class ReplyHead(msgspec.Struct, frozen=True):
    """What all chunks of one reply have in common."""

    id: str
    model: str
    created: int


def reply_head(id_: str, model: str) -> ReplyHead:
    return ReplyHead(id_, model, int(time.time()))


def finish_name(finish: Finish, *, called_tools: bool = False) -> str:
    """A call that was cut off stays `length`; `called_tools` is for calls that the model chose."""
    if called_tools and finish.reason is FinishReason.STOP:
        return "tool_calls"
    return finish.reason.value


def valid_or_unset(outcome: ConstraintOutcome | None) -> bool | UnsetType:
    """What a validator said of one choice, if one was asked."""
    return UNSET if outcome is None or outcome.valid is None else outcome.valid


def outcome_of_all(
    outcomes: Sequence[ConstraintOutcome | None],
) -> ConstraintOutcome | UnsetType:
    """What can be said of all choices of a reply."""
    known = [outcome for outcome in outcomes if outcome is not None]
    if not known:
        return UNSET
    verdicts = {outcome.valid for outcome in known}
    valid = False if False in verdicts else None if None in verdicts else True
    complete = all(outcome.complete for outcome in known)
    return msgspec.structs.replace(known[0], complete=complete, valid=valid)

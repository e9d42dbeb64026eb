"""Replies of the Messages API and the events of its streams
(https://docs.anthropic.com/en/api/messages-streaming), in the order that they come in:

message_start → for each block: content_block_start, content_block_delta…, content_block_stop →
message_delta → message_stop
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from phloem.srt.generation import ConstraintOutcome
from phloem.srt.http.warning import ReplyWarning

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class OutputTokensDetails(msgspec.Struct, frozen=True):
    thinking_tokens: int


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """The prompt's tokens are `input_tokens`, which were computed, and `cache_read_input_tokens`,
    which were not. Writing to the cache costs nothing, so nothing is counted for it."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails | UnsetType = UNSET
    service_tier: Literal["standard"] = "standard"


class TextBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Raw


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class MessageReply(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    constraint: ConstraintOutcome | UnsetType = UNSET
    warnings: list[ReplyWarning] | UnsetType = UNSET


class TokenCount(msgspec.Struct, frozen=True):
    """The reply of `count_tokens`."""

    input_tokens: int


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    """Said in silence, so that nobody takes the connection for dead."""


class MessageStart(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"
):
    message: MessageReply


class BlockStart(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"
):
    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"
):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class BlockStop(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"
):
    index: int


class Stop(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"
):
    """The end, with the counts of the whole message, which replace those of its start."""

    delta: Stop
    usage: MessageUsage
    constraint: ConstraintOutcome | UnsetType = UNSET
    warnings: list[ReplyWarning] | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    """Nothing follows."""


StreamEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Ping

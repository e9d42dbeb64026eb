"""The body of `POST /v1/responses`: OpenAI's fields, and ours that every generation has.

What OpenAI has and this server does not is refused by name; so is what belongs to chat, and would
be without effect here.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from phloem.srt.http.body import ABSENT, BodyReader
from phloem.srt.http.protocol import (
    UNSUPPORTED_IN_CHAT,
    Count,
    Effort,
    GenerationFields,
    Positive,
    StreamOptions,
    TopLogprobs,
)

Key = Annotated[str, Meta(max_length=64)]
MetadataValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[Key, MetadataValue], Meta(max_length=16)]

LOGPROBS: Final = "message.output_text.logprobs"


class TextFormat(msgspec.Struct, kw_only=True):
    """`schema` and what follows belong to the type `json_schema`."""

    type: str
    name: str | None = None
    schema: Raw = ABSENT
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, kw_only=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseStreamOptions(StreamOptions, kw_only=True):
    include_obfuscation: bool | None = None


class ResponsesRequest(GenerationFields, kw_only=True):
    """`POST /v1/responses`, and `POST /v1/responses/input_tokens`."""

    stream_options: ResponseStreamOptions | None = None
    input: str | list[Raw] | None = None
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    text: TextOptions | None = None
    tools: list[Raw] | None = None
    tool_choice: Raw = ABSENT
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: TopLogprobs | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "default"] | None = None
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    thinking_token_budget: Count | None = None


_NOTHING: Final = (None,)
UNSUPPORTED_IN_RESPONSES: Final = {
    **UNSUPPORTED_IN_CHAT,
    "max_tool_calls": _NOTHING,
    "conversation": _NOTHING,
    "prompt": _NOTHING,
    "context_management": (None, []),
    "moderation": _NOTHING,
    "personality": _NOTHING,
    "image": _NOTHING,
    "access_programs": _NOTHING,
    "background_options": _NOTHING,
    "prompt_cache_options": (None, {}, {"mode": "implicit"}),
    "messages": _NOTHING,
    "max_tokens": _NOTHING,
    "max_completion_tokens": _NOTHING,
    "logprobs": (None, False),
    "reasoning_effort": _NOTHING,
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "echo": (None, False),
    "separate_reasoning": (None, True),
    "stream_reasoning": (None, True),
    "include_reasoning": (None, True),
}

responses_reader: Final = BodyReader(ResponsesRequest, unsupported=UNSUPPORTED_IN_RESPONSES)

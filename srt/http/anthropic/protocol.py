"""Bodies of the Messages API as structs: decoding one is validating it
(https://docs.anthropic.com/en/api/messages, version 2023-06-01 with structured outputs).

`cache_control` may stand anywhere and says nothing here: every prompt is cached as it is computed.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Raw

from phloem.srt.http.body import ABSENT
from phloem.srt.http.protocol import (
    UNSUPPORTED,
    ChatRequest,
    CommonFields,
    Count,
    Positive,
    PositiveShare,
)


class Text(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str


class Image(msgspec.Struct, kw_only=True, tag_field="type", tag="image"):
    """Known to be refused by what it is, as the two below."""


class Document(msgspec.Struct, kw_only=True, tag_field="type", tag="document"):
    """A PDF or a text with citations."""


class SearchResult(msgspec.Struct, kw_only=True, tag_field="type", tag="search_result"):
    """A text with citations."""


class ToolUse(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: Annotated[str, Meta(min_length=1)]
    name: Annotated[str, Meta(min_length=1)]
    input: Raw


class ToolResult(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[Text | Image | Document | SearchResult] | None = None
    is_error: bool | None = None


class Thinking(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinking(msgspec.Struct, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """What another server encrypted; nobody else can read it."""

    data: str


Block = Text | Image | Document | SearchResult | ToolUse | ToolResult | Thinking | RedactedThinking


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class Tool(msgspec.Struct, kw_only=True):
    """A tool of the client's own. Those that Anthropic defines have another `type`."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,128}\Z")]
    type: str | None = None
    description: str | None = None
    input_schema: Raw = ABSENT
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None
    input_examples: list[dict[str, object]] | None = None


class ToolChoice(msgspec.Struct, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


Display = Literal["summarized", "omitted"]


class ThinkingEnabled(msgspec.Struct, kw_only=True, tag_field="type", tag="enabled"):
    budget_tokens: Positive
    display: Display | None = None


class ThinkingAdaptive(msgspec.Struct, kw_only=True, tag_field="type", tag="adaptive"):
    display: Display | None = None


class ThinkingDisabled(msgspec.Struct, kw_only=True, tag_field="type", tag="disabled"):
    """The answer begins at once."""


class OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`strict` is ours: false leaves out what cannot be enforced of the schema."""

    type: Literal["json_schema"]
    schema: Raw
    name: str | None = None
    strict: bool | None = None


class OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ExtraFields(CommonFields, kw_only=True):
    """What this server understands beyond the Messages API, as `ChatRequest` has it."""

    chat_template_kwargs: dict[str, object] | None = None


class CountRequest(ExtraFields, kw_only=True):
    """`POST /v1/messages/count_tokens`: what makes the prompt."""

    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: str | None = None
    system: str | list[Text] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: dict[str, object] | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    top_p: PositiveShare | None = None
    metadata: dict[str, object] | None = None
    service_tier: Literal["auto", "standard_only"] | None = None


# Fields that would change the answer or the reply, with the values that ask for nothing: those that
# chat has and Messages has not, or by another name; then Anthropic's.
_KNOWN: Final = {field.name for field in msgspec.structs.fields(MessagesRequest)}
_HINTS: Final = {"user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
_CHAT_ONLY: Final[dict[str, tuple[object, ...]]] = {
    field.name: (None,)
    for field in msgspec.structs.fields(ChatRequest)
    if field.name not in _KNOWN | _HINTS
}
UNSUPPORTED_IN_MESSAGES: Final = {
    **UNSUPPORTED,
    **_CHAT_ONLY,
    "n": (None, 1),
    "best_of": (None, 1),
    "logprobs": (None, False),
    "functions": (None, []),
    "container": (None,),
    "context_management": (None, {}),
    "compaction": (None,),
    "diagnostics": (None,),
    "fallbacks": (None, []),
    "inference_geo": (None, "global"),
    "mcp_servers": (None, []),
    "speed": (None, "standard"),
    "thread": (None,),
}

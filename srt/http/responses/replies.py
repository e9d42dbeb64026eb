"""The `response` object, and the events of its stream (each is named by its tag).

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from phloem.srt.errors import PhloemError
from phloem.srt.generation import ConstraintOutcome
from phloem.srt.http.replies import TokenLogprobEntry
from phloem.srt.http.replies import Usage as ChatUsage
from phloem.srt.http.responses.items import Item, OutputItem, OutputText, ReasoningText
from phloem.srt.http.warning import ReplyWarning

Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
UNFINISHED: tuple[Status, ...] = ("queued", "in_progress")


class ResponseError(msgspec.Struct, frozen=True, kw_only=True):
    """`code` is one of OpenAI's; `param` is the request field at fault, if one is."""

    code: str
    message: str
    param: str | UnsetType = UNSET


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """`forced_tokens` were not sampled, since the constraint left no choice."""

    reasoning_tokens: int
    forced_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class FormatEcho(msgspec.Struct, frozen=True, kw_only=True):
    type: str = "text"
    name: str | UnsetType = UNSET
    description: str | UnsetType = UNSET
    schema: Raw | UnsetType = UNSET
    strict: bool | UnsetType = UNSET


class TextEcho(msgspec.Struct, frozen=True, kw_only=True):
    format: FormatEcho = FormatEcho()
    verbosity: str = "medium"


class ReasoningEcho(msgspec.Struct, frozen=True, kw_only=True):
    effort: str | None = None
    summary: str | None = None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked, as it was understood, and what came of it. `constraint`, `warnings` and
    `truncated_items`, how many items were left out of the prompt, are ours."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Status
    background: bool
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None = None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None = None
    reasoning: ReasoningEcho
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextEcho
    tool_choice: Raw
    tools: list[Raw] = []
    top_logprobs: int
    top_p: float
    truncation: str
    truncated_items: int | UnsetType = UNSET
    usage: ResponseUsage | None = None
    user: str | None = None
    constraint: ConstraintOutcome | UnsetType = UNSET
    warnings: list[ReplyWarning] | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class ItemList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


# ------------------------------------------------------------------------------------------ events


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """`sequence_number` counts a response's events from 0."""

    sequence_number: int


class StateEvent(Event, frozen=True, kw_only=True):
    response: Response


class Created(StateEvent, frozen=True, tag="response.created"):
    """The first event."""


class Queued(StateEvent, frozen=True, tag="response.queued"):
    """It runs in the background, and its first token is not there yet."""


class InProgress(StateEvent, frozen=True, tag="response.in_progress"):
    """Generating."""


class Completed(StateEvent, frozen=True, tag="response.completed"):
    """The last event of an answer that ended by itself."""


class Incomplete(StateEvent, frozen=True, tag="response.incomplete"):
    """The last event of one that was cut off by `max_output_tokens`, or cancelled."""


class Failed(StateEvent, frozen=True, tag="response.failed"):
    """The last event of one that met an error."""


class ItemEvent(Event, frozen=True, kw_only=True):
    output_index: int
    item: OutputItem


class ItemAdded(ItemEvent, frozen=True, tag="response.output_item.added"):
    """An item begins; what it has is still empty."""


class ItemDone(ItemEvent, frozen=True, tag="response.output_item.done"):
    """An item as it stays."""


class InItemEvent(Event, frozen=True, kw_only=True):
    item_id: str
    output_index: int


class InPartEvent(InItemEvent, frozen=True, kw_only=True):
    content_index: int = 0


class PartAdded(InPartEvent, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class PartDone(InPartEvent, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class TextDelta(InPartEvent, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprobEntry]


class TextDone(InPartEvent, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprobEntry]


class ReasoningDelta(InPartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(InPartEvent, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(
    InItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    delta: str


class ArgumentsDone(
    InItemEvent, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    name: str
    arguments: str


class ErrorEvent(Event, frozen=True, kw_only=True, tag="error"):
    """A stream that cannot go on, though the response may."""

    code: str | None
    message: str
    param: str | None


AnyEvent = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)


def usage_of(chat: ChatUsage) -> ResponseUsage:
    """The counts of a chat under the names that they have here."""
    return ResponseUsage(
        input_tokens=chat.prompt_tokens,
        input_tokens_details=InputTokensDetails(chat.prompt_tokens_details.cached_tokens),
        output_tokens=chat.completion_tokens,
        output_tokens_details=OutputTokensDetails(
            chat.completion_tokens_details.reasoning_tokens,
            chat.completion_tokens_details.forced_tokens,
        ),
        total_tokens=chat.total_tokens,
    )


def response_error(error: PhloemError) -> ResponseError:
    code = "server_error" if error.status >= 500 else "invalid_prompt"
    if error.status == 429:
        code = "rate_limit_exceeded"
    return ResponseError(code=code, message=error.message, param=error.param or UNSET)

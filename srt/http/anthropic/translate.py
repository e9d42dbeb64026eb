"""A body of the Messages API → the inner chat that asks the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import Raw

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.anthropic.history import inner_messages, system_message
from phloem.srt.http.anthropic.paths import Paths
from phloem.srt.http.anthropic.protocol import (
    CountRequest,
    ExtraFields,
    MessagesRequest,
    OutputFormat,
    ThinkingDisabled,
    ThinkingEnabled,
    Tool,
    ToolChoice,
)
from phloem.srt.http.body import given, invalid, unsupported
from phloem.srt.http.protocol import ChatRequest, Effort, FunctionSpec, Message, ToolSpec

_PLACES: Final = {
    "tool_choice.function": "tool_choice",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
}
"""Inner fields that have another name in the client's body."""

_EXTRA: Final = tuple(field.name for field in msgspec.structs.fields(ExtraFields))


@dataclass(frozen=True)
class Translated:
    """The inner chat, and where its fields stand in the client's body."""

    chat: ChatRequest
    paths: Paths


def translated(body: CountRequest) -> Translated:
    """Raises `InvalidRequest` with the path of what cannot be asked here."""
    placed = [*system_message(body.system), *inner_messages(body.messages)]
    last = placed[-1].message
    if last.role == "assistant" and not last.content and len(placed) > 1:
        placed.pop()  # an answer that goes on from nothing
    effort_at, effort = _effort(body)
    fields: dict[str, Any] = {name: getattr(body, name) for name in _EXTRA}
    if isinstance(body.thinking, ThinkingEnabled):
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    format_at, format_ = _output_format(body)
    if format_ is not None:
        if given(body.response_format):
            raise invalid(f"`response_format` and `{format_at}` say the same.", format_at)
        fields["response_format"] = _response_format(format_)
    if isinstance(body, MessagesRequest):
        _check_thinking(body)
        fields |= {
            "max_tokens": body.max_tokens,
            "stop": body.stop_sequences,
            "temperature": body.temperature,
            "top_k": body.top_k,
            "top_p": body.top_p,
        }
    chat = ChatRequest(
        messages=[message for message, _ in placed],
        model=body.model,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=_parallel(body.tool_choice),
        continue_final_message=_goes_on(placed[-1].message),
        reasoning_effort=effort,
        **fields,
    )
    places = {
        **_PLACES,
        "response_format.json_schema": format_at,
        "reasoning_effort": effort_at,
        "continue_final_message": placed[-1].at,
    }
    return Translated(chat, Paths([at for _, at in placed], places))


def shows_thinking(body: MessagesRequest) -> bool:
    """Whether the reply says what was thought, and not only that it was."""
    if body.thinking is None or isinstance(body.thinking, ThinkingDisabled):
        return True
    return body.thinking.display != "omitted"


def _goes_on(last: Message) -> bool | None:
    return True if last.role == "assistant" else None


# ------------------------------------------------------------------ the fields


def _output_format(body: CountRequest) -> tuple[str, OutputFormat | None]:
    """The format that the output is to have, and where it stands: its older place is the top."""
    newer = None if body.output_config is None else body.output_config.format
    if newer is not None and body.output_format is not None:
        raise invalid("`output_format` and `output_config.format` say the same.", "output_format")
    if body.output_format is not None:
        return "output_format", body.output_format
    return "output_config.format", newer


def _response_format(format_: OutputFormat) -> Raw:
    schema: dict[str, object] = {"schema": format_.schema, "strict": format_.strict}
    return Raw(msgspec.json.encode({"type": "json_schema", "json_schema": schema}))


def _effort(body: CountRequest) -> tuple[str, Effort | None]:
    """How much is to be thought, and which field says so.

    An effort of `high` is as good as none, as Anthropic has it, but where thinking is asked for:
    there it is what is meant if no other is given.
    """
    at = "output_config.effort"
    effort = None if body.output_config is None else body.output_config.effort
    if isinstance(body.thinking, ThinkingDisabled):
        if effort not in (None, "high"):
            raise unsupported(at, "without thinking there is nothing that it could change")
        return "thinking", "none"
    if body.thinking is not None:
        return ("thinking", "high") if effort is None else (at, effort)
    return at, None if effort == "high" else effort


def _check_thinking(body: MessagesRequest) -> None:
    thinking = body.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= body.max_tokens:
        raise invalid(
            f"budget_tokens ({thinking.budget_tokens}) leaves nothing of max_tokens"
            f" ({body.max_tokens}) to the answer.",
            "thinking.budget_tokens",
        )


def _tool(tool: Tool, at: str) -> ToolSpec:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(
            f"The tool {tool.type!r} is not there; tools are the client's own (`custom`).",
            param=f"{at}.type",
            code="unsupported_tool",
        )
    if tool.defer_loading:
        raise unsupported(f"{at}.defer_loading", "all tools are in the prompt")
    if tool.input_examples:
        raise unsupported(f"{at}.input_examples", "say it in the description")
    if tool.allowed_callers is not None and "direct" not in tool.allowed_callers:
        raise unsupported(f"{at}.allowed_callers", "the model alone calls tools")
    if not given(tool.input_schema):
        raise invalid("A tool needs the schema of its input.", f"{at}.input_schema")
    function = FunctionSpec(
        name=tool.name,
        description=tool.description,
        parameters=tool.input_schema,
        strict=tool.strict,
    )
    return ToolSpec(type="function", function=function)


def _tool_choice(choice: ToolChoice | None) -> Raw:
    if choice is None:
        return Raw()
    if choice.type != "tool":
        return Raw(b'"required"' if choice.type == "any" else b'"%s"' % choice.type.encode())
    if choice.name is None:
        raise invalid("tool_choice of type tool needs the tool's name.", "tool_choice.name")
    return Raw(msgspec.json.encode({"type": "function", "function": {"name": choice.name}}))


def _parallel(choice: ToolChoice | None) -> bool | None:
    if choice is None or choice.disable_parallel_tool_use is None:
        return None
    return not choice.disable_parallel_tool_use

"""`tools` and `tool_choice` of a request → those of a chat, and where each came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec
from msgspec import Raw

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.body import given
from phloem.srt.http.constraint_values import convert
from phloem.srt.http.protocol import FunctionSpec, ToolSpec


class _Kind(msgspec.Struct):
    type: str


class _Function(msgspec.Struct, tag_field="type", tag="function"):
    name: str


class _Allowed(msgspec.Struct, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: list[_Function]


@dataclass(frozen=True)
class ChatTools:
    """The fields of a chat, and the outer paths of inner ones."""

    tools: list[ToolSpec] | None
    choice: Raw
    paths: dict[str, str]


def chat_tools(sent: list[Raw] | None, choice: Raw) -> ChatTools:
    """Raises `InvalidRequest` for tools that are not functions, and for choices that are unknown.
    No tools are as good as an empty list of them."""
    tools = [_tool(raw, f"tools[{i}]") for i, raw in enumerate(sent or ())]
    paths = {f"tools[{i}].function": f"tools[{i}]" for i in range(len(tools))}
    if not tools and bytes(choice) in (b'"auto"', b'"none"'):
        return ChatTools(None, Raw(), paths)
    if given(choice) and not bytes(choice).startswith(b'"'):
        choice, inner = _choice(choice)
        paths |= inner
    return ChatTools(tools or None, choice, paths)


def _tool(raw: Raw, at: str) -> ToolSpec:
    kind = convert(raw, _Kind, at).type
    if kind != "function":
        raise _unsupported(f"Tools of type {kind!r} are not supported; functions are.", at)
    return ToolSpec(type=kind, function=convert(raw, FunctionSpec, at))


def _choice(raw: Raw) -> tuple[Raw, dict[str, str]]:
    """A chat's choice: what it names stands one level deeper there."""
    at = "tool_choice"
    match convert(raw, _Kind, at).type:
        case "function":
            paths = {f"{at}.function": at}
            chosen: object = _named(convert(raw, _Function, at))
        case "allowed_tools":
            allowed = convert(raw, _Allowed, at)
            paths = {
                f"{at}.allowed_tools.tools[{i}].function": f"{at}.tools[{i}]"
                for i in range(len(allowed.tools))
            }
            paths[f"{at}.allowed_tools"] = at
            tools = [_named(one) for one in allowed.tools]
            inner = {"mode": allowed.mode, "tools": tools}
            chosen = {"type": "allowed_tools", "allowed_tools": inner}
        case kind:
            raise _unsupported(
                f"tool_choice.type {kind!r} is not supported; function and allowed_tools are.", at
            )
    return Raw(msgspec.json.encode(chosen)), paths


def _named(function: _Function) -> dict[str, object]:
    return {"type": "function", "function": {"name": function.name}}


def _unsupported(message: str, at: str) -> InvalidRequest:
    return InvalidRequest(message, param=f"{at}.type", code="unsupported_tool")

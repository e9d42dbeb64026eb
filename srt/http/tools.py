"""Tool calls: what a request's `tools` and `tool_choice` ask of the output.

`required` and a named tool constrain the whole output to calls; `auto` lets the model write text
and constrains what begins like a call. So arguments always satisfy the tool's parameters, or, where
the call is forced and `strict` is false, as much of them as can be enforced (see `enforcement`).
How a call is written is the model's `ToolFormat`; `tool_parser` turns the constrained text back
into calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import msgspec
from msgspec import Raw

from phloem.constrained.spec import JsonSchema
from phloem.srt.errors import InvalidConstraint
from phloem.srt.generation import ToolFormatName
from phloem.srt.http.body import given, invalid, strict_loads, validation_error
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.protocol import ChatRequest, ToolSpec
from phloem.srt.http.tool_formats import FORMATS, Schema, Tool
from phloem.srt.http.tool_parser import AnswerParser, CallsParser, NamedParser, TextParser

_NO_PARAMETERS: Final[Schema] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@dataclass(frozen=True)
class ToolPlan:
    """How tools shape one chat request: for the template, for the sampler, for the reply."""

    rendered: list[dict[str, object]] | None
    constraint: FoundConstraint | None
    parser: Callable[[], AnswerParser]


@dataclass(frozen=True)
class _Choice:
    """What was chosen: `named` is the function that must be called; `allowed` the functions that
    may be, None for all."""

    mode: Literal["none", "auto", "required", "named"]
    named: str = ""
    allowed: tuple[str, ...] | None = None


class _Function(msgspec.Struct):
    name: str


class _Named(msgspec.Struct, tag="function", tag_field="type"):
    function: _Function


class _Reference(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class _AllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: list[_Reference]


class _Allowed(msgspec.Struct, tag="allowed_tools", tag_field="type"):
    allowed_tools: _AllowedTools


def plan_tools(request: ChatRequest, form: ToolFormatName = "json") -> ToolPlan:
    """`form` is how the model writes calls. Raises `InvalidRequest` for a choice that the tools do
    not offer."""
    choice = _choice(request)
    if request.tools is None:
        if choice.mode != "none":
            raise invalid("tool_choice without tools.", "tool_choice")
        return ToolPlan(None, None, TextParser)
    tools = _tools(request.tools)
    rendered = [_rendered(tool) for tool in request.tools]
    if choice.mode == "none":
        return ToolPlan(rendered, None, TextParser)
    strict = {tool.function.name: tool.function.strict is not False for tool in request.tools}
    syntax = FORMATS[form].syntax
    if choice.mode == "named":
        name = choice.named
        if name not in tools:
            raise invalid(f"There is no tool {name!r}.", "tool_choice.function.name")
        one = tools[name]
        text = msgspec.json.encode(one.schema).decode()
        found = FoundConstraint(one.field, JsonSchema(schema=text), strict[name])
        return ToolPlan(rendered, found, lambda: NamedParser(name, syntax.new_id))
    tools = _allowed(tools, choice)
    once = request.parallel_tool_calls is False
    if choice.mode == "auto":
        calls = FORMATS[form].may_call(tools, once=once)
        found = FoundConstraint("tools", calls.constraint, places=calls.places)
        return ToolPlan(rendered, found, lambda: CallsParser(syntax))
    calls = FORMATS[form].must_call(tools, once=once)
    found = FoundConstraint(
        "tools", calls.constraint, any(strict[name] for name in tools), places=calls.places
    )
    return ToolPlan(rendered, found, lambda: CallsParser(syntax, must_call=True))


def _choice(request: ChatRequest) -> _Choice:
    raw = request.tool_choice
    if not given(raw):
        return _Choice("none" if request.tools is None else "auto")
    if bytes(raw).startswith(b'"'):
        return _Choice(_mode(msgspec.json.decode(raw, type=str)))
    try:
        chosen = msgspec.json.decode(raw, type=_Named | _Allowed)
    except msgspec.ValidationError as error:
        raise validation_error(error, "tool_choice") from None
    if isinstance(chosen, _Named):
        return _Choice("named", named=chosen.function.name)
    allowed = chosen.allowed_tools
    return _Choice(allowed.mode, allowed=tuple(tool.function.name for tool in allowed.tools))


def _mode(word: str) -> Literal["none", "auto", "required"]:
    match word:
        case "none" | "auto" | "required":
            return word
        case _:
            raise invalid(
                f"tool_choice is {word!r}; known are none, auto, required, a function and"
                " allowed_tools.",
                "tool_choice",
            )


def _allowed(tools: dict[str, Tool], choice: _Choice) -> dict[str, Tool]:
    """The tools that may be called, in the request's order."""
    if choice.allowed is None:
        return tools
    at = "tool_choice.allowed_tools.tools"
    if not choice.allowed:
        raise invalid("No tool is allowed; tool_choice none says that.", at)
    for i, name in enumerate(choice.allowed):
        if name not in tools:
            raise invalid(f"There is no tool {name!r}.", f"{at}[{i}].function.name")
    return {name: tool for name, tool in tools.items() if name in choice.allowed}


def _tools(specs: list[ToolSpec]) -> dict[str, Tool]:
    """Name → tool, in the request's order."""
    tools: dict[str, Tool] = {}
    for i, spec in enumerate(specs):
        if spec.type != "function":
            raise invalid(f"Tools of type {spec.type!r} are not supported.", f"tools[{i}].type")
        if spec.function.name in tools:
            raise invalid(f"Two tools are named {spec.function.name!r}.", f"tools[{i}].function")
        field = f"tools[{i}].function.parameters"
        tools[spec.function.name] = Tool(_parameters(spec.function.parameters, field), field)
    return tools


def _parameters(raw: Raw, param: str) -> Schema:
    """The arguments' schema. A tool without parameters is called with `{}` and nothing else."""
    if not given(raw):
        return _NO_PARAMETERS
    try:
        schema = strict_loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise InvalidConstraint(f"{param}: {error}", param=param, code="invalid_schema") from None
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidConstraint(
            f"{param} must be the schema of an object.", param=param, code="invalid_schema"
        )
    told = {k for k, v in schema.items() if v not in ({}, [])}
    if told <= {"type", "title", "description", "$schema", "additionalProperties", "strict"} and (
        schema.get("additionalProperties") in (None, False)
    ):
        return _NO_PARAMETERS
    return schema if "type" in schema else {"type": "object", **schema}


def _rendered(tool: ToolSpec) -> dict[str, object]:
    """The tool as templates want it: plain values, as they were sent."""
    function: dict[str, object] = {"name": tool.function.name}
    if tool.function.description is not None:
        function["description"] = tool.function.description
    if given(tool.function.parameters):
        function["parameters"] = msgspec.json.decode(tool.function.parameters)
    else:
        function["parameters"] = {"type": "object", "properties": {}}
    return {"type": "function", "function": function}

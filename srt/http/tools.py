"""Tool calls: what a request's `tools` and `tool_choice` ask of the output.

`required` and a named tool constrain the whole output to calls; `auto` lets the model write text
and constrains what follows a `<tool_call>` marker. So arguments always satisfy the tool's
parameters, or, where the call is forced and `strict` is false, as much of them as can be enforced
(see `enforcement`). `tool_parser` turns the constrained text back into calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from phloem.constrained.spec import JsonSchema
from phloem.srt.errors import InvalidConstraint, InvalidRequest
from phloem.srt.http.body import given, strict_loads, validation_error
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.protocol import ChatRequest, ToolSpec
from phloem.srt.http.structural_tags import tag, triggered_tags
from phloem.srt.http.tool_parser import (
    CALL_BEGIN,
    CALL_END,
    AnswerParser,
    AutoParser,
    NamedParser,
    RequiredParser,
    TextParser,
)

Schema = dict[str, object]

_NO_PARAMETERS: Final[Schema] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}
_SCHEMA_MAPS: Final = frozenset(
    {"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"}
)
_PLAIN_VALUES: Final = frozenset({"const", "enum", "default", "examples"})


@dataclass(frozen=True)
class ToolPlan:
    """How tools shape one chat request: for the template, for the sampler, for the reply."""

    rendered: list[dict[str, object]] | None
    constraint: FoundConstraint | None
    parser: Callable[[], AnswerParser]


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedChoice(msgspec.Struct):
    type: str
    function: _NamedFunction


def plan_tools(request: ChatRequest) -> ToolPlan:
    """Raises `InvalidRequest` for a choice that the tools do not offer."""
    choice = _choice(request)
    if request.tools is None:
        if choice != "none":
            raise _invalid("tool_choice without tools.", "tool_choice")
        return ToolPlan(None, None, TextParser)
    schemas = _schemas(request.tools)
    rendered = [_rendered(tool) for tool in request.tools]
    if isinstance(choice, _NamedChoice):
        name = choice.function.name
        if name not in schemas:
            raise _invalid(f"There is no tool {name!r}.", "tool_choice.function.name")
        index = list(schemas).index(name)
        param = f"tools[{index}].function.parameters"
        strict = request.tools[index].function.strict is not False
        found = FoundConstraint(param, JsonSchema(schema=_text(schemas[name])), strict)
        return ToolPlan(rendered, found, lambda: NamedParser(name))
    if choice == "required":
        strict = any(tool.function.strict is not False for tool in request.tools)
        found = FoundConstraint("tools", JsonSchema(schema=_text(_any_call(schemas))), strict)
        return ToolPlan(rendered, found, RequiredParser)
    if choice == "auto":
        once = request.parallel_tool_calls is False
        return ToolPlan(rendered, _triggered_calls(schemas, once=once), AutoParser)
    return ToolPlan(rendered, None, TextParser)


def _choice(request: ChatRequest) -> str | _NamedChoice:
    raw = request.tool_choice
    if not given(raw):
        return "none" if request.tools is None else "auto"
    if bytes(raw).startswith(b'"'):
        word = msgspec.json.decode(raw, type=str)
        if word not in ("none", "auto", "required"):
            raise _invalid(
                f"tool_choice is {word!r}; known are none, auto, required and a function.",
                "tool_choice",
            )
        return word
    try:
        named = msgspec.json.decode(raw, type=_NamedChoice)
    except msgspec.ValidationError as error:
        raise validation_error(error, "tool_choice") from None
    if named.type != "function":
        raise _invalid(f"tool_choice.type {named.type!r} is unknown.", "tool_choice.type")
    return named


def _schemas(tools: list[ToolSpec]) -> dict[str, Schema]:
    """Name → schema of the arguments, in the request's order."""
    schemas: dict[str, Schema] = {}
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise _invalid(f"Tools of type {tool.type!r} are not supported.", f"tools[{i}].type")
        if tool.function.name in schemas:
            raise _invalid(f"Two tools are named {tool.function.name!r}.", f"tools[{i}].function")
        schemas[tool.function.name] = _parameters(
            tool.function.parameters, f"tools[{i}].function.parameters"
        )
    return schemas


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


def _any_call(schemas: dict[str, Schema]) -> Schema:
    """One object, `{"name": …, "arguments": …}`, of any of the tools."""
    calls: list[Schema] = []
    definitions: Schema = {}
    for i, (name, schema) in enumerate(schemas.items()):
        arguments = schema
        if '"$ref"' in _text(schema):  # its references count from its own root
            key = f"tool{i}"
            definitions[key] = rebase(schema, f"#/$defs/{key}")
            arguments = {"$ref": f"#/$defs/{key}"}
        calls.append(
            {
                "type": "object",
                "properties": {"name": {"const": name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    root: Schema = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {**root, "$defs": definitions} if definitions else root


def _triggered_calls(schemas: dict[str, Schema], *, once: bool) -> FoundConstraint:
    """Free text, in which the marker of a call starts a whole and valid call."""
    tags = [
        tag(
            f'{CALL_BEGIN}\n{{"name": "{name}", "arguments": ',
            _text(schema),
            f"}}\n{CALL_END}",
        )
        for name, schema in schemas.items()
    ]
    constraint = triggered_tags([CALL_BEGIN], tags, at_least_one=False, stop_after_first=once)
    return FoundConstraint("tools", constraint)


def rebase(schema: object, root: str) -> object:
    """The same schema placed at the pointer `root` of a bigger one: local references follow."""
    if isinstance(schema, list):
        return [rebase(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _rebased(key, value, root) for key, value in schema.items()}


def _rebased(key: str, value: object, root: str) -> object:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return root + value[1:]
    if key in _PLAIN_VALUES:
        return value
    if key in _SCHEMA_MAPS and isinstance(value, dict):
        return {name: rebase(sub, root) for name, sub in value.items()}
    return rebase(value, root)


def _text(schema: object) -> str:
    return msgspec.json.encode(schema).decode()


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(message, param=param, code="invalid_value")

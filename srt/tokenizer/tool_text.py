"""Tools and tool calls as plain text, for chat templates that have no place for them.

Most small models' templates know only roles and texts: what such a template does not mention
would silently be missing from the prompt.
"""

from __future__ import annotations

import json
from typing import Any

from phloem.srt.generation import ToolFormatName


def describe_tools(tools: list[dict[str, Any]], form: ToolFormatName) -> str:
    """A system text that lists the tools and the form of a call."""
    functions = [tool.get("function", tool) for tool in tools]
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    example = {"function": {"name": "function name", "arguments": {}}}
    return (
        "You can call these functions:\n"
        f"{lines}\n"
        "To call one, answer with:\n"
        f"{spell_tool_calls([example], form)}"
    )


def spell_tool_calls(calls: list[dict[str, Any]], form: ToolFormatName) -> str:
    """Tool calls of an assistant message, in the form that `describe_tools` names."""
    functions = [call["function"] for call in calls]
    match form:
        case "mistral":
            return f"[TOOL_CALLS]{_json(functions)}"
        case "mistral-args":
            return "".join(
                f"[TOOL_CALLS]{f['name']}[ARGS]{_json(f['arguments'])}" for f in functions
            )
        case "llama3":
            return "\n".join(
                _json({"name": f["name"], "parameters": f["arguments"]}) for f in functions
            )
        case _:
            return "\n".join(f"<tool_call>\n{_json(f)}\n</tool_call>" for f in functions)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

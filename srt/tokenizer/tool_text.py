"""Tools and tool calls as plain text, for chat templates that have no place for them.

Most small models' templates know only roles and texts: what such a template does not mention
would silently be missing from the prompt.
"""

from __future__ import annotations

import json
from typing import Any


def describe_tools(tools: list[dict[str, Any]]) -> str:
    """A system text that lists the tools and the form of a call."""
    functions = [tool.get("function", tool) for tool in tools]
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
    return (
        "You can call these functions:\n"
        f"{lines}\n"
        "To call one, answer with:\n"
        '<tool_call>\n{"name": "function name", "arguments": {}}\n</tool_call>'
    )


def spell_tool_calls(calls: list[dict[str, Any]]) -> str:
    """Tool calls of an assistant message, in the form that `describe_tools` names."""
    return "\n".join(
        f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
        for call in calls
    )

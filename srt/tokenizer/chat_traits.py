"""What a chat template says of its model: how it calls tools, and where it thinks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import jinja2
from jinja2 import meta

from phloem.srt.generation import ReasoningMarks, ToolFormatName

_THOUGHTS: Final = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
_SWITCHES: Final = ("enable_thinking", "thinking")
EFFORT: Final = "reasoning_effort"


def detect_tool_format(sources: Mapping[str, str]) -> ToolFormatName:
    """The form of calls that the templates (by name, "tool_use" for requests with tools) show.
    `json` where they show none that is known."""
    source = sources.get("tool_use") or sources.get("default", "")
    if "[TOOL_CALLS]" in source:
        return "mistral-args" if "[ARGS]" in source else "mistral"
    if "<tool_call>" in source:
        return "hermes"
    if "<|python_tag|>" in source or '"parameters": dictionary of argument name' in source:
        return "llama3"
    return "json"


def detect_reasoning(
    sources: Mapping[str, str], environment: jinja2.Environment
) -> ReasoningMarks | None:
    """How the model thinks before it answers, if it does. The templates are valid Jinja."""
    source = sources.get("default", "")
    marks = next((marks for marks in _THOUGHTS if any(mark in source for mark in marks)), None)
    if marks is None:
        return None
    variables = meta.find_undeclared_variables(environment.parse(source))
    return ReasoningMarks(
        begin=marks[0],
        end=marks[1],
        switch=next((name for name in _SWITCHES if name in variables), None),
        efforts=EFFORT in variables,
    )

"""Calls of tools in every format, and reasoning, by a real model: whatever it says, it is whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "get_time"}},
]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is not defined"
    " or enable_thinking %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    "{% if false %}</think>{% endif %}"
)


def chat(server: Any, **body: object) -> Any:
    """A whole reply, which a streamed one joins to."""
    defaults: dict[str, object] = {
        "messages": [{"role": "user", "content": "How warm is it in Oslo, and what is the time?"}],
        "temperature": 0,
        "max_tokens": 200,
    }
    asked = {**defaults, **body}
    status, reply = server.post("/v1/chat/completions", asked)
    assert status == 200, reply
    streamed = {**asked, "stream": True, "stream_options": {"include_usage": True}}
    events = server.events("/v1/chat/completions", streamed)
    message, joined = reply["choices"][0]["message"], join(events)
    assert joined["content"] == (message["content"] or "")
    assert joined["reasoning"] == message.get("reasoning_content", "")
    calls = [c["function"] for c in message.get("tool_calls", [])]
    assert joined["calls"] == [[c["name"], c["arguments"]] for c in calls]
    assert joined["finish_reason"] == reply["choices"][0]["finish_reason"]
    details = "completion_tokens_details"
    thought = "reasoning_tokens"
    assert events[-1]["usage"][details][thought] == reply["usage"][details][thought]
    return reply


def join(events: list[Any]) -> dict[str, Any]:
    joined: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for choice in (c for e in events for c in e["choices"]):
        delta = choice["delta"]
        joined["content"] += delta.get("content", "")
        joined["reasoning"] += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            if "id" in call:
                joined["calls"].append([call["function"]["name"], ""])
            joined["calls"][call["index"]][1] += call["function"]["arguments"]
        joined["finish_reason"] = choice["finish_reason"] or joined.get("finish_reason")
    return joined


def check(reply: Any, at_most: int) -> None:
    (choice,) = reply["choices"]
    calls = [c["function"] for c in choice["message"]["tool_calls"]]
    assert 1 <= len(calls) <= at_most
    for call in calls:
        arguments = json.loads(call["arguments"])
        if call["name"] == "get_time":
            assert arguments == {}
        else:
            assert set(arguments) == {"city", "unit"}


@pytest.mark.parametrize("form", ["json", "hermes", "llama3", "mistral", "mistral-args"])
def test_every_format(start_server: Callable[..., Any], form: str) -> None:
    server = start_server("--kv-tokens", "4096", "--tool-call-format", form)
    assert json.loads(server.get("/server_info")[1])["tool_call_format"] == form
    reply = chat(server, tools=TOOLS, tool_choice="required")
    check(reply, 16)
    one = {"parallel_tool_calls": False, "max_tokens": 400}
    reply = chat(server, tools=TOOLS, tool_choice="required", **one)
    check(reply, 1)
    assert reply["choices"][0]["finish_reason"] == "tool_calls"
    named = {"type": "function", "function": {"name": "get_time"}}
    reply = chat(server, tools=TOOLS, tool_choice=named)
    check(reply, 1)
    assert reply["usage"]["completion_tokens"] < 10
    # Calls or none, what comes is whole.
    chat(server, tools=TOOLS, max_tokens=60)
    calls = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "abc", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
        ],
    }
    answer = {"role": "tool", "tool_call_id": "abc", "content": "12:00"}
    user = {"role": "user", "content": "When?"}
    chat(server, tools=TOOLS, messages=[user, calls, answer], max_tokens=8)
    server.stop()


@pytest.fixture(scope="module")
def thinker(start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    template = tmp_path_factory.mktemp("template") / "thinking.jinja"
    Path(template).write_text(THINKING)
    return start_server("--kv-tokens", "8192", "--chat-template", str(template))


def test_a_model_that_thinks(thinker: Any) -> None:
    assert json.loads(thinker.get("/server_info")[1])["reasoning"] is True
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY}}
    mark = len(thinker.post("/tokenize", {"prompt": "</think>"})[1]["tokens"])
    for budget in (0, 12):
        reply = chat(thinker, response_format=form, thinking_token_budget=budget)
        (choice,) = reply["choices"]
        assert set(json.loads(choice["message"]["content"])) == {"city", "unit"}
        assert choice["finish_reason"] == "stop"
        assert reply["constraint"]["valid"] is True
        details = reply["usage"]["completion_tokens_details"]
        assert 0 < details["reasoning_tokens"] <= budget + mark
        assert bool(choice["message"].get("reasoning_content")) == bool(budget)
    # Without a budget its thoughts end while there is room for the answer.
    reply = chat(thinker, response_format=form, max_tokens=60)
    assert set(json.loads(reply["choices"][0]["message"]["content"])) == {"city", "unit"}
    assert reply["constraint"]["complete"] is True
    assert reply["usage"]["completion_tokens"] <= 60


def test_thinking_with_tools_and_without_anything(thinker: Any) -> None:
    check(chat(thinker, tools=TOOLS, tool_choice="required", thinking_token_budget=8), 16)
    reply = chat(thinker, thinking_token_budget=5, max_tokens=40)
    message = reply["choices"][0]["message"]
    assert message["content"]
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] < 40
    assert "constraint" not in reply
    reply = chat(thinker, reasoning_effort="none", max_tokens=8)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0
    assert "reasoning_content" not in reply["choices"][0]["message"]
    reply = chat(thinker, max_tokens=8)
    assert reply["usage"]["completion_tokens_details"]["reasoning_tokens"] == 8
    assert reply["choices"][0]["finish_reason"] == "length"

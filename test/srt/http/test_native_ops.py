"""Native routes beside `/generate`."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from phloem.srt.errors import DeadlineExceeded, Unavailable
from phloem.srt.generation import ReasoningMarks
from phloem.srt.messages import StatsSnapshot

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    for name in ("time", "weather")
]


async def test_health_that_generates(api: Any, engine: Any, script: Any) -> None:
    reply = await api.call("GET", "/health_generate")
    assert (reply.status, reply.json["status"]) == (200, "ok")
    (request,) = engine.requests
    assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (1, True)
    for error in (Unavailable("it restarts"), DeadlineExceeded("no token came")):
        engine.script = lambda r, e=error: script(refusal=e)
        reply = await api.call("GET", "/health_generate")
        assert (reply.status, reply.json["status"]) == (503, "unhealthy")
        assert reply.json["reason"] == error.message
    assert not engine.running


async def test_loads(api: Any, engine: Any) -> None:
    engine.stats_now = StatsSnapshot(
        running=3,
        waiting=1,
        compiling=1,
        kv_locked=24,
        kv_private=1000,
        kv_evictable=500,
        prompt_tokens_total=8,
        cached_tokens_total=2,
    )
    reply = await api.call("GET", "/v1/loads")
    (load,) = reply.json["loads"]
    assert (load["num_running_reqs"], load["num_waiting_reqs"]) == (3, 2)
    assert (load["num_used_tokens"], load["max_total_num_tokens"]) == (1024, 4096)
    assert (load["token_usage"], load["cache_hit_rate"]) == (0.25, 0.25)
    assert reply.json["aggregate"]["total_reqs"] == 5
    assert (await api.call("GET", "/v1/loads?format=json&dp_rank=0")).status == 200
    assert (await api.call("GET", "/v1/loads?format=prometheus")).status == 400
    assert (await api.call("GET", "/v1/loads?dp_rank=1")).status == 400


CALL = '{"name": "weather", "arguments": {"city": "Oslo"}}'


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (None, f"Let me see. <tool_call>\n{CALL}\n</tool_call>"),
        ("qwen25", f"Let me see. <tool_call>\n{CALL}\n</tool_call>"),
        ("mistral", f"Let me see. [TOOL_CALLS][{CALL}]"),
    ],
)
async def test_calls_in_a_text(api: Any, parser: str | None, text: str) -> None:
    body = {"text": text, "tools": TOOLS, "tool_call_parser": parser}
    reply = await api.call("POST", "/parse_function_call", body)
    assert reply.status == 200, reply.raw
    assert reply.json["normal_text"].strip() == "Let me see."
    (call,) = reply.json["calls"]
    assert (call["tool_index"], call["name"]) == (1, "weather")
    assert json.loads(call["parameters"]) == {"city": "Oslo"}
    none = await api.call("POST", "/parse_function_call", {**body, "text": "No call."})
    assert none.json == {"normal_text": "No call.", "calls": []}
    unknown = await api.call("POST", "/parse_function_call", {**body, "tool_call_parser": "x"})
    assert unknown.json["error"]["param"] == "tool_call_parser"
    other = await api.call("POST", "/parse_function_call", {**body, "tools": []})
    assert other.json["calls"][0]["tool_index"] == -1


@pytest.mark.parametrize(
    ("text", "thought", "said"),
    [
        ("<think>Hm.</think>\nYes.", "Hm.", "Yes."),
        ("Hm.</think>Yes.", "Hm.", "Yes."),
        ("Yes.", "", "Yes."),
    ],
)
async def test_reasoning_in_a_text(
    api: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, text: str, thought: str, said: str
) -> None:
    path = "/separate_reasoning"
    reply = await api.call("POST", path, {"text": text, "reasoning_parser": "qwen3"})
    assert reply.json == {"reasoning_text": thought, "text": said}
    none = await api.call("POST", path, {"text": text})
    assert (none.status, none.json["error"]["param"]) == (400, "reasoning_parser")
    marks = ReasoningMarks(begin="<think>", end="</think>")
    card = msgspec.structs.replace(engine.card, reasoning=marks)
    monkeypatch.setattr(type(engine), "card", card)
    assert (await api.call("POST", path, {"text": text})).json["reasoning_text"] == thought


async def test_tokenize_by_both_its_paths(api: Any, engine: Any) -> None:
    for path in ("/tokenize", "/v1/tokenize"):
        reply = await api.call("POST", path, {"prompt": "ab", "return_token_strs": True})
        assert reply.json == {
            "tokens": [97, 98],
            "count": 2,
            "max_model_len": 512,
            "token_strs": ["a", "b"],
        }
    await api.call("POST", "/v1/tokenize", {"prompt": "ab", "add_special_tokens": False})
    assert engine.tokenized[-1] == ("ab", True, False)
    chat = {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}
    refused = await api.call("POST", "/v1/tokenize", chat)
    assert refused.json["error"]["param"] == "add_special_tokens"
    back = await api.call("POST", "/v1/detokenize", {"tokens": [97, 98]})
    assert back.json["text"] == "ab"


async def test_server_info_tells_the_page_size(api: Any) -> None:
    assert (await api.call("GET", "/server_info")).json["page_size"] == 1

"""`/v1/responses`: what reaches the engine, whole replies, streams, and refusals."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from phloem.constrained.spec import JsonObject, JsonSchema, Regex
from phloem.srt.errors import InternalError, InvalidConstraint, QueueFull
from phloem.srt.generation import ReasoningMarks

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": CITY}
TIME = {"type": "function", "name": "get_time"}
NAMED = {"type": "function", "name": "get_weather"}
INCLUDE = ["message.output_text.logprobs"]
CALL = ['<tool_call>\n{"name": "get_weather", "argu', 'ments": {"city": ', '"Oslo"}}\n</tool_call>']


async def post(api: Any, **body: object) -> Any:
    return await api.call("POST", "/v1/responses", {"input": "Hi", **body})


def named(raw: str) -> list[dict[str, Any]]:
    """The events of a stream; its framing and its numbers are checked."""
    blocks = [b for b in raw.split("\n\n") if b and not b.startswith(":")]
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


async def stream(api: Any, **body: object) -> list[dict[str, Any]]:
    reply = await post(api, stream=True, **body)
    assert reply.status == 200, reply.raw
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    return named(reply.raw)


def settled(value: Any) -> Any:
    """Without what differs between two runs of one request: ids and times."""
    if isinstance(value, list):
        return [settled(one) for one in value]
    if not isinstance(value, dict):
        return value
    known = ("id", "item_id", "call_id", "created_at", "completed_at")
    return {key: settled(one) for key, one in value.items() if key not in known}


def prompt_of(engine: Any) -> str:
    return bytes(engine.requests[-1].prompt).decode()


# --------------------------------------------------------------------------------------- the reply


async def test_a_whole_reply_has_the_openai_shape(api: Any, engine: Any) -> None:
    reply = await post(api, model="tiny", metadata={"a": "b"}, user="me", temperature=0.5)
    assert reply.status == 200
    body = reply.json
    id_ = body.pop("id")
    assert id_.startswith("resp_")
    assert reply.headers["X-Request-Id"] == id_ == engine.requests[0].rid
    assert body.pop("created_at") > 1_700_000_000
    assert body.pop("completed_at") > 1_700_000_000
    (message,) = body.pop("output")
    assert message.pop("id") == f"msg_{id_.removeprefix('resp_')}0000"
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [
            {"type": "output_text", "text": "Hello world.", "annotations": [], "logprobs": []}
        ],
    }
    assert body == {
        "object": "response",
        "status": "completed",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {"a": "b"},
        "model": "tiny",
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 0.5,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "usage": {
            "input_tokens": 8,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 4,
            "output_tokens_details": {"reasoning_tokens": 0, "forced_tokens": 0},
            "total_tokens": 12,
        },
        "user": "me",
    }


async def test_the_events_of_a_text(api: Any) -> None:
    events = await stream(api)
    assert [e["type"].removeprefix("response.") for e in events] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 4,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    created, progress, added, part, *deltas, text, part_done, done, last = events
    assert created["response"]["status"] == progress["response"]["status"] == "in_progress"
    assert created["response"]["output"] == []
    assert added["item"]["content"] == []
    assert added["item"]["status"] == "in_progress"
    assert part["part"]["text"] == ""
    assert [d["delta"] for d in deltas] == ["Hel", "lo", " wor", "ld."]
    assert {d["item_id"] for d in deltas} == {added["item"]["id"]}
    assert text["text"] == part_done["part"]["text"] == "Hello world."
    assert done["item"] == last["response"]["output"][0]
    assert (await api.call("GET", f"/v1/responses/{last['response']['id']}")).json == last[
        "response"
    ]


async def test_the_events_of_text_and_calls(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["I look. ", *CALL, "\n", *CALL, "Then."])
    events = await stream(api, tools=[WEATHER, TIME])
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[2:] == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        *[
            "output_item.added",
            "function_call_arguments.delta",
            "function_call_arguments.delta",
            "function_call_arguments.done",
            "output_item.done",
        ]
        * 2,
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [e["output_index"] for e in events if "output_index" in e] == sorted(
        e["output_index"] for e in events if "output_index" in e
    )
    text, first, second, then = events[-1]["response"]["output"]
    assert (text["content"][0]["text"], then["content"][0]["text"]) == ("I look. ", "Then.")
    for call in (first, second):
        assert (call["type"], call["name"], call["status"]) == (
            "function_call",
            "get_weather",
            "completed",
        )
        assert call["arguments"] == '{"city": "Oslo"}'
        assert call["call_id"].startswith("call_")
    assert first["id"] != second["id"]


@pytest.mark.parametrize(
    ("pieces", "body"),
    [
        (["Hello", " you"], {}),
        (["Hello", " you"], {"max_output_tokens": 1, "instructions": "Be brief"}),
        (["Hello", " you"], {"top_logprobs": 2, "metadata": {"a": "b"}}),
        ([], {}),
        ([], {"tools": [WEATHER]}),
        (["Well: ", *CALL, "\n"], {"tools": [WEATHER]}),
        (["Well: ", *CALL, "\n"], {"tools": [WEATHER], "max_output_tokens": 2}),
        (["Well: ", *CALL, "\n"], {"tools": [WEATHER], "top_logprobs": 0, "include": INCLUDE}),
        (
            ['{"name": "get_weather", "arg', 'uments": {"city": "Oslo"}}'],
            {"tools": [WEATHER], "tool_choice": "required"},
        ),
        (
            ['{"name": "get_weather", "arg', 'uments": {"city": "Oslo"}}'],
            {"tools": [WEATHER], "tool_choice": "required", "max_output_tokens": 1},
        ),
        (['{"city"', ': "x"}'], {"tools": [WEATHER], "tool_choice": NAMED}),
        (['{"city"', ': "x"}'], {"text": {"format": {"type": "json_object"}}}),
    ],
)
async def test_the_last_event_has_the_whole_reply(
    api: Any, engine: Any, script: Any, pieces: list[str], body: dict[str, Any]
) -> None:
    engine.script = lambda r: script(pieces)
    whole = (await post(api, **body)).json
    last = (await stream(api, **body))[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert settled(last["response"]) == settled(whole)
    stored = await api.call("GET", f"/v1/responses/{whole['id']}")
    assert stored.json == whole


# ------------------------------------------------------------------------------------- the request


OSLO = '{"city": "Oslo"}'


async def test_items_become_a_chat(api: Any, engine: Any) -> None:
    sent = [
        {"role": "user", "content": "The weather?"},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {
            "type": "message",
            "id": "msg_1",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": OSLO},
        {"type": "function_call", "call_id": "c2", "name": "get_time", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "noon"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "rain"}],
        },
        {
            "role": "developer",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
    ]
    reply = await post(api, input=sent, instructions="Be brief", tools=[WEATHER, TIME])
    assert reply.status == 200, reply.raw
    (rendered,) = engine.rendered
    assert rendered["messages"] == [
        {"role": "system", "content": "Be brief"},
        {"role": "user", "content": "The weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": {"city": "Oslo"}},
                },
                {
                    "id": "c2",
                    "type": "function",
                    "function": {"name": "get_time", "arguments": {}},
                },
            ],
        },
        {"role": "tool", "content": "noon", "tool_call_id": "c2"},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
        {"role": "system", "content": "a\nb"},
    ]
    assert [t["function"]["name"] for t in rendered["tools"]] == ["get_weather", "get_time"]


async def test_our_fields_reach_the_engine(api: Any, engine: Any) -> None:
    await post(
        api,
        max_output_tokens=7,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=5,
        stop=["x"],
        priority=3,
        cache_salt="mine",
        program="p",
        timeout=2.5,
        regex="[a-zA-Z .]+",
        rid="r-1",
        chat_template_kwargs={"k": 1},
        unknown={"a": 1},
    )
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (7, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, sampling.seed) == (40, 0.1, 5)
    assert (request.stop, request.priority, request.deadline_s) == (("x",), 3, 2.5)
    assert request.namespace.endswith("4:mine")
    assert (request.program, request.rid) == ("p", "r-1")
    assert request.constraint == Regex(pattern="[a-zA-Z .]+")
    assert engine.rendered[0]["template_kwargs"] == {"k": 1}


async def test_a_reply_warns_under_the_names_of_its_request(api: Any) -> None:
    asked = {"max_output_tokens": 600, "stops": 1, "reasoning": {"efort": "low"}}
    whole = (await post(api, **asked)).json
    warnings = {one["param"]: one["message"] for one in whole["warnings"]}
    assert set(warnings) == {"stops", "reasoning.efort", "max_output_tokens"}
    assert "max_output_tokens is 600, and was taken for 504" in warnings["max_output_tokens"]
    last = (await stream(api, **asked))[-1]
    assert last["response"]["warnings"] == whole["warnings"]


async def test_reasoning_is_told_apart(api: Any, engine: Any, script: Any) -> None:
    engine.reasoning = ReasoningMarks(begin="<think>", end="</think>", switch="enable_thinking")
    engine.script = lambda r: script(["<think>\n", "I mu", "se", "\n</think>\n\n", "Hel", "lo"])
    asked = {"reasoning": {"effort": "low", "summary": "auto"}, "include": INCLUDE}
    events = await stream(api, **asked)
    assert engine.rendered[0]["template_kwargs"] == {"enable_thinking": True}
    kinds = [e["type"].removeprefix("response.") for e in events]
    assert kinds[2:10] == [
        "output_item.added",
        "content_part.added",
        *["reasoning_text.delta"] * 2,
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
    ]
    response = events[-1]["response"]
    reasoning, message = response["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I muse"}]
    assert (reasoning["summary"], reasoning["id"][:3]) == ([], "rs_")
    assert [one["token"] for one in message["content"][0]["logprobs"]] == ["Hel", "lo"]
    assert response["reasoning"] == {"effort": "low", "summary": None}
    assert settled((await post(api, **asked)).json) == settled(response)
    await post(api, input="Go on", previous_response_id=response["id"])
    assert engine.rendered[-1]["messages"][1] == {
        "role": "assistant",
        "content": "Hello",
        "reasoning_content": "I muse",
    }


async def test_a_stream_with_an_interval(api: Any) -> None:
    events = await stream(api, stream_interval=3)
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert deltas == ["Hel", "lo world."]


async def test_text_formats(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["{}"])
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    format_ = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    reply = await post(api, text={"format": format_})
    constraint = engine.requests[-1].constraint
    assert isinstance(constraint, JsonSchema)
    assert json.loads(constraint.schema) == schema
    assert constraint.schema.index('"b"') < constraint.schema.index('"a"')
    assert reply.json["text"]["format"] == format_
    assert reply.json["constraint"]["valid"] is True
    reply = await post(api, text={"format": {"type": "json_object"}, "verbosity": "medium"})
    assert engine.requests[-1].constraint == JsonObject()
    assert reply.json["text"]["format"] == {"type": "json_object"}
    await post(api, text={"format": {"type": "text"}}, regex="{}")
    assert engine.requests[-1].constraint == Regex(pattern="{}")


async def test_only_allowed_tools_are_called(api: Any, engine: Any, script: Any) -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "get_time"}],
    }
    engine.script = lambda r: script(['{"name": "get_time", "arguments": {}}'])
    reply = await post(api, tools=[WEATHER, TIME], tool_choice=choice)
    seen = [t["function"]["name"] for t in engine.rendered[0]["tools"]]
    assert seen == ["get_weather", "get_time"]
    constraint = str(engine.requests[0].constraint)
    assert "get_time" in constraint
    assert "get_weather" not in constraint
    assert reply.json["tool_choice"] == choice
    assert [t["name"] for t in reply.json["tools"]] == ["get_weather", "get_time"]


async def test_logprobs(api: Any) -> None:
    asked = {"include": INCLUDE, "top_logprobs": 2}
    events = await stream(api, **asked)
    (part,) = events[-1]["response"]["output"][0]["content"]
    assert [one["token"] for one in part["logprobs"]] == ["Hel", "lo", " wor", "ld."]
    assert [len(one["top_logprobs"]) for one in part["logprobs"]] == [2] * 4
    told = [e["logprobs"] for e in events if e["type"] == "response.output_text.delta"]
    assert [one for list_ in told for one in list_] == part["logprobs"]
    assert events[-1]["response"]["top_logprobs"] == 2
    plain = (await post(api, include=INCLUDE)).json
    assert len(plain["output"][0]["content"][0]["logprobs"]) == 4
    none = (await post(api, top_logprobs=0)).json
    assert none["output"][0]["content"][0]["logprobs"] == []


TEXT = {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_image"}]}
BAD_SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": 5}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [TEXT]}, "input[0].content[1].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
        ),
        ({"input": [{"role": "tool", "content": "a"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [5]}, "input[0]"),
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
            "input[0].call_id",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]},
            "input[0]",
        ),
        (
            {
                "input": [
                    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"},
                    {"type": "function_call_output", "call_id": "c", "output": "a"},
                ]
            },
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "reasoning", "encrypted_content": "x"}]},
            "input[0].encrypted_content",
        ),
        ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "parameters": {"type": "array"}}]}, "tools[0].parameters"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice.name",
        ),
        ({"tools": [WEATHER], "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []},
            },
            "tool_choice.tools",
        ),
        ({"text": {"format": {"type": "poem"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "regex": "a"}, "regex"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"include": ["message.output_text.logprobs", "x"]}, "include[1]"),
        ({"include": ["reasoning.encrypted_content"]}, "include[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 1, "min_tokens": 2}, "min_tokens"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_tool_calls": 1}, "max_tool_calls"),
        ({"messages": []}, "messages"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"truncation": "some"}, "truncation"),
        ({"service_tier": "flex"}, "service_tier"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"background": True, "store": False}, "store"),
        ({"stream_options": {}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"previous_response_id": "resp_x"}, "previous_response_id"),
        ({"guided_jsn": {}, "guided_thing": 1}, "guided_thing"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
async def test_refusals_name_the_field(
    api: Any, engine: Any, fields: dict[str, Any], param: str, streamed: bool
) -> None:
    reply = await post(api, **{"stream": streamed, **fields} if streamed else fields)
    if "stream_options" in fields and streamed and param == "stream_options":
        assert reply.status == 200
        return
    assert reply.status == 400, reply.raw
    error = reply.json["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert "messages[" not in error["message"]
    assert "response_format" not in error["message"]
    assert engine.requests == []


async def test_an_unknown_model_is_a_404(api: Any) -> None:
    reply = await post(api, model="other")
    assert (reply.status, reply.json["error"]["param"]) == (404, "model")


@pytest.mark.parametrize("mode", [{}, {"stream": True}, {"background": True}])
async def test_what_the_engine_refuses_is_a_status(
    api: Any, engine: Any, script: Any, mode: dict[str, bool]
) -> None:
    refusal = InvalidConstraint("no `x`", param="/properties/a/x", code="unsupported_keyword")
    engine.script = lambda r: script(refusal=refusal)
    schema = {"type": "object", "properties": {"a": {"x": 1}}}
    reply = await post(
        api, text={"format": {"type": "json_schema", "name": "n", "schema": schema}}, **mode
    )
    assert reply.status == 400
    assert reply.json["error"]["param"] == "text.format.schema.properties.a.x"
    reply = await post(api, tools=[TIME, WEATHER], tool_choice=NAMED, **mode)
    assert reply.json["error"]["param"] == "tools[1].parameters.properties.a.x"
    engine.script = lambda r: script(refusal=QueueFull("full"))
    assert (await post(api, **mode)).status == 429


async def test_an_error_in_a_stream_is_its_last_event(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(failure=InternalError("it broke"))
    events = await stream(api)
    last = events[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert last["response"]["output"][0]["content"][0]["text"] == "Hello world."
    stored = await api.call("GET", f"/v1/responses/{last['response']['id']}")
    assert stored.json == last["response"]
    assert (await post(api)).status == 500


async def test_a_cut_answer_is_incomplete(api: Any, engine: Any, script: Any) -> None:
    events = await stream(api, max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"
    response = events[-1]["response"]
    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert response["output"][0]["status"] == "incomplete"
    assert response["output"][0]["content"][0]["text"] == "Hello"


async def test_a_client_that_leaves_ends_its_response(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    response = await api.session.post(
        api.base + "/v1/responses", json={"input": "a", "stream": True}
    )
    assert response.status == 200
    response.close()
    await eventually(lambda: bool(engine.closed) and not engine.running)

"""Tools: what is asked of the output, and how the output becomes calls, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from phloem.constrained.spec import JsonDocuments, JsonSchema, StructuralTag
from phloem.srt.errors import InvalidConstraint
from phloem.srt.http.tool_formats import rebase
from phloem.srt.messages import FinishReason

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "}O"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def allowed(mode: str, *names: str) -> dict[str, object]:
    """`tool_choice` of some tools only."""
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def assemble(events: list[Any]) -> tuple[str, list[dict[str, Any]]]:
    """Content and calls of choice 0, joined from a stream as clients do it."""
    content = ""
    calls: list[dict[str, Any]] = []
    for event in events:
        delta = event["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "arguments": ""})
                calls[-1]["name"] = call["function"]["name"]
            assert call["index"] == len(calls) - 1
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    return content, calls


async def both(api: Any, **body: object) -> tuple[Any, str, list[dict[str, Any]], str]:
    """The whole reply's choice beside the streamed one's content, calls and reason."""
    whole = (await api.chat(**body)).json["choices"][0]
    events = (await api.chat(**body, stream=True)).events
    content, calls = assemble(events)
    return whole, content, calls, events[-1]["choices"][0]["finish_reason"]


async def test_a_named_tool(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(['{"ci', 'ty":', ' "Oslo"}'])
    whole, content, calls, reason = await both(api, tools=TOOLS, tool_choice=NAMED)
    assert engine.requests[0].constraint == JsonSchema(schema=msgspec.json.encode(CITY).decode())
    (call,) = whole["message"]["tool_calls"]
    assert whole["message"]["content"] is None
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    assert (whole["finish_reason"], reason, content) == ("stop", "stop", "")
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", '{"city": "Oslo"}')]
    assert (call["type"], calls[0]["type"]) == ("function", "function")
    assert call["id"].startswith("call_")


async def test_required_is_calls_of_any_tool(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(
        ['{"na', 'me": "get_wea', 'ther", "argu', 'ments": {"city": ', '"}O"', "}}"]
    )
    whole, content, calls, reason = await both(api, tools=TOOLS, tool_choice="required")
    schema = json.loads(engine.requests[0].constraint.schema)
    assert [s["properties"]["name"]["const"] for s in schema["anyOf"]] == [
        "get_weather",
        "get_time",
    ]
    assert schema["anyOf"][0]["properties"]["arguments"] == CITY
    (call,) = whole["message"]["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "}O"}'}
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", '{"city": "}O"}')]
    assert (reason, content, whole["message"]["content"]) == ("tool_calls", "", None)


@pytest.mark.parametrize("choice", ["required", NAMED])
async def test_a_call_that_was_cut_off(api: Any, engine: Any, script: Any, choice: object) -> None:
    engine.script = lambda r: script(["{"], FinishReason.LENGTH)
    whole, _, calls, reason = await both(api, tools=TOOLS, tool_choice=choice)
    assert (whole["finish_reason"], reason) == ("length", "length")
    assert len(whole["message"].get("tool_calls", [])) == len(calls)
    if choice == "required":
        assert calls == []


async def test_auto_may_talk_or_call(api: Any, engine: Any, script: Any) -> None:
    whole, content, calls, reason = await both(api, tools=TOOLS)
    assert (whole["message"]["content"], content) == ("Hello world.", "Hello world.")
    assert (calls, whole["finish_reason"], reason) == ([], "stop", "stop")
    assert "tool_calls" not in whole["message"]
    tree = json.loads(engine.requests[0].constraint.format)
    assert isinstance(engine.requests[0].constraint, StructuralTag)
    assert (tree["triggers"], tree["stop_after_first"]) == (["<tool_call>"], False)
    assert tree["tags"][0]["content"]["json_schema"] == CITY
    begin, end = tree["tags"][0]["begin"], tree["tags"][0]["end"]

    answer = f'Let me see.{begin}{{"city": "Oslo"}}{end}\n{tree["tags"][1]["begin"]}{{}}{end}'
    engine.script = lambda r: script([answer[i : i + 3] for i in range(0, len(answer), 3)])
    whole, content, calls, reason = await both(api, tools=TOOLS, parallel_tool_calls=False)
    assert (whole["message"]["content"], content) == ("Let me see.", "Let me see.")
    assert [c["function"]["name"] for c in whole["message"]["tool_calls"]] == [
        "get_weather",
        "get_time",
    ]
    assert [c["arguments"] for c in calls] == ['{"city": "Oslo"}', "{}"]
    assert len({c["id"] for c in calls}) == 2
    assert (whole["finish_reason"], reason) == ("tool_calls", "tool_calls")
    assert json.loads(engine.requests[-1].constraint.format)["stop_after_first"] is True


async def test_none_only_shows_the_tools(api: Any, engine: Any) -> None:
    reply = await api.chat(tools=TOOLS, tool_choice="none")
    assert reply.json["choices"][0]["message"]["content"] == "Hello world."
    assert engine.requests[0].constraint is None
    assert [t["function"]["name"] for t in engine.rendered[0]["tools"]] == [
        "get_weather",
        "get_time",
    ]
    assert (await api.chat(tool_choice="none")).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}},
            "tool_choice.allowed_tools",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "any"}}, "tool_choice.type"),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto")},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tools": TOOLS, "tool_choice": allowed("auto", "get_time", "nothing")},
            "tool_choice.allowed_tools.tools[1].function.name",
        ),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"tools": TOOLS, "function_call": "auto"}, "function_call"),
        ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
        (
            {
                "tools": TOOLS,
                "tool_choice": {"type": "function", "function": {"name": "fly_to_mars"}},
            },
            "tool_choice.function.name",
        ),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function"),
        ({"tools": [{"type": "web_search", "function": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": TOOLS, "regex": "a"}, "tools"),
    ],
)
async def test_refusals(api: Any, engine: Any, body: dict[str, object], param: str) -> None:
    reply = await api.chat(**body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.raw
    assert not engine.requests


@pytest.mark.parametrize(
    "parameters",
    [None, {}, {"type": "object"}, {"type": "object", "properties": {}, "required": []}],
)
async def test_no_parameters_means_an_empty_object(
    api: Any, engine: Any, script: Any, parameters: object
) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    choice = {"type": "function", "function": {"name": "f"}}
    engine.script = lambda r: script(["{", "}"])
    assert (await api.chat(tools=[tool], tool_choice=choice)).status == 200
    assert json.loads(engine.requests[0].constraint.schema) == {
        "type": "object",
        "properties": {},
        "additionalProperties": False,
    }


async def test_references_follow_a_schema_into_a_bigger_one(api: Any, engine: Any) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/A"}, "$ref": {"const": {"$ref": "#/x"}}},
        "$defs": {"A": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    await api.chat(tools=[tool, TIME], tool_choice="required")
    sent = json.loads(engine.requests[0].constraint.schema)
    assert sent["anyOf"][0]["properties"]["arguments"] == {"$ref": "#/$defs/tool0"}
    moved = sent["$defs"]["tool0"]
    assert moved["properties"]["a"] == {"$ref": "#/$defs/tool0/$defs/A"}
    assert moved["properties"]["$ref"] == {"const": {"$ref": "#/x"}}
    assert moved["$defs"]["A"]["anyOf"][1] == {"$ref": "#/$defs/tool0"}
    assert rebase({"$ref": "http://x/y"}, "#/z") == {"$ref": "http://x/y"}


async def test_several_calls_unless_parallel_is_off(api: Any, engine: Any, script: Any) -> None:
    one = '{"name": "get_time", "arguments": {}}'
    engine.script = lambda r: script([one, "\n", one])
    whole, content, calls, reason = await both(api, tools=TOOLS, tool_choice="required")
    assert [c["name"] for c in calls] == ["get_time", "get_time"]
    assert [c["function"]["arguments"] for c in whole["message"]["tool_calls"]] == ["{}", "{}"]
    assert (reason, content) == ("tool_calls", "")
    sent = engine.requests[0].constraint
    assert isinstance(sent, JsonDocuments)
    assert (sent.begin, sent.separator, sent.end) == ("", "\n", "")
    assert sent.max_documents > 1
    await api.chat(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert isinstance(engine.requests[-1].constraint, JsonSchema)


async def test_only_allowed_tools(api: Any, engine: Any) -> None:
    await api.chat(tools=TOOLS, tool_choice=allowed("required", "get_time"))
    schema = json.loads(engine.requests[0].constraint.schema)
    assert schema["properties"]["name"] == {"const": "get_time"}
    assert len(engine.rendered[0]["tools"]) == 2
    await api.chat(tools=TOOLS, tool_choice=allowed("auto", "get_weather"))
    (tag,) = json.loads(engine.requests[1].constraint.format)["tags"]
    assert "get_weather" in tag["begin"]


@pytest.mark.parametrize(
    ("choice", "path", "form"),
    [
        ("required", "/anyOf/0/properties/arguments/properties/city", "json"),
        ("required", "/anyOf/0/properties/parameters/properties/city", "llama3"),
        ("required", "/items/anyOf/0/properties/arguments/properties/city", "mistral"),
        ("auto", "/tags/0/content/properties/city", "hermes"),
        ("auto", "/tags/0/content/properties/city", "mistral-args"),
        ("auto", "/tags/0/content/items/anyOf/0/properties/arguments/properties/city", "mistral"),
        (
            "auto",
            "/elements/0/elements/1/anyOf/0/properties/parameters/properties/city",
            "llama3",
        ),
        ("required", "/content/elements/0/content/properties/city", "mistral-args"),
        (NAMED, "/properties/city", "json"),
    ],
)
async def test_what_is_wrong_in_a_tool_is_reported_there(
    api: Any, engine: Any, script: Any, choice: object, path: str, form: str
) -> None:
    engine.tool_format = form
    refusal = InvalidConstraint("no", param=path, code="unsupported_keyword")
    engine.script = lambda r: script(refusal=refusal)
    reply = await api.chat(tools=TOOLS, tool_choice=choice)
    assert reply.json["error"]["param"] == "tools[0].function.parameters.properties.city"


# ------------------------------------------------------------------ history

CALL = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
ASKED = {"role": "user", "content": "When?"}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def with_function(**function: object) -> dict[str, object]:
    return {**CALLED, "tool_calls": [{**CALL, "function": {**CALL["function"], **function}}]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([{"role": "tool", "content": "5"}], "messages[0].tool_call_id"),
        ([CALLED, {"role": "tool", "content": "5"}], "messages[1].tool_call_id"),
        (
            [CALLED, {"role": "tool", "content": "5", "tool_call_id": "c2"}],
            "messages[1].tool_call_id",
        ),
        (
            [{"role": "tool", "content": "5", "tool_call_id": "c1"}, CALLED],
            "messages[0].tool_call_id",
        ),
        ([CALLED, {"role": "tool", "content": "5", "name": "other"}], "messages[1].name"),
        ([with_function(arguments="{")], "messages[0].tool_calls[0].function.arguments"),
        ([with_function(arguments="[]")], "messages[0].tool_calls[0].function.arguments"),
        ([{**CALLED, "role": "user"}], "messages[0].tool_calls"),
        ([{"role": "function", "name": "f", "content": "5"}], "messages[0].role"),
        (
            [{"role": "assistant", "content": "", "function_call": {"name": "f"}}],
            "messages[0].function_call",
        ),
        ([{**ASKED, "reasoning_content": "hm"}], "messages[0].reasoning_content"),
    ],
)
async def test_malformed_history(
    api: Any, engine: Any, messages: list[dict[str, object]], param: str
) -> None:
    reply = await api.chat(messages=messages)
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.raw
    assert not engine.requests


async def test_history_reaches_the_template(api: Any, engine: Any) -> None:
    answers = [
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "tool", "content": "6", "name": "get_time"},
    ]
    thought = {**CALLED, "reasoning_content": "hm"}
    reply = await api.chat(messages=[ASKED, thought, *answers, CALLED])
    assert reply.status == 200, reply.raw
    _, call, first, _, _ = engine.rendered[0]["messages"]
    assert call["tool_calls"][0]["function"] == {"name": "get_time", "arguments": {}}
    assert (call["reasoning_content"], first["tool_call_id"]) == ("hm", "c1")
    refused = {"role": "assistant", "content": None, "refusal": "I will not."}
    await api.chat(messages=[ASKED, refused, ASKED])
    assert engine.rendered[1]["messages"][1]["content"] == "I will not."


async def test_ids_fit_a_template_that_wants_short_ones(api: Any, engine: Any, script: Any) -> None:
    engine.tool_format = "mistral"
    answer = {"role": "tool", "content": "5", "tool_call_id": "c1"}
    engine.script = lambda r: script(['[TOOL_CALLS][{"name": "get_time", "arguments": {}}]'])
    reply = await api.chat(messages=[ASKED, CALLED, answer], tools=TOOLS)
    (call,) = reply.json["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9
    assert call["id"].isalnum()
    _, sent, told = engine.rendered[0]["messages"]
    assert sent["tool_calls"][0]["id"] == told["tool_call_id"]
    assert len(told["tool_call_id"]) == 9
    kept = {**CALLED, "tool_calls": [{**CALL, "id": call["id"]}]}
    await api.chat(messages=[ASKED, kept, {**answer, "tool_call_id": call["id"]}])
    assert engine.rendered[1]["messages"][2]["tool_call_id"] == call["id"]

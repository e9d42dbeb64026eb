"""Tools: what is asked of the output, and how the output becomes calls, whole and streamed."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained.spec import JsonSchema, StructuralTag
from phloem.srt.http.tool_parser import (
    AnswerParser,
    AutoParser,
    NamedParser,
    RequiredParser,
    ToolArguments,
    ToolStart,
)
from phloem.srt.http.tools import rebase
from phloem.srt.messages import FinishReason

CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "}O"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "get_weather"}}


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
    assert (whole["finish_reason"], reason, content) == ("tool_calls", "tool_calls", "")
    assert [(c["name"], c["arguments"]) for c in calls] == [("get_weather", '{"city": "Oslo"}')]
    assert (call["type"], calls[0]["type"]) == ("function", "function")
    assert call["id"].startswith("call_")


async def test_required_is_one_call_of_any_tool(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(
        ['{"na', 'me": "get_wea', 'ther", "argu', 'ments": {"city": ', '"}O"', "}}", " "]
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
        ({"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice.function"),
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


# ------------------------------------------------------------------ parsers, on any split

_values = st.recursive(
    st.none() | st.integers(-9, 9) | st.text(alphabet='a"\\{}[]<>/é ', max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(alphabet='k"}<', max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)
_arguments = st.dictionaries(st.text(alphabet="ab", max_size=2), _values, max_size=3)


def run(parser: AnswerParser, text: str, cuts: list[int]) -> tuple[str, list[tuple[str, str]]]:
    """Feed `text` cut at `cuts`; content and (name, arguments) of the calls."""
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    pieces = [
        piece for a, b in pairwise(places) for piece in parser.feed(text[a:b])
    ] + parser.finish()
    content = "".join(p for p in pieces if isinstance(p, str))
    starts = [p for p in pieces if isinstance(p, ToolStart)]
    assert [s.index for s in starts] == list(range(len(starts)))
    texts = {s.index: "" for s in starts}
    for piece in pieces:
        if isinstance(piece, ToolArguments):
            texts[piece.index] += piece.text
    return content, [(s.name, texts[s.index]) for s in starts]


@given(arguments=_arguments, cuts=st.lists(st.integers(0, 200), max_size=8))
def test_required_calls_survive_any_split(arguments: dict[str, Any], cuts: list[int]) -> None:
    text = json.dumps(arguments)
    answer = f'{{"name": "f", "arguments": {text}}}'
    assert run(RequiredParser(), answer, cuts) == ("", [("f", text)])
    assert run(NamedParser("f"), text, cuts) == ("", [("f", text)])


@given(
    parts=st.lists(
        st.text(alphabet="a<tool_c>\n ", max_size=8) | _arguments, min_size=1, max_size=4
    ),
    cuts=st.lists(st.integers(0, 400), max_size=8),
)
def test_auto_answers_survive_any_split(parts: list[Any], cuts: list[int]) -> None:
    answer = "".join(
        part
        if isinstance(part, str)
        else f'<tool_call>\n{{"name": "f", "arguments": {json.dumps(part)}}}\n</tool_call>'
        for part in parts
    )
    whole = run(AutoParser(), answer, [])
    assert run(AutoParser(), answer, cuts) == whole
    if not any(isinstance(part, str) and "<tool_call>" in part for part in parts):
        calls = [("f", json.dumps(part)) for part in parts if not isinstance(part, str)]
        assert whole[1] == calls


@pytest.mark.parametrize(
    "text",
    ["<tool_call>", "<tool_call>\n{broken}\n</tool_call>", "a <tool", "<<tool_call", "x\n"],
)
def test_what_is_no_call_is_text(text: str) -> None:
    assert run(AutoParser(), text, list(range(len(text)))) == (text, [])

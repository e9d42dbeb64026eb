"""The Messages API: what a request asks of the engine, and what is refused by its path."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from phloem.constrained.spec import JsonSchema, Regex
from phloem.srt.errors import InvalidConstraint, QueueFull
from phloem.srt.generation import ReasoningMarks

HI: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "}O"]}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Now.", "input_schema": CITY}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Oslo"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "Rain."}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}
TEXT = {"type": "text", "text": "Hi"}


async def ask(api: Any, **body: object) -> Any:
    return await api.call("POST", "/v1/messages", {**HI, **body})


async def test_the_conversation_as_the_template_gets_it(api: Any, engine: Any) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    messages = [
        {"role": "user", "content": "One"},
        {"role": "user", "content": [{"type": "text", "text": "Two", **cached}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Wait."},
                CALL,
                {**CALL, "id": "toolu_2"},
            ],
        },
        {
            "role": "user",
            "content": [
                {**RESULT, "tool_use_id": "toolu_2", "content": "No.", "is_error": True},
                {
                    **RESULT,
                    "content": [{"type": "text", "text": "Rain"}, {"type": "text", "text": "now."}],
                    **cached,
                },
                {"type": "text", "text": "So?"},
            ],
        },
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And now?"},
    ]
    system = [{"type": "text", "text": "You"}, {"type": "text", "text": "help.", **cached}]
    assert (await ask(api, messages=messages, system=system, **cached)).status == 200
    function = {"name": "get_weather", "arguments": {"city": "Oslo"}}
    calls = [{"id": f"toolu_{i}", "type": "function", "function": function} for i in (1, 2)]
    assert engine.rendered[0]["messages"] == [
        {"role": "system", "content": "You\nhelp."},
        {"role": "user", "content": "One\nTwo"},
        {
            "role": "assistant",
            "content": "Wait.",
            "tool_calls": calls,
            "reasoning_content": "Hm.",
        },
        {"role": "tool", "content": "Error: No.", "tool_call_id": "toolu_2"},
        {"role": "tool", "content": "Rain\nnow.", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "So?"},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And now?"},
    ]
    assert engine.rendered[0]["add_generation_prompt"] is True


@pytest.mark.parametrize("content", ["The answer is", [{"type": "text", "text": "The answer is"}]])
async def test_an_answer_that_goes_on(api: Any, engine: Any, content: object) -> None:
    messages = [*HI["messages"], {"role": "assistant", "content": content}]
    reply = await ask(api, messages=messages, regex=" [0-9]+", constraint_prefix="The")
    assert reply.status == 400  # the text does not end in it
    assert reply.json["error"]["param"] == "constraint_prefix"
    assert (await ask(api, messages=messages)).status == 200
    assert engine.rendered[0]["continue_final_message"] is True
    assert engine.rendered[0]["messages"][-1] == {"role": "assistant", "content": "The answer is"}


@pytest.mark.parametrize("content", ["", []])
async def test_an_answer_that_goes_on_from_nothing(api: Any, engine: Any, content: object) -> None:
    messages = [*HI["messages"], {"role": "assistant", "content": content}]
    assert (await ask(api, messages=messages)).status == 200
    assert engine.rendered[0]["continue_final_message"] is False
    assert engine.rendered[0]["messages"] == HI["messages"]


async def test_sampling_and_our_own_fields(api: Any, engine: Any) -> None:
    body = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 11,
        "priority": 2,
        "cache_salt": "a",
        "program": "p",
        "jump_forward": "off",
        "stop_token_ids": [9],
        "metadata": {"user_id": "u", "format": "of my own"},
        "service_tier": "auto",
        "made_up": 1,
    }
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "made-up-2030-01-01"}
    reply = await api.call("POST", "/v1/messages", {**HI, **body}, headers=headers)
    assert reply.status == 200, reply.raw
    assert [warning["param"] for warning in reply.json["warnings"]] == ["made_up"]
    (request,) = engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 7, 0.9)
    assert (sampling.min_p, sampling.seed, sampling.stop_token_ids) == (0.1, 11, (9,))
    assert (request.priority, request.program, request.jump.value) == (2, "p", "off")
    assert request.namespace


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_an_output_format(api: Any, engine: Any, script: Any, field: str) -> None:
    engine.script = lambda r: script(['{"city": ', '"Oslo"}'])
    format_ = {"type": "json_schema", "schema": CITY}
    body = {field: {"format": format_} if field == "output_config" else format_}
    message = (await ask(api, **body)).json
    assert isinstance(engine.requests[0].constraint, JsonSchema)
    assert json.loads(engine.requests[0].constraint.schema) == CITY
    assert message["content"] == [{"type": "text", "text": '{"city": "Oslo"}'}]
    assert message["constraint"]["complete"] is True
    engine.script = lambda r: script(refusal=InvalidConstraint("No.", param="/properties/city"))
    reply = await ask(api, **body)
    at = "output_format" if field == "output_format" else "output_config.format"
    assert reply.json["error"]["param"] == f"{at}.schema.properties.city"


async def test_our_own_constraints(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["1", "2"])
    message = (await ask(api, regex="[0-9]+")).json
    assert engine.requests[0].constraint == Regex(pattern="[0-9]+")
    assert message["constraint"]["complete"] is True


@pytest.fixture
def thinking_engine(engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The engine with a model that thinks, which its template can be told."""
    marks = ReasoningMarks(begin="<think>", end="</think>", switch="enable_thinking", efforts=True)
    card = msgspec.structs.replace(engine.card, reasoning=marks)
    monkeypatch.setattr(type(engine), "card", card)
    return engine


@pytest.mark.parametrize(
    ("body", "variables", "budget"),
    [
        ({}, None, None),
        ({"output_config": {"effort": "high"}}, None, None),
        ({"output_config": {"effort": "low"}}, ("low", True), None),
        ({"thinking": {"type": "disabled"}}, ("none", False), None),
        ({"thinking": {"type": "adaptive"}}, ("high", True), None),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, ("high", True), 9),
        (
            {"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}},
            ("max", True),
            None,
        ),
    ],
)
async def test_how_much_is_thought(
    api: Any, thinking_engine: Any, body: Any, variables: Any, budget: int | None
) -> None:
    assert (await ask(api, **body)).status == 200
    told = variables and {"reasoning_effort": variables[0], "enable_thinking": variables[1]}
    assert thinking_engine.rendered[0]["template_kwargs"] == told
    constraint = thinking_engine.requests[0].constraint
    assert (constraint and constraint.budget) == budget


@pytest.mark.parametrize("display", ["summarized", "omitted"])
async def test_thinking_comes_apart(
    api: Any, thinking_engine: Any, script: Any, display: str
) -> None:
    thinking_engine.script = lambda r: script(["<think>\nHm", ".\n</think>", "\n\nYes."])
    thinking = {"type": "enabled", "budget_tokens": 9, "display": display}
    thought, said = (await ask(api, thinking=thinking)).json["content"]
    assert (thought["type"], bool(thought["signature"])) == ("thinking", True)
    assert thought["thinking"] == ("Hm." if display == "summarized" else "")
    assert said == {"type": "text", "text": "Yes."}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
        ({"thinking": {"type": "adaptive"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"),
        (
            {"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}},
            "output_config.effort",
        ),
    ],
)
async def test_a_model_that_does_not_think(api: Any, body: dict[str, Any], param: str) -> None:
    reply = await ask(api, **body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert param in reply.json["error"]["message"]
    assert (await ask(api, thinking={"type": "disabled"})).status == 200


SCHEMA_TOO: dict[str, Any] = {"output_config": {"format": {"type": "json_schema", "schema": {}}}}


def last(*content: object) -> dict[str, Any]:
    return {"messages": [*HI["messages"], {"role": "assistant", "content": list(content)}]}


def turns(*contents: list[object]) -> dict[str, Any]:
    """Turns of the user and the assistant, in turn."""
    roles = ("user", "assistant")
    return {
        "messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)],
    }


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (turns([]), "messages[0].content"),
        (turns([TEXT, IMAGE]), "messages[0].content[1].type"),
        (turns([{"type": "document"}]), "messages[0].content[0].type"),
        (turns([{"type": "poem"}]), "messages[0].content[0].type"),
        (turns([{"type": "text"}]), "messages[0].content[0].text"),
        (turns([CALL]), "messages[0].content[0].type"),
        (turns([TEXT], [RESULT]), "messages[1].content[0].type"),
        (turns([TEXT], [TEXT, IMAGE]), "messages[1].content[1].type"),
        (turns([RESULT]), "messages[0].content[0].tool_use_id"),
        (turns([TEXT], [CALL]), "messages[1].content[0]"),
        (turns([TEXT], [TEXT, CALL], [TEXT]), "messages[1].content[1]"),
        (turns([TEXT], [CALL], [TEXT, RESULT]), "messages[2].content[1].type"),
        (turns([TEXT], [CALL], [RESULT, RESULT]), "messages[2].content[1].tool_use_id"),
        (turns([TEXT], [CALL, CALL], [RESULT]), "messages[1].content[1].id"),
        (turns([TEXT], [{**CALL, "input": []}], [RESULT]), "messages[1].content[0].input"),
        (
            turns([TEXT], [CALL], [{**RESULT, "content": [TEXT, IMAGE]}]),
            "messages[2].content[0].content[1].type",
        ),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages[0]"),
        (turns([TEXT], [TEXT, {"type": "thinking", "thinking": "x"}]), "messages[1].content[1]"),
        ({"system": [IMAGE]}, "system[0].type"),
        ({"temperature": 3}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "x"}, "stop_sequences"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1]"),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [WEATHER | {"input_examples": [{"a": 1}]}]}, "tools[0].input_examples"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "maybe"}}, "tool_choice.type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 50}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, "thinking.type"),
        ({"output_config": {"task_budget": 3}}, "output_config.task_budget"),
        ({"output_config": {"format": {"type": "poem"}}}, "output_config.format.type"),
        (
            {"output_config": {"format": {"type": "json_schema"}}},
            "output_config.format.schema",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
            "output_config.format.schema",
        ),
        ({**SCHEMA_TOO, "output_format": SCHEMA_TOO["output_config"]["format"]}, "output_format"),
        ({**SCHEMA_TOO, "regex": "a"}, "regex"),
        ({**SCHEMA_TOO, "response_format": {"type": "text"}}, "output_config.format"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"context_management": {"edits": [{}]}}, "context_management"),
        ({"container": "x"}, "container"),
        ({"speed": "fast"}, "speed"),
        ({"n": 2}, "n"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": True}, "logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"guided_poem": "x"}, "guided_poem"),
    ],
)
async def test_refusals(api: Any, engine: Any, body: dict[str, Any], param: str) -> None:
    reply = await ask(api, **body)
    assert reply.status == 400, reply.raw
    error = reply.json["error"]
    assert (reply.json["type"], error["type"]) == ("error", "invalid_request_error")
    assert error.get("param") == param, reply.raw
    assert reply.json["request_id"] == reply.headers["request-id"]
    assert not engine.requests


async def test_max_tokens_is_required(api: Any) -> None:
    reply = await api.call("POST", "/v1/messages", {"messages": HI["messages"]})
    assert (reply.status, reply.json["error"]["param"]) == (400, "max_tokens")


async def test_messages_of_errors_speak_of_the_client_s_fields(api: Any) -> None:
    async def message(**body: object) -> str:
        return str((await ask(api, **body)).json["error"]["message"])

    tools = [{"name": "f", "input_schema": {"type": "string"}}]
    assert (await message(tools=tools)).startswith("tools[0].input_schema must be")
    said = await message(**SCHEMA_TOO, regex="a")
    assert said.endswith("not `output_config.format.schema` and `regex`.")
    assert await message(stop_sequences=[""]) == "A stop string is empty."


async def test_a_tool_s_schema_that_is_refused(api: Any, engine: Any, script: Any) -> None:
    refusal = InvalidConstraint("No.", param="/properties/city/enum", code="unsupported_keyword")
    engine.script = lambda r: script(refusal=refusal)
    for stream in (False, True):
        reply = await ask(
            api,
            tools=[TIME, WEATHER],
            tool_choice={"type": "tool", "name": "get_weather"},
            stream=stream,
        )
        assert reply.status == 400
        assert reply.json["error"]["param"] == "tools[1].input_schema.properties.city.enum"
        assert reply.json["error"]["code"] == "unsupported_keyword"


# ------------------------------------------------------------------ errors, keys, counting


async def test_errors_have_anthropic_s_shape(api: Any, engine: Any, script: Any) -> None:
    reply = await ask(api, model="other")
    assert (reply.status, reply.json["error"]["type"]) == (404, "not_found_error")
    engine.script = lambda r: script(refusal=QueueFull("Full."))
    reply = await ask(api)
    assert (reply.status, reply.json["error"]["type"]) == (429, "rate_limit_error")
    assert reply.headers["Retry-After"]
    reply = await api.call("GET", "/v1/messages")
    assert (reply.status, reply.json["type"]) == (405, "error")


async def test_keys(serve: Any) -> None:
    api = await serve(api_key="k")
    for headers, status in (
        ({"x-api-key": "k"}, 200),
        ({"Authorization": "Bearer k"}, 200),
        ({"x-api-key": "wrong"}, 401),
        ({}, 401),
    ):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = await api.call("POST", path, HI, headers=headers)
            assert reply.status == status, (headers, path)
            if status == 401:
                assert reply.json["error"]["type"] == "authentication_error"
                assert reply.headers["request-id"]


async def test_counting_is_that_of_usage(api: Any, engine: Any) -> None:
    bodies: list[dict[str, Any]] = [
        {},
        {"system": "Be brief.", "tools": [WEATHER], "tool_choice": {"type": "auto"}},
        last({"type": "text", "text": "The"}),
    ]
    for body in bodies:
        usage = (await ask(api, **body)).json["usage"]
        reply = await api.call(
            "POST", "/v1/messages/count_tokens", {"messages": HI["messages"], **body}
        )
        assert reply.json == {"input_tokens": usage["input_tokens"]}
    assert len(engine.requests) == len(bodies)
    reply = await api.call("POST", "/v1/messages/count_tokens", turns([TEXT, IMAGE]))
    assert (reply.status, reply.json["error"]["param"]) == (400, "messages[0].content[1].type")

"""The official Anthropic client, unmodified, against a real server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from pydantic import BaseModel

anthropic = pytest.importorskip("anthropic")

pytestmark = [pytest.mark.e2e, pytest.mark.model]

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Lima"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "The weather.", "input_schema": CITY}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}
GREEDY = {"temperature": 0}


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def asked(**fields: Any) -> dict[str, Any]:
    """Arguments of `create`; sampling is what this client leaves to `extra_body`."""
    defaults = {"model": "tiny", "max_tokens": 24, "messages": user("Name three colours.")}
    return {**defaults, "extra_body": GREEDY, **fields}


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def without_ids(message: Any) -> dict[str, Any]:
    told: dict[str, Any] = message.to_dict()
    assert told.pop("id").startswith("msg_")
    for block in told["content"]:
        if block["type"] == "tool_use":
            assert block.pop("id").startswith("toolu_")
    for key in ("usage", "stop_details", "constraint"):  # not in what it makes of a stream
        told.pop(key, None)
    return told


def both(client: Any, **fields: Any) -> Any:
    """The whole message; the stream's is the same."""
    whole = client.messages.create(**asked(**fields))
    with client.messages.stream(**asked(**fields)) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    assert without_ids(streamed) == without_ids(whole)
    assert text == "".join(b.text for b in whole.content if b.type == "text")
    return whole


@pytest.mark.client("anthropic", "messages, whole and streamed")
def test_a_message_and_its_stream_are_the_same(client: Any) -> None:
    whole = both(client, system="You like colours.")
    assert whole.content[0].text
    assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 24)
    assert whole._request_id == whole.id


@pytest.mark.client("anthropic", "events of a stream")
def test_events(client: Any) -> None:
    with client.messages.create(**asked(stream=True)) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert len(kinds[2:-3]) > 4
    assert events[0].message.usage.output_tokens <= 1
    assert events[-2].usage.output_tokens == 24


@pytest.mark.client("anthropic", "cached tokens, count_tokens")
def test_counts(client: Any) -> None:
    fields = asked(
        messages=user("Count the cached tokens of this prompt, please."), tools=[WEATHER]
    )
    cold, warm = (client.messages.create(**fields).usage for _ in range(2))
    kept = {k: v for k, v in fields.items() if k in ("model", "messages", "tools")}
    counted = client.messages.count_tokens(**kept).input_tokens
    for usage in (cold, warm):
        assert usage.input_tokens + usage.cache_read_input_tokens == counted
        assert usage.cache_creation_input_tokens == 0
    assert (warm.input_tokens, warm.cache_read_input_tokens) == (1, counted - 1)


@pytest.mark.client("anthropic", "stop sequences, an answer that goes on")
def test_stop_sequences(client: Any) -> None:
    messages = [*user("Count."), {"role": "assistant", "content": "1, 2, 3, 4, 5, 6, 7,"}]
    message = both(client, messages=messages, stop_sequences=["10"])
    assert message.content[0].text.strip() == "8, 9,"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "10")


@pytest.mark.client("anthropic", "tools: forced, any, auto, none")
def test_tools_and_their_results(client: Any) -> None:
    named = {"type": "tool", "name": "get_weather"}
    ask = user("What is the weather in Oslo for 3 days?")
    for choice, names in ((named, {"get_weather"}), ({"type": "any"}, {"get_weather", "get_time"})):
        message = both(
            client, messages=ask, tools=[WEATHER, TIME], tool_choice=choice, max_tokens=300
        )
        (call,) = message.content[:1]
        assert (message.stop_reason, call.type) == ("tool_use", "tool_use")
        assert call.name in names
        if call.name == "get_weather":
            assert call.input["city"] in ("Oslo", "Lima")
            assert call.input["days"] <= 9
    for kind in ("auto", "none"):
        message = both(
            client, messages=ask, tools=[WEATHER], tool_choice={"type": kind}, max_tokens=200
        )
        assert message.stop_reason in ("end_turn", "tool_use")
    call = client.messages.create(
        **asked(messages=ask, tools=[WEATHER], tool_choice=named, max_tokens=80)
    )
    result = {
        "type": "tool_result",
        "tool_use_id": call.content[0].id,
        "content": [{"type": "text", "text": "Rain."}],
    }
    history = [*ask, call.to_param(), {"role": "user", "content": [result]}]
    assert both(client, messages=history, tools=[WEATHER], max_tokens=200).content


class Weather(BaseModel):
    city: Literal["Oslo", "Lima"]
    celsius: int
    sunny: bool


@pytest.mark.client("anthropic", "structured output: parse, output_config")
def test_structured_output(client: Any) -> None:
    fields = asked(messages=user("The weather in Oslo?"), max_tokens=80)
    reply = client.messages.parse(**fields, output_format=Weather)
    assert isinstance(reply.parsed_output, Weather)
    assert (reply.stop_reason, reply.constraint["enforcement"]) == ("end_turn", "full")
    with client.messages.stream(**fields, output_format=Weather) as stream:
        assert stream.get_final_message().parsed_output == reply.parsed_output
    config = {"format": {"type": "json_schema", "schema": CITY}}
    message = both(client, messages=user("Where?"), max_tokens=80, output_config=config)
    assert message.content[0].text.startswith("{")
    number = client.messages.create(**asked(extra_body={"regex": "[1-9][0-9]{2}"})).content[0].text
    assert 100 <= int(number) <= 999


@pytest.mark.client("anthropic", "models: list, retrieve")
def test_models(client: Any) -> None:
    (model,) = list(client.models.list())
    assert (model.type, model.id, model.lifecycle) == ("model", "tiny", "active")
    assert model.display_name == "tiny"
    assert abs(datetime.now(UTC) - model.created_at) < timedelta(hours=1)
    assert model.max_tokens > 0
    assert client.models.retrieve("tiny") == model
    page = client.models.list(limit=1)
    assert (page.first_id, page.last_id, page.has_next_page()) == ("tiny", "tiny", False)
    assert list(client.models.list(after_id="tiny")) == []
    assert list(client.models.list(lifecycle=["retired", "deprecated"])) == []
    assert [one.id for one in client.models.list(lifecycle=["active", "retired"])] == ["tiny"]
    with pytest.raises(anthropic.BadRequestError) as wrong:
        client.models.list(before_id="other")
    assert wrong.value.body["error"]["param"] == "before_id"
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.models.retrieve("other")
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id == missing.value.body["request_id"]


@pytest.mark.client("anthropic", "errors")
def test_errors(client: Any) -> None:
    bad: Any = {"type": "object", "properties": {"x": {"$ref": "#/nowhere"}}}
    named, tool = {"type": "tool", "name": "f"}, {"name": "f", "input_schema": bad}
    image = [{"type": "image", "source": {"type": "url", "url": "http://localhost/x.png"}}]
    for fields, param in (
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": image}]}, "messages[0].content[0].type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": bad}}}, "output_config"),
        ({"tools": [tool], "tool_choice": named}, "tools[0].input_schema.properties.x"),
        ({"tools": [TIME, tool], "tool_choice": {"type": "any"}}, "tools[1].input_schema.prop"),
        ({"tools": [TIME, tool]}, "tools[1].input_schema.properties.x"),
        ({"messages": user("word " * 9000)}, "messages"),
    ):
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as caught:
                client.messages.create(**asked(**fields), stream=stream)
            error = caught.value.body
            assert error["type"] == "error"
            assert error["error"]["type"] == "invalid_request_error"
            assert error["error"]["param"].startswith(param), error
            assert caught.value.request_id == error["request_id"]
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**asked(model="other"))
    assert client.messages.create(**asked(max_tokens=1)).content


@pytest.mark.client("anthropic", "keys")
def test_keys(start_server: Callable[..., Any]) -> None:
    url = start_server("--api-key", "k-1", "--kv-tokens", "4096").url
    for keys, right in (
        ({"api_key": "k-1"}, True),
        ({"auth_token": "k-1"}, True),
        ({"api_key": "k-2"}, False),
        ({"auth_token": "k-2"}, False),
    ):
        with anthropic.Anthropic(base_url=url, max_retries=0, **keys) as client:
            if right:
                assert client.messages.create(**asked(max_tokens=1)).content
            else:
                with pytest.raises(anthropic.AuthenticationError):
                    client.messages.create(**asked(max_tokens=1))


@pytest.mark.client("anthropic", "AsyncAnthropic, leaving a stream")
async def test_leaving_a_stream_ends_its_request(server: Any) -> None:
    async with anthropic.AsyncAnthropic(
        base_url=server.url, api_key="none", max_retries=0
    ) as client:
        fields = asked(max_tokens=4000, extra_body={"ignore_eos": True, "temperature": 0})
        async with client.messages.stream(**fields) as stream:
            async for event in stream:
                if event.type == "text":
                    break
            server.until(lambda: server.metric("phloem_num_requests_running") == 1)
        server.until(lambda: server.metric("phloem_num_requests_running") == 0)
        assert (await client.messages.create(**asked(max_tokens=1))).content

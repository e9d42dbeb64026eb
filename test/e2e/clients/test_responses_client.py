"""The official client's Responses API, unmodified, against a real server."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import FunctionToolParam, Response
from pydantic import BaseModel, ConfigDict

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.client("openai", "Responses: whole, streamed, parsed, tools, chained, background"),
]


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Oslo", "Lima"]
    celsius: int
    sunny: bool


TOOL: FunctionToolParam = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a city",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Lima"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("responses")


@pytest.fixture(scope="module")
def keeper(start_server: Callable[..., Any], data_dir: Path) -> Any:
    """A server that keeps responses in a folder of its own."""
    return start_server("--kv-tokens", "16384", "--data-dir", str(data_dir))


@pytest.fixture
def client(keeper: Any, connect: Callable[[Any], openai.OpenAI]) -> openai.OpenAI:
    return connect(keeper)


def test_create_and_retrieve(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="tiny",
        instructions="You are brief.",
        input="Name three colours.",
        max_output_tokens=24,
        temperature=0,
        metadata={"test": "yes"},
    )
    assert response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.metadata == {"test": "yes"}
    assert client.responses.retrieve(response.id) == response
    counted = client.responses.input_tokens.count(
        model="tiny", instructions="You are brief.", input="Name three colours."
    )
    assert counted.input_tokens == response.usage.input_tokens
    (item,) = client.responses.input_items.list(response.id).data
    assert item.type == "message"
    assert item.content[0].to_dict() == {"type": "input_text", "text": "Name three colours."}


def test_a_stream_is_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "input": [{"role": "user", "content": "Count to five."}],
        "temperature": 0,
        "max_output_tokens": 24,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    last = events[-1]
    assert last.type in ("response.completed", "response.incomplete")
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == last.response.output_text
    message = whole.output[0]
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    logprobs = message.content[0].logprobs
    assert logprobs is not None
    assert "".join(one.token for one in logprobs) == text
    assert all(len(one.top_logprobs) == 2 for one in logprobs)


def test_parse_with_a_pydantic_model(client: openai.OpenAI) -> None:
    for temperature in (0, 1.5):
        response = client.responses.parse(
            model="tiny",
            input="The weather in Oslo?",
            text_format=Weather,
            temperature=temperature,
            extra_body={"seed": 1},
        )
        assert response.status == "completed"
        assert isinstance(response.output_parsed, Weather)


def test_a_stream_with_a_pydantic_model(client: openai.OpenAI) -> None:
    with client.responses.stream(
        model="tiny", input="The weather in Lima?", text_format=Weather, temperature=0
    ) as stream:
        for event in stream:
            if event.type == "response.output_text.done":
                assert isinstance(event.parsed, Weather)
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Weather)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_tools(client: openai.OpenAI, choice: Any) -> None:
    asked: Any = {
        "model": "tiny",
        "input": "The weather?",
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "temperature": 0,
    }
    first = client.responses.create(**asked)
    call = first.output[0]
    assert call.type == "function_call"
    assert call.name == "get_weather"
    assert json.loads(call.arguments)["city"] in ("Oslo", "Lima")
    outputs: Any = [
        {"type": "function_call_output", "call_id": one.call_id, "output": "Rain, 4 degrees."}
        for one in first.output
        if one.type == "function_call"
    ]
    second = client.responses.create(
        model="tiny",
        previous_response_id=first.id,
        input=outputs,
        tools=[TOOL],
        tool_choice="none",
        max_output_tokens=16,
    )
    assert second.output[0].type == "message"
    with client.responses.stream(**asked) as stream:
        deltas = [e for e in stream if e.type == "response.function_call_arguments.delta"]
        final = stream.get_final_response()
    streamed = final.output[0]
    assert streamed.type == "function_call"
    text = "".join(e.delta for e in deltas if e.output_index == 0)
    assert text == streamed.arguments == call.arguments


def test_a_tool_of_a_pydantic_model(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="report")["function"]
    function: Any = {"type": "function", **tool}
    response = client.responses.parse(
        model="tiny",
        input="Report.",
        tools=[function],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
    )
    call = response.output[0]
    assert call.type == "function_call"
    Weather.model_validate_json(call.arguments)


def test_a_conversation_is_kept_and_cached(client: openai.OpenAI) -> None:
    common: Any = {"model": "tiny", "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(
        input="My name is Ada, and I come from a town by the sea.", **common
    )
    second = client.responses.create(
        input="What is my name?", previous_response_id=first.id, **common
    )
    assert first.usage is not None
    assert second.usage is not None
    # All that was said, but the end token that the template writes behind an answer.
    said = first.usage.input_tokens + first.usage.output_tokens - 1
    assert second.usage.input_tokens_details.cached_tokens >= said
    explicit = client.responses.create(
        input=[
            {"role": "user", "content": "My name is Ada, and I come from a town by the sea."},
            {"type": "item_reference", "id": first.output[0].id or ""},
            {"role": "user", "content": "What is my name?"},
        ],
        **common,
    )
    assert explicit.output_text == second.output_text
    items = client.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in items] == ["message"] * 3


def test_in_the_background(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 16}
    first = client.responses.create(input="Say something.", background=True, **asked)
    assert first.status == "queued"
    done = finished(client, first.id)
    assert done.output_text == client.responses.create(input="Say something.", **asked).output_text
    endless = client.responses.create(
        model="tiny", input="Go on.", background=True, extra_body={"ignore_eos": True}
    )
    cancelled = client.responses.cancel(endless.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(endless.id) == cancelled
    stream = client.responses.create(input="Count.", background=True, stream=True, **asked)
    id_ = next(e.response.id for e in stream if e.type == "response.created")
    stream.close()
    again = list(client.responses.retrieve(id_, stream=True, starting_after=1))
    assert again[0].sequence_number == 2
    assert again[-1].type in ("response.completed", "response.incomplete")
    assert again[-1].response == client.responses.retrieve(id_)


def finished(client: openai.OpenAI, id_: str) -> Response:
    deadline = time.monotonic() + 60
    while True:
        response = client.responses.retrieve(id_)
        if response.status not in ("queued", "in_progress"):
            return response
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_deleted_is_gone(client: openai.OpenAI) -> None:
    response = client.responses.create(model="tiny", input="Hi", max_output_tokens=4)
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="tiny", input="Hi", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"


def test_what_cannot_be_honoured_is_named(client: openai.OpenAI) -> None:
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]
    refused: list[tuple[Any, str]] = [
        ({"input": image}, "input[0].content[0].type"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        (
            {
                "input": "a",
                "text": {
                    "format": {
                        "type": "json_schema",
                        "name": "x",
                        "schema": {
                            "type": "object",
                            "properties": {"a": {"$ref": "#/$defs/nowhere"}},
                        },
                    }
                },
            },
            "text.format.schema.properties.a.$ref",
        ),
    ]
    for asked, param in refused:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", **asked)
        assert caught.value.param == param


async def test_the_asynchronous_client(keeper: Any) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{keeper.url}/v1", api_key="none", max_retries=0
    ) as client:
        whole = await client.responses.create(
            model="tiny", input="Hi", max_output_tokens=8, temperature=0
        )
        async with client.responses.stream(
            model="tiny", input="Hi", max_output_tokens=8, temperature=0
        ) as stream:
            events = [event async for event in stream]
        last = events[-1]
        assert last.type in ("response.completed", "response.incomplete")
        assert last.response.output_text == whole.output_text


def test_a_server_that_was_killed(
    start_server: Callable[..., Any], connect: Callable[[Any], openai.OpenAI], tmp_path: Path
) -> None:
    flags = ("--kv-tokens", "4096", "--data-dir", str(tmp_path))
    server = start_server(*flags)
    client = connect(server)
    done = client.responses.create(model="tiny", input="Hi", max_output_tokens=4)
    cut = client.responses.create(
        model="tiny", input="Go on.", background=True, extra_body={"ignore_eos": True}
    )
    server.stop(signal.SIGKILL)
    client = connect(start_server(*flags))
    assert client.responses.retrieve(done.id) == done
    failed = client.responses.retrieve(cut.id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert "restarted" in failed.error.message

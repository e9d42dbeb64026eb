"""litellm: its routes to any OpenAI server, to vLLM's kind, to Anthropic's and to Ollama's."""

from __future__ import annotations

from typing import Any

import pytest

litellm = pytest.importorskip("litellm")

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.filterwarnings("default")]

HELLO = [{"role": "user", "content": "Say hello."}]


def ask(base: str, model: str = "openai/tiny", **fields: Any) -> Any:
    fields = {"messages": HELLO, "max_tokens": 8, "temperature": 0, **fields}
    return litellm.completion(model=model, api_base=base, api_key="none", **fields)


@pytest.mark.client("litellm", "chat, whole and streamed")
def test_a_stream_says_what_the_whole_says(base: str) -> None:
    whole = ask(base).choices[0]
    pieces = list(ask(base, stream=True))
    assert "".join(p.choices[0].delta.content or "" for p in pieces) == whole.message.content
    assert pieces[-1].choices[0].finish_reason == whole.finish_reason == "length"


@pytest.mark.client("litellm", "usage")
def test_usage(base: str) -> None:
    usage = ask(base, model="hosted_vllm/tiny").usage
    assert usage.completion_tokens == 8
    assert usage.total_tokens == usage.prompt_tokens + 8


@pytest.mark.client("litellm", "structured output")
def test_a_model_as_response_format(base: str, city: Any) -> None:
    reply = ask(base, response_format=city, max_tokens=60)
    city.model_validate_json(reply.choices[0].message.content)


@pytest.mark.client("litellm", "tools")
def test_a_tool_that_must_be_called(base: str, city: Any) -> None:
    function = {"name": "store", "parameters": city.model_json_schema()}
    tool = {"type": "function", "function": function}
    reply = ask(base, tools=[tool], tool_choice="required", max_tokens=80)
    (call,) = reply.choices[0].message.tool_calls[:1]
    assert call.function.name == "store"
    city.model_validate_json(call.function.arguments)


@pytest.mark.client("litellm", "errors")
def test_a_wrong_field_is_a_bad_request(base: str) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        ask(base, temperature=7)

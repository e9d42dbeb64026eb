"""The official client, unmodified, against a real server."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.client("openai", "chat: whole, streamed, parsed, tools; completions; models"),
]

NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 12},
        "rating": {"type": "integer", "minimum": 1, "maximum": 5},
        "author": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["human", "machine"]},
                "verified": {"type": "boolean"},
            },
            "required": ["kind", "verified"],
            "additionalProperties": False,
        },
        "tags": {
            "type": "array",
            "items": {"enum": ["new", "old", "red", "blue"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["title", "rating", "author", "tags"],
    "additionalProperties": False,
}


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert client.models.retrieve("tiny").object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_chat_and_its_stream_are_the_same(client: openai.OpenAI) -> None:
    asked: Any = {
        "model": "tiny",
        "messages": user("Name three colours."),
        "temperature": 0,
        "max_tokens": 24,
    }
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content
    assert whole.usage is not None
    assert whole.usage.completion_tokens <= 24
    assert whole.usage.prompt_tokens_details is not None
    chunks = list(
        client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [f for f in finishes if f] == [whole.choices[0].finish_reason]


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(
        model="tiny", prompt=["The sky is", "Grass is"], max_tokens=5, temperature=0, logprobs=2
    )
    assert [c.index for c in reply.choices] == [0, 1]
    for choice in reply.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens) == choice.text


def test_response_format_with_a_nested_schema(client: openai.OpenAI) -> None:
    for seed in range(4):
        reply = client.chat.completions.create(
            model="tiny",
            messages=user("Review a book as JSON."),
            temperature=1.5,
            seed=seed,
            max_tokens=200,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "review", "strict": True, "schema": NESTED},
            },
        )
        assert reply.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(reply.choices[0].message.content or ""), NESTED)


class Weather(BaseModel):
    city: Literal["Oslo", "Lima"]
    celsius: int
    sunny: bool


def test_parse_with_a_pydantic_model(client: openai.OpenAI) -> None:
    reply = client.beta.chat.completions.parse(
        model="tiny",
        messages=user("The weather in Oslo?"),
        response_format=Weather,
        temperature=0,
        max_tokens=80,
    )
    weather = reply.choices[0].message.parsed
    assert isinstance(weather, Weather)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1},
        {"n": 0},
        {"top_p": 1.5},
        {"response_format": {"type": "poem"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"$ref": "#/$defs/nowhere"}},
            }
        },
        {"messages": []},
        {"stop": 5},
        {"logit_bias": {"999999999": 1}},
    ],
)
def test_bad_input_is_a_400_and_the_server_lives(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    good: dict[str, Any] = {"model": "tiny", "messages": user("hi"), "max_tokens": 2}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**(good | fields), stream=stream)
        assert caught.value.message
    assert client.chat.completions.create(**good).choices


def test_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=user("hi"))


def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match=r"\d{4,}.*8192"):
        client.chat.completions.create(model="tiny", messages=user("word " * 9000))


def test_seeded_answers_repeat_and_differ(client: openai.OpenAI) -> None:
    def ask(seed: int, n: int = 1) -> list[str]:
        reply = client.chat.completions.create(
            model="tiny",
            messages=user("Invent a name."),
            temperature=1.2,
            seed=seed,
            n=n,
            max_tokens=12,
        )
        return [c.message.content or "" for c in reply.choices]

    three = ask(7, n=3)
    assert len(set(three)) > 1
    assert ask(7, n=3) == three
    assert ask(7)[0] == three[0]
    assert len({ask(seed)[0] for seed in range(4)}) > 1


def test_logprobs_are_the_same_when_cached(client: openai.OpenAI) -> None:
    def ask() -> list[tuple[str, float]]:
        reply = client.chat.completions.create(
            model="tiny",
            messages=user("Count to five, please."),
            temperature=0,
            max_tokens=8,
            logprobs=True,
            top_logprobs=3,
        )
        entries = reply.choices[0].logprobs
        assert entries is not None
        assert entries.content is not None
        assert all(len(e.top_logprobs) == 3 for e in entries.content)
        return [(e.token, e.logprob) for e in entries.content]

    cold, warm = ask(), ask()
    assert [t for t, _ in cold] == [t for t, _ in warm]
    assert all(abs(a - b) < 1e-3 for (_, a), (_, b) in zip(cold, warm, strict=True))

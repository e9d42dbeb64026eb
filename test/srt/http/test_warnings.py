"""`warnings`: what was not known, and what was done otherwise than it was asked for."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.srt.http.body import BodyReader
from phloem.srt.http.protocol import ChatRequest

ROUTES = ("chat", "complete")


async def ask(api: Any, route: str, **body: object) -> Any:
    return await (api.chat if route == "chat" else api.complete)(**body)


def params(reply: Any) -> list[str]:
    assert reply.status == 200, reply.raw
    return [warning["param"] for warning in reply.json.get("warnings", [])]


@pytest.mark.parametrize("route", ROUTES)
async def test_fields_that_are_not_known_are_named(api: Any, route: str) -> None:
    reply = await ask(api, route, temprature=0.5, session_id="s", verbosity="high", nothing=None)
    assert params(reply) == ["temprature", "session_id", "verbosity"]
    assert "temprature" in reply.json["warnings"][0]["message"]
    inner = await ask(api, route, stream=True, stream_options={"include_usge": True})
    assert inner.events[-1]["warnings"][0]["param"] == "stream_options.include_usge"


@pytest.mark.parametrize("route", ROUTES)
async def test_nothing_to_say_says_nothing(api: Any, route: str) -> None:
    """Fields that are known, and ask for nothing that changes an answer, are no reason to warn."""
    quiet: dict[str, object] = {
        "user": "u",
        "metadata": {"run": "7", "json_schema": {}},
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "service_tier": "auto",
        "store": False,
        "prediction": None,
        "suffix": None,
        "lora_path": None,
        "spaces_between_special_tokens": False,
        "max_tokens": 500,
        "whatever": None,
    }
    reply = await ask(api, route, **quiet)
    assert reply.status == 200, reply.raw
    assert "warnings" not in reply.json
    events = (await ask(api, route, **quiet, stream=True)).events
    assert not any("warnings" in event for event in events)


@pytest.mark.parametrize("route", ROUTES)
async def test_hints_that_are_not_followed(api: Any, route: str) -> None:
    prediction = {"type": "content", "content": "x"}
    reply = await ask(api, route, store=True, service_tier="flex", prediction=prediction)
    assert params(reply) == ["store", "service_tier", "prediction"]


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("route", ROUTES)
async def test_a_stream_says_it_once_in_its_last_frame(api: Any, route: str, usage: bool) -> None:
    options = {"include_usage": usage}
    reply = await ask(api, route, stream=True, n=3, stream_options=options, unheard_of=1)
    told = [event.get("warnings") for event in reply.events]
    assert [one["param"] for one in told[-1]] == ["unheard_of"]
    assert not any(told[:-1])


@pytest.mark.parametrize(
    ("route", "field", "prompt"),
    [
        ("chat", "max_tokens", 8),
        ("chat", "max_completion_tokens", 8),
        ("complete", "max_tokens", 2),
    ],
)
async def test_more_tokens_than_the_context_has(
    api: Any, route: str, field: str, prompt: int
) -> None:
    room = 512 - prompt
    assert params(await ask(api, route, **{field: room})) == []
    reply = await ask(api, route, **{field: room + 1})
    assert params(reply) == [field]
    assert str(room) in reply.json["warnings"][0]["message"]
    events = (await ask(api, route, **{field: 10**9}, stream=True)).events
    assert [one["param"] for one in events[-1]["warnings"]] == [field]


async def test_of_two_limits_one_counts(api: Any, engine: Any) -> None:
    assert params(await api.chat(max_tokens=3, max_completion_tokens=2)) == ["max_tokens"]
    assert params(await api.chat(max_tokens=2, max_completion_tokens=2)) == []
    assert {request.sampling.max_tokens for request in engine.requests} == {2}


async def test_a_native_reply_has_them_in_its_meta_info(api: Any) -> None:
    sampling = {"max_new_tokens": 10_000, "ignore_eos": True, "regex": "Hello world."}
    reply = await api.generate(text=["Hi", "Ho"], sampling_params=[sampling, {}])
    told = [one["meta_info"].get("warnings", []) for one in reply.json]
    assert [[w["param"] for w in one] for one in told] == [
        ["sampling_params[0].ignore_eos", "sampling_params[0].max_new_tokens"],
        [],
    ]
    events = (await api.generate(text="Hi", sampling_params=sampling, stream=True)).events
    assert ["warnings" in e["meta_info"] for e in events] == [False, False, False, True]


async def test_a_constraint_ends_the_answer_whatever_ignore_eos_says(api: Any) -> None:
    assert params(await api.chat(ignore_eos=True)) == []
    assert params(await api.chat(ignore_eos=True, regex="[A-z .]*")) == ["ignore_eos"]


def test_a_reader_tells_what_it_does_not_know() -> None:
    reader = BodyReader(ChatRequest, unsupported={"audio": (None,)})
    body = (
        b'{"messages": [{"role": "user", "content": "a", "x": 1}], "audio": null, "b": 0,'
        b' "stream_options": {"c": 1, "d": null, "include_usage": true}}'
    )
    _, unknown = reader.decode_noting(body)
    assert unknown == ["b", "stream_options.c"]

"""`/v1/completions`: prompts, echo, logprobs, choices."""

from __future__ import annotations

import math
from collections.abc import Sized
from typing import Any

import pytest
from openai import AsyncOpenAI

from phloem.srt.generation import Logprob
from phloem.srt.http.logprobs import CompletionLogprobsBuilder, chat_logprobs, join


async def test_whole_and_streamed_replies(api: Any) -> None:
    body = (await api.complete()).json
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "Hello world.",
            "logprobs": None,
            "finish_reason": "stop",
            "matched_stop": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == 2
    events = (await api.complete(stream=True, stream_options={"include_usage": True})).events
    assert "".join(e["choices"][0]["text"] for e in events[:-1]) == "Hello world."
    assert [e["choices"][0]["finish_reason"] for e in events[:-1]] == [None] * 3 + ["stop"]
    assert events[-1]["usage"] == body["usage"]
    assert {e["object"] for e in events} == {"text_completion"}


async def test_sixteen_tokens_by_default(api: Any, engine: Any) -> None:
    await api.complete()
    await api.complete(max_tokens=3)
    assert [r.sampling.max_tokens for r in engine.requests] == [16, 3]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("Hi", ["Hi"]),
        (["Hi", "Yo"], ["Hi", "Yo"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        (["a"], ["a"]),
    ],
)
async def test_prompts_in_every_form(
    api: Any, engine: Any, prompt: object, prompts: list[Sized]
) -> None:
    reply = await api.complete(prompt=prompt, n=2)
    assert reply.status == 200, reply.raw
    assert [r.prompt for r in engine.requests] == [p for p in prompts for _ in range(2)]
    assert [c["index"] for c in reply.json["choices"]] == list(range(2 * len(prompts)))
    assert reply.json["usage"]["prompt_tokens"] == sum(map(len, prompts))


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([""], "prompt[0]"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([1, "a"], "prompt"),
        ([100, 999999999], "prompt[1]"),
        ([100, -5], "prompt[1]"),
        ([[1], [1000]], "prompt[1][0]"),
        ([1.5], "prompt[0]"),
        (7, "prompt"),
        (None, "prompt"),
        (["x"] * 1025, "prompt"),
    ],
)
async def test_prompts_that_are_none(api: Any, engine: Any, prompt: object, param: str) -> None:
    reply = await api.complete(prompt=prompt)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert not engine.requests


async def test_echo_gives_the_prompt_back(api: Any, engine: Any) -> None:
    assert (await api.complete(echo=True)).json["choices"][0]["text"] == "HiHello world."
    ids = (await api.complete(prompt=[72, 105], echo=True)).json["choices"][0]["text"]
    assert ids == "HiHello world."
    events = (await api.complete(echo=True, stream=True)).events
    assert [e["choices"][0]["text"] for e in events] == ["Hi", "Hel", "lo", " wor", "ld."]


@pytest.mark.parametrize("stream", [False, True])
async def test_scoring_a_prompt(api: Any, engine: Any, stream: bool) -> None:
    """echo with logprobs and no new token: the classic way to score a text."""
    reply = await api.complete(prompt="abc", echo=True, logprobs=1, max_tokens=0, stream=stream)
    assert reply.status == 200, reply.raw
    choice = (reply.events[-1] if stream else reply.json)["choices"][0]
    assert engine.requests[0].prompt_logprobs_from == 0
    assert engine.requests[0].prompt == [97, 98, 99]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"b": -1.0}, {"c": -2.0}],
        "text_offset": [0, 1, 2],
    }


async def test_echo_logprobs_go_on_into_the_answer(api: Any) -> None:
    whole = (await api.complete(prompt="ab", echo=True, logprobs=2)).json["choices"][0]
    assert whole["text"] == "abHello world."
    assert whole["logprobs"]["text_offset"] == [0, 1, 2, 5, 7, 11]
    assert whole["logprobs"]["token_logprobs"][:3] == [None, -1.0, -0.5]
    events = (await api.complete(prompt="ab", echo=True, logprobs=2, stream=True)).events
    for key, values in whole["logprobs"].items():
        assert [v for e in events for v in e["choices"][0]["logprobs"][key]] == values


async def test_logprobs_counts(api: Any) -> None:
    zero = (await api.complete(logprobs=0)).json["choices"][0]["logprobs"]
    assert (zero["tokens"], zero["top_logprobs"]) == (["Hel", "lo", " wor", "ld."], None)
    two = (await api.complete(logprobs=2)).json["choices"][0]["logprobs"]
    assert two["top_logprobs"][0] == {"Hel": -0.5, "Hel1": -1.5}
    for bad in (-1, 100_000, "2", 1.5):
        assert (await api.complete(logprobs=bad)).status == 400


async def test_zero_tokens_need_echo(api: Any) -> None:
    assert (await api.complete(max_tokens=0)).status == 400
    assert (await api.complete(max_tokens=0, echo=True)).status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt": ["a"] * 1000, "best_of": 128}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"prompt": ["a"] * 1000, "n": 128}, "n"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"prompt_embeds": "x"}, "prompt_embeds"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"stream_interval": 4}, "stream_interval"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    api: Any, body: dict[str, object], param: str
) -> None:
    reply = await api.complete(**body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param)
    assert (await api.complete(suffix="", best_of=2, n=2, use_beam_search=False)).status == 200


async def test_the_official_client(openai_client: AsyncOpenAI) -> None:
    reply = await openai_client.completions.create(
        model="tiny", prompt=["a", "b"], n=2, logprobs=1, echo=True
    )
    assert [c.text for c in reply.choices] == ["aHello world."] * 2 + ["bHello world."] * 2
    assert reply.choices[0].logprobs is not None
    stream = await openai_client.completions.create(model="tiny", prompt="a", stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "Hello world."


def test_logprobs_are_json_numbers_and_names_are_distinct() -> None:
    split = [Logprob(1, "\ufffd", b"\xc3", -math.inf), Logprob(2, "\ufffd", b"\xa9", -1.0)]
    built = CompletionLogprobsBuilder(1).build(split)
    assert built.tokens == ["bytes:\\xc3", "bytes:\\xa9"]
    assert built.token_logprobs == [-9999.0, -1.0]
    assert built.text_offset == [0, 0]
    chat = chat_logprobs(split)
    assert chat is not None
    assert [e.bytes for e in chat.content] == [[0xC3], [0xA9]]
    assert join(None, None) is None

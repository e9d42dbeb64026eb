"""`/v1/chat/completions`: what reaches the engine, and the shapes of whole and streamed replies."""

from __future__ import annotations

from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError

from phloem.srt.errors import InvalidRequest
from phloem.srt.messages import FinishReason


async def test_a_whole_reply_has_the_openai_shape(api: Any, engine: Any) -> None:
    reply = await api.chat(model="tiny")
    assert reply.status == 200
    body = reply.json
    assert body.pop("created") > 1_700_000_000
    rid = body.pop("id")
    assert rid.startswith("chatcmpl-")
    assert reply.headers["X-Request-Id"] == rid == engine.requests[0].rid
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello world.", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "matched_stop": None,
            }
        ],
        "usage": {
            "prompt_tokens": 8,
            "completion_tokens": 4,
            "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "forced_tokens": 0,
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        },
    }


async def test_a_stream_opens_with_the_role_and_closes_with_the_reason(api: Any) -> None:
    reply = await api.chat(stream=True)
    assert reply.status == 200
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    events = reply.events
    deltas = [event["choices"][0]["delta"] for event in events]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [d["content"] for d in deltas[1:-1]] == ["Hel", "lo", " wor", "ld."]
    assert deltas[-1] == {}
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons == [None] * 5 + ["stop"]
    assert {event["id"] for event in events} == {reply.headers["X-Request-Id"]}
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert not any("usage" in event for event in events)


async def test_sampling_fields_reach_the_engine(api: Any, engine: Any) -> None:
    reply = await api.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        presence_penalty=1,
        frequency_penalty=-1,
        repetition_penalty=1.1,
        logit_bias={"3": -100, "4": 2.5},
        seed=-5,
        stop=["a", "b"],
        max_completion_tokens=7,
        min_tokens=2,
        stop_token_ids=[9],
        ignore_eos=True,
        skip_special_tokens=False,
        include_stop_str_in_output=True,
        priority=3,
        cache_salt="tenant",
        rid="mine",
        timeout=2.5,
        logprobs=True,
        top_logprobs=2,
        logprobs_mode="processed",
        user="u",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
    )
    assert reply.status == 200, reply.raw
    request = engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (
        0.5,
        0.9,
        40,
        0.1,
    )
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (1, -1)
    assert sampling.repetition_penalty == 1.1
    assert sampling.logit_bias == {3: -100, 4: 2.5}
    assert (sampling.seed, sampling.max_tokens, sampling.min_tokens) == (-5, 7, 2)
    assert (sampling.stop_token_ids, sampling.ignore_eos) == ((9,), True)
    assert (sampling.logprobs, sampling.logprobs_mode) == (2, "processed")
    assert (request.stop, request.include_stop) == (("a", "b"), True)
    assert (request.skip_special_tokens, request.priority) == (False, 3)
    assert (request.rid, request.deadline_s) == ("mine", 2.5)
    assert "tenant" in request.namespace


async def test_null_is_the_same_as_absent(api: Any, engine: Any) -> None:
    names = [
        "model",
        "stream",
        "stream_options",
        "n",
        "best_of",
        "temperature",
        "top_p",
        "presence_penalty",
        "seed",
        "stop",
        "top_k",
        "frequency_penalty",
        "logit_bias",
        "max_tokens",
        "max_completion_tokens",
        "logprobs",
        "top_logprobs",
        "tools",
        "tool_choice",
        "response_format",
        "regex",
        "ebnf",
        "json_schema",
        "grammar",
        "guided_json",
        "structured_outputs",
        "chat_template",
        "suffix",
        "functions",
        "timeout",
        "priority",
    ]
    assert (await api.chat(**dict.fromkeys(names))).status == 200
    assert (await api.chat()).status == 200
    first, second = engine.requests
    assert first.sampling == second.sampling
    assert first.constraint is second.constraint is None


async def test_limits_beyond_the_context_do_not_travel(api: Any, engine: Any) -> None:
    assert (await api.chat(max_tokens=10_000_000_000_000_000_000, top_k=9_999_999)).status == 200
    assert engine.requests[0].sampling.max_tokens == engine.card.context_length
    assert engine.requests[0].sampling.top_k == 0
    huge = 2**64  # more than a message between processes has room for
    assert (await api.chat(min_tokens=huge)).status == 200
    limits = {"max_new_tokens": huge, "min_new_tokens": huge}
    assert (await api.generate(text="a", sampling_params=limits)).status == 200
    for request in engine.requests[1:]:
        assert request.sampling.min_tokens == engine.card.context_length


async def test_message_contents_and_roles(api: Any, engine: Any) -> None:
    reply = await api.chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "add", "arguments": '{"a": 2}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "5"},
            {"role": "assistant", "content": "Five.", "tool_calls": []},
            {"role": "user", "content": "", "name": "Ann"},
        ]
    )
    assert reply.status == 200, reply.raw
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
    assert engine.rendered[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
        {"role": "assistant", "content": "Five."},
        {"role": "user", "content": "", "name": "Ann"},
    ]
    assert engine.rendered[0]["add_generation_prompt"] is True


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({"role": "user", "content": "hi"}, "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "bot", "content": "x"}], "messages[0].role"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}}
                    ],
                }
            ],
            "messages[0].content[0].type",
        ),
        (
            [
                {
                    "role": "assistant",
                    "tool_calls": [{"function": {"name": "f", "arguments": "{broken"}}],
                }
            ],
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_messages_name_the_place(
    api: Any, engine: Any, messages: object, param: str, stream: bool
) -> None:
    body = {"stream": stream} if messages is None else {"stream": stream, "messages": messages}
    reply = await api.call("POST", "/v1/chat/completions", body)
    assert reply.status == 400
    assert reply.json["error"]["param"] == param
    assert not engine.requests


async def test_going_on_with_the_last_message(api: Any, engine: Any) -> None:
    messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2,"}]
    for extra in ({}, {"add_generation_prompt": False}):
        reply = await api.chat(messages=messages, continue_final_message=True, **extra)
        assert reply.status == 200, reply.raw
        assert engine.rendered[-1]["continue_final_message"] is True
        assert engine.rendered[-1]["add_generation_prompt"] is False
    both = await api.chat(
        messages=messages, continue_final_message=True, add_generation_prompt=True
    )
    assert both.status == 400
    assert (await api.chat(continue_final_message=True)).status == 400


async def test_templates_do_not_come_from_requests(api: Any, engine: Any) -> None:
    for body in ({"chat_template": "{{ x }}"}, {"chat_template_kwargs": {"chat_template": "x"}}):
        reply = await api.chat(**body)
        assert reply.status == 400
        assert "chat_template" in reply.json["error"]["param"]
    assert (await api.chat(chat_template_kwargs={"enable_thinking": False})).status == 200
    assert engine.rendered[-1]["template_kwargs"] == {"enable_thinking": False}


async def test_a_template_that_refuses_is_a_400(api: Any, engine: Any) -> None:
    engine.render_error = InvalidRequest("Roles must alternate.", param="messages")
    reply = await api.chat(stream=True)
    assert (reply.status, reply.json["error"]["message"]) == (400, "Roles must alternate.")


async def test_n_choices_count_the_prompt_once(api: Any, engine: Any, script: Any) -> None:
    cached = {"0": 0, "1": 7, "2": 7}
    engine.script = lambda r: script([f"c{r.rid[-1]}", "."], cached_tokens=cached[r.rid[-1]])
    reply = await api.chat(n=3, seed=2**63 - 2)
    choices = reply.json["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2]
    assert [c["message"]["content"] for c in choices] == ["c0.", "c1.", "c2."]
    assert reply.json["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 6,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {
            "forced_tokens": 0,
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }
    assert [r.sampling.seed for r in engine.requests] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert len({r.rid for r in engine.requests}) == 3


async def test_n_choices_in_one_stream(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script([f"c{r.rid[-1]}", "."])
    events = (await api.chat(n=2, stream=True)).events
    for index in (0, 1):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in mine) == f"c{index}."
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["stop"]
        assert mine[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("finish", "matched", "reason"),
    [
        (FinishReason.STOP, "\n", "stop"),
        (FinishReason.STOP, 2, "stop"),
        (FinishReason.LENGTH, None, "length"),
        (FinishReason.ABORT, None, "abort"),
    ],
)
async def test_finish_reasons(
    api: Any, engine: Any, script: Any, finish: FinishReason, matched: object, reason: str
) -> None:
    engine.script = lambda r: script(["x"], finish, matched)
    whole = (await api.chat()).json["choices"][0]
    last = (await api.chat(stream=True)).events[-1]["choices"][0]
    for choice in (whole, last):
        assert choice["finish_reason"] == reason
        assert choice.get("matched_stop") == matched


async def test_usage_in_streams(api: Any) -> None:
    for options in ({}, {"include_usage": False}, None):
        events = (await api.chat(stream=True, stream_options=options)).events
        assert not any("usage" in e for e in events)
    whole = (await api.chat()).json["usage"]
    events = (await api.chat(stream=True, stream_options={"include_usage": True})).events
    assert [i for i, e in enumerate(events) if "usage" in e] == [len(events) - 1]
    assert (events[-1]["choices"], events[-1]["usage"]) == ([], whole)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [
        e["usage"]["completion_tokens"]
        for e in (await api.chat(stream=True, stream_options=options)).events
    ]
    assert counts == [0, 1, 2, 3, 4, 4, 4]
    refused = await api.chat(stream_options={"include_usage": True})
    assert (refused.status, refused.json["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("top", [None, 0, 2])
async def test_logprobs_whole_and_streamed(api: Any, top: int | None) -> None:
    whole = (await api.chat(logprobs=True, top_logprobs=top)).json["choices"][0]["logprobs"]
    events = (await api.chat(logprobs=True, top_logprobs=top, stream=True)).events
    joined = [
        entry
        for e in events
        if e["choices"][0]["logprobs"]
        for entry in e["choices"][0]["logprobs"]["content"]
    ]
    assert joined == whole["content"]
    assert "".join(e["token"] for e in joined) == "Hello world."
    assert b"".join(bytes(e["bytes"]) for e in joined) == b"Hello world."
    assert all(len(e["top_logprobs"]) == (top or 0) for e in joined)


async def test_tokens_whose_text_is_held_back_keep_their_logprobs(
    api: Any, engine: Any, script: Any
) -> None:
    engine.script = lambda r: script(["a", "", "bc"])
    events = (await api.chat(logprobs=True, stream=True)).events
    with_logprobs = [e["choices"][0] for e in events if e["choices"][0]["logprobs"]]
    assert [c["delta"]["content"] for c in with_logprobs] == ["a", "", "bc"]


@pytest.mark.parametrize(
    "body",
    [
        {"logprobs": True, "top_logprobs": 21},
        {"logprobs": True, "top_logprobs": -1},
        {"top_logprobs": 0},
        {"logprobs": False, "top_logprobs": 3},
    ],
)
async def test_impossible_logprobs(api: Any, body: dict[str, object]) -> None:
    assert (await api.chat(**body)).status == 400
    assert (await api.chat(stream=True, **body)).status == 400


async def test_the_official_client(openai_client: AsyncOpenAI) -> None:
    reply = await openai_client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], n=2, logprobs=True
    )
    assert [c.message.content for c in reply.choices] == ["Hello world."] * 2
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 8
    stream = await openai_client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "Hello world."
    assert chunks[-1].usage is not None
    with pytest.raises(NotFoundError) as missing:
        await openai_client.chat.completions.create(
            model="gpt-4o", messages=[{"role": "user", "content": "Hi"}]
        )
    assert missing.value.code == "model_not_found"
    with pytest.raises(BadRequestError) as bad:
        await openai_client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], temperature=3
        )
    assert bad.value.param == "temperature"

"""`/generate`: SGLang's shapes."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.constrained.spec import Ebnf, JsonSchema, Regex
from phloem.srt.messages import FinishReason


async def test_a_whole_reply(api: Any, engine: Any) -> None:
    reply = await api.generate(text="Hi", rid="mine")
    assert reply.status == 200, reply.raw
    body = reply.json
    meta = body["meta_info"]
    assert (body["text"], body["output_ids"]) == ("Hello world.", [0, 1, 2, 3])
    assert (meta["id"], reply.headers["X-Request-Id"]) == ("mine", "mine")
    assert meta["finish_reason"] == {"type": "stop", "matched": None}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (2, 4, 0)
    assert meta["e2e_latency"] >= 0
    assert "output_token_logprobs" not in meta
    assert engine.requests[0].sampling.max_tokens == 128


async def test_nulls_are_defaults(api: Any, engine: Any) -> None:
    names = [
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "max_new_tokens",
        "min_new_tokens",
        "n",
        "stop",
        "stop_token_ids",
        "stop_regex",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "frequency_penalty",
        "presence_penalty",
        "ignore_eos",
        "regex",
        "json_schema",
    ]
    assert (await api.generate(text="Hi", sampling_params=dict.fromkeys(names))).status == 200
    assert (await api.generate(text="Hi", sampling_params=None, image_data=None)).status == 200
    assert (await api.generate(text="Hi")).status == 200
    assert len({r.sampling.__repr__() for r in engine.requests}) == 1


async def test_streams_repeat_the_whole_text(api: Any) -> None:
    events = (await api.generate(text="Hi", stream=True, return_logprob=True)).events
    assert [e["text"] for e in events] == ["Hel", "Hello", "Hello wor", "Hello world."]
    assert [len(e["output_ids"]) for e in events] == [1, 2, 3, 4]
    assert [len(e["meta_info"]["output_token_logprobs"]) for e in events] == [1, 2, 3, 4]
    assert [e["meta_info"]["finish_reason"] is None for e in events] == [True] * 3 + [False]
    assert not any("index" in e for e in events)


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"text": ["a", "b"]}, 2),
        ({"input_ids": [[1, 2], [3]]}, 2),
        ({"input_ids": [[1, 2]]}, 1),
        ({"text": ["a"], "sampling_params": {"n": 3}}, 3),
        ({"text": "a", "sampling_params": {"n": 3}}, 3),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, 3),
    ],
)
async def test_lists_give_lists(api: Any, body: dict[str, object], count: int) -> None:
    reply = await api.generate(**body)
    assert reply.status == 200, reply.raw
    assert len(reply.json) == count
    assert len({one["meta_info"]["id"] for one in reply.json}) == count
    events = (await api.generate(**body, stream=True)).events
    assert {e["index"] for e in events} == set(range(count))
    last = {e["index"]: e["text"] for e in events}
    assert set(last.values()) == {"Hello world."}


async def test_ids_of_a_batch(api: Any) -> None:
    prefix = (await api.generate(text=["a", "b"], rid="job")).json
    assert [one["meta_info"]["id"] for one in prefix] == ["job-0", "job-1"]
    own = (await api.generate(text=["a", "b"], rid=["x", "y"])).json
    assert [one["meta_info"]["id"] for one in own] == ["x", "y"]
    assert (await api.generate(text=["a", "b"], rid=["x"])).status == 400
    assert (await api.generate(text=["a", "b"], rid=["x", "x"])).status == 400


async def test_input_logprobs(api: Any, engine: Any) -> None:
    whole = await api.generate(
        text="abc",
        sampling_params={"max_new_tokens": 0, "temperature": 0},
        return_logprob=True,
        return_text_in_logprobs=True,
    )
    meta = whole.json["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-1.0, 98, "b"], [-2.0, 99, "c"]]
    assert (meta["output_token_logprobs"], meta["output_token_logprobs_length"]) == ([], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    part = await api.generate(
        text="abc", sampling_params={"max_new_tokens": 0}, return_logprob=True, logprob_start_len=1
    )
    assert part.json["meta_info"]["input_token_logprobs"] == [[-1.0, 98, None], [-2.0, 99, None]]
    assert [r.prompt_logprobs_from for r in engine.requests] == [0, 1]


async def test_output_logprobs(api: Any, engine: Any) -> None:
    reply = await api.generate(text="abc", return_logprob=True, top_logprobs_num=2)
    meta = reply.json["meta_info"]
    assert meta["output_token_logprobs"][0] == [-0.5, 0, None]
    assert meta["output_top_logprobs"][0] == [[-0.5, 0, None], [-1.5, 1, None]]
    assert meta["input_token_logprobs"] == []
    assert engine.requests[0].prompt_logprobs_from is None


async def test_sampling_fields_and_constraints(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["1", "2"])
    sampling = {
        "max_new_tokens": 5,
        "min_new_tokens": 1,
        "temperature": 1e-9,
        "top_k": -1,
        "sampling_seed": 3,
        "stop": "x",
        "no_stop_trim": True,
        "n": 2,
        "json_schema": '{"type": "integer"}',
        "regex": "",
        "ebnf": None,
        "logit_bias": {"5": 1},
    }
    reply = await api.generate(text="a", sampling_params=sampling, cache_salt="s", priority=1)
    assert reply.status == 200, reply.raw
    request = engine.requests[1]
    assert request.sampling.temperature == 0.0
    assert (request.sampling.seed, request.sampling.max_tokens) == (4, 5)
    assert (request.stop, request.include_stop) == (("x",), True)
    assert request.constraint == JsonSchema(schema='{"type":"integer"}')
    assert request.namespace
    for field, constraint in (
        ("regex", Regex(pattern="a+")),
        ("ebnf", Ebnf(grammar="a+")),
    ):
        assert (await api.generate(text="a", sampling_params={field: "a+"})).status == 200
        assert engine.requests[-1].constraint == constraint


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": ""}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [1, [2]]}, "input_ids"),
        ({"input_ids": [1, 1000]}, "input_ids[1]"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"text": "a", "smapling_params": {}}, "smapling_params"),
        ({"text": "a", "image_data": "http://x"}, "image_data"),
        ({"text": "a", "return_hidden_states": True}, "return_hidden_states"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "session_id": "s"}, "session_id"),
        ({"text": "a", "sampling_params": {"stop_regex": "("}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"beam_width": 2}}, "sampling_params.beam_width"),
        (
            {"text": "a", "sampling_params": {"stream_interval": 0}},
            "sampling_params.stream_interval",
        ),
        (
            {"text": "a", "return_logprob": True, "token_ids_logprob": [[1], [2]]},
            "token_ids_logprob",
        ),
        (
            {"text": "a", "return_logprob": True, "token_ids_logprob": [1000]},
            "token_ids_logprob[0]",
        ),
        ({"text": "a", "bootstrap_room": 3}, "bootstrap_room"),
        ({"text": "a", "session_params": {"id": "s"}}, "session_params"),
        ({"text": "a", "require_reasoning": True}, "require_reasoning"),
        ({"text": "a", "sampling_params": {"watermark": True}}, "sampling_params.watermark"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        (
            {"text": "a", "sampling_params": {"max_new_tokens": -1}},
            "sampling_params.max_new_tokens",
        ),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params.ebnf"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "rid": "with space"}, "rid"),
    ],
)
async def test_refusals_name_the_field(
    api: Any, engine: Any, body: dict[str, object], param: str
) -> None:
    reply = await api.generate(**body)
    assert (reply.status, reply.json["error"]["param"]) == (400, param), reply.raw
    assert not engine.requests


async def test_ends(api: Any, engine: Any, script: Any) -> None:
    for finish, matched, expected in (
        (FinishReason.STOP, "x", {"type": "stop", "matched": "x"}),
        (FinishReason.LENGTH, None, {"type": "length", "length": 1}),
        (FinishReason.ABORT, None, {"type": "abort", "message": "The request was aborted."}),
    ):
        engine.script = lambda r, f=finish, m=matched: script(["a"], f, m)
        assert (await api.generate(text="a")).json["meta_info"]["finish_reason"] == expected


async def test_put_is_post(api: Any) -> None:
    assert (await api.call("PUT", "/generate", {"text": "a"})).status == 200


async def test_token_ids_of_the_prompt(api: Any) -> None:
    reply = await api.generate(text=["ab", "c"], return_prompt_token_ids=True)
    assert [one["prompt_token_ids"] for one in reply.json] == [[97, 98], [99]]
    assert "prompt_token_ids" not in (await api.generate(text="ab")).json


async def test_logprobs_of_chosen_tokens(api: Any, engine: Any) -> None:
    common = {"return_logprob": True, "logprob_start_len": 0, "text": ["ab", "c"]}
    reply = await api.generate(**common, token_ids_logprob=[65])
    metas = [one["meta_info"] for one in reply.json]
    assert [len(meta["output_token_ids_logprobs"]) for meta in metas] == [4, 4]
    assert metas[0]["output_token_ids_logprobs"][0] == [[-1.0, 65, None]]
    assert metas[0]["input_token_ids_logprobs"] == [None, []]
    await api.generate(**common, token_ids_logprob=[[65], [66, 67]])
    chosen = [request.sampling.logprob_token_ids for request in engine.requests]
    assert chosen == [(65,), (65,), (65,), (66, 67)]
    plain = await api.generate(text="a", return_logprob=True)
    assert "output_token_ids_logprobs" not in plain.json["meta_info"]


async def test_a_stream_of_what_is_new(api: Any) -> None:
    """As SGLang's server option of that name: the pieces join to the whole."""
    body = {"text": "a", "return_logprob": True}
    whole = (await api.generate(**body)).json
    events = (await api.generate(**body, stream=True, incremental_streaming_output=True)).events
    assert [e["text"] for e in events] == ["Hel", "lo", " wor", "ld."]
    assert [i for e in events for i in e["output_ids"]] == whole["output_ids"]
    logprobs = [one for e in events for one in e["meta_info"]["output_token_logprobs"]]
    assert logprobs == whole["meta_info"]["output_token_logprobs"]
    assert [e["meta_info"]["output_token_logprobs_length"] for e in events] == [1, 2, 3, 4]


async def test_stream_intervals_of_each_prompt(api: Any) -> None:
    sampling = [{"stream_interval": 3}, {}]
    events = (await api.generate(text=["a", "b"], sampling_params=sampling, stream=True)).events
    texts = [[e["text"] for e in events if e["index"] == index] for index in range(2)]
    assert texts == [["Hel", "Hello world."], ["Hel", "Hello", "Hello wor", "Hello world."]]

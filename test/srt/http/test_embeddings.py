"""`/v1/embeddings` and `/encode` over a scripted engine, and what it is asked."""

from __future__ import annotations

import asyncio
import base64
import math
import struct
from typing import Any

import pytest
from msgspec.structs import replace

from phloem.srt.errors import QueueFull
from phloem.srt.generation import ModelCard
from phloem.srt.http.gathering import GROUP
from phloem.srt.messages import FinishReason, Pooling

# The scripted engine's embedding of "Hi" (72 is "H"), of Euclidean length 1.
RAW = [3.0, 2.0, 72.0, 0.0]
LENGTH = math.sqrt(3.0**2 + 2.0**2 + 72.0**2)
UNIT = [one / LENGTH for one in RAW]


async def embed(api: Any, **body: object) -> Any:
    return await api.call("POST", "/v1/embeddings", body)


async def encode(api: Any, **body: object) -> Any:
    return await api.call("POST", "/encode", body)


async def test_a_text(api: Any, engine: Any) -> None:
    reply = await embed(api, input="Hi", model="tiny", user="ada")
    assert reply.status == 200
    body = reply.json
    (data,) = body["data"]
    assert data.pop("embedding") == pytest.approx(UNIT, rel=1e-6)
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0}],
        "model": "tiny",
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
    (request,) = engine.requests
    assert request.embed is Pooling.MEAN
    assert request.sampling.max_tokens == 0
    assert request.prompt == [72, 105]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        (["Hi", "you"], [[72, 105], [121, 111, 117]]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_every_form_of_input(
    api: Any, engine: Any, given: object, prompts: list[list[int]]
) -> None:
    reply = await embed(api, input=given)
    assert [request.prompt for request in engine.requests] == prompts
    assert [one["index"] for one in reply.json["data"]] == list(range(len(prompts)))
    assert reply.json["usage"]["prompt_tokens"] == sum(map(len, prompts))


async def test_base64_is_the_same_vector(api: Any) -> None:
    plain = await embed(api, input="Hi", encoding_format="float")
    packed = await embed(api, input="Hi", encoding_format="base64")
    data = base64.b64decode(packed.json["data"][0]["embedding"])
    assert list(struct.unpack("<4f", data)) == plain.json["data"][0]["embedding"]


async def test_pooling_and_length_may_be_chosen(api: Any, engine: Any) -> None:
    reply = await embed(api, input="Hi", pooling="last", normalize=False)
    assert reply.json["data"][0]["embedding"] == [-3.0, 2.0, 72.0, 0.0]
    assert engine.requests[0].embed is Pooling.LAST


async def test_how_it_is_run(api: Any, engine: Any) -> None:
    await api.call(
        "POST",
        "/v1/embeddings",
        {"input": ["a", "b"], "rid": "mine", "priority": 3, "timeout": 9, "cache_salt": "s"},
        headers={"X-Program-Id": "index"},
    )
    for i, request in enumerate(engine.requests):
        assert request.rid == f"mine-{i}"
        assert (request.priority, request.deadline_s) == (3, 9)
        assert (request.namespace, request.program) == ("1:s", "index")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", [1]]}, "input"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [[1], [1, 1000]]}, "input[1][1]"),
        ({"input": ["a", "b" * 513]}, "input[1]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"input": "a", "messages": [{}]}, "messages"),
    ],
)
async def test_refusals_name_the_field(
    api: Any, engine: Any, fields: dict[str, object], param: str
) -> None:
    reply = await embed(api, **fields)
    assert reply.status == 400, reply.raw
    assert reply.json["error"]["param"] == param
    assert not engine.requests


async def test_the_models_own_dimensions_and_another_model(api: Any) -> None:
    assert (await embed(api, input="a", dimensions=4)).status == 200
    assert (await embed(api, input="a", model="other")).status == 404


async def test_a_model_that_was_made_for_it(
    api: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says how, and which token it wants behind a text; ids are taken as they are."""
    card: ModelCard = replace(engine.card, pooling=Pooling.LAST, end_id=7)
    monkeypatch.setattr(type(engine), "card", card)
    await embed(api, input=["Hi", "you"])
    await embed(api, input=[[1, 2]])
    assert [r.prompt for r in engine.requests] == [[72, 105, 7], [121, 111, 117, 7], [1, 2]]
    assert {r.embed for r in engine.requests} == {Pooling.LAST}


async def test_many_texts_leave_room_in_the_queue(api: Any, engine: Any) -> None:
    reply = await embed(api, input=[f"text {i}" for i in range(2 * GROUP + 1)])
    vectors = [one["embedding"] for one in reply.json["data"]]
    assert [v[1] > 0 for v in vectors] == [True] * (2 * GROUP + 1)
    assert len(engine.requests) == 2 * GROUP + 1


async def test_an_error_of_one_is_the_answer(api: Any, engine: Any, script: Any) -> None:
    full = QueueFull("full", retry_after=2)
    engine.script = lambda request: script(refusal=full if request.prompt == [98] else None)
    reply = await embed(api, input=["a", "b"])
    assert reply.status == 429
    assert reply.headers["Retry-After"] == "2"


async def test_it_can_be_aborted(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(finish=FinishReason.ABORT, pieces=())
    reply = await embed(api, input="a")
    assert (reply.status, reply.json["error"]["code"]) == (409, "aborted")


async def test_a_client_that_leaves_ends_its_requests(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    engine.script = lambda request: script(hold=asyncio.Event())
    task = asyncio.create_task(embed(api, input=["a", "b"]))
    await eventually(lambda: len(engine.running) == 2)
    task.cancel()
    await eventually(lambda: not engine.running)
    assert len(engine.closed) == 2


async def test_the_official_client(openai_client: Any) -> None:
    """It asks for base64 by itself, and gives floats."""
    reply = await openai_client.embeddings.create(model="tiny", input=["Hi"])
    assert reply.data[0].embedding == pytest.approx(UNIT, rel=1e-6)
    assert reply.usage.total_tokens == 2


# ----------------------------------------------------------------------- the native route


async def test_encode_one(api: Any) -> None:
    reply = await encode(api, text="Hi", rid="mine")
    meta = reply.json["meta_info"]
    assert reply.json["embedding"] == pytest.approx(UNIT, rel=1e-6)
    assert meta.pop("e2e_latency") > 0
    assert meta == {
        "id": "mine",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": 2,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "queue_time": 0.0,
    }


async def test_encode_several(api: Any) -> None:
    reply = await encode(api, input_ids=[[1, 2], [3]], normalize=False, rid="mine")
    assert [one["embedding"] for one in reply.json] == [[3.0, 2.0, 1.0, 0.0], [3.0, 1.0, 3.0, 0.0]]
    assert [one["meta_info"]["id"] for one in reply.json] == ["mine-0", "mine-1"]
    assert isinstance((await encode(api, text=["Hi"])).json, list)
    assert isinstance((await encode(api, input_ids=[1, 2])).json, dict)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": []}, "text"),
        ({"text": "a", "image_data": "x"}, "image_data"),
        ({"text": "a", "is_cross_encoder_request": True}, "is_cross_encoder_request"),
        ({"text": "a", "txet": "b"}, "txet"),
        ({"text": "a", "dimensions": 2}, "dimensions"),
    ],
)
async def test_encode_refuses(api: Any, fields: dict[str, object], param: str) -> None:
    reply = await encode(api, **fields)
    assert reply.status == 400, reply.raw
    assert reply.json["error"]["param"] == param

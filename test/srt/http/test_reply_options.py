"""What a client may want in its reply beside the answer: ids, metrics, logprobs of the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.srt.generation import Chunk, Finish, Logprob
from phloem.srt.http.logprobs import prompt_logprobs
from phloem.srt.http.stopwatch import Stopwatch
from phloem.srt.messages import FinishReason

CHAT_PROMPT = list(b"<user>Hi")


async def ask(api: Any, route: str, **body: object) -> Any:
    reply = await (api.chat if route == "chat" else api.complete)(**body)
    assert reply.status == 200, reply.raw
    return reply


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_token_ids(api: Any, engine: Any, script: Any, route: str) -> None:
    engine.script = lambda r: script(["a", "", "bc"])  # the second token's text is held back
    prompt = CHAT_PROMPT if route == "chat" else list(b"Hi")
    whole = (await ask(api, route, return_token_ids=True, n=2)).json
    assert [choice["token_ids"] for choice in whole["choices"]] == [[0, 1, 2]] * 2
    holders = [whole] if route == "chat" else whole["choices"]
    assert all(one["prompt_token_ids"] == prompt for one in holders)
    events = (await ask(api, route, return_token_ids=True, stream=True)).events
    choices = [e["choices"][0] for e in events]
    assert [i for c in choices for i in c.get("token_ids", [])] == [0, 1, 2]
    holders = events if route == "chat" else choices
    assert [one.get("prompt_token_ids") for one in holders] == [prompt] + [None] * (len(events) - 1)
    plain = (await ask(api, route)).raw
    assert "token_ids" not in plain


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_tokens_spelled_by_their_ids(api: Any, route: str) -> None:
    body = {"logprobs": True, "top_logprobs": 1} if route == "chat" else {"logprobs": 1}
    reply = await ask(api, route, return_tokens_as_token_ids=True, **body)
    logprobs = reply.json["choices"][0]["logprobs"]
    if route == "chat":
        tokens = [entry["token"] for entry in logprobs["content"]]
        assert logprobs["content"][1]["top_logprobs"][0]["token"] == "token_id:1"
    else:
        tokens = logprobs["tokens"]
        assert logprobs["top_logprobs"][1] == {"token_id:1": -0.5}
    assert tokens == [f"token_id:{i}" for i in range(4)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_metrics_of_each_choice(api: Any, route: str, stream: bool) -> None:
    reply = await ask(api, route, return_metrics=True, n=2, stream=stream)
    if stream:
        choices = [e["choices"][0] for e in reply.events]
        assert all(("metrics" in c) == (c["finish_reason"] is not None) for c in choices)
        choices = [c for c in choices if "metrics" in c]
    else:
        choices = reply.json["choices"]
    assert len(choices) == 2
    for choice in choices:
        assert set(choice["metrics"]) == {
            "queue_time_ms",
            "time_to_first_token_ms",
            "generation_time_ms",
            "mean_itl_ms",
            "tokens_per_second",
        }
        assert all(value >= 0 for value in choice["metrics"].values())
    assert "metrics" not in (await ask(api, route)).raw


def test_a_stopwatch_counts_from_the_end_of_the_waiting() -> None:
    now = 100.0
    watch = Stopwatch(lambda: now)
    none = watch.metrics()
    assert (none.time_to_first_token_ms, none.tokens_per_second) == (None, None)
    for at, ids in ((101.0, []), (103.0, [1]), (104.0, [2, 3]), (105.0, [])):
        now = at
        watch.see(Chunk(rid="r", token_ids=ids, queue_seconds=2.0))
    metrics = watch.metrics()
    assert metrics.queue_time_ms == 2000
    assert metrics.time_to_first_token_ms == 3000
    assert metrics.generation_time_ms == 1000
    assert metrics.mean_itl_ms == 500
    assert metrics.tokens_per_second == 3 / 2
    alone = Stopwatch(lambda: now)
    alone.see(Chunk(rid="r", token_ids=[1], finish=Finish(FinishReason.STOP)))
    assert (alone.metrics().mean_itl_ms, alone.metrics().tokens_per_second) == (None, None)


async def test_logprobs_of_the_prompt(api: Any, engine: Any) -> None:
    entry = {
        "105": {"logprob": -1.0, "decoded_token": "i"},
        "0": {"logprob": -0.1, "rank": 1, "decoded_token": "top0"},
    }
    whole = (await ask(api, "complete", prompt=[72, 105], prompt_logprobs=1)).json["choices"][0]
    assert whole["prompt_logprobs"] == [None, entry]
    assert whole["logprobs"] is None
    request = engine.requests[-1]
    assert (request.prompt_logprobs_from, request.sampling.prompt_logprobs) == (0, 1)
    assert request.sampling.logprobs is None
    chat = (await ask(api, "chat", prompt_logprobs=0, n=2)).json
    assert len(chat["prompt_logprobs"]) == len(CHAT_PROMPT)
    assert chat["prompt_logprobs"][0] is None
    assert list(chat["prompt_logprobs"][1]) == [str(CHAT_PROMPT[1])]


async def test_scoring_without_echo(api: Any) -> None:
    reply = await ask(api, "complete", prompt=[72, 105], prompt_logprobs=0, max_tokens=0)
    choice = reply.json["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "length")
    assert len(choice["prompt_logprobs"]) == 2


async def test_echo_and_prompt_logprobs_have_each_their_own_count(api: Any, engine: Any) -> None:
    reply = await ask(api, "complete", prompt=[72, 105], echo=True, logprobs=1, prompt_logprobs=3)
    assert engine.requests[-1].sampling.prompt_logprobs == 3
    choice = reply.json["choices"][0]
    assert list(choice["logprobs"]["top_logprobs"][1]) == ["top0", "i"]
    assert len(choice["prompt_logprobs"][1]) == 4


def test_the_rank_of_a_token_among_the_best() -> None:
    best = [Logprob(i, str(i), b"", -float(i)) for i in range(3)]
    entry = prompt_logprobs([None, Logprob(2, "2", b"2", -2.0, best)], 1)[1]
    assert entry is not None
    assert {i: one.rank for i, one in entry.items()} == {2: 3, 0: 1}


@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_logprobs_of_tokens_chosen_by_id(api: Any, engine: Any, route: str) -> None:
    body = {"logprobs": True} if route == "chat" else {"logprobs": 0}
    reply = await ask(api, route, logprob_token_ids=[65, 66], **body)
    assert engine.requests[-1].sampling.logprob_token_ids == (65, 66)
    logprobs = reply.json["choices"][0]["logprobs"]
    if route == "chat":
        found = {e["token"]: e["logprob"] for e in logprobs["content"][0]["top_logprobs"]}
        assert found == {"A": -1.0, "B": -2.0}
    else:
        assert logprobs["top_logprobs"][0] == {"A": -1.0, "B": -2.0, "Hel": -0.5}


@pytest.mark.parametrize("interval", [1, 2, 3, 10])
@pytest.mark.parametrize("route", ["chat", "complete"])
async def test_fewer_frames_with_more_in_each(api: Any, route: str, interval: int) -> None:
    body: dict[str, object] = {"logprobs": True} if route == "chat" else {"logprobs": 0}
    reply = await ask(
        api, route, stream=True, n=2, stream_interval=interval, return_token_ids=True, **body
    )
    for index in range(2):
        choices = [e["choices"][0] for e in reply.events if e["choices"][0]["index"] == index]
        texts = [c["delta"].get("content", "") if route == "chat" else c["text"] for c in choices]
        assert "".join(texts) == "Hello world."
        ids = [c["token_ids"] for c in choices if c.get("token_ids")]
        assert [i for one in ids for i in one] == [0, 1, 2, 3]
        assert ids[0] == [0]
        assert all(len(one) >= interval for one in ids[1:-1])
        with_logprobs = [c["logprobs"] for c in choices if c["logprobs"]]
        count = sum(
            len(one["content"] if route == "chat" else one["tokens"]) for one in with_logprobs
        )
        assert count == 4


async def test_an_error_does_not_swallow_what_was_held_back(
    api: Any, engine: Any, script: Any
) -> None:
    engine.script = lambda r: script(failure=RuntimeError("broken"))
    reply = await api.complete(stream=True, stream_interval=50)
    *pieces, last = reply.events
    assert last["error"]["type"] == "server_error"
    assert "".join(e["choices"][0]["text"] for e in pieces) == "Hello world."

"""Fields beyond the plain ones, against a real server: what they ask for is what is done."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model]

TEXT = "Rivers carry water from the mountains to the sea, and shape the land on their way."


def complete(server: Any, **body: Any) -> Any:
    status, reply = server.post("/v1/completions", {"prompt": TEXT, "temperature": 0, **body})
    assert status == 200, reply
    return reply


def chat(server: Any, **body: Any) -> Any:
    messages = [{"role": "user", "content": "Tell me of the sea."}]
    status, reply = server.post("/v1/chat/completions", {"messages": messages, **body})
    assert status == 200, reply
    return reply


def scores(server: Any, prompt: str | list[int], salt: str) -> list[float | None]:
    reply = complete(server, prompt=prompt, cache_salt=salt, echo=True, logprobs=3, max_tokens=0)
    logprobs = reply["choices"][0]["logprobs"]
    best = zip(logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=True)
    assert all(own in top.values() for own, top in best)
    found: list[float | None] = logprobs["token_logprobs"]
    return found


def test_the_score_of_a_prompt_does_not_depend_on_the_cache(server: Any) -> None:
    """Cold, with its prefix cached, and cached whole: bit for bit."""
    cold = scores(server, TEXT, "cold")
    assert cold[0] is None
    assert all(one is not None and one <= 0 for one in cold[1:])
    complete(server, prompt=TEXT[:40], cache_salt="warm", max_tokens=1)
    complete(server, prompt=TEXT, cache_salt="warmer", max_tokens=4)
    assert scores(server, TEXT, "warm") == cold
    assert scores(server, TEXT, "warmer") == cold
    assert scores(server, TEXT, "cold") == cold


def test_a_score_is_what_generating_it_would_give(server: Any) -> None:
    """Logprobs of tokens as they are drawn, and of the same tokens read as a prompt."""
    drawn = complete(server, logprobs=0, max_tokens=12, return_token_ids=True)["choices"][0]
    ids = drawn["prompt_token_ids"] + drawn["token_ids"]
    read = scores(server, ids, "read")[len(drawn["prompt_token_ids"]) :]
    assert len(read) == 12
    for one, other in zip(read, drawn["logprobs"]["token_logprobs"], strict=True):
        assert one == pytest.approx(other, abs=1e-3)
    scored = complete(server, prompt=ids, prompt_logprobs=0, max_tokens=1)["choices"][0]
    entries = scored["prompt_logprobs"]
    assert entries[0] is None
    told = [entry[str(i)]["logprob"] for entry, i in zip(entries[1:], ids[1:], strict=True)]
    assert told[-12:] == read


def test_logprobs_of_chosen_tokens_are_those_of_the_best(server: Any) -> None:
    best = chat(server, max_tokens=3, temperature=0, logprobs=True, top_logprobs=5)
    first = best["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    ids = [server.post("/tokenize", {"text": one["token"]})[1]["tokens"][0] for one in first]
    chosen = chat(server, max_tokens=3, temperature=0, logprobs=True, logprob_token_ids=ids)[
        "choices"
    ][0]["logprobs"]["content"][0]["top_logprobs"]
    assert {one["token"]: one["logprob"] for one in chosen} == {
        one["token"]: one["logprob"] for one in first
    }


def test_processed_logprobs_are_of_what_may_be_drawn(server: Any) -> None:
    allowed = [10, 20, 30]
    common: dict[str, Any] = {
        "logprobs": True,
        "top_logprobs": 20,
        "allowed_token_ids": allowed,
        "max_tokens": 2,
        "temperature": 0,
    }
    processed = chat(server, **common, logprobs_mode="processed")["choices"][0]["logprobs"]
    raw = chat(server, **common)["choices"][0]["logprobs"]
    assert [len(e["top_logprobs"]) for e in processed["content"]] == [3, 3]
    assert [len(e["top_logprobs"]) for e in raw["content"]] == [20, 20]
    assert all(
        mine["logprob"] > theirs["logprob"]
        for mine, theirs in zip(processed["content"], raw["content"], strict=True)
    )


@pytest.mark.parametrize("temperature", [0, 2])
def test_only_allowed_tokens_are_drawn(server: Any, temperature: float) -> None:
    allowed = [300, 400, 500, 600]
    reply = chat(
        server,
        allowed_token_ids=allowed,
        temperature=temperature,
        max_tokens=30,
        return_token_ids=True,
        seed=1,
    )
    ids = reply["choices"][0]["token_ids"]
    assert len(ids) == 30
    assert set(ids) <= set(allowed)


def test_bad_words_never_come(server: Any) -> None:
    free = chat(server, temperature=0, max_tokens=60)["choices"][0]["message"]["content"]
    words = sorted(set(re.findall(r"[a-z]+", free)))[:20]
    assert words
    for seed in range(3):
        reply = chat(server, bad_words=words, temperature=1, seed=seed, max_tokens=60)
        text = reply["choices"][0]["message"]["content"]
        assert text
        assert not [word for word in words if word in text]
    assert (
        chat(server, bad_words=["\n\x00never"], temperature=0, max_tokens=60)["choices"][0][
            "message"
        ]["content"]
        == free
    )


def test_a_pattern_ends_the_answer(server: Any) -> None:
    free = complete(server, max_tokens=40)["choices"][0]["text"]
    pattern = r"[a-z]{4}[^a-z]"
    found = re.search(pattern, free)
    assert found is not None
    for include, end in ((False, found.start()), (True, found.end())):
        body = {
            "max_tokens": 40,
            "stop_regex": ["zz+y", pattern],
            "include_stop_str_in_output": include,
        }
        choice = complete(server, **body)["choices"][0]
        assert choice["text"] == free[:end]
        assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", pattern)
        request = urllib.request.Request(
            server.url + "/v1/completions",
            json.dumps({"prompt": TEXT, "temperature": 0, "stream": True, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as reply:
            frames = [line[6:] for line in reply.read().decode().split("\n\n") if line]
        assert frames.pop() == "[DONE]"
        pieces = [json.loads(frame)["choices"][0]["text"] for frame in frames]
        assert "".join(pieces) == choice["text"]


def test_the_best_of_several(server: Any) -> None:
    common: dict[str, Any] = {"max_tokens": 12, "temperature": 1.3, "seed": 3, "logprobs": 0}

    def mean(choice: Any) -> float:
        values = choice["logprobs"]["token_logprobs"]
        return float(sum(values) / len(values))

    every = complete(server, **common, n=5)["choices"]
    best = complete(server, **common, n=2, best_of=5)
    assert [c["text"] for c in best["choices"]] == [
        c["text"] for c in sorted(every, key=mean, reverse=True)[:2]
    ]
    assert best["usage"]["completion_tokens"] == sum(len(c["logprobs"]["tokens"]) for c in every)


def test_what_the_context_leaves_is_said(server: Any) -> None:
    reply = complete(server, max_tokens=10**9, stop=[" "], logprobs=0)
    (warning,) = reply["warnings"]
    assert warning["param"] == "max_tokens"
    room = 8192 - reply["usage"]["prompt_tokens"]
    assert str(room) in warning["message"]
    assert "warnings" not in complete(server, max_tokens=room, stop=[" "])


def test_a_cut_prompt(server: Any) -> None:
    ids = server.post("/v1/tokenize", {"text": TEXT})[1]["tokens"]
    for side, left in (("left", ids[-5:]), ("right", ids[:5])):
        reply = complete(
            server,
            truncate_prompt_tokens=5,
            truncation_side=side,
            return_token_ids=True,
            echo=True,
            max_tokens=2,
        )
        choice = reply["choices"][0]
        assert choice["prompt_token_ids"] == left
        text = server.post("/v1/detokenize", {"tokens": left + choice["token_ids"]})[1]["text"]
        assert choice["text"] == text
        assert [one["param"] for one in reply["warnings"]] == ["truncate_prompt_tokens"]


def test_metrics_of_a_choice(server: Any) -> None:
    metrics = complete(server, max_tokens=8, return_metrics=True)["choices"][0]["metrics"]
    assert all(value is not None and value >= 0 for value in metrics.values())
    assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 7)


def test_a_model_that_does_not_fill_in(server: Any) -> None:
    status, reply = server.post("/v1/completions", {"prompt": "a", "suffix": "b"})
    assert (status, reply["error"]["param"]) == (400, "suffix")


def test_a_token_is_really_generated(server: Any) -> None:
    status, text = server.get("/health_generate")
    assert (status, json.loads(text)["status"]) == (200, "ok")
    status, text = server.get("/v1/loads")
    assert (status, json.loads(text)["loads"][0]["max_total_num_tokens"]) == (200, 16384)

"""The official client's embeddings, and scores, against a real server."""

from __future__ import annotations

from typing import Any

import numpy as np
import openai
import pytest

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.model,
    pytest.mark.client("openai", "embeddings"),
]

TEXTS = [
    "A cat sleeps on the warm roof.",
    "On the warm roof a cat is sleeping.",
    "The committee raised interest rates by half a point.",
    "Les taux d'intérêt montent.",
]


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_embeddings_do_not_depend_on_their_neighbours(client: openai.OpenAI, pooling: str) -> None:
    """Together, one by one and as ids: the same bits, of length 1."""
    more: Any = {"model": "tiny", "extra_body": {"pooling": pooling}}
    long = " ".join(TEXTS * 20)  # longer than a step
    together = client.embeddings.create(input=[*TEXTS, long], **more)
    vectors = [one.embedding for one in together.data]
    assert [len(v) for v in vectors] == [576] * 5
    assert np.linalg.norm(np.array(vectors), axis=1) == pytest.approx(1.0, abs=1e-5)
    for text, vector in zip([*TEXTS, long], vectors, strict=True):
        alone = client.embeddings.create(input=text, encoding_format="float", **more)
        assert alone.data[0].embedding == vector
    assert together.usage.prompt_tokens > 512


def test_ids_are_their_texts(client: openai.OpenAI, server: Any) -> None:
    _, tokens = server.post("/tokenize", {"prompt": TEXTS[0]})
    by_ids = client.embeddings.create(model="tiny", input=tokens["tokens"])
    by_text = client.embeddings.create(model="tiny", input=TEXTS[0])
    assert by_ids.data[0].embedding == by_text.data[0].embedding
    assert by_ids.usage == by_text.usage


def test_what_says_the_same_is_nearer(client: openai.OpenAI) -> None:
    reply = client.embeddings.create(model="tiny", input=TEXTS)
    vectors = np.array([one.embedding for one in reply.data])
    near = vectors @ vectors[0]
    assert near[1] > max(near[2], near[3])


def test_refusals(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="576"):
        client.embeddings.create(model="tiny", input="a", dimensions=64)
    with pytest.raises(openai.BadRequestError, match=r"8192"):
        client.embeddings.create(model="tiny", input="word " * 9000)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")


def test_a_mean_leaves_nothing_in_the_cache(client: openai.OpenAI, server: Any) -> None:
    def cached() -> int:
        return sum(
            server.post("/cache/explain", {"prompt": text})[1]["matched_tokens"] for text in TEXTS
        )

    server.post("/cache/flush", {})
    client.embeddings.create(model="tiny", input=TEXTS)
    assert cached() == 0


def test_native_encode(server: Any) -> None:
    status, reply = server.post("/encode", {"text": TEXTS[:2]})
    assert status == 200
    assert [len(one["embedding"]) for one in reply] == [576, 576]
    assert reply[0]["meta_info"]["prompt_tokens"] > 5


def test_scores_are_those_of_the_logprobs_of_an_echo(client: openai.OpenAI, server: Any) -> None:
    prompt, choices = "The capital of France is", [" Paris", " Rome, of course", " a"]
    status, reply = server.post("/v1/score", {"prompt": prompt, "choices": choices})
    assert status == 200
    assert reply["choice"] == " Paris"
    for text, found in zip(choices, reply["choices"], strict=True):
        echo = client.completions.create(
            model="tiny", prompt=prompt + text, max_tokens=0, echo=True, logprobs=0, temperature=0
        )
        logprobs = echo.choices[0].logprobs
        assert logprobs is not None and logprobs.tokens is not None
        count = len(found["logprobs"])
        assert "".join(found["tokens"]) == text == "".join(logprobs.tokens[-count:])
        assert found["logprobs"] == (logprobs.token_logprobs or [])[-count:]


def test_a_choice_that_merges_with_the_prompt_is_judged_with_its_last_token(server: Any) -> None:
    """`in` is one token, `i` and `n` would be two: the tokenizer's own split is what counts."""
    status, reply = server.post("/v1/score", {"prompt": "The cat is i", "choices": ["n", "ll"]})
    assert status == 200
    _, prompt = server.post("/tokenize", {"prompt": "The cat is i"})
    assert reply["boundary"] == prompt["count"] - 1
    for choice in reply["choices"]:
        _, whole = server.post("/tokenize", {"prompt": "The cat is i" + choice["text"]})
        assert choice["token_ids"] == whole["tokens"][reply["boundary"] :]


def test_branches_share_their_prefix(server: Any) -> None:
    """A hundred choices after a long prompt cost about what the prompt costs, computed once."""
    prompt = " ".join(f"Fact {i}: nothing is {i * 7}." for i in range(60)) + " The number is"
    before = server.metric("phloem_computed_prefill_tokens_total")
    status, reply = server.post(
        "/v1/score", {"prompt": prompt, "choices": [f" {i}" for i in range(100)]}
    )
    assert status == 200
    computed = server.metric("phloem_computed_prefill_tokens_total") - before
    scored = sum(len(choice["token_ids"]) for choice in reply["choices"])
    assert reply["boundary"] > 400
    assert computed <= reply["boundary"] + scored + 100


def test_items_with_labels(server: Any) -> None:
    yes, no = (
        server.post("/tokenize", {"prompt": word})[1]["tokens"][0] for word in (" yes", " no")
    )
    body = {
        "query": "Is Paris in France? It is:",
        "items": [" so", ""],
        "label_token_ids": [yes, no],
    }
    status, reply = server.post("/v1/score", body)
    assert status == 200
    status, soft = server.post("/v1/score", {**body, "apply_softmax": True})
    for plain, shares in zip(reply["scores"], soft["scores"], strict=True):
        assert sum(plain) < 1
        assert sum(shares) == pytest.approx(1)
        assert shares[0] == pytest.approx(plain[0] / sum(plain))

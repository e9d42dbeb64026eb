"""Programs against a real server: scoring, streaming, a batch, and an error that surfaces."""

from __future__ import annotations

import json
from typing import Any

import pytest

import phloem

pytestmark = [pytest.mark.e2e, pytest.mark.model]

COLOURS = ["red", "blue", "green"]


@phloem.function
def pick(s: phloem.State, thing: str) -> None:
    s += phloem.user(f"What colour is {thing}?")
    s += phloem.assistant("It is " + phloem.select("colour", COLOURS))


@phloem.function
def tree(s: phloem.State, topic: str) -> None:
    s += f"A note on {topic}.\n"
    branches = s.fork(4)
    branches += "Point: " + phloem.gen("point", max_tokens=6, temperature=0.0)
    branches.join()


@phloem.function
def broken(s: phloem.State) -> None:
    s += "x" + phloem.gen("bad", json_schema={"type": "array", "uniqueItems": True})


def test_select_scores_every_choice(server: Any) -> None:
    state = pick.run(thing="grass", backend=server.url)
    assert state["colour"] in COLOURS
    spelled = state.get_meta_info("colour")["choice_tokens"]
    assert ["".join(tokens).strip() for tokens in spelled] == COLOURS
    states = pick.run_batch([{"thing": "grass"}] * 6, backend=server.url)
    assert {s["colour"] for s in states} == {state["colour"]}


def test_forks_share_their_prefix(server: Any) -> None:
    server.post("/flush_cache", {})
    before = server.metric("phloem_computed_prefill_tokens_total")
    state = tree.run(
        topic="a topic with a good many words in it, so that it matters" * 4, backend=server.url
    )
    assert len(set(state["point"])) == 1, "equal greedy branches say the same"
    server.until(lambda: server.metric("phloem_num_requests_running") == 0)
    _, reply = server.post("/tokenize", {"text": state.text() + "Point: "})
    computed = server.metric("phloem_computed_prefill_tokens_total") - before
    assert computed <= reply["count"] + 4


def test_the_refusal_surfaces_at_its_variable(server: Any) -> None:
    state = broken.run(backend=server.url)
    with pytest.raises(phloem.GenerationError, match="uniqueItems") as caught:
        _ = state["bad"]
    assert caught.value.variable == "bad"


def test_a_stream_joins_to_the_value(server: Any) -> None:
    @phloem.function
    def story(s: phloem.State) -> None:
        s += "Once upon a time" + phloem.gen("rest", max_tokens=12, temperature=0.0)

    stream = story.stream(backend=server.url)
    pieces = list(stream.text_iter("rest"))
    assert len(pieces) > 1
    assert "".join(pieces) == stream["rest"]


def test_json_in_a_chat(server: Any) -> None:
    @phloem.function
    def rate(s: phloem.State, review: str) -> None:
        s += phloem.user(f"Rate this review: {review}")
        s += phloem.assistant(
            phloem.gen(
                "stars",
                json_schema={
                    "type": "object",
                    "properties": {"stars": {"enum": [1, 2, 3]}},
                    "required": ["stars"],
                    "additionalProperties": False,
                },
            )
        )

    state = rate.run(review="Lovely.", backend=server.url)
    assert json.loads(state["stars"])["stars"] in (1, 2, 3)

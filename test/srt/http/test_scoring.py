"""`/v1/score` over a scripted engine, and the pure functions behind it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.lang import choices as dsl
from phloem.srt.errors import InvalidRequest
from phloem.srt.http.scoring import Normalization, boundary, decide, label_scores

METHODS = {
    Normalization.TOKEN: dsl.ChoicesMethod.TOKEN_LENGTH_NORMALIZED,
    Normalization.GREEDY: dsl.ChoicesMethod.GREEDY_TOKEN_SELECTION,
    Normalization.UNCONDITIONAL: dsl.ChoicesMethod.UNCONDITIONAL_LIKELIHOOD_NORMALIZED,
}
SCORES = st.lists(st.lists(st.floats(-20, 0), min_size=1, max_size=4), min_size=2, max_size=5)


async def score(api: Any, **body: object) -> Any:
    return await api.call("POST", "/v1/score", body)


# ----------------------------------------------------------------------- pure functions


@given(scores=SCORES, data=st.data())
def test_the_dsl_chooses_the_same(scores: list[list[float]], data: st.DataObject) -> None:
    size = len(scores)
    alone = data.draw(
        st.lists(st.lists(st.floats(-20, 0), min_size=1, max_size=4), min_size=size, max_size=size)
    )

    def theirs(values: list[list[float]]) -> list[dsl.ChoiceScore]:
        return [dsl.ChoiceScore(tuple("x" * len(v)), tuple(v)) for v in values]

    for ours, method in METHODS.items():
        found = decide(ours, scores, alone)
        expected = dsl.decide(method, theirs(scores), theirs(alone))
        assert (found.index, tuple(found.values)) == (expected.index, expected.values)


def test_without_normalisation_the_sum_decides() -> None:
    found = decide(Normalization.NONE, [[-1.0, -1.0], [-1.5], [-1.5]])
    assert (found.index, found.values) == (1, [-2.0, -1.5, -1.5])
    assert decide(Normalization.TOKEN, [[-1.0, -1.0], [-1.5]]).index == 0


def test_the_boundary_is_where_the_tokens_part() -> None:
    assert boundary([1, 2, 3], [[1, 2, 3, 4], [1, 2, 3, 5, 6]], "prompt") == 3
    # the prompt's last token merges with one choice: all are judged from before it on
    assert boundary([1, 2, 3], [[1, 2, 3, 4], [1, 2, 9]], "prompt") == 2
    with pytest.raises(InvalidRequest) as caught:
        boundary([1, 2], [[1, 2, 3], [1, 2]], "prompt")
    assert caught.value.param == "choices[1]"
    with pytest.raises(InvalidRequest) as caught:
        boundary([1], [[2, 3]], "messages")
    assert caught.value.param == "messages"


def test_labels() -> None:
    assert label_scores([math.log(0.25), math.log(0.5)], softmax=False) == pytest.approx(
        [0.25, 0.5]
    )
    assert label_scores([-1000.0, -1000.0 + math.log(3)], softmax=True) == pytest.approx(
        [0.25, 0.75]
    )


# ----------------------------------------------------------------------- choices


async def test_choices_after_a_prompt(api: Any, engine: Any) -> None:
    """The scripted logprob of the token at place i is -i: "Is" is 0 and 1, a choice begins at 2."""
    reply = await score(api, prompt="Is", choices=["it", "a"], rid="mine")
    assert reply.status == 200, reply.raw
    body = reply.json
    assert body.pop("created") > 0
    assert body == {
        "id": "mine",
        "object": "choice.scores",
        "model": "tiny",
        "choice": "a",
        "index": 1,
        "normalization": "token",
        "boundary": 2,
        "choices": [
            {
                "index": 0,
                "text": "it",
                "token_ids": [105, 116],
                "tokens": ["i", "t"],
                "logprobs": [-2.0, -3.0],
                "sum": -5.0,
                "mean": -2.5,
                "value": -2.5,
            },
            {
                "index": 1,
                "text": "a",
                "token_ids": [97],
                "tokens": ["a"],
                "logprobs": [-2.0],
                "sum": -2.0,
                "mean": -2.0,
                "value": -2.0,
            },
        ],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 0,
            "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert [request.prompt for request in engine.requests] == [[*b"Isit"], [*b"Isa"]]
    assert {request.prompt_logprobs_from for request in engine.requests} == {2}
    assert {request.sampling.max_tokens for request in engine.requests} == {0}


async def test_unconditional_scores_stand_after_a_line_break(api: Any, engine: Any) -> None:
    reply = await score(api, prompt="Is", choices=["it", "a"], normalization="unconditional")
    assert [request.prompt for request in engine.requests[2:]] == [[*b"\nit"], [*b"\na"]]
    assert {request.prompt_logprobs_from for request in engine.requests[2:]} == {1}
    assert [one["value"] for one in reply.json["choices"]] == [-2.5 - -1.5, -2.0 - -1.0]
    assert reply.json["index"] == 0


async def test_one_choice_has_its_logprobs(api: Any, engine: Any) -> None:
    for normalization, value in ("none", -5.0), ("token", -2.5), ("greedy", -2.5):
        reply = await score(api, prompt="Is", choices=["it"], normalization=normalization)
        assert reply.status == 200, reply.raw
        assert (reply.json["choice"], reply.json["choices"][0]["value"]) == ("it", value)


async def test_choices_after_ids_are_texts_that_go_on(api: Any, engine: Any) -> None:
    reply = await score(api, input_ids=[5, 6, 7], choices=["a", "bc"])
    assert reply.json["boundary"] == 3
    assert [request.prompt for request in engine.requests] == [[5, 6, 7, 97], [5, 6, 7, 98, 99]]


async def test_choices_in_a_chat_are_the_assistants_words(api: Any, engine: Any) -> None:
    messages = [{"role": "user", "content": "?"}]
    reply = await score(api, messages=messages, choices=["yes", "no"])
    assert reply.status == 200, reply.raw
    asked, *said = engine.rendered
    assert (asked["add_generation_prompt"], asked["continue_final_message"]) == (True, False)
    assert [one["messages"][-1] for one in said] == [
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "no"},
    ]
    assert all(one["continue_final_message"] for one in said)
    assert reply.json["boundary"] == len("<user>?")


async def test_choices_go_on_with_the_assistants_message(api: Any, engine: Any) -> None:
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "I say "}]
    reply = await score(api, messages=messages, choices=["yes", "no"], continue_final_message=True)
    assert reply.status == 200, reply.raw
    assert [one["messages"][-1]["content"] for one in engine.rendered] == [
        "I say ",
        "I say yes",
        "I say no",
    ]
    assert reply.json["boundary"] == len("<user>?<assistant>I say ")


async def test_how_it_is_run(api: Any, engine: Any) -> None:
    body = {"prompt": "a", "choices": ["b", "c"], "priority": 2, "cache_salt": "s", "program": "p"}
    await score(api, **body)
    assert {(r.priority, r.namespace, r.program) for r in engine.requests} == {(2, "1:s", "p")}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "choices"),
        ({"prompt": "a"}, "choices"),
        ({"choices": ["a", "b"]}, "prompt"),
        ({"prompt": "a", "choices": []}, "choices"),
        ({"prompt": "a", "choices": ["b"] * 1025}, "choices"),
        ({"prompt": "a", "input_ids": [1], "choices": ["b", "c"]}, "prompt"),
        ({"prompt": "a", "choices": ["b", ""]}, "choices[1]"),
        ({"prompt": "", "choices": ["b", "c"]}, "prompt"),
        ({"prompt": "a", "choices": ["b", "c" * 512]}, "choices[1]"),
        ({"prompt": "a", "choices": ["b", "c"], "tools": [{}]}, "tools[0].type"),
        (
            {"prompt": "a", "choices": ["b", "c"], "chat_template_kwargs": {}},
            "chat_template_kwargs",
        ),
        ({"prompt": "a", "choices": ["b", "c"], "normalization": "best"}, "normalization"),
        ({"prompt": "a", "choices": ["b", "c"], "query": "d"}, "prompt"),
        ({"prompt": "a", "choices": ["b", "c"], "stream": True}, "stream"),
        ({"input_ids": [1, 1000], "choices": ["b", "c"]}, "input_ids[1]"),
        ({"messages": [{"role": "user", "content": "?"}], "choices": ["b", ""]}, "choices[1]"),
        ({"text_1": "a", "text_2": "b"}, "text_1"),
        ({"queries": "a", "documents": [{}]}, "queries"),
        ({"query": "a", "items": ["b"]}, "label_token_ids"),
        ({"query": "a", "label_token_ids": [1]}, "items"),
        ({"query": "a", "items": [[1]], "label_token_ids": [1]}, "items[0]"),
        ({"query": "a", "items": ["b"], "label_token_ids": [1000]}, "label_token_ids[0]"),
        ({"query": "", "items": ["b", ""], "label_token_ids": [1]}, "items[1]"),
        ({"query": "a", "items": ["b" * 511], "label_token_ids": [1]}, "items[0]"),
    ],
)
async def test_refusals_name_the_field(
    api: Any, engine: Any, fields: dict[str, object], param: str
) -> None:
    reply = await score(api, **fields)
    assert reply.status == 400, reply.raw
    assert reply.json["error"]["param"] == param
    assert not engine.requests


async def test_cross_encoders_are_refused_in_words(api: Any) -> None:
    reply = await score(api, model="tiny", text_1="a", text_2=["b"])
    assert "cross-encoder" in reply.json["error"]["message"]
    assert reply.json["error"]["code"] == "unsupported_parameter"


async def test_another_model(api: Any) -> None:
    assert (await score(api, prompt="a", choices=["b", "c"], model="other")).status == 404


# ----------------------------------------------------------------------- items


async def test_items_with_labels(api: Any, engine: Any) -> None:
    """The scripted logprobs of the labels are -1 and -2."""
    labels = {"label_token_ids": [5, 9], "model": "tiny"}
    reply = await score(api, query="Q", items=["a", "bc"], **labels)
    assert reply.status == 200, reply.raw
    assert reply.json["object"] == "scoring"
    assert reply.json["model"] == "tiny"
    expected = pytest.approx([math.exp(-1), math.exp(-2)])
    assert reply.json["scores"] == [expected, expected]
    assert reply.json["usage"]["prompt_tokens"] == 5
    assert [request.prompt for request in engine.requests] == [[*b"Qa"], [*b"Qbc"]]
    asked = [request.sampling for request in engine.requests]
    assert {(one.logprob_token_ids, one.max_tokens) for one in asked} == {((5, 9), 1)}


async def test_items_first_softmax_and_ids(api: Any, engine: Any) -> None:
    labels = {"label_token_ids": [5, 9], "apply_softmax": True, "item_first": True}
    reply = await score(api, query="Q", items="a", **labels)
    assert reply.json["scores"] == [pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])]
    await score(api, query=[1], items=[[2, 3], [4]], **labels)
    assert [request.prompt for request in engine.requests] == [[*b"aQ"], [2, 3, 1], [4, 1]]

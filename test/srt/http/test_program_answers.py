"""`POST /programs/run`: what it tells of an answer beside its text."""

from __future__ import annotations

from typing import Any

import pytest

from phloem.srt.generation import ReasoningMarks

MARKS = {"begin": "<think>", "end": "</think>"}


def gen(name: str, **fields: Any) -> dict[str, Any]:
    return {"gen": {"name": name, **fields}}


async def call_of(api: Any, steps: list[Any], **more: Any) -> Any:
    """The reply, whose first call is looked at."""
    reply = await api.call("POST", "/programs/run", {"steps": steps, **more})
    assert reply.status == 200, reply.raw
    return reply.json


async def test_a_text_has_what_its_route_has(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(pieces=["a", "b"], matched=".")
    fields = {"logprobs": 2, "return_metrics": True, "max_tokens": 4}
    reply = await call_of(api, [{"text": "Q"}, gen("x", **fields)])
    (call,) = reply["calls"]
    body = {"prompt": "Q", **fields}
    alone = (await api.call("POST", "/v1/completions", body)).json["choices"][0]
    assert call["matched_stop"] == alone["matched_stop"] == "."
    assert call["logprobs"] == alone["logprobs"] and call["logprobs"]["tokens"] == ["a", "b"]
    assert call["metrics"].keys() == alone["metrics"].keys()
    assert "reasoning_content" not in call


async def test_a_chat_has_what_its_route_has(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(pieces=["a", "b"])
    fields = {"logprobs": True, "top_logprobs": 2}
    steps = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": [gen("x")]}]
    reply = await call_of(api, steps, defaults=fields)
    (call,) = reply["calls"]
    body = {"messages": [{"role": "user", "content": "Q"}], **fields}
    alone = (await api.call("POST", "/v1/chat/completions", body)).json["choices"][0]
    assert call["matched_stop"] is None
    assert call["logprobs"] == alone["logprobs"]
    assert not call.keys() & {"metrics", "reasoning_content"}


async def test_of_several_answers_there_are_lists(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(pieces=["<think>t</think>a"], matched="!")
    fields = {"n": 2, "logprobs": 0, "return_metrics": True, "reasoning_marks": MARKS}
    reply = await call_of(api, [{"text": "Q"}, gen("x", **fields)])
    (call,) = reply["calls"]
    assert call["matched_stop"] == ["!", "!"]
    assert call["value"] == ["a", "a"] and call["reasoning_content"] == ["t", "t"]
    assert [one["tokens"] for one in call["logprobs"]] == [["<think>t</think>a"]] * 2
    assert "top_logprobs" not in call["logprobs"][0]
    assert len(call["metrics"]) == 2
    assert reply["variables"] == {"x": ["a", "a"], "x_reasoning_content": ["t", "t"]}


async def test_thoughts_are_no_part_of_the_text(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(pieces=[" <think>", "so", "</think>\n", "yes"])
    steps = [
        {"text": "Q:"},
        gen("x", reasoning_marks=MARKS),
        {"text": " since "},
        {"insert": "x_reasoning_content"},
        gen("y", reasoning_marks=MARKS | {"opened": True}, max_tokens=2),
        gen("z", reasoning_marks=MARKS | {"begin": "[t]"}, max_tokens=1),
    ]
    reply = await call_of(api, steps)
    assert reply["text"] == "Q:yes since so<think>"
    assert reply["variables"] == {
        "x": "yes",
        "x_reasoning_content": "so",
        "y": "",
        "y_reasoning_content": "so",
        "z": "<think>",
        "z_reasoning_content": "",
    }
    assert [call.get("reasoning_content") for call in reply["calls"]] == ["so", "so", None]
    prompts = [request.prompt for request in engine.requests]
    assert prompts == ["Q:", "Q:yes since so", "Q:yes since so"]


async def test_a_model_that_reasons_needs_no_marks(api: Any, engine: Any, script: Any) -> None:
    engine.reasoning = ReasoningMarks(begin="<think>", end="</think>")
    engine.script = lambda request: script(pieces=["<think>", "so", "</think>", "yes"])
    steps: list[Any] = [
        {"role": "user", "content": "Q"},
        {"role": "assistant", "content": [gen("x")]},
    ]
    reply = await call_of(api, steps)
    assert reply["calls"][0]["reasoning_content"] == "so"
    assert reply["messages"][-1]["content"] == "yes"
    assert reply["variables"] == {"x": "yes"}
    steps[1]["content"] = [gen("x", reasoning_marks={"begin": "y", "end": "s"})]
    reply = await call_of(api, steps)
    assert reply["variables"] == {"x": "yes", "x_reasoning_content": "so"}, (
        "the server knows better"
    )


async def test_thoughts_of_all_branches_are_a_list(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda request: script(pieces=["<think>t</think>a"])
    fork = {"fork": [[gen("x", reasoning_marks=MARKS)]] * 2}
    reply = await call_of(api, [{"text": "Q"}, fork, {"insert": "x_reasoning_content"}])
    assert reply["variables"] == {"x": ["a", "a"], "x_reasoning_content": ["t", "t"]}
    assert reply["text"] == "Qt\nt"


@pytest.mark.parametrize(
    ("marks", "at"),
    [
        ("<think>", ""),
        ({"begin": "a"}, ".end"),
        ({"begin": "", "end": "b"}, ".begin"),
        ({**MARKS, "open": True}, ".open"),
    ],
)
async def test_marks_that_are_none_are_refused(api: Any, marks: Any, at: str) -> None:
    steps = [{"text": "a"}, gen("x", reasoning_marks=marks)]
    reply = await api.call("POST", "/programs/run", {"steps": steps})
    assert reply.status == 400
    assert reply.json["error"]["param"] == f"steps[1].gen.reasoning_marks{at}"


async def test_the_name_of_thoughts_is_taken(api: Any) -> None:
    steps = [{"text": "a"}, gen("x", reasoning_marks=MARKS), gen("x_reasoning_content")]
    reply = await api.call("POST", "/programs/run", {"steps": steps})
    assert reply.status == 400 and "x_reasoning_content" in reply.json["error"]["message"]

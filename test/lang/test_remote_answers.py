"""What a server that runs a program tells of its calls beside their values: logprobs, stops that
matched, thoughts, times."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import phloem as sgl
from phloem.lang.backend.base import TokenLogprob
from phloem.lang.reasoning import MARKS, Splitter
from phloem.lang.state import State
from phloem.srt.http.program_answers import AnswerMarks, apart

pytestmark = pytest.mark.timeout(30)

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
STOPPED = {"type": "variable", "value": "so", "finish_reason": "stop", "usage": USAGE}
OPEN = {"begin": "<think>", "end": "</think>", "opened": True}


class Telling(sgl.MockBackend):
    """Its server runs a program, and tells `events` of it: each has the path of its step."""

    def __init__(self, *events: dict[str, Any]) -> None:
        super().__init__({})
        self.events = events
        self.body: dict[str, Any] = {}

    async def run_program(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        self.body = msgspec.json.decode(msgspec.json.encode(body))
        for event in (*self.events, {"type": "done"}):
            yield json.dumps(event).encode()


def told(fn: Any, *events: dict[str, Any]) -> tuple[State, dict[str, Any]]:
    backend = Telling(*events)
    state = sgl.function(fn).run_remote(backend=backend)
    return state, backend.body


def test_logprobs_and_stops_of_a_text() -> None:
    def program(s: State) -> None:
        s += "A" + sgl.gen("x", logprobs=1) + sgl.gen("y", n=2, return_logprob=True)

    lists = {"tokens": ["s", "o"], "token_logprobs": [-1.0, -2.0]}
    one = lists | {"top_logprobs": [{"s": -1.0}, {"a": -0.5, "o": -2.0}]}
    state, body = told(
        program,
        STOPPED | {"path": "steps[1]", "matched_stop": ".", "logprobs": one},
        STOPPED
        | {"path": "steps[2]", "value": ["so", "no"], "finish_reason": ["stop", "length"]}
        | {"matched_stop": [0, None], "logprobs": [lists, {"tokens": [], "token_logprobs": []}]},
    )
    assert [step["gen"].get("logprobs") for step in body["steps"][1:]] == [1, 0]
    x, y = state.meta("x"), state.meta("y")
    assert x.matched == (".",) and y.matched == (0, None)
    assert x.logprobs == (
        (
            TokenLogprob("s", -1.0, (("s", -1.0),)),
            TokenLogprob("o", -2.0, (("a", -0.5), ("o", -2.0))),
        ),
    )
    assert y.logprobs == ((TokenLogprob("s", -1.0), TokenLogprob("o", -2.0)), ())
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop", "matched": "."}


def test_logprobs_of_a_chat() -> None:
    def program(s: State) -> None:
        s += sgl.user("A") + sgl.assistant(sgl.gen("x", logprobs=2))

    top = [{"token": "a", "logprob": -0.5}]
    content = [{"token": "so", "logprob": -1.0, "bytes": [115, 111], "top_logprobs": top}]
    event = STOPPED | {"path": "steps[1].content[0]", "logprobs": {"content": content}}
    state, body = told(program, event)
    gen = body["steps"][1]["content"][0]["gen"]
    assert (gen["logprobs"], gen["top_logprobs"]) == (True, 2)
    assert state.meta("x").logprobs == ((TokenLogprob("so", -1.0, (("a", -0.5),)),),)


def test_a_chat_that_begins_in_forks_is_one() -> None:
    def program(s: State) -> None:
        forks = s.fork(2)
        forks += sgl.user("A") + sgl.assistant(sgl.gen("x", logprobs=0))

    events = [STOPPED | {"path": f"steps[0].fork[{i}][1].content[0]"} for i in range(2)]
    _, body = told(program, *events)
    fork = body["steps"][0]["fork"]
    assert [branch[1]["content"][0]["gen"]["logprobs"] for branch in fork] == [True, True]


def test_thoughts_are_a_variable_of_their_own() -> None:
    def program(s: State) -> Any:
        thinks = sgl.gen("x") + sgl.gen() + sgl.gen("y", n=2) + sgl.gen("z", regex="so")
        s += "A" + sgl.separate_reasoning(thinks, model_type="deepseek-r1")
        s += s["x_reasoning_content"] + "|"
        for one in s["y_reasoning_content"]:
            s += one
        s += sgl.gen("x_reasoning_content")
        return s["z_reasoning_content"]

    state, body = told(
        program,
        STOPPED | {"path": "steps[1]", "reasoning_content": "I think"},
        STOPPED | {"path": "steps[2]"},
        STOPPED
        | {"path": "steps[3]", "value": ["a", "b"], "finish_reason": ["stop"] * 2}
        | {"reasoning_content": ["one", "two"]},
        STOPPED | {"path": "steps[4]"},
        STOPPED | {"path": "steps[8]"},
    )
    steps = body["steps"]
    gens = [step["gen"] for step in steps if "gen" in step]
    assert [gen.get("reasoning_marks") for gen in gens] == [OPEN, None, OPEN, None, None]
    assert gens[-1]["name"] == "x_reasoning_content (2)"
    assert steps[5:8] == [
        {"insert": "x_reasoning_content"},
        {"text": "|"},
        {"insert": "y_reasoning_content", "separator": ""},
    ]
    assert state.error() is None
    assert state["x"] == "so" and state["x_reasoning_content"] == "so", "bound once more"
    assert state.meta("x").reasoning == ("I think",)
    assert (state["y"], state["y_reasoning_content"]) == (["a", "b"], ["one", "two"])
    assert state.returned == ""
    assert state.text() == "AsososoI think|onetwoso"


def test_an_answer_is_not_split_once_more() -> None:
    """Without thoughts, all of it would be taken for what was thought."""

    def program(s: State) -> None:
        thinks = sgl.separate_reasoning(sgl.gen("x"), model_type="deepseek-r1")
        s += sgl.user("A") + sgl.assistant(thinks)

    state, _ = told(program, STOPPED | {"path": "steps[1].content[0]"})
    assert (state["x"], state["x_reasoning_content"]) == ("so", "")


def test_times_are_in_the_trace() -> None:
    def program(s: State) -> None:
        s += "A" + sgl.gen("x") + sgl.gen("y", n=2)

    times = {"queue_time_ms": 2.0, "time_to_first_token_ms": 0.0}
    state, body = told(
        program,
        STOPPED | {"path": "steps[1]", "metrics": times},
        STOPPED
        | {"path": "steps[2]", "value": ["a", "b"], "finish_reason": ["stop"] * 2}
        | {"metrics": [times, times | {"queue_time_ms": 1.0}]},
    )
    assert body["defaults"] == {"return_metrics": True}
    assert [span.queue_s for span in state.trace.spans] == [0.002, 0.001]
    assert all(span.first == span.sent for span in state.trace.spans)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"matched_stop": ["."]}, "1 matched stops of 2 answers"),
        ({"reasoning_content": "I think"}, "1 thoughts of 2 answers"),
        ({"logprobs": [{"tokens": ["a"], "token_logprobs": []}] * 2}, "not one a token"),
    ],
)
def test_what_does_not_fit_the_answers_is_an_error(wrong: dict[str, Any], message: str) -> None:
    def program(s: State) -> None:
        s += "A" + sgl.gen("x", n=2)

    event = STOPPED | {"path": "steps[1]", "value": ["a", "b"], "finish_reason": ["stop"] * 2}
    state, _ = told(program, event | wrong)
    with pytest.raises(sgl.GenerationError, match=message):
        state["x"]


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<thi", " ", "\n", "a", "b", "k>"])),
    st.booleans(),
)
def test_server_and_client_tell_thoughts_apart_alike(parts: list[str], opened: bool) -> None:
    marks = MARKS["deepseek-r1" if opened else "qwen3"]
    splitter = Splitter(marks)
    pieces = [*map(splitter.feed, parts), splitter.finish()]
    expected = tuple("".join(one[i] for one in pieces) for i in (0, 1))
    own = AnswerMarks(begin=marks.begin, end=marks.end, opened=marks.opened)
    assert apart("".join(parts), own) == expected

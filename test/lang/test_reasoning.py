"""Thoughts and answers told apart, by the backend or by marks."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import phloem
from phloem.lang import ir
from phloem.lang.backend.base import Call, ChatPrompt, Delta, TextPrompt
from phloem.lang.backend.openai_wire import reply_deltas
from phloem.lang.reasoning import MARKS, Splitter
from phloem.lang.sampling import Sampling
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(30)

ANSWERS = [
    ("qwen3", "<think>\nHm.\n</think>\n\nYes. ", "Hm.", "Yes."),
    ("qwen3", " <think>a</think>b</think>c", "a", "b</think>c"),
    ("qwen3", "Yes, <think>.", "", "Yes, <think>."),
    ("qwen3", "<think>cut off", "cut off", ""),
    ("qwen3", "<thin", "", "<thin"),
    ("deepseek-r1", "Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek-r1", "<think>Hm.</think>Yes.", "Hm.", "Yes."),
    ("deepseek-r1", "cut </thi", "cut </thi", ""),
    ("mistral", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."),
    ("kimi", "◁think▷Hm.◁/think▷Yes.", "Hm.", "Yes."),
    ("qwen3", "", "", ""),
]


@given(st.sampled_from(ANSWERS), st.lists(st.integers(0, 40), max_size=8))
def test_however_it_is_cut_it_is_split_the_same(
    answer: tuple[str, str, str, str], cuts: list[int]
) -> None:
    model, text, thought, said = answer
    splitter = Splitter(MARKS[model])
    places = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    pairs = [splitter.feed(text[a:b]) for a, b in pairwise(places)]
    pairs.append(splitter.finish())
    assert "".join(pair[0] for pair in pairs) == thought
    assert "".join(pair[1] for pair in pairs) == said


def test_every_named_call_of_the_expression_is_marked() -> None:
    made = phloem.separate_reasoning(
        "a" + phloem.gen("x") + phloem.assistant(phloem.gen("y") + phloem.gen()), "qwen3"
    )
    marks = MARKS["qwen3"]
    inner = ir.Seq((ir.Gen("y", Sampling(), marks=marks), ir.Gen(None, Sampling())))
    assert made == ir.Seq(
        (ir.Text("a"), ir.Gen("x", Sampling(), marks=marks), ir.Role("assistant", inner))
    )
    with pytest.raises(ValueError, match="unknown model_type 'gpt'"):
        phloem.separate_reasoning(phloem.gen("x"), "gpt")


@phloem.function
def solve(s: State) -> None:
    s += "Q: 1+1?\nA:"
    s += phloem.separate_reasoning(phloem.gen("answer"), model_type="qwen3")
    s += "\nSure? " + phloem.gen("sure")


def test_the_text_goes_on_without_the_thoughts() -> None:
    backend = phloem.MockBackend({"answer": "<think>one, two</think>2", "sure": "Yes"})
    state = solve.run(backend=backend)
    assert (state["answer"], state["answer_reasoning_content"]) == ("2", "one, two")
    assert backend.calls[1].prompt == TextPrompt("Q: 1+1?\nA:2\nSure? ")
    assert state.meta("answer").reasoning == ("one, two",)
    assert state.get_meta_info("answer")["reasoning_content"] == "one, two"


def test_a_stream_has_them_apart_too() -> None:
    backend = phloem.MockBackend({"answer": "<think>one, two</think>2", "sure": "Yes"})
    stream = solve.stream(backend=backend)
    assert "".join(stream) == "Q: 1+1?\nA:2\nSure? Yes"
    assert "".join(stream.text_iter("answer")) == "2"
    pieces = list(stream.text_iter("answer_reasoning_content"))
    assert "".join(pieces) == "one, two"
    assert len(pieces) > 1


def test_several_answers_have_their_own_thoughts() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += "Q" + phloem.separate_reasoning(phloem.gen("x", n=2), "qwen3")

    state = program.run(backend=phloem.MockBackend({"x": ["<think>a</think>1", "2"]}))
    assert (state["x"], state["x_reasoning_content"]) == (["1", "2"], ["a", ""])


class Separating(phloem.MockBackend):
    """Tells thoughts and answer apart itself, as servers do for chats."""

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        self.calls.append(call)
        yield Delta(reasoning="let me ")
        yield Delta(reasoning="see")
        yield Delta(text="</think> is a mark")
        yield Delta(finish="stop")


def test_what_the_backend_has_told_apart_is_not_searched_for_marks() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += phloem.user("Q")
        s += phloem.separate_reasoning(phloem.assistant(phloem.gen("x")), "deepseek-r1")

    backend = Separating()
    state = program.run(backend=backend)
    assert state["x"] == "</think> is a mark"
    assert state["x_reasoning_content"] == "let me see"
    assert isinstance(backend.calls[0].prompt, ChatPrompt)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("message", ["message", "delta"])
def test_servers_tell_them_apart_by_two_names(message: str, field: str) -> None:
    choice = {"index": 0, message: {"content": "Yes.", field: "Hm."}, "finish_reason": "stop"}
    (delta,) = reply_deltas(json.dumps({"choices": [choice]}).encode())
    assert delta == Delta(text="Yes.", reasoning="Hm.", finish="stop")


def test_without_it_thoughts_are_in_the_meta_only() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += phloem.user("Q") + phloem.assistant(phloem.gen("x"))

    state = program.run(backend=Separating())
    assert state.meta("x").reasoning == ("let me see",)
    assert "x_reasoning_content" not in state


def test_a_text_under_a_constraint_has_no_thoughts() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += "Q" + phloem.separate_reasoning(phloem.gen("x", schema=int), "deepseek-r1")

    state = program.run(backend=phloem.MockBackend({"x": "36"}))
    assert (state["x"], state["x_reasoning_content"]) == (36, "")


def test_a_failed_call_fails_both() -> None:
    backend = phloem.MockBackend({"answer": ValueError("no"), "sure": "Yes"})
    state = solve.run(backend=backend)
    for name in ("answer", "answer_reasoning_content"):
        with pytest.raises(phloem.GenerationError, match="'answer' failed: ValueError: no"):
            state[name]

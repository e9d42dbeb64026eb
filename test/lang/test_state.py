"""What a program does with its state, on a scripted model."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

import phloem
from phloem.lang.backend.base import ChatPrompt, Message, TextPrompt, TokenLogprob
from phloem.lang.backend.mock import MockReply
from phloem.lang.sampling import DEFAULT_MAX_TOKENS, Sampling
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(30)


def run(body: Callable[..., Any], backend: phloem.MockBackend, **options: Any) -> State:
    return phloem.function(body).run(backend=backend, **options)


def test_plain_text_goes_on_from_all_text() -> None:
    def body(s: State) -> None:
        s += "The capital of France is"
        s += phloem.gen("city", stop=".") + " and of Italy "
        s += phloem.gen("other")

    backend = phloem.MockBackend({"city": " Paris", "other": "Rome"})
    state = run(body, backend)
    assert state.text() == "The capital of France is Paris and of Italy Rome"
    assert [call.prompt for call in backend.calls] == [
        TextPrompt("The capital of France is"),
        TextPrompt("The capital of France is Paris and of Italy "),
    ]
    assert backend.calls[0].sampling == Sampling(stop=(".",), max_tokens=DEFAULT_MAX_TOKENS)
    assert state.messages() == []
    assert state.error() is None


def test_roles_become_messages_and_an_open_answer_is_continued() -> None:
    def body(s: State) -> None:
        s += phloem.system("Be brief.")
        with s.user():
            s += "Count "
            s += "to two."
        with s.assistant():
            s += "Sure: "
            s += phloem.gen("one")
            s += ", "
            s += phloem.gen("two")
        s.user("Again.")
        s.assistant(phloem.gen("again"))

    backend = phloem.MockBackend({"one": "1", "two": "2", "again": "No."})
    state = run(body, backend)
    before = (Message("system", "Be brief."), Message("user", "Count to two."))
    assert [call.prompt for call in backend.calls] == [
        ChatPrompt(before, "Sure: "),
        ChatPrompt(before, "Sure: 1, "),
        ChatPrompt((*before, Message("assistant", "Sure: 1, 2"), Message("user", "Again.")), ""),
    ]
    assert state.messages()[-1] == {"role": "assistant", "content": "No."}
    assert state.text() == (
        "system: Be brief.\nuser: Count to two.\nassistant: Sure: 1, 2\n"
        "user: Again.\nassistant: No."
    )


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda s: s.__iadd__("text").user("x"), "after plain text"),
        (lambda s: (s.user("q"), s.__iadd__("loose")), "'loose' outside of any message"),
        (lambda s: (s.user("q"), s.__iadd__(phloem.gen("a"))), "outside of any message"),
        (lambda s: s.user("q" + phloem.gen("a")), "not into user"),
        (lambda s: s.user(phloem.assistant("x")), "do not nest"),
    ],
)
def test_chat_and_text_do_not_mix(build: Callable[[State], Any], reason: str) -> None:
    with pytest.raises(phloem.UsageError, match=reason):
        run(build, phloem.MockBackend())


@pytest.mark.parametrize("value", [None, 3, ["a"], b"x"])
def test_only_text_and_expressions_are_appended(value: Any) -> None:
    def body(s: State) -> None:
        s += value

    with pytest.raises(TypeError):
        run(body, phloem.MockBackend())


def test_variables() -> None:
    def body(s: State) -> str:
        s["given"] = {"any": "thing"}
        assert "given" in s
        assert "word" not in s
        s += "say " + phloem.gen("word")
        s["given"] = s["word"].upper()  # assignment may replace
        s += s["given"]
        return "result"

    state = run(body, phloem.MockBackend({"word": "ho"}))
    assert (state["word"], state["given"], state.returned) == ("ho", "HO", "result")
    assert state.text() == "say hoHO"
    with pytest.raises(KeyError, match=r"no variable 'x'.*'given', 'word'"):
        state["x"]
    with pytest.raises(phloem.UsageError, match="ended"):
        state += "late"


def test_a_name_stands_for_what_was_bound_to_it_last() -> None:
    def body(s: State) -> None:
        seen = []
        for step in range(3):
            s += f" {step}:" + phloem.gen("x")
            seen.append(s["x"])
        s["seen"] = seen
        s += phloem.select("x", ["!"])

    state = run(body, phloem.MockBackend({"x": ["a", "b", "c"]}))
    assert (state["seen"], state["x"]) == (["a", "b", "c"], "!")
    assert state.text() == " 0:a 1:b 2:c!"


def test_several_answers_are_a_list_to_choose_from() -> None:
    def body(s: State) -> None:
        s += "Pick: "
        s += phloem.gen("options", n=3)
        s += sorted(s["options"])[0] + "!"
        s += phloem.gen("end")

    backend = phloem.MockBackend({"options": ["c", "a", "b"], "end": "."})
    state = run(body, backend)
    assert state["options"] == ["c", "a", "b"]
    assert state.meta("options").finish_reasons == ("stop",) * 3
    assert backend.calls[1].prompt == TextPrompt("Pick: a!")


def test_n_of_the_run_counts_too() -> None:
    def body(s: State) -> None:
        s += "Pick: " + phloem.gen("x")

    state = run(body, phloem.MockBackend({"x": ["a", "b"]}), n=2)
    assert (state["x"], state.text()) == (["a", "b"], "Pick: ")


def test_options_of_run_are_defaults_of_its_calls() -> None:
    def body(s: State, seed: str) -> None:
        s += seed + phloem.gen("a") + phloem.gen("b", temperature=0.5, max_tokens=9)

    backend = phloem.MockBackend({"a": "1", "b": "2"})
    state = run(body, backend, seed="the function's own", temperature=0.0)
    assert state.arguments == {"seed": "the function's own"}
    assert [call.sampling for call in backend.calls] == [
        Sampling(temperature=0.0, max_tokens=DEFAULT_MAX_TOKENS),
        Sampling(temperature=0.5, max_tokens=9),
    ]


def test_select_takes_the_likeliest_and_tells_why() -> None:
    def body(s: State) -> None:
        s += "Is it?"
        s += phloem.gen("answer", choices=[" YES", " NO"], return_logprob=True)
        s += phloem.select("sure", [" a", " bcd"], choices_method="greedy_token_selection")

    backend = phloem.MockBackend(scores={" YES": -3.0, " NO": [-0.1, -0.3], " a": -5, " bcd": -1})
    state = run(body, backend)
    assert state.text() == "Is it? NO bcd"
    info = state.get_meta_info("answer")
    assert ["".join(tokens) for tokens in info["choice_tokens"]] == [" YES", " NO"]
    assert info["choice_logprobs"] == [[-3.0], [-0.1, -0.3]]
    assert info["choice_values"] == pytest.approx([-3.0, -0.2])
    assert backend.scored[1] == (TextPrompt("Is it? NO"), (" a", " bcd"))


def test_unconditional_method_asks_twice() -> None:
    def body(s: State) -> None:
        s += "Q" + phloem.select(
            "a", ["x", "y"], choices_method="unconditional_likelihood_normalized"
        )

    backend = phloem.MockBackend(scores={"x": -1, "y": -1})
    state = run(body, backend)
    assert state["a"] == "x"
    assert [prompt for prompt, _ in backend.scored] == [TextPrompt("Q"), TextPrompt("\n")]
    assert state.meta("a").values == (0.0, 0.0)


def test_meta() -> None:
    def body(s: State) -> None:
        s += "two words" + phloem.gen("x", logprobs=1)

    logprobs = (TokenLogprob("hi", -0.5, (("ho", -1.0),)),)
    reply = MockReply("hi", "length", matched=None, logprobs=logprobs)
    meta = run(body, phloem.MockBackend({"x": reply})).meta("x")
    assert (meta.usage.prompt_tokens, meta.usage.completion_tokens) == (2, 1)
    assert (meta.finish_reason, meta.logprobs) == ("length", (logprobs,))
    info = meta.as_dict()
    assert info["output_token_logprobs"] == [(-0.5, None, "hi")]
    assert info["output_top_logprobs"] == [[(-1.0, None, "ho")]]
    assert info["finish_reason"] == {"type": "length", "length": 1}


@pytest.mark.parametrize(
    ("options", "text", "whole"),
    [
        ({"json_schema": {"type": "object"}}, '{"a": 1}', True),
        ({"json_schema": {"type": "object"}}, '{"a": 1', False),
        ({"regex": "a+"}, "aaa", True),
        ({"regex": "a+b"}, "aaa", False),
        ({"regex": "(a+)+b"}, "a" * 200, False),  # exponential for a backtracking engine
        ({"regex": "(?=a)a"}, "a", False),  # cannot be shown to be whole
        ({}, "any", True),
    ],
)
def test_an_answer_cut_off_inside_its_constraint_is_an_error(
    options: dict[str, Any], text: str, whole: bool
) -> None:
    def body(s: State) -> None:
        s += "x" + phloem.gen("x", max_tokens=5, **options)

    state = run(body, phloem.MockBackend({"x": MockReply(text, "length")}))
    if whole:
        assert state["x"] == text
        return
    with pytest.raises(phloem.GenerationError, match="max_tokens=5") as caught:
        state["x"]
    assert isinstance(caught.value.cause, phloem.Truncated)


def test_programs_call_programs() -> None:
    @phloem.function
    def ask(s: State, question: str, name: str) -> str:
        s += question + phloem.gen(name)
        return str(s[name])

    @phloem.function
    def both(s: State) -> list[str]:
        return [ask(s, "1?", "a"), ask(s, " 2?", name="b")]

    state = both.run(backend=phloem.MockBackend({"a": "A", "b": "B"}))
    assert (state.returned, state.text()) == (["A", "B"], "1?A 2?B")
    with pytest.raises(TypeError, match="too many positional arguments"):
        ask("not a state", "q", "n")  # type: ignore[call-overload]


def test_what_cannot_be_a_program() -> None:
    with pytest.raises(TypeError, match="first parameter"):
        phloem.function(lambda: None)  # type: ignore[arg-type, misc]
    with pytest.raises(TypeError, match="plain def"):

        @phloem.function
        async def coroutine(s: State) -> None: ...

    with pytest.raises(TypeError, match="backend would hide"):

        @phloem.function
        def clash(s: State, backend: int) -> None: ...


def test_arguments_are_checked_before_anything_runs() -> None:
    @phloem.function
    def program(s: State, city: str) -> None:
        raise AssertionError("ran")

    backend = phloem.MockBackend()
    with pytest.raises(TypeError, match="city"):
        program.run(backend=backend)
    with pytest.raises(TypeError, match="temprature"):
        program.run(city="x", temprature=1, backend=backend)
    with pytest.raises(ValueError, match="temperature"):
        program.run(city="x", temperature=-1, backend=backend)
    with pytest.raises(ValueError, match="timeout_s"):
        program.run(city="x", timeout_s=0, backend=backend)
    with pytest.raises(TypeError, match="a backend must be"):
        program.run(city="x", backend=3)  # type: ignore[arg-type]


def test_default_backend() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += "x" + phloem.gen("x")

    with pytest.raises(phloem.UsageError, match="set_default_backend"):
        program.run()
    phloem.set_default_backend(phloem.MockBackend({"x": "default"}))
    try:
        assert program.run()["x"] == "default"
    finally:
        phloem.set_default_backend(None)


def test_first_program_of_the_issue() -> None:
    """Fork three ways, one JSON result."""

    @phloem.function
    def pick(s: State, city: str) -> None:
        s += phloem.user(f"Ideas for a day in {city}?")
        ideas = s.fork(3)
        ideas += phloem.assistant(phloem.gen("idea"))
        ideas.join()
        s += phloem.assistant("Ideas: " + "; ".join(s["idea"]))
        s += phloem.user("The best one, as JSON.")
        s += phloem.assistant(phloem.gen("best", json_schema={"type": "object"}))

    backend = phloem.MockBackend({"idea": ["a", "b", "c"], "best": '{"idea": "b"}'})
    state = pick.run(city="Oslo", backend=backend)
    assert json.loads(state["best"]) == {"idea": "b"}
    assert state.messages()[1] == {"role": "assistant", "content": "Ideas: a; b; c"}

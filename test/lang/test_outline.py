"""`trace`, `bind`, `cache`: what is known of a program before it runs."""

from __future__ import annotations

from typing import Any

import pytest

import phloem as sglang
from phloem.lang import ir
from phloem.lang.backend.base import ChatPrompt, Message, TextPrompt
from phloem.lang.outline import Forked, Outline
from phloem.lang.sampling import Sampling
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(30)


@sglang.function
def ask(s: State, prompt: str, question: str, times: int = 1) -> None:
    s += prompt
    s += "Q: One?\nA: 1\n"
    s += "Q: " + question + "\nA:" + sglang.gen("answer", stop="\n") + "!" * times


def test_nodes_are_what_is_appended() -> None:
    outline = ask.trace(prompt="Answer.\n")
    assert outline.nodes == [
        ir.Text("Answer.\n"),
        ir.Text("Q: One?\nA: 1\n"),
        ir.Text("Q: "),
        ir.Placeholder("argument", "question"),
        ir.Text("\nA:"),
        ir.Gen("answer", Sampling(stop=("\n",))),
        ir.Text("!"),
    ]
    assert outline.prefix() == TextPrompt("Answer.\nQ: One?\nA: 1\nQ: ")
    drawn = outline.last_node.print_graph_dfs()
    assert drawn == str(outline)
    assert drawn.splitlines()[0] == "ask(prompt, question, times)"
    assert "├ {question}" in drawn and "├ gen answer" in drawn


def test_an_f_string_around_an_argument_is_a_type_error() -> None:
    @sglang.function
    def wrong(s: State, question: str) -> None:
        s += f"I ask {question}"

    with pytest.raises(TypeError, match="argument 'question' has no text in an outline"):
        wrong.trace()
    assert wrong.trace(question="why").nodes == [ir.Text("I ask why")]


def test_roles_and_choices() -> None:
    @sglang.function
    def chat(s: State, thing: str) -> None:
        s += sglang.system("Be brief.")
        with s.user():
            s += "What is " + thing + "?"
        s.assistant("It is " + sglang.select("colour", ["red", "blue"]))
        s += sglang.user(s["colour"]) + sglang.assistant(sglang.gen("why", regex="[a-z]+"))

    outline = chat.trace()
    assert outline.prefix() == ChatPrompt((Message("system", "Be brief."),))
    assert str(outline).splitlines()[1:] == [
        "├ system:",
        "├ 'Be brief.'",
        "├ end of system",
        "├ user:",
        "├ 'What is '",
        "├ {thing}",
        "├ '?'",
        "├ end of user",
        "├ assistant:",
        "├ 'It is '",
        "├ select colour: 'red' | 'blue'",
        "├ end of assistant",
        "├ user:",
        "├ {s['colour']}",
        "├ end of user",
        "├ assistant:",
        "├ gen why: regex",
        "├ end of assistant",
    ]


def test_forks_and_programs_within() -> None:
    @sglang.function
    def expand(s: State, tip: Any) -> None:
        s += "More on " + tip + ":" + sglang.gen("more")

    @sglang.function
    def suggest(s: State, topic: str) -> None:
        s += "On " + topic + ": " + sglang.gen("tip", stop=".")
        branch = expand(tip=s["tip"])
        s += "More: " + branch["more"]
        forks = s.fork(2)
        for i in range(2):
            forks[i] += f"Tip {i}: " + sglang.gen("detail")
        s += forks[0]["detail"] + "\n"
        forks.join()
        for text in s["detail"]:
            s += text
        with s.var_scope("end"):
            s += sglang.gen("summary")
        s += s["end"]

    outline = suggest.trace()
    (forked,) = [node for node in outline.nodes if isinstance(node, Forked)]
    assert [state.nodes[0] for state in forked.states] == [ir.Text("Tip 0: "), ir.Text("Tip 1: ")]
    shown = str(outline)
    assert "├┬ fork 1\n│├ 'Tip 1: '\n│├ gen detail\n├ {s['detail']}" in shown
    assert "{s['detail[0]']}\n├ {s['detail[1]']}\n├ gen summary\n├ {s['end']}" in shown
    inner = expand.trace(tip="sleep")
    assert inner.nodes[0] == ir.Text("More on sleep:")


def test_what_has_no_value_in_an_outline() -> None:
    seen: list[str] = []

    @sglang.function
    def program(s: State, tool: str) -> None:
        s += "a" + sglang.gen("x") + sglang.gen("several", n=2)
        s["own"] = 3
        assert (s["own"], "x" in s, "y" in s) == (3, True, False)
        assert len(s["several"]) == 2
        if tool == "hammer" or s["x"] == "b":
            seen.append("a branch")
        s.sync()
        assert s.error() is None
        for read in (s.text, s.messages, s.text_iter, lambda: s.meta("x")):
            with pytest.raises(sglang.UsageError, match="has no model"):
                read()
        with pytest.raises(KeyError):
            s["y"]

    outline = program.trace()
    assert isinstance(outline, Outline)
    assert not seen
    program.trace(tool="hammer")
    assert seen


def test_mistakes_of_a_program_are_found() -> None:
    @sglang.function
    def program(s: State) -> None:
        s += sglang.user("Q")
        s += sglang.gen("x")

    with pytest.raises(sglang.UsageError, match="outside of any message"):
        program.trace()
    with pytest.raises(TypeError, match="nothing"):
        program.trace(nothing=1)


def test_bound_arguments_are_given() -> None:
    bound = ask.bind(prompt="P.")
    backend = sglang.MockBackend({"answer": "2"})
    for state in (
        bound.run("Two?", backend=backend),
        bound.run(question="Two?", backend=backend),
        *bound.run_batch([("Two?",), {"question": "Two?"}], backend=backend),
        bound.bind(question="Two?").run(backend=backend),
    ):
        assert state.error() is None
        assert state.text() == "P.Q: One?\nA: 1\nQ: Two?\nA:2!"
        assert state.arguments["prompt"] == "P."
    with pytest.raises(TypeError, match="prompt"):
        bound.run(prompt="Q.", question="Two?", backend=backend)
    with pytest.raises(TypeError, match="proompt"):
        ask.bind(proompt="P.")

    @sglang.function
    def outer(s: State) -> None:
        bound(s, "Two?", times=2)

    assert outer.run(backend=backend).text().endswith("A:2!!")


def test_cache_computes_the_constant_beginning() -> None:
    backend = sglang.MockBackend(lambda call: "")
    ask.bind(prompt="Answer.\n").cache(backend)
    ask.cache(backend)  # begins with an argument
    (call,) = backend.calls
    assert call.prompt == TextPrompt("Answer.\nQ: One?\nA: 1\nQ: ")
    assert call.sampling == Sampling(max_tokens=1)

    @sglang.function
    def branching(s: State, question: str) -> None:
        s += "Constant. "
        s += f"{question}"

    branching.cache(backend)
    assert backend.calls[1].prompt == TextPrompt("Constant. ")
    with pytest.raises(sglang.BackendError, match="no answer"):
        branching.cache(sglang.MockBackend())


def test_compile_says_what_to_do() -> None:
    with pytest.raises(sglang.UsageError, match=r"ask\.run"):
        ask.compile()

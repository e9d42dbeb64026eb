"""Programs run in a server, and run call by call: the states have the same in them, field by
field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import phloem
from phloem.lang.program import Program

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(120)]

# of a chat whose answers begin inside the model's thoughts
OPENED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
    "{% if false %}</think>{% endif %}"
)
SHOTS = "Q: 1+1 <think> add </think> 2\nQ: 2+2 <think> add </think> 4\nQ: 3+3"


@phloem.function
def measured(s: phloem.State) -> None:
    """Logprobs of every kind of call, and stops of every kind."""
    s += "One, two, three," + phloem.gen("next", max_tokens=6, logprobs=3, stop=[" six", "!"])
    s += phloem.gen("rest", max_tokens=4, return_logprob=True, stop_regex=r"e[a-z]+")
    s += "\nA name:" + phloem.gen("name", regex=" [A-Z][a-z]{2,6}", max_tokens=12, logprobs=1)
    s += phloem.gen_int("age", minimum=1, maximum=99, top_logprobs_num=2, max_tokens=6)
    s += phloem.gen("many", n=3, max_tokens=5, logprobs=2, stop="\n")
    s += phloem.select("kind", choices=[" cat", " dog"]) + phloem.select("only", choices=["!"])
    forks = s.fork(2)
    forks += lambda i: f" Fact {i}:" + phloem.gen("fact", max_tokens=5, logprobs=0, stop=".")
    forks.join()


@phloem.function
def talked(s: phloem.State) -> None:
    s += phloem.system("Be brief.") + phloem.user("Count to nine.")
    s += phloem.assistant("1, 2," + phloem.gen("count", max_tokens=12, logprobs=2, stop=" 5"))
    s += phloem.user("So " + s["count"] + ". And now?")
    s += phloem.assistant(phloem.gen("more", n=2, max_tokens=5, logprobs=1))
    s += phloem.user("Which?")
    s += phloem.assistant(phloem.select("which", choices=["one", "two"]))


@phloem.function
def thought_in_text(s: phloem.State) -> Any:
    """The model copies the marks of the examples before."""
    think = phloem.gen("sum", max_tokens=12, stop="\n", logprobs=0)
    s += SHOTS + phloem.separate_reasoning(think, model_type="qwen3")
    s += "\nQ: 4+4 <think>"
    again = phloem.gen("again", n=2, max_tokens=12, stop="\n")
    s += phloem.separate_reasoning(again, model_type="deepseek-r1")
    s += "\nIt was: " + s["sum_reasoning_content"] + phloem.gen("last", max_tokens=4)
    return s["again_reasoning_content"]


@phloem.function
def thought_in_chat(s: phloem.State) -> Any:
    """A constraint writes the marks where the server knows of none."""
    form = "<think>(one|two)</think>\n\n(yes|no)"
    s += phloem.user("Is water wet?")
    answer = phloem.gen("wet", regex=form, max_tokens=24, logprobs=1)
    s += phloem.assistant(phloem.separate_reasoning(answer, model_type="qwen3"))
    s += phloem.user("You thought " + s["wet_reasoning_content"] + ". Why?")
    s += phloem.assistant(phloem.gen("why", max_tokens=6))
    return s["wet"], s["wet_reasoning_content"]


@phloem.function
def thought_by_server(s: phloem.State) -> None:
    s += phloem.user("Is water wet?")
    answer = phloem.gen("wet", max_tokens=40, regex="yes|no") + phloem.gen("more", max_tokens=6)
    s += phloem.assistant(phloem.separate_reasoning(answer, model_type="deepseek-r1"))


def close(found: Any, expected: Any) -> bool:
    """Whether they are equal: numbers nearly, since rows of other calls stood beside them."""
    if isinstance(expected, dict):
        same = isinstance(found, dict) and found.keys() == expected.keys()
        return same and all(close(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        same = type(found) is type(expected) and len(found) == len(expected)
        return same and all(map(close, found, expected))
    if isinstance(expected, float):
        return bool(found == pytest.approx(expected, abs=0.02))
    return bool(found == expected)


def compare(server: Any, program: Program[..., Any], names: Sequence[str]) -> phloem.State:
    """Run twice, so that both find the same in the cache."""
    for _ in range(2):
        state = program.run(backend=server.url, temperature=0)
        whole = program.run_remote(backend=server.url, temperature=0)
    assert (state.error(), whole.error()) == (None, None)
    assert (whole.text(), whole.messages()) == (state.text(), state.messages())
    assert whole.returned == state.returned
    for name in names:
        assert whole[name] == state[name], name
        found, expected = whole.get_meta_info(name), state.get_meta_info(name)
        assert close(found, expected), (name, found, expected)
        one, other = whole.meta(name), state.meta(name)
        for field in ("usage", "finish_reasons", "matched", "reasoning"):
            assert getattr(one, field) == getattr(other, field), (name, field)
        tokens = [[t.token for t in answer] for answer in other.logprobs]
        assert [[t.token for t in answer] for answer in one.logprobs] == tokens, name
    for span, other_span in zip(whole.trace.spans, state.trace.spans, strict=True):
        assert span.queue_s is not None or span.kind == "select"
        assert (span.first is None) == (other_span.first is None)
        assert span.finish == other_span.finish
    return whole


def test_logprobs_and_stops(server: Any) -> None:
    state = compare(
        server, measured, ["next", "rest", "name", "age", "many", "kind", "only", "fact"]
    )
    assert state.meta("next").matched == (" six",)
    assert state.get_meta_info("next")["finish_reason"] == {"type": "stop", "matched": " six"}
    assert len(state.meta("many").logprobs) == 3
    assert all(state.meta(name).logprobs[0] for name in ("next", "rest", "name", "age", "many"))
    assert len(state.meta("next").logprobs[0][0].top) >= 3


def test_logprobs_of_chats(server: Any) -> None:
    state = compare(server, talked, ["count", "more", "which"])
    assert state.meta("count").matched == (" 5",)
    assert all(len(one.top) == 2 for one in state.meta("count").logprobs[0])


def test_thoughts(server: Any) -> None:
    names = ["sum", "sum_reasoning_content", "again", "again_reasoning_content", "last"]
    state = compare(server, thought_in_text, names)
    for name in ("sum", "sum_reasoning_content"):
        assert state[name] and "think>" not in state[name]
    assert all(state["again"]) and all(state["again_reasoning_content"])
    state = compare(server, thought_in_chat, ["wet", "wet_reasoning_content", "why"])
    assert state["wet"] in ("yes", "no") and state["wet_reasoning_content"] in ("one", "two")
    assert "think>" not in state.text()


def test_thoughts_that_the_server_tells_apart(
    start_server: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    template = Path(tmp_path_factory.mktemp("template")) / "thinking.jinja"
    template.write_text(OPENED)
    thinker = start_server("--kv-tokens", "4096", "--chat-template", str(template))
    names = ["wet", "wet_reasoning_content", "more", "more_reasoning_content"]
    state = compare(thinker, thought_by_server, names)
    assert state["wet"] in ("yes", "no") and state["wet_reasoning_content"]
    thinker.stop()

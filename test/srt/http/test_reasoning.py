"""Reasoning: kept apart from the answer, asked for, bounded; constraints hold behind it."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained.spec import Deferred, JsonSchema, Regex, StructuralTag
from phloem.srt.generation import ReasoningMarks, Thoughts
from phloem.srt.http.reasoning import ReasoningParser, ReasoningPlan
from phloem.srt.http.tool_formats import FORMATS
from phloem.srt.http.tool_parser import (
    CallsParser,
    Reasoning,
    TextParser,
    ToolArguments,
    ToolStart,
)

MARKS = ReasoningMarks(begin="<think>", end="</think>", switch="enable_thinking")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


def run(
    text: str, cuts: list[int], *, tools: bool = False, opened: bool = False, **options: bool
) -> tuple[str, str, list[str]]:
    """Reasoning, content and arguments of a text that is cut at `cuts`."""
    inner = CallsParser(FORMATS["hermes"].syntax) if tools else TextParser()
    parser = ReasoningParser(inner, ReasoningPlan(MARKS, opened, **options))
    places = sorted({min(c, len(text)) for c in cuts} | {0, len(text)})
    pieces = [p for a, b in pairwise(places) for p in parser.feed(text[a:b])] + parser.finish()
    calls: list[str] = []
    for piece in pieces:
        if isinstance(piece, ToolStart):
            calls.append("")
        if isinstance(piece, ToolArguments):
            calls[-1] += piece.text
    assert all(p != "" and p != Reasoning("") for p in pieces)
    thoughts = "".join(p.text for p in pieces if isinstance(p, Reasoning))
    return thoughts, "".join(p for p in pieces if isinstance(p, str)), calls


@pytest.mark.parametrize(
    ("text", "opened", "thoughts", "content"),
    [
        ("<think>\nhm, yes\n</think>\n\nHello", False, "hm, yes", "Hello"),
        ("\nhm\n\nmore </thin\n</think>Hello\n", True, "hm\n\nmore </thin", "Hello\n"),
        ("Hello <think>x</think>", False, "", "Hello <think>x</think>"),
        ("<think>\n\n</think>\n\nHello", False, "", "Hello"),
        ("<think>hm", False, "hm", ""),
        ("hm </thi", True, "hm </thi", ""),
        ("<thin", False, "", "<thin"),
        (" <think>a</think> b", False, "a", " b"),
        ("a</think>b</think>c", True, "a", "b</think>c"),
        ("", True, "", ""),
    ],
)
def test_thoughts_and_answer(text: str, opened: bool, thoughts: str, content: str) -> None:
    for cuts in ([], list(range(len(text))), [3, 8, 11]):
        assert run(text, cuts, opened=opened) == (thoughts, content, [])
        # Not separated, it is the text as it was written; not streamed, in one piece.
        assert run(text, cuts, opened=opened, separate=False) == ("", text, [])
        assert run(text, cuts, opened=opened, stream=False) == (thoughts, content, [])
        assert run(text, cuts, opened=opened, include=False) == ("", content, [])


_texts = st.lists(
    st.text(alphabet="a<>/think \n", max_size=8)
    | st.sampled_from(
        [
            "<think>",
            "</think>",
            "<tool_call>",
            '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        ]
    ),
    max_size=6,
).map("".join)


@given(
    text=_texts,
    cuts=st.lists(st.integers(0, 120), max_size=12),
    opened=st.booleans(),
    tools=st.booleans(),
    separate=st.booleans(),
    stream=st.booleans(),
)
def test_any_split_says_the_same(
    text: str, cuts: list[int], opened: bool, tools: bool, separate: bool, stream: bool
) -> None:
    options: Any = {"opened": opened, "tools": tools, "separate": separate}
    whole = run(text, [], **options)
    assert run(text, cuts, **options, stream=stream) == whole
    assert run(text, list(range(len(text))), **options) == whole


def test_calls_in_thoughts_are_thoughts() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>maybe {call}</think>\n\n{call}"
    assert run(text, [5, 30, 70], tools=True) == (f"maybe {call}", "", ['{"a": 1}'])


def test_thoughts_stream_as_they_come() -> None:
    parser = ReasoningParser(TextParser(), ReasoningPlan(MARKS, opened=True))
    assert parser.feed("so \n") == [Reasoning("so")]
    assert parser.feed("it is</") == [Reasoning(" \nit is")]
    assert parser.feed("think>") == []
    assert parser.feed("\nYes") == ["Yes"]


# ------------------------------------------------------------------ routes


@pytest.fixture
def thinker(engine: Any, script: Any) -> Any:
    engine.reasoning = MARKS
    engine.script = lambda r: script(["<th", "ink>\nhm", "m\n</think>", "\n\nHel", "lo"])
    return engine


async def streamed(api: Any, **body: object) -> tuple[str, str]:
    events = (await api.chat(**body, stream=True)).events
    deltas = [e["choices"][0]["delta"] for e in events if e["choices"]]
    thoughts = "".join(d.get("reasoning_content", "") for d in deltas)
    return thoughts, "".join(d.get("content", "") for d in deltas)


async def test_reasoning_is_apart(api: Any, thinker: Any) -> None:
    message = (await api.chat()).json["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hmm", "Hello")
    assert await streamed(api) == ("hmm", "Hello")
    assert await streamed(api, stream_reasoning=False) == ("hmm", "Hello")
    raw = "<think>\nhmm\n</think>\n\nHello"
    assert await streamed(api, separate_reasoning=False) == ("", raw)
    assert await streamed(api, include_reasoning=False) == ("", "Hello")
    assert (
        "reasoning_content"
        not in (await api.chat(include_reasoning=False)).json["choices"][0]["message"]
    )
    assert thinker.requests[0].thoughts == Thoughts("<think>", "</think>", opened=False)
    assert thinker.requests[0].constraint is None


async def test_the_prompt_may_have_opened_or_closed_it(api: Any, thinker: Any, script: Any) -> None:
    thinker.script = lambda r: script(["hm</think>", "Hello"])
    thinker.opening = "<assistant><think>\n"
    assert await streamed(api, regex="a+") == ("hm", "Hello")
    sent = thinker.requests[-1]
    assert sent.thoughts.opened
    assert sent.constraint == Deferred(constraint=Regex(pattern="a+"), end="</think>")
    thinker.opening = "<assistant><think>\n\n</think>\n\n"
    assert await streamed(api, regex="a+") == ("", "hm</think>Hello")
    sent = thinker.requests[-1]
    assert (sent.thoughts, sent.constraint) == (None, Regex(pattern="a+"))
    thinker.opening = ""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>so"}]
    assert await streamed(api, messages=messages, continue_final_message=True) == ("hm", "Hello")
    messages[1]["content"] = "<think>so</think>I"
    assert await streamed(api, messages=messages, continue_final_message=True) == (
        "",
        "hm</think>Hello",
    )


async def test_constraints_hold_behind_it(api: Any, thinker: Any, script: Any) -> None:
    thinker.script = lambda r: script(["<think>{", '"b"}</think>', '\n\n{"a"', ": 1}"])
    reply = await api.chat(response_format=FORM, thinking_token_budget=7)
    (choice,) = reply.json["choices"]
    assert (choice["message"]["content"], choice["constraint_valid"]) == ('{"a": 1}', True)
    sent = thinker.requests[0].constraint
    assert isinstance(sent, Deferred)
    assert isinstance(sent.constraint, JsonSchema)
    assert (sent.begin, sent.end, sent.budget) == ("<think>", "</think>", 7)
    events = (
        await api.chat(response_format=FORM, stream=True, stream_options={"include_fields": True})
    ).events
    fields = [f for e in events for c in e["choices"] for f in c.get("fields", [])]
    assert fields == [{"path": "/a", "value": 1}]
    thinker.script = lambda r: script(["<think>hm</think>", '\n\n{"b"', ": 1}"])
    assert (await api.chat(response_format=FORM)).status == 500
    # It need not think, and where the client placed the constraint it stays there.
    thinker.script = lambda r: script(['{"a"', ": 1}"])
    reply = await api.chat(response_format=FORM)
    assert reply.json["choices"][0]["constraint_valid"] is True
    await api.chat(regex="a", constraint_after="ANSWER:")
    assert thinker.requests[-1].constraint == Deferred(constraint=Regex(pattern="a"), end="ANSWER:")


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("auto", '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'),
        ("required", '{"name": "f", "arguments": {"a": 1}}'),
        ({"type": "function", "function": {"name": "f"}}, '{"a": 1}'),
    ],
)
async def test_calls_behind_it(
    api: Any, thinker: Any, script: Any, choice: object, text: str
) -> None:
    thinker.script = lambda r: script(["<think>hm", "</think>\n\n", text[:9], text[9:]])
    (whole,) = (await api.chat(tools=TOOLS, tool_choice=choice)).json["choices"]
    assert whole["message"]["reasoning_content"] == "hm"
    (call,) = whole["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    assert whole["finish_reason"] == ("stop" if isinstance(choice, dict) else "tool_calls")
    sent = thinker.requests[0].constraint
    assert isinstance(sent, Deferred)
    assert isinstance(sent.constraint, StructuralTag) == (choice == "auto")


async def test_a_budget_without_a_constraint(api: Any, thinker: Any) -> None:
    await api.chat(thinking_token_budget=7)
    assert thinker.requests[0].constraint == Deferred(
        constraint=None, begin="<think>", end="</think>", budget=7
    )
    thinker.opening = "<think>\n"
    reply = await api.chat(thinking_token_budget=0)
    assert "constraint" not in reply.json
    assert thinker.requests[1].constraint == Deferred(constraint=None, end="</think>", budget=0)


@pytest.mark.parametrize(
    ("marks", "effort", "kwargs", "budget"),
    [
        ({"switch": "enable_thinking"}, "none", {"enable_thinking": False}, None),
        ({"switch": "enable_thinking"}, "low", {"enable_thinking": True}, None),
        (
            {"switch": "thinking", "efforts": True},
            "high",
            {"thinking": True, "reasoning_effort": "high"},
            None,
        ),
        ({"efforts": True}, "minimal", {"reasoning_effort": "minimal"}, None),
        ({}, "none", None, 0),
        ({}, "high", None, None),
    ],
)
async def test_efforts(
    api: Any,
    thinker: Any,
    marks: dict[str, Any],
    effort: str,
    kwargs: dict[str, object] | None,
    budget: int | None,
) -> None:
    thinker.reasoning = ReasoningMarks(begin="<think>", end="</think>", **marks)
    thinker.opening = "<think>"
    await api.chat(reasoning_effort=effort)
    assert thinker.rendered[0]["template_kwargs"] == kwargs
    sent = thinker.requests[0].constraint
    assert (None if sent is None else sent.budget) == budget


async def test_a_model_that_does_not_reason(api: Any, engine: Any) -> None:
    for body in (
        {"reasoning_effort": "none"},
        {"separate_reasoning": True, "stream_reasoning": False, "include_reasoning": True},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        reply = await api.chat(**body)
        assert reply.json["choices"][0]["message"]["content"] == "Hello world."
        assert engine.requests[-1].thoughts is None
    for name, value in (("reasoning_effort", "high"), ("thinking_token_budget", 5)):
        reply = await api.chat(**{name: value})
        assert (reply.status, reply.json["error"]["param"]) == (400, name)
        reply = await api.complete(**{name: value})
        assert (reply.status, reply.json["error"]["param"]) == (400, name)


async def test_contradictions(api: Any, thinker: Any) -> None:
    reply = await api.chat(
        reasoning_effort="none", chat_template_kwargs={"enable_thinking": True, "x": 1}
    )
    assert reply.json["error"]["param"] == "chat_template_kwargs.enable_thinking"
    assert (await api.chat(reasoning_effort="some")).json["error"]["param"] == "reasoning_effort"
    reply = await api.chat(chat_template_kwargs={"enable_thinking": True, "x": 1})
    assert thinker.rendered[0]["template_kwargs"] == {"enable_thinking": True, "x": 1}


async def test_its_tokens_are_in_the_usage(api: Any, thinker: Any, script: Any) -> None:
    thinker.script = lambda r: script(["<think>", "a", "</think>", "b"], reasoning_tokens=3)
    for body in ({}, {"n": 2}):
        usage = (await api.chat(**body)).json["usage"]
        assert usage["completion_tokens_details"]["reasoning_tokens"] == 3 * body.get("n", 1)

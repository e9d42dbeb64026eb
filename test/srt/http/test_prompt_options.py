"""Fields that shape the prompt and the draw: cut, fill in, echo, documents, words, best_of."""

from __future__ import annotations

import re
from typing import Any

import pytest

from phloem.constrained.spec import Regex
from phloem.srt.errors import InvalidRequest, PromptTooLong

CHAT_PROMPT = list(b"<user>Hi")


def ok(reply: Any) -> Any:
    assert reply.status == 200, reply.raw
    return reply.json


@pytest.mark.parametrize(
    ("fields", "left"),
    [
        ({"truncate_prompt_tokens": 4}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, slice(-4, None)),
        ({"truncate_prompt_tokens": 4, "truncation_side": "right"}, slice(None, 4)),
        ({"truncate_prompt_tokens": 8}, slice(None)),
        ({"truncate_prompt_tokens": -1}, slice(None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 509}, slice(-3, None)),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10**6}, slice(-1, None)),
    ],
)
async def test_prompts_are_cut(
    api: Any, engine: Any, fields: dict[str, object], left: slice
) -> None:
    cut = len(CHAT_PROMPT[left]) < 8
    for reply in (await api.chat(**fields), await api.complete(prompt="<user>Hi", **fields)):
        told = [one["param"] for one in ok(reply).get("warnings", [])]
        assert ("truncate_prompt_tokens" in told) == cut
    assert [r.prompt for r in engine.requests] == [CHAT_PROMPT[left]] * 2


async def test_the_echo_of_a_cut_prompt_is_what_is_left(api: Any) -> None:
    reply = ok(await api.complete(prompt="abcdef", echo=True, truncate_prompt_tokens=2))
    assert reply["choices"][0]["text"] == "efHello world."


async def test_a_prompt_without_the_opening_token(api: Any, engine: Any) -> None:
    ok(await api.complete(prompt="ab", add_special_tokens=False))
    ok(await api.chat(add_special_tokens=False))
    assert engine.tokenized == [("ab", True, False)]
    assert engine.requests[0].prompt == [97, 98]


async def test_filling_in(api: Any, engine: Any) -> None:
    engine.fills_in = True
    reply = ok(await api.complete(prompt=["a", ""], suffix="z", stop_token_ids=[9]))
    assert len(reply["choices"]) == 2
    assert [r.prompt for r in engine.requests] == [[1, 97, 2, 122, 3], [1, 2, 122, 3]]
    assert {r.sampling.stop_token_ids for r in engine.requests} == {(9, 4)}
    for body, param in (
        ({"prompt": [1, 2]}, "prompt"),
        ({"echo": True}, "echo"),
        ({"truncate_prompt_tokens": 3}, "truncate_prompt_tokens"),
        ({"add_special_tokens": False}, "add_special_tokens"),
    ):
        refused = await api.complete(suffix="z", **body)
        assert (refused.status, refused.json["error"]["param"]) == (400, param)
    engine.fills_in = False
    assert (await api.complete(suffix="z")).json["error"]["param"] == "suffix"


async def test_documents_reach_the_template(api: Any, engine: Any) -> None:
    documents = [{"title": "t", "text": "x"}]
    ok(await api.chat(documents=documents))
    ok(await api.chat(documents=[]))
    assert [one["documents"] for one in engine.rendered] == [documents, None]


@pytest.mark.parametrize("stream", [False, True])
async def test_echo_in_a_chat_that_goes_on(api: Any, stream: bool) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "1, 2, "},
    ]
    fields: dict[str, object] = {"messages": messages, "continue_final_message": True}
    reply = await api.chat(**fields, echo=True, stream=stream)
    if stream:
        text = "".join(e["choices"][0]["delta"].get("content", "") for e in reply.events)
    else:
        text = ok(reply)["choices"][0]["message"]["content"]
    assert text == "1, 2, Hello world."
    refused = await api.chat(echo=True)
    assert (refused.status, refused.json["error"]["param"]) == (400, "echo")


async def test_the_best_of_several(api: Any, engine: Any, script: Any) -> None:
    """The n of best_of whose tokens were likeliest on the whole, best first; all are paid for."""
    texts = iter(["bad", "best", "worst", "good"] * 2)
    scores = {"bad": -3.0, "best": -0.5, "worst": -9.0, "good": -1.0}

    def write(request: Any) -> Any:
        text = next(texts)
        return script([text, "!"], logprob=scores[text])

    engine.script = write
    reply = ok(await api.complete(prompt=["a", "b"], n=2, best_of=4, seed=5))
    assert [c["text"] for c in reply["choices"]] == ["best!", "good!"] * 2
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    assert all(c["logprobs"] is None for c in reply["choices"])
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (2, 16)
    assert [r.sampling.seed for r in engine.requests] == [5, 6, 7, 8] * 2
    assert {r.sampling.logprobs for r in engine.requests} == {0}


async def test_as_many_as_wanted_need_no_ranking(api: Any, engine: Any) -> None:
    ok(await api.complete(n=2, best_of=2))
    assert {r.sampling.logprobs for r in engine.requests} == {None}


async def test_bad_words_are_a_constraint(api: Any, engine: Any) -> None:
    """It is one on the text, so no split into tokens gets around it."""
    reply = ok(await api.chat(bad_words=["a.c", "naïve\n"]))
    assert reply["constraint"]["kind"] == "regex"
    (request,) = engine.requests
    assert isinstance(request.constraint, Regex)
    pattern = re.compile(request.constraint.pattern)
    assert pattern.fullmatch("abc\nnaïve")
    assert not pattern.fullmatch("xa.cx")
    assert not pattern.fullmatch("naïve\n")
    ok(await api.complete(bad_words=[]))
    assert engine.requests[-1].constraint is None


async def test_allowed_tokens_and_patterns_reach_the_engine(api: Any, engine: Any) -> None:
    fields = {"allowed_token_ids": [3, 5], "stop_regex": ["a+", ""]}
    ok(await api.chat(**fields))
    ok(await api.complete(**fields))
    ok(await api.generate(text="a", sampling_params={"stop_regex": "a+"}))
    assert {r.stop_regex for r in engine.requests} == {("a+",)}
    assert [r.sampling.allowed_token_ids for r in engine.requests] == [(3, 5), (3, 5), ()]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_refuses_is_named_as_the_client_named_it(
    api: Any, engine: Any, script: Any, stream: bool
) -> None:
    async def params(error: Exception, **fields: object) -> list[str]:
        engine.script = lambda request: script(refusal=error)
        replies = [
            await api.chat(stream=stream, **fields),
            await api.complete(stream=stream, **fields),
            await api.generate(text="a", stream=stream),
            await api.generate(input_ids=[1], stream=stream),
        ]
        assert {reply.status for reply in replies} == {400}
        return [reply.json["error"]["param"] for reply in replies]

    too_long = PromptTooLong("too long", param="prompt", code="context_length_exceeded")
    assert await params(too_long) == ["messages", "prompt", "text", "input_ids"]
    short = InvalidRequest("too few", param="max_tokens", code="max_tokens_too_small")
    sampled = "sampling_params.max_new_tokens"
    assert await params(short) == ["max_tokens", "max_tokens", sampled, sampled]
    used = InvalidRequest("in use", param="rid")
    assert (await params(used, request_id="x"))[:2] == ["request_id"] * 2
    engine.script = lambda request: script(refusal=short)
    reply = await api.chat(max_completion_tokens=1)
    assert reply.json["error"]["param"] == "max_completion_tokens"

"""Backends for servers that are not Phloem's: what they send, and what they make of odd replies.
What all backends do alike is in test/contract/test_lang_backends.py."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import phloem
from phloem.constrained.spec import Choice, JsonObject, JsonSchema, Regex, Whitespace
from phloem.lang.backend.anthropic import AnthropicBackend
from phloem.lang.backend.base import Backend, Call, ChatPrompt, Delta, Message, TextPrompt
from phloem.lang.backend.openai import OpenAIBackend
from phloem.lang.choices import ChoicesMethod
from phloem.lang.sampling import Sampling

pytestmark = pytest.mark.timeout(30)

PAGE = Path(__file__).parents[2] / "docs" / "dsl-backends.md"
HELLO = ChatPrompt((Message("user", "Hello"),))
SCHEMA = JsonSchema(schema='{"type": "object"}', whitespace=Whitespace.COMPACT)


class Scripted:
    """A server that gives `reply` (or what that function of the body gives) and remembers."""

    def __init__(self, reply: Any) -> None:
        self.reply = reply
        self.paths: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[Any] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.paths.append(request.path)
        self.headers.append(request.headers)
        body = await request.json() if request.can_read_body else {}
        self.bodies.append(body)
        reply = self.reply(body) if callable(self.reply) else self.reply
        if isinstance(reply, str):
            return web.Response(text=reply, content_type="text/event-stream")
        return web.json_response(reply)


@asynccontextmanager
async def over(
    script: Scripted, make: Callable[..., Backend], *args: Any, path: str = "", **options: Any
) -> AsyncIterator[Any]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", script.handle)
    async with TestServer(app) as server:
        url = str(server.make_url(path or "/"))
        backend = make(*args, base_url=url, **options)
        try:
            yield backend
        finally:
            await backend.aclose()


def call(
    prompt: Any = HELLO, constraint: Any = None, *, stream: bool = False, **options: Any
) -> Call:
    options.setdefault("max_tokens", 8)
    return Call(prompt, Sampling(**options), constraint, "x", stream)


async def ask(backend: Backend, asked: Call) -> list[Delta]:
    return [delta async for delta in backend.generate(asked)]


def said(text: str | None, **fields: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, **fields}
    return {"choices": [{"message": message, "finish_reason": "stop"}]}


# ----------------------------------------------------------------------- OpenAI's API


def test_what_cannot_be_a_backend() -> None:
    dialect: Any = "gpt"
    with pytest.raises(ValueError, match="dialect must be one of openai, vllm"):
        OpenAIBackend("http://h", dialect=dialect)
    kind: Any = "text"
    with pytest.raises(ValueError, match="kind must be"):
        OpenAIBackend("http://h", kind=kind)
    with pytest.raises(ValueError, match="must begin with http://"):
        OpenAIBackend("localhost:8080")
    with pytest.raises(ValueError, match="must begin with http://"):
        AnthropicBackend("m", base_url="localhost:8080")


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("", "/v1"),
        ("/v1", "/v1"),
        ("/a/b/", "/a/b"),
    ],
)
async def test_the_path_of_the_api(path: str, asked: str) -> None:
    script = Scripted(said("hi"))
    async with over(script, OpenAIBackend, path=path, model="m") as backend:
        await ask(backend, call())
    assert script.paths == [asked + "/chat/completions"]


async def test_what_openai_is_sent() -> None:
    script = Scripted(said("hi"))
    options: dict[str, Any] = {
        "api_key": "k",
        "headers": {"X-Org": "o"},
        "extra_body": {"store": False},
    }
    async with over(script, OpenAIBackend, model="m", **options) as backend:
        await ask(backend, call(temperature=0.5, stop=("a",), top_k=0, logit_bias={7: -1.0}))
        await ask(backend, call(TextPrompt("p"), logprobs=2))
    chat, completion = script.bodies
    assert chat == {
        "model": "m",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_completion_tokens": 8,
        "temperature": 0.5,
        "stop": ["a"],
        "logit_bias": {"7": -1.0},
        "store": False,
    }
    assert completion == {
        "model": "m",
        "prompt": "p",
        "max_tokens": 8,
        "logprobs": 2,
        "store": False,
    }
    assert script.headers[0]["Authorization"] == "Bearer k"
    assert script.headers[0]["X-Org"] == "o"
    assert script.headers[0]["X-Request-Id"] != script.headers[1]["X-Request-Id"]


async def test_older_servers_want_max_tokens() -> None:
    script = Scripted(said("hi"))
    async with over(script, OpenAIBackend, model="m", max_tokens_field="max_tokens") as backend:
        await ask(backend, call())
    assert script.bodies[0]["max_tokens"] == 8
    assert "max_completion_tokens" not in script.bodies[0]


async def test_a_server_of_one_kind() -> None:
    script = Scripted(said("hi"))
    async with over(script, OpenAIBackend, model="m", kind="chat") as backend:
        with pytest.raises(phloem.RequestRefused, match="chat only"):
            await ask(backend, call(TextPrompt("p")))
        with pytest.raises(phloem.RequestRefused, match="chat only"):
            await backend.score(TextPrompt("p"), ["a", "b"])
    async with over(script, OpenAIBackend, model="m", kind="completions") as backend:
        with pytest.raises(phloem.RequestRefused, match="completions only"):
            await ask(backend, call())
    assert script.bodies == []


async def test_the_one_model_is_asked_for_and_of_several_one_is_to_be_named() -> None:
    names = ["a"]
    script = Scripted(
        lambda body: said("hi") if body else {"data": [{"id": name} for name in names]}
    )
    async with over(script, OpenAIBackend) as backend:
        await ask(backend, call())
        await ask(backend, call())
    assert script.paths == ["/v1/models"] + ["/v1/chat/completions"] * 2
    assert script.bodies[-1]["model"] == "a"
    names.append("b")
    async with over(script, OpenAIBackend) as backend:
        with pytest.raises(phloem.RequestRefused, match="2 models"):
            await ask(backend, call())


@pytest.mark.parametrize(
    ("constraint", "text"),
    [
        (SCHEMA, "Sure! {}"),
        (JsonObject(), "[1]"),
        (Regex(pattern="[0-9]+"), "about 7"),
        (Choice(choices=("yes", "no")), "yes."),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_unenforced_constraint_is_an_error(
    constraint: Any, text: str, stream: bool
) -> None:
    whole = said(text)
    event = {"choices": [{"delta": {"content": text}, "finish_reason": "stop"}]}
    script = Scripted(f"data: {json.dumps(event)}\n\ndata: [DONE]\n\n" if stream else whole)
    async with over(script, OpenAIBackend, model="m", dialect="vllm") as backend:
        with pytest.raises(phloem.BackendError, match="did not enforce") as caught:
            await ask(backend, call(constraint=constraint, stream=stream))
        assert caught.value.code == "constraint_violated"
        # what a stop string may have cut is not judged
        await ask(backend, call(constraint=constraint, stream=stream, stop=("x",)))


@pytest.mark.parametrize("dialect", ["vllm", "vllm-guided"])
async def test_vllms_spellings(dialect: Any) -> None:
    script = Scripted(said("{}"))
    async with over(script, OpenAIBackend, model="m", dialect=dialect) as backend:
        for constraint in (SCHEMA, JsonObject(), Regex(pattern="{}"), Choice(choices=("{}",))):
            await ask(backend, call(constraint=constraint))
        spaced = JsonSchema(schema="{}", whitespace=Whitespace.SPACED)
        with pytest.raises(phloem.RequestRefused, match="no constraint 'json_schema'"):
            await ask(backend, call(constraint=spaced))
    sent = [
        {k: v for k, v in body.items() if k.startswith(("structured", "guided", "response"))}
        for body in script.bodies
    ]
    if dialect == "vllm":
        assert [one["structured_outputs"] for one in sent] == [
            {"json": {"type": "object"}, "disable_any_whitespace": True},
            {"json_object": True},
            {"regex": "{}"},
            {"choice": ["{}"]},
        ]
    else:
        assert sent == [
            {"guided_json": {"type": "object"}},
            {"response_format": {"type": "json_object"}},
            {"guided_regex": "{}"},
            {"guided_choice": ["{}"]},
        ]


async def test_llama_server_continues_by_streaming_only() -> None:
    """Its whole answers have the beginning in them, its streamed ones have not."""
    event = {"choices": [{"delta": {"content": " is"}, "finish_reason": "stop"}]}
    script = Scripted(f"data: {json.dumps(event)}\r\n\r\n: ping\n\ndata: [DONE]\n\n")
    async with over(script, OpenAIBackend, model="m", dialect="llama-server") as backend:
        deltas = await ask(backend, call(ChatPrompt(HELLO.messages, "It"), logprobs=0))
    assert "".join(delta.text for delta in deltas) == " is"
    body = script.bodies[0]
    assert (body["stream"], body["top_logprobs"]) == (True, 1)
    assert body["messages"][-1] == {"role": "assistant", "content": "It"}


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (said(None, refusal="I won't"), "refused: I won't"),
        ({"choices": [{"message": {}, "finish_reason": "content_filter"}]}, "content_filter"),
        (
            {"choices": [{"message": {}, "logprobs": {"tokens": ["a"], "token_logprobs": []}}]},
            "one a",
        ),
    ],
)
async def test_odd_replies(reply: Any, reason: str) -> None:
    async with over(Scripted(reply), OpenAIBackend, model="m") as backend:
        with pytest.raises(phloem.BackendError, match=reason):
            await ask(backend, call())


ENTRY = {"logprob": -1.0, "decoded_token": "a"}


@pytest.mark.parametrize(
    ("dialect", "reply", "reason"),
    [
        ("openai", {"choices": []}, "0 replies to 3"),
        ("openai", {"choices": [{"index": i, "text": "t"} for i in range(3)]}, "no logprobs"),
        ("vllm", {"choices": [{"index": i, "text": "t"} for i in range(3)]}, "no logprobs"),
        (
            "vllm",
            {
                "choices": [
                    {"index": i, "prompt_logprobs": [None, {"1": ENTRY}, None][: 2 + (i > 0)]}
                    for i in range(3)
                ]
            },
            "has no logprob",
        ),
    ],
)
async def test_odd_scores(dialect: Any, reply: Any, reason: str) -> None:
    async with over(Scripted(reply), OpenAIBackend, model="m", dialect=dialect) as backend:
        with pytest.raises(phloem.BackendError, match=reason):
            await backend.score(TextPrompt("p"), ["a", "b"])


async def test_a_generated_choice_is_one_of_them() -> None:
    script = Scripted({"choices": [{"text": "maybe", "finish_reason": "length"}]})
    options: dict[str, Any] = {"dialect": "vllm", "select_by_generation": True}
    async with over(script, OpenAIBackend, model="m", **options) as backend:
        method = ChoicesMethod.GREEDY_TOKEN_SELECTION
        with pytest.raises(phloem.BackendError, match="'maybe', which is no choice"):
            await backend.select(TextPrompt("p"), ["yes", "no"], method)
    assert script.bodies[0]["temperature"] == 0.0
    assert script.bodies[0]["max_tokens"] == 4  # each token is a byte at least, and an end


@pytest.mark.parametrize("text", ["no", '{"choice": "maybe"}', '{"choice": 1}', "[]", ""])
async def test_a_choice_generated_as_json_is_one_of_them(text: str) -> None:
    script = Scripted(said(text))
    async with over(script, OpenAIBackend, model="m", select_by_generation=True) as backend:
        method = ChoicesMethod.TOKEN_LENGTH_NORMALIZED
        with pytest.raises(phloem.BackendError):
            await backend.select(HELLO, ["yes", "no"], method)
        script.reply = said('{"choice": "no"}')
        assert (await backend.select(HELLO, ["yes", "no"], method)).index == 1
    (body, _) = script.bodies
    schema = body["response_format"]["json_schema"]
    assert schema["strict"] is True
    assert schema["schema"]["properties"] == {"choice": {"type": "string", "enum": ["yes", "no"]}}
    assert body["messages"] == [{"role": "user", "content": "Hello"}]
    assert (body["temperature"], "stop" in body) == (0.0, False)


# ----------------------------------------------------------------------- Anthropic's API


def message(text: str, **fields: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "stop_reason": "end_turn", **fields}


async def test_what_anthropic_is_sent() -> None:
    usage = {"input_tokens": 3, "cache_read_input_tokens": 4, "output_tokens": 5}
    script = Scripted(message("{}", usage=usage))
    prompt = ChatPrompt(
        (Message("system", "a"), Message("system", "b"), Message("user", "q")), "So "
    )
    async with over(script, AnthropicBackend, "m", api_key="k") as backend:
        deltas = await ask(backend, call(prompt, SCHEMA, top_k=0, stop=("x",)))
    assert script.bodies == [
        {
            "model": "m",
            "max_tokens": 8,
            "system": "a\n\nb",
            "messages": [
                {"role": "user", "content": "q"},
                {"role": "assistant", "content": "So "},
            ],
            "stop_sequences": ["x"],
            "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
        }
    ]
    assert script.paths == ["/v1/messages"]
    assert script.headers[0]["x-api-key"] == "k"
    assert script.headers[0]["anthropic-version"] == "2023-06-01"
    (told,) = [delta.usage for delta in deltas if delta.usage]
    assert (told.prompt_tokens, told.cached_tokens, told.completion_tokens) == (7, 4, 5)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        (call(TextPrompt("p")), "prompt"),
        (call(ChatPrompt((*HELLO.messages, Message("system", "late")))), "system"),
        (call(max_tokens=None), "max_tokens"),
        (call(logprobs=0), "logprobs"),
        (call(frequency_penalty=0.5), "frequency_penalty"),
        (call(constraint=JsonObject()), "json_object"),
    ],
)
async def test_what_anthropic_is_not_asked(asked: Call, param: str) -> None:
    script = Scripted(message("hi"))
    async with over(script, AnthropicBackend, "m") as backend:
        with pytest.raises(phloem.RequestRefused) as caught:
            await ask(backend, asked)
    assert (caught.value.param, caught.value.code) == (param, "unsupported")
    assert script.bodies == []


@pytest.mark.parametrize(
    ("reply", "error", "reason"),
    [
        (message("", stop_reason="refusal"), phloem.BackendError, "refusal"),
        (message("", stop_reason=None), phloem.BackendError, "stop_reason None"),
        ("data: {}\n\n", phloem.BackendError, "not what it should be"),
        (
            'data: {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}\n\n',
            phloem.BackendUnavailable,
            "busy",
        ),
        (
            'data: {"type": "error", "error": {"type": "api_error", "message": "oops"}}\n\n',
            phloem.BackendError,
            "oops",
        ),
        ('data: {"type": "ping"}\n\n', phloem.BackendUnavailable, "broke off"),
    ],
)
async def test_odd_answers_of_anthropic(reply: Any, error: type[Exception], reason: str) -> None:
    async with over(Scripted(reply), AnthropicBackend, "m") as backend:
        with pytest.raises(error, match=reason):
            await ask(backend, call(stream=isinstance(reply, str)))


async def test_thoughts_are_no_part_of_the_answer() -> None:
    reply = message("hi")
    reply["content"].insert(0, {"type": "thinking", "thinking": "hm", "signature": "s"})
    async with over(Scripted(reply), AnthropicBackend, "m") as backend:
        deltas = await ask(backend, call())
    assert "".join(delta.text for delta in deltas) == "hi"


async def test_one_failed_answer_of_several_ends_the_others() -> None:
    replies = iter([message("a"), message("", stop_reason="refusal"), message("c")])
    async with over(Scripted(lambda body: next(replies)), AnthropicBackend, "m") as backend:
        with pytest.raises(phloem.BackendError, match="refusal"):
            await ask(backend, call(n=3))


def test_the_pages_backends_can_be_made() -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(compile(code, str(PAGE), "exec"), {"phloem": phloem})

"""What the suite over all backends of the DSL needs: one fake model, and every backend over it.

Characters are tokens (with one merge, to test boundaries); an answer tells the end of the prompt
that the model saw.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import phloem
from phloem.constrained.spec import Choice, JsonSchema, Regex
from phloem.lang.backend import http_transport, retry
from phloem.lang.backend.anthropic import AnthropicBackend
from phloem.lang.backend.base import Backend, Call, Delta, TextPrompt, TokenLogprob
from phloem.lang.backend.dialects import DIALECTS
from phloem.lang.backend.http import HttpBackend
from phloem.lang.backend.local import LocalBackend
from phloem.lang.backend.mock import MockBackend, MockReply
from phloem.lang.backend.openai import OpenAIBackend
from phloem.srt.config import ServerOptions
from phloem.srt.errors import InvalidRequest, PhloemError, QueueFull
from phloem.srt.generation import (
    ChatMessage,
    Chunk,
    Finish,
    GenerateRequest,
    Health,
    InfillPrompt,
    Logprob,
    ModelCard,
)
from phloem.srt.http.app import create_app
from phloem.srt.messages import FinishReason, StatsSnapshot

MERGED = 1000  # the token "?Y"


def encode(text: str) -> list[int]:
    return [MERGED if part == "?Y" else ord(part) for part in re.findall(r"\?Y|[\s\S]", text)]


def spell(token: int) -> str:
    return "?Y" if token == MERGED else chr(token)


def decode(ids: list[int]) -> str:
    return "".join(map(spell, ids))


def logprob(token: int) -> float:
    return -(token % 7 + 1) / 4


def render(messages: list[tuple[str, str]], *, open_end: bool) -> str:
    """A template: `role(content)`; an open assistant turn lacks its closing bracket."""
    text = "".join(f"{role}({content})" for role, content in messages)
    return text[:-1] if open_end else text + "assistant("


class Model:
    """What is behind each backend. `busy` requests are refused before one is taken."""

    merged = MERGED
    logprob = staticmethod(logprob)
    render = staticmethod(render)

    def __init__(self) -> None:
        self.busy = 0
        self.hanging = 0
        self.left = 0
        self.constraints: list[Any] = []
        self.ended: list[str] = []

    async def answer(
        self, prompt: str, index: int, max_tokens: int | None, stop: list[str]
    ) -> tuple[str, str, str | None]:
        """Text, finish reason, matched stop string."""
        if self.busy:
            self.busy -= 1
            raise QueueFull("the queue is full", retry_after=0.01)
        if "REFUSE" in prompt:
            raise InvalidRequest("no such thing", param="regex", code="bad")
        if "HANG" in prompt:
            self.hanging += 1
            try:
                await asyncio.sleep(3600)
            finally:
                self.left += 1
        text = "{}" if "JSON" in prompt else f"{index}:{prompt[-12:]}"
        for one in stop:
            if one in text:
                return text[: text.index(one)], "stop", one
        if max_tokens is not None and len(text) > max_tokens:
            return text[:max_tokens], "length", None
        return text, "stop", None


class Engine:
    """`EngineClient` over the model."""

    ask = watch = cast("Any", None)  # the DSL asks nothing of the cache
    stats = StatsSnapshot()
    card = msgspec.convert(
        dict.fromkeys(("path", "format", "architecture"), "")
        | dict.fromkeys(
            ("created", "vocab_size", "context_length", "kv_slots", "embedding_length"), 1001
        )
        | {"name": "fake", "embedding_length": 4},
        ModelCard,
    )

    def __init__(self, model: Model) -> None:
        self.model = model

    def health(self) -> Health:
        return Health(live=True, ready=True)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        ids = request.prompt if isinstance(request.prompt, list) else encode(request.prompt)
        sampling = request.sampling
        self.model.constraints.append(request.constraint)
        scored: list[Logprob | None] | None = None
        if request.prompt_logprobs_from is not None:
            start = request.prompt_logprobs_from
            scored = [None if i == 0 else entry(token) for i, token in enumerate(ids)][start:]
        if scored is not None and sampling.max_tokens == 0:
            yield Chunk(rid="r")
            end = Finish(FinishReason.LENGTH)
            yield Chunk(rid="r", prompt_tokens=len(ids), prompt_logprobs=scored, finish=end)
            return
        index = 0 if sampling.seed is None else sampling.seed - 7
        text, reason, matched = await self.model.answer(
            decode(ids), index, sampling.max_tokens, list(request.stop)
        )
        yield Chunk(rid="r", prompt_tokens=len(ids))
        for i, char in enumerate(text):
            logprobs = None if sampling.logprobs is None else [entry(ord(char), sampling.logprobs)]
            yield Chunk(rid="r", text=char, completion_tokens=i + 1, logprobs=logprobs)
        yield Chunk(
            rid="r",
            prompt_tokens=len(ids),
            completion_tokens=len(text),
            cached_tokens=1,
            prompt_logprobs=scored,
            finish=Finish(FinishReason(reason), matched),
        )

    async def tokenize(
        self, text: str, *, special: bool = True, opening: bool = True, inside: bool = False
    ) -> list[int]:
        return encode(text)

    async def infill(self, before: str, behind: str) -> InfillPrompt:
        raise NotImplementedError

    async def detokenize(self, ids: list[int], *, skip_special: bool = False) -> str:
        return decode(ids)

    async def render_chat(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, object]] | None = None,
        template_kwargs: dict[str, object] | None = None,
        documents: list[dict[str, object]] | None = None,
    ) -> list[int]:
        assert add_generation_prompt != continue_final_message
        pairs = [(message.role, message.content or "") for message in messages]
        return encode(render(pairs, open_end=continue_final_message))

    async def flush(self) -> int:
        return 0

    def end_program(self, program: str) -> None:
        self.model.ended.append(program)

    def abort(self, rid: str) -> bool:
        return False

    def abort_all(self) -> int:
        return 0


def entry(token: int, top: int = 0) -> Logprob:
    best = [Logprob(token_id=35, text="#", data=b"#", logprob=-2.0)][:top]
    text = spell(token)
    return Logprob(token, text, text.encode(), logprob(token), best)


class Server:
    """A Phloem server's HTTP face over the model."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.bodies: list[dict[str, Any]] = []
        self.app = web.Application()
        self.app.router.add_get("/v1/models", self.models)
        self.app.router.add_post("/v1/completions", self.completions)
        self.app.router.add_post("/v1/chat/completions", self.completions)
        self.app.router.add_post("/tokenize", self.tokenize)
        self.app.router.add_post("/generate", self.generate)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 99}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        assert body["model"] == "fake"
        chat = "messages" in body
        prompt = self.prompt(body)
        self.model.constraints.append(
            Regex(pattern=body["regex"])
            if "regex" in body
            else Choice(choices=tuple(body["guided_choice"]))
            if "guided_choice" in body
            else JsonSchema(schema=json.dumps(body["response_format"]["json_schema"]["schema"]))
            if "response_format" in body
            else None
        )
        try:
            answers = [
                await self.model.answer(prompt, i, body.get("max_tokens"), body.get("stop", []))
                for i in range(body.get("n", 1))
            ]
        except PhloemError as error:
            info = {"message": error.message, "param": error.param, "code": error.code}
            headers = {"Retry-After": "0.01"} if error.status == 429 else {}
            return web.json_response({"error": info}, status=error.status, headers=headers)
        usage = {
            "prompt_tokens": len(encode(prompt)),
            "completion_tokens": sum(len(text) for text, _, _ in answers),
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        wanted = body.get("top_logprobs" if chat else "logprobs")
        if not body.get("stream"):
            choices = [self.choice(i, *a, chat, "message", wanted) for i, a in enumerate(answers)]
            return web.json_response({"choices": choices, "usage": usage})
        assert body["stream_options"] == {"include_usage": True}
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for i, (text, reason, matched) in enumerate(answers):
            for char in text:
                choice = self.choice(i, char, None, None, chat, "delta", wanted)
                await self.event(response, {"choices": [choice]})
            end = self.choice(i, "", reason, matched, chat, "delta", None)
            await self.event(response, {"choices": [end]})
        await response.write(b": ping\n\n")
        await self.event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def event(response: web.StreamResponse, data: object) -> None:
        await response.write(f"data: {json.dumps(data)}\n\n".encode())

    @staticmethod
    def choice(
        index: int,
        text: str,
        reason: str | None,
        matched: str | None,
        chat: bool,
        key: str,
        wanted: int | None,
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": index, "finish_reason": reason}
        choice |= {key: {"content": text}} if chat else {"text": text}
        if matched is not None:
            choice["matched_stop"] = matched
        if wanted is not None:
            values = [logprob(ord(char)) for char in text]
            if chat:
                top = [{"token": "#", "logprob": -2.0}][:wanted]
                choice["logprobs"] = {
                    "content": [
                        {"token": char, "logprob": value, "top_logprobs": top}
                        for char, value in zip(text, values, strict=True)
                    ]
                }
            else:
                tops = [{"#": -2.0} if wanted else {} for _ in text]
                choice["logprobs"] = {
                    "tokens": list(text),
                    "token_logprobs": values,
                    "top_logprobs": tops,
                }
        return choice

    @staticmethod
    def prompt(body: dict[str, Any]) -> str:
        if "prompt" in body:
            return str(body["prompt"])
        pairs = [(message["role"], message["content"]) for message in body["messages"]]
        open_end = body.get("continue_final_message", False)
        assert body.get("add_generation_prompt", True) != open_end
        return render(pairs, open_end=open_end)

    async def tokenize(self, request: web.Request) -> web.Response:
        ids = encode(self.prompt(await request.json()))
        return web.json_response({"tokens": ids, "count": len(ids)})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["sampling_params"]["max_new_tokens"] == 0
        start = body["logprob_start_len"]
        return web.json_response(
            [
                {
                    "meta_info": {
                        "input_token_logprobs": [[logprob(t), t, spell(t)] for t in ids[start:]]
                    }
                }
                for ids in body["input_ids"]
            ]
        )


def mock_of(model: Model) -> MockBackend:
    class Scripted(MockBackend):
        async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
            if isinstance(call.prompt, TextPrompt):
                prompt = call.prompt.text
            else:
                pairs = [(m.role, m.content) for m in call.prompt.messages]
                partial = call.prompt.partial
                ends = [("assistant", partial)] if partial else []
                prompt = render([*pairs, *ends], open_end=bool(partial))
            model.constraints.append(call.constraint)
            replies: list[Any] = []
            while len(replies) < call.sampling.samples:
                try:
                    text, reason, matched = await model.answer(
                        prompt,
                        len(replies),
                        call.sampling.max_tokens,
                        list(call.sampling.stop or ()),
                    )
                except QueueFull:
                    continue
                except InvalidRequest as error:
                    raise phloem.RequestRefused(
                        error.message, status=400, param=error.param, code=error.code
                    ) from error
                wanted = call.sampling.logprobs
                logprobs = () if wanted is None else tuple(expected_logprobs(text, wanted))
                end: Any = reason
                replies.append(MockReply(text, end, matched, logprobs))
            async for delta in MockBackend(lambda _: replies).generate(call):
                yield delta

    return Scripted(scores={"?": -1.0}, model="fake")


def expected_logprobs(text: str, top: int) -> list[TokenLogprob]:
    best = (("#", -2.0),)[:top]
    return [TokenLogprob(char, logprob(ord(char)), best) for char in text]


Open = Callable[..., AbstractAsyncContextManager[Backend]]


@asynccontextmanager
async def open_one(kind: str, model: Model, **options: Any) -> AsyncIterator[Backend]:
    """A backend of `kind` over `model`; options are its own."""
    if kind == "mock":
        yield mock_of(model)
    elif kind == "local":
        yield LocalBackend(Engine(model))
    elif kind == "local-other-loop":
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        yield LocalBackend(Engine(model), loop=loop)
        await asyncio.sleep(0.01)
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()
    else:
        older = kind == "older-server"
        app = Server(model).app if older else create_app(Engine(model), ServerOptions())
        async with TestServer(app, handler_cancellation=True) as server:
            backend = over_http(kind, str(server.make_url("/v1")), options)
            yield backend
            await backend.aclose()


def over_http(kind: str, url: str, options: dict[str, Any]) -> Backend:
    if kind == "anthropic":
        return AnthropicBackend("fake", api_key="k", base_url=url, retries=3, **options)
    if kind.startswith("openai-"):
        dialect: Any = kind.removeprefix("openai-")
        return OpenAIBackend(url, dialect=dialect, retries=3, **options)
    return HttpBackend(url, retries=3, **options)


KINDS = (
    *("mock", "local", "local-other-loop", "older-server", "server"),
    *(f"openai-{dialect}" for dialect in DIALECTS),
    "anthropic",
)


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def open_backend(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens a backend of a kind over a model; it does not wait long before it asks again."""
    monkeypatch.setattr(retry, "_FIRST_S", 0.001)
    monkeypatch.setattr(
        http_transport, "_LONGEST_WAIT_S", 0.001
    )  # of a second that servers ask for
    return open_one


@pytest.fixture
async def backend(kind: str, model: Model, open_backend: Open) -> AsyncIterator[Backend]:
    async with open_backend(kind, model) as made:
        yield made


@pytest.fixture
def engine(model: Model) -> Engine:
    return Engine(model)

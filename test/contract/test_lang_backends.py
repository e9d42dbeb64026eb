"""What every backend of the DSL must do alike: scripted, in process, and over HTTP, to a server
written for this test ("http") and to the routes of Phloem itself ("server").

One fake model stands behind all of them: characters are tokens (with one merge, to test
boundaries), an answer tells the end of the prompt that the model saw.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import phloem
from phloem.constrained.spec import JsonSchema, Regex
from phloem.lang.backend import retry
from phloem.lang.backend.base import (
    Backend,
    Call,
    ChatPrompt,
    Delta,
    Message,
    TextPrompt,
    TokenLogprob,
)
from phloem.lang.backend.http import HttpBackend
from phloem.lang.backend.local import LocalBackend
from phloem.lang.backend.mock import MockBackend, MockReply
from phloem.lang.sampling import Sampling
from phloem.srt.config import ServerOptions
from phloem.srt.errors import InvalidRequest, PhloemError, QueueFull
from phloem.srt.generation import (
    ChatMessage,
    Chunk,
    Finish,
    GenerateRequest,
    Health,
    Logprob,
    ModelCard,
)
from phloem.srt.http.app import create_app
from phloem.srt.messages import FinishReason, StatsSnapshot

pytestmark = pytest.mark.timeout(30)

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

    def __init__(self) -> None:
        self.busy = 0
        self.hanging = 0
        self.left = 0
        self.constraints: list[Any] = []

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

    ask = watch = end_program = cast("Any", None)  # the DSL asks nothing of the cache
    stats = StatsSnapshot()
    card = msgspec.convert(
        dict.fromkeys(("path", "format", "architecture"), "")
        | dict.fromkeys(("created", "vocab_size", "context_length", "kv_slots"), 1001)
        | {"name": "fake"},
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
        if request.prompt_logprobs_from is not None:
            assert sampling.max_tokens == 0
            scored: list[Logprob | None] = [
                entry(token) for token in ids[request.prompt_logprobs_from :]
            ]
            yield Chunk(rid="r")
            yield Chunk(rid="r", prompt_logprobs=scored, finish=Finish(FinishReason.LENGTH))
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
            finish=Finish(FinishReason(reason), matched),
        )

    async def tokenize(self, text: str, *, special: bool = True) -> list[int]:
        return encode(text)

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
    ) -> list[int]:
        assert add_generation_prompt != continue_final_message
        pairs = [(message.role, message.content or "") for message in messages]
        return encode(render(pairs, open_end=continue_final_message))

    async def flush(self) -> int:
        return 0

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
        assert body["add_generation_prompt"] != open_end
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


@asynccontextmanager
async def open_backend(kind: str, model: Model) -> AsyncIterator[Backend]:
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
        app = Server(model).app if kind == "http" else create_app(Engine(model), ServerOptions())
        async with TestServer(app, handler_cancellation=True) as server:
            backend = HttpBackend(str(server.make_url("/v1")), retries=3)
            yield backend
            await backend.aclose()


KINDS = ("mock", "local", "local-other-loop", "http", "server")


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture(params=KINDS)
async def backend(
    request: pytest.FixtureRequest, model: Model, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Backend]:
    monkeypatch.setattr(retry, "_FIRST_S", 0.001)
    async with open_backend(request.param, model) as made:
        yield made


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110  (the model is not to know that it is watched)
        await asyncio.sleep(0.005)


async def collect(backend: Backend, call: Call) -> tuple[list[str], list[Delta]]:
    deltas = [delta async for delta in backend.generate(call)]
    texts = [""] * call.sampling.samples
    for delta in deltas:
        texts[delta.index] += delta.text
    return texts, deltas


def call(
    text: str | ChatPrompt, *, stream: bool = False, constraint: Any = None, **options: Any
) -> Call:
    prompt = text if isinstance(text, ChatPrompt) else TextPrompt(text)
    return Call(prompt, Sampling(**options), constraint, "x", stream)


async def test_info(backend: Backend) -> None:
    assert (await backend.info()).model == "fake"


@pytest.mark.parametrize("stream", [False, True])
async def test_text(backend: Backend, stream: bool) -> None:
    texts, deltas = await collect(backend, call("Once upon", stream=stream))
    assert texts == ["0:Once upon"]
    assert [delta.finish for delta in deltas if delta.finish] == ["stop"]
    usage = [delta.usage for delta in deltas if delta.usage]
    assert len(usage) == 1
    assert usage[0].completion_tokens > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chat_gets_a_new_turn_or_continues_the_open_one(
    backend: Backend, stream: bool
) -> None:
    asked = (Message("system", "s"), Message("user", "q"))
    texts, _ = await collect(backend, call(ChatPrompt(asked), stream=stream))
    assert texts == ["0:q)assistant("]
    texts, _ = await collect(backend, call(ChatPrompt(asked, "So: "), stream=stream))
    assert texts == ["0:sistant(So: "]


async def test_several_answers_and_the_end_of_each(backend: Backend) -> None:
    texts, deltas = await collect(backend, call("prompt", n=3, seed=7))
    assert texts == ["0:prompt", "1:prompt", "2:prompt"]
    assert sorted(delta.index for delta in deltas if delta.finish) == [0, 1, 2]


async def test_stop_and_length(backend: Backend) -> None:
    texts, deltas = await collect(backend, call("ab|cd", stop=("|",)))
    assert (texts, deltas[-2].finish, deltas[-2].matched) == (["0:ab"], "stop", "|")
    texts, deltas = await collect(backend, call("abcd", max_tokens=4))
    assert (texts, deltas[-2].finish) == (["0:ab"], "length")


@pytest.mark.parametrize("prompt", ["ab", ChatPrompt((Message("user", "q"),), "ab")])
@pytest.mark.parametrize("top", [0, 1])
async def test_logprobs(backend: Backend, prompt: str | ChatPrompt, top: int) -> None:
    texts, deltas = await collect(backend, call(prompt, logprobs=top))
    found = [entry for delta in deltas for entry in delta.logprobs]
    for got, wanted in zip(found, expected_logprobs(texts[0], top), strict=True):
        assert (got.token, got.logprob) == (wanted.token, wanted.logprob)
        # completions over HTTP also list the token itself, as OpenAI's do
        assert set(wanted.top) <= set(got.top) <= {*wanted.top, (got.token, got.logprob)}


async def test_constraints_arrive(backend: Backend, model: Model) -> None:
    schema = JsonSchema(schema='{"properties":{"z":{},"a":{}},"type":"object"}')
    for prompt in ("JSON", ChatPrompt((Message("user", "JSON"),))):
        for constraint in (Regex(pattern="a+"), schema, None):
            await collect(backend, call(prompt, constraint=constraint))
    said = [json.loads(c.schema) if isinstance(c, JsonSchema) else c for c in model.constraints]
    assert said == [Regex(pattern="a+"), json.loads(schema.schema), None] * 2


async def test_a_refusal_says_what_and_why(backend: Backend) -> None:
    with pytest.raises(phloem.RequestRefused, match="no such thing") as caught:
        await collect(backend, call("REFUSE"))
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, "regex", "bad")


async def test_a_busy_model_is_asked_again(backend: Backend, model: Model) -> None:
    model.busy = 2
    texts, _ = await collect(backend, call("p"))
    assert texts == ["0:p"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_leaving_early_stops_the_work(
    backend: Backend, model: Model, stream: bool, n: int
) -> None:
    task = asyncio.create_task(collect(backend, call("HANG", stream=stream, n=n)))
    await until(lambda: model.hanging > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: model.left == model.hanging)


async def test_closing_an_iterator_half_way(backend: Backend) -> None:
    async with aclosing(backend.generate(call("abcdefgh", stream=True))) as deltas:
        async for delta in deltas:
            if delta.text:
                break
    texts, _ = await collect(backend, call("p"))  # and it still works
    assert texts == ["0:p"]


async def test_many_at_once(backend: Backend) -> None:
    results = await asyncio.gather(*(collect(backend, call(f"p{i}")) for i in range(100)))
    assert [texts for texts, _ in results] == [[f"0:p{i}"] for i in range(100)]


async def test_scores_belong_to_the_choices(backend: Backend) -> None:
    asked = (Message("user", "Is it?"),)
    for prompt in (TextPrompt("Is it"), ChatPrompt(asked, "It is"), ChatPrompt(asked)):
        scores = await backend.score(prompt, [" yes", " no"])
        assert ["".join(score.tokens) for score in scores] == [" yes", " no"]
        assert all(len(score.logprobs) == len(score.tokens) for score in scores)


# only for backends that have tokens
REAL = pytest.mark.parametrize("backend", KINDS[1:], indirect=True)


@REAL
async def test_score_numbers_and_boundary(backend: Backend) -> None:
    yes, no = await backend.score(TextPrompt("Is it"), [" yes", " no"])
    assert yes.logprobs == tuple(logprob(ord(char)) for char in " yes")
    assert no.logprobs == tuple(logprob(ord(char)) for char in " no")
    # "?Y" is one token: both choices are judged from before the question mark
    merged, apart = await backend.score(TextPrompt("Is it?"), ["Y", "N"])
    assert (merged.tokens, apart.tokens) == (("?Y",), ("?", "N"))
    assert merged.logprobs == (logprob(MERGED),)


@REAL
async def test_scoring_without_a_prompt_is_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="first token"):
        await backend.score(TextPrompt(""), ["yes", "no"])


@REAL
async def test_a_model_that_stays_busy_is_unavailable(backend: Backend, model: Model) -> None:
    model.busy = 10_000
    with pytest.raises(phloem.BackendUnavailable, match="queue is full"):
        await collect(backend, call("p"))


@phloem.function
def judge(s: phloem.State, topic: str) -> None:
    s += phloem.user(topic)
    forks = s.fork(3)
    forks += phloem.assistant("A" + phloem.gen("idea", max_tokens=100))
    forks.join()
    s += phloem.assistant(" ".join(s["idea"]) + phloem.select("best", ["yes", "no"]))


@pytest.mark.parametrize("kind", ["http", "local-other-loop"])
async def test_a_program_end_to_end(kind: str, model: Model) -> None:
    async with open_backend(kind, model) as backend:
        states = await asyncio.gather(
            *(judge.arun(topic=f"t{i}", backend=backend) for i in range(5))
        )
        for state in states:
            assert state["idea"] == ["0:)assistant(A"] * 3
            assert state["best"] in ("yes", "no")
            assert state.error is None
        if isinstance(backend, HttpBackend):
            await asyncio.to_thread(backend.close)


async def test_an_engine_is_a_backend() -> None:
    engine = Engine(Model())
    state = await judge.arun(topic="t", backend=engine)
    assert state["best"] in ("yes", "no")
    with pytest.raises(phloem.UsageError, match="await arun"):
        judge.run(topic="t", backend=engine)
    with pytest.raises(phloem.UsageError, match="BlockingEngine"):
        await asyncio.to_thread(lambda: judge.run(topic="t", backend=engine))


async def test_an_engine_on_a_loop_of_its_own() -> None:
    """The shape of `phloem.BlockingEngine`; a run after its end is an error, not a wait."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    handle = SimpleNamespace(engine=Engine(Model()), loop=loop)
    assert judge.run(topic="t", backend=handle)["best"] in ("yes", "no")
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    with pytest.raises(phloem.GenerationError, match="engine is closed"):
        judge.run(topic="t", backend=handle)

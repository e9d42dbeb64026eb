"""A scripted engine, and the application over it on an ephemeral port."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest
from aiohttp import web
from multidict import CIMultiDict
from openai import AsyncOpenAI

from phloem.srt.config import ServerOptions
from phloem.srt.errors import InvalidRequest, PhloemError
from phloem.srt.generation import (
    ChatMessage,
    Chunk,
    Finish,
    GenerateRequest,
    Health,
    InfillPrompt,
    Logprob,
    ModelCard,
    ReasoningMarks,
    ToolFormatName,
)
from phloem.srt.http.app import create_app, make_runner
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import (
    Answer,
    FinishReason,
    Flush,
    Flushed,
    Pooling,
    Question,
    SamplingParams,
    StatsSnapshot,
)
from phloem.srt.questions import Refused

VOCAB = 1000


@dataclass
class Script:
    """What a request gets: pieces of text (a token each), then a finish or an error."""

    pieces: Sequence[str] = ("Hel", "lo", " wor", "ld.")
    finish: FinishReason = FinishReason.STOP
    matched: str | int | None = None
    refusal: Exception | None = None  # before the first chunk
    failure: Exception | None = None  # after the pieces
    hold: asyncio.Event | None = None  # waited for before each piece
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    logprob: float = -0.5  # of each token


@dataclass
class ScriptedEngine:
    """An `EngineClient` whose tokens are bytes and whose answers are scripts.

    `requests` and `questions` record what came, `closed` the ids whose streams were left early,
    `ended` the programs that are over. `answers` says what the scheduler answers; what is put into
    `kv_events` is what a watcher gets, or is told.
    """

    script: Callable[[GenerateRequest], Script] = lambda request: Script()
    health_now: Health = field(default_factory=lambda: Health(live=True, ready=True))
    requests: list[GenerateRequest] = field(default_factory=list)
    rendered: list[dict[str, object]] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    running: set[str] = field(default_factory=set)
    stats_now: StatsSnapshot = field(default_factory=StatsSnapshot)
    render_error: PhloemError | None = None
    tokenized: list[tuple[str, bool, bool]] = field(default_factory=list)
    fills_in: bool = False
    answers: Callable[[Question], Answer | PhloemError] = lambda question: default_answer(question)
    questions: list[Question] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    kv_events: asyncio.Queue[KvEvents | PhloemError] = field(default_factory=asyncio.Queue)
    watchers: int = 0
    tool_format: ToolFormatName = "json"
    reasoning: ReasoningMarks | None = None
    opening: str = ""  # how prompts end

    @property
    def card(self) -> ModelCard:
        return ModelCard(
            name="tiny",
            path="/models/tiny.gguf",
            format="gguf Q8_0",
            architecture="llama",
            created=1,
            vocab_size=VOCAB,
            context_length=512,
            kv_slots=4096,
            tool_format=self.tool_format,
            reasoning=self.reasoning,
            embedding_length=4,
        )

    @property
    def stats(self) -> StatsSnapshot:
        return self.stats_now

    def health(self) -> Health:
        return self.health_now

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        self.requests.append(request)
        script = self.script(request)
        rid = request.rid or "?"
        prompt = (
            list(request.prompt.encode()) if isinstance(request.prompt, str) else request.prompt
        )
        self.running.add(rid)
        try:
            await asyncio.sleep(0)
            if script.refusal is not None:
                raise script.refusal
            yield Chunk(rid=rid, prompt_tokens=len(prompt))
            for chunk in self._chunks(rid, prompt, script, request):
                if script.hold is not None:
                    await script.hold.wait()
                await asyncio.sleep(0)
                yield chunk
            if script.failure is not None:
                raise script.failure
        except (GeneratorExit, asyncio.CancelledError):
            self.closed.append(rid)
            raise
        finally:
            self.running.discard(rid)

    def _chunks(
        self, rid: str, prompt: list[int], script: Script, request: GenerateRequest
    ) -> list[Chunk]:
        sampling = request.sampling
        pieces = list(script.pieces)
        finish = Finish(script.finish, script.matched)
        if sampling.max_tokens is not None and sampling.max_tokens < len(pieces):
            pieces = pieces[: sampling.max_tokens]
            finish = Finish(FinishReason.LENGTH)
        common = {
            "rid": rid,
            "prompt_tokens": len(prompt),
            "cached_tokens": script.cached_tokens,
            "reasoning_tokens": script.reasoning_tokens,
        }
        prompt_logprobs = self._prompt_logprobs(prompt, request)
        embedding = None if request.embed is None else embedding_of(prompt, request.embed)
        chunks: list[Chunk] = []
        for i, piece in enumerate(pieces):
            chunks.append(
                msgspec.convert(
                    {
                        **common,
                        "text": piece,
                        "token_ids": [i],
                        "completion_tokens": i + 1,
                        "finish": finish if i + 1 == len(pieces) else None,
                        "prompt_logprobs": prompt_logprobs if i == 0 else None,
                        "logprobs": _logprobs(i, piece, sampling, script.logprob),
                    },
                    Chunk,
                )
            )
        if not pieces:
            last = {"finish": finish, "prompt_logprobs": prompt_logprobs}
            chunks.append(msgspec.convert({**common, **last, "embedding": embedding}, Chunk))
        if script.failure is not None:
            chunks = [msgspec.structs.replace(c, finish=None) for c in chunks]
        return chunks

    @staticmethod
    def _prompt_logprobs(
        prompt: list[int], request: GenerateRequest
    ) -> list[Logprob | None] | None:
        start = request.prompt_logprobs_from
        if start is None:
            return None
        return [
            None if i == 0 else _prompt_logprob(i, token, request.sampling)
            for i, token in enumerate(prompt)
            if i >= start
        ]

    async def tokenize(
        self, text: str, *, special: bool = True, opening: bool = True, inside: bool = False
    ) -> list[int]:
        self.tokenized.append((text, special, opening))
        return list(text.encode())

    async def infill(self, before: str, behind: str) -> InfillPrompt:
        if not self.fills_in:
            raise InvalidRequest("no tokens for it", param="suffix", code="unsupported_parameter")
        return InfillPrompt([1, *before.encode(), 2, *behind.encode(), 3], (4,))

    async def detokenize(self, ids: list[int], *, skip_special: bool = False) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

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
        if self.render_error is not None:
            raise self.render_error
        self.rendered.append(
            {
                "messages": [msgspec.to_builtins(m) for m in messages],
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "tools": tools,
                "template_kwargs": template_kwargs,
                "documents": documents,
            }
        )
        text = "".join(f"<{m.role}>{m.content}" for m in messages) + self.opening
        return list(text.encode())

    async def flush(self) -> int:
        answer = await self.ask(Flush(0))
        assert isinstance(answer, Flushed)
        return answer.tokens

    async def ask(self, question: Question) -> Answer:
        self.questions.append(question)
        answer = self.answers(question)
        if isinstance(answer, PhloemError):
            raise answer
        if isinstance(answer, Refused):
            raise PhloemError.from_info(answer.error)
        return answer

    async def watch(self) -> AsyncGenerator[KvEvents, None]:
        self.watchers += 1
        try:
            while True:
                item = await self.kv_events.get()
                if isinstance(item, PhloemError):
                    raise item
                yield item
        finally:
            self.watchers -= 1

    def end_program(self, program: str) -> None:
        self.ended.append(program)

    def abort(self, rid: str) -> bool:
        self.aborted.append(rid)
        return rid in self.running

    def abort_all(self) -> int:
        return len(self.running)


def embedding_of(prompt: list[int], pooling: Pooling) -> bytes:
    """Four numbers that tell the prompt and how it is pooled."""
    numbers = (3.0 if pooling is Pooling.MEAN else -3.0, float(len(prompt)), *prompt[:1], 0.0)
    return struct.pack("<4f", *numbers)


def default_answer(question: Question) -> Answer:
    assert isinstance(question, Flush), question
    return Flushed(question.id, 17)


def _logprobs(
    index: int, piece: str, sampling: SamplingParams, logprob: float
) -> list[Logprob] | None:
    if sampling.logprobs is None:
        return None
    top = [
        Logprob(index + k, piece if k == 0 else f"{piece}{k}", piece.encode(), -0.5 - k)
        for k in range(sampling.logprobs)
    ]
    chosen = [
        Logprob(token, chr(token), bytes([token % 256]), -1.0 - k)
        for k, token in enumerate(sampling.logprob_token_ids)
    ]
    return [Logprob(index, piece, piece.encode(), logprob, top, chosen)]


def _prompt_logprob(index: int, token: int, sampling: SamplingParams) -> Logprob:
    top = [Logprob(k, f"top{k}", b"", -0.1 - k) for k in range(sampling.prompt_logprobs or 0)]
    return Logprob(token, chr(token), bytes([token]), -float(index), top)


class Reply:
    """One answer: its status, headers and JSON, or its frames when it is a stream."""

    def __init__(self, status: int, headers: CIMultiDict[str], raw: str) -> None:
        self.status = status
        self.headers = headers
        self.raw = raw

    @property
    def json(self) -> object:
        return json.loads(self.raw)

    @property
    def frames(self) -> list[str]:
        """What stands behind `data: `, frame by frame; the framing itself is checked."""
        assert self.raw.endswith("\n\n"), self.raw[-80:]
        blocks = self.raw[:-2].split("\n\n")
        data = [block for block in blocks if not block.startswith(":")]
        assert all(block.startswith("data: ") and "\n" not in block for block in data)
        return [block.removeprefix("data: ") for block in data]

    @property
    def events(self) -> list[object]:
        """The frames' JSON; the last frame must be `[DONE]`, and only it."""
        assert self.frames[-1] == "[DONE]"
        return [json.loads(frame) for frame in self.frames[:-1]]


class Api:
    """A running application and a client of it."""

    def __init__(self, base: str, session: aiohttp.ClientSession) -> None:
        self.base = base
        self.session = session

    async def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        data = json.dumps(body).encode() if body is not None else raw
        sent = {"Content-Type": "application/json"} if data is not None else {}
        async with self.session.request(
            method, self.base + path, data=data, headers={**sent, **(headers or {})}
        ) as response:
            text = await response.text()
            return Reply(response.status, response.headers.copy(), text)

    async def chat(self, **body: object) -> Reply:
        defaults: dict[str, object] = {"messages": [{"role": "user", "content": "Hi"}]}
        return await self.call("POST", "/v1/chat/completions", {**defaults, **body})

    async def complete(self, **body: object) -> Reply:
        return await self.call("POST", "/v1/completions", {"prompt": "Hi", **body})

    async def generate(self, **body: object) -> Reply:
        return await self.call("POST", "/generate", body)


Serve = Callable[..., Awaitable[Api]]


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine()


@pytest.fixture
def script() -> type[Script]:
    """The `Script` class, for tests that write their own."""
    return Script


@pytest.fixture
async def serve(engine: ScriptedEngine) -> AsyncIterator[Serve]:
    """Start applications over `engine`; options of the server as keywords."""
    runners: list[web.AppRunner] = []
    sessions: list[aiohttp.ClientSession] = []

    async def start(*, keepalive_s: float = 15.0, **options: object) -> Api:
        app = create_app(engine, msgspec.convert(options, ServerOptions), keepalive_s=keepalive_s)
        runner = make_runner(app)
        runners.append(runner)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        session = aiohttp.ClientSession()
        sessions.append(session)
        return Api(f"http://{host}:{port}", session)

    yield start
    for session in sessions:
        await session.close()
    for runner in runners:
        await runner.cleanup()


@pytest.fixture
async def api(serve: Serve) -> Api:
    return await serve()


@pytest.fixture
async def openai_client(api: Api) -> AsyncIterator[AsyncOpenAI]:
    """The official client, without retries."""
    async with AsyncOpenAI(base_url=f"{api.base}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def eventually() -> Callable[[Callable[[], bool]], Awaitable[None]]:
    """Wait until something holds; the test's own timeout is the limit."""

    async def wait(condition: Callable[[], bool]) -> None:
        while not condition():  # noqa: ASYNC110 — any condition, not one event
            await asyncio.sleep(0.005)

    return wait

"""The engine: text in, text out, in this process; model, tree and grammars in others.

It starts the backend's processes, submits requests to the scheduler, turns sampled ids into text,
and stands up again when a process dies: requests in flight then end in `Unavailable`, new ones are
served as soon as the new backend is ready. The HTTP server is one user of it; a Python program can
use it directly:

    async with Engine(ServeConfig()) as engine:
        async for chunk in engine.generate(GenerateRequest(prompt="Once")):
            print(chunk.text, end="")
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import AsyncGenerator
from pathlib import Path
from types import TracebackType
from typing import Self

import zmq.asyncio

from phloem.srt.asking import Questions
from phloem.srt.backend import Backend, make_plan
from phloem.srt.checkpoint import Checkpoint, open_checkpoint
from phloem.srt.config import ServeConfig
from phloem.srt.errors import InvalidRequest, PhloemError, Unavailable
from phloem.srt.generation import (
    ChatMessage,
    Chunk,
    GenerateRequest,
    Health,
    InfillPrompt,
    ModelCard,
)
from phloem.srt.hub import SILENT, Progress, resolve_model
from phloem.srt.ipc import AsyncChannel, make_run_dir
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import (
    Abort,
    Accepted,
    Answer,
    BackendReady,
    Drain,
    Drained,
    EndProgram,
    Failed,
    Flush,
    Flushed,
    JumpForward,
    Pooling,
    Question,
    StatsSnapshot,
    Submit,
    ToFrontend,
    Tokens,
    ToScheduler,
)
from phloem.srt.resolve import choose_kv_tokens, detect_hardware, resolve
from phloem.srt.supervise import ChildDied, Generation
from phloem.srt.tokenizer.answer import AnswerBuilder
from phloem.srt.tokenizer.infill import infill_prompt
from phloem.srt.tokenizer.template import ChatTemplate, load_chat_template
from phloem.srt.tokenizer.tokenizer import load_tokenizer
from phloem.srt.watching import Watchers
from phloem.srt.wire import pack

log = logging.getLogger(__name__)

HEARTBEAT_LIMIT_S = 10.0
"""A scheduler that was silent for longer is not alive."""

INLINE_TEXT = 8_000
"""Longer texts are tokenised in a thread: half a millisecond in the event loop is felt by every
stream."""

RESTART_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Pause before the n-th restart within a minute; the last one for all that follow."""


class StartupError(Exception):
    """The backend did not come up. The message is for the user, whole and in one line."""


class Engine:
    """One served model. Implements `phloem.srt.generation.EngineClient`.

    Use it as an async context manager, or `start` and `close` it.
    """

    def __init__(self, config: ServeConfig | None = None, *, progress: Progress = SILENT) -> None:
        self.config = config or ServeConfig()
        self.restarts = 0
        self.startup: dict[str, float] = {}
        """Phase → seconds of the first start."""
        self._progress = progress
        self._streams: dict[str, asyncio.Queue[ToFrontend | PhloemError]] = {}
        self._questions = Questions()
        self._watchers = Watchers(lambda message: self._channel().send(message))
        self._drained = asyncio.Event()
        self._draining = False
        self._down = "the server is starting"
        """Why nothing can be served now; empty when it can."""
        self._stats = StatsSnapshot()
        self._heartbeat = time.monotonic()
        self._backend: Backend | None = None
        self._ready: BackendReady | None = None
        self._card: ModelCard | None = None
        self._run_dir: Path | None = None
        self._generation = 0
        self._restart_times: list[float] = []
        self._tasks: list[asyncio.Task[None]] = []  # listener, supervisor

    # ------------------------------------------------------------------ life

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def start(self) -> None:
        """Find the model, start the processes, wait until they are ready.

        Raises:
            PhloemError: the model cannot be found or served, or an option is out of range.
            CheckpointError: the model's file is damaged or not supported.
            StartupError: a process did not come up.
        """
        timer = _Timer()
        generation = Generation()
        try:
            await generation.spawn()  # they import while the model is looked for
            self.model = await asyncio.to_thread(
                resolve_model, self.config.model.model, self._progress
            )
            checkpoint = await asyncio.to_thread(open_checkpoint, self.model.path)
            self._plan_backend(checkpoint)
            timer.mark("find model")
            self._context = zmq.asyncio.Context()
            self._run_dir = make_run_dir()
            self._backend = await self._configure(generation)
            await asyncio.to_thread(self._load_tokenizer, checkpoint)
            timer.mark("tokenizer")
            self._ready = await self._await_ready(self._backend)
        except ChildDied as death:
            await generation.stop(0.2)
            await self._tear_down(0.2)
            raise StartupError(str(death)) from death
        except BaseException:
            await generation.stop(0.2)
            await self._tear_down(0.2)
            raise
        self._down = ""
        self.startup = timer.phases | self._ready.startup | {"total": timer.total}
        self._card = self._make_card(checkpoint, self._ready)
        self._tasks = [
            asyncio.create_task(self._listen(self._backend), name="phloem listener"),
            asyncio.create_task(self._supervise(), name="phloem supervisor"),
        ]

    def _plan_backend(self, checkpoint: Checkpoint) -> None:
        hardware = detect_hardware()
        self.resolved = resolve(self.config, hardware)
        model = checkpoint.config
        context = self.config.model.context_length
        if context is not None and context > model.context_length:
            raise InvalidRequest(
                f"context_length {context:,} is more than the model's {model.context_length:,}",
                param="model.context_length",
            )
        kv_tokens, self.resolved.reasons["kv_tokens"] = choose_kv_tokens(
            self.config.cache.kv_tokens,
            bytes_per_slot=model.kv_slot_bytes(self.resolved.kv_dtype),
            hardware=hardware,
        )
        self._plan = make_plan(self.resolved, checkpoint, kv_tokens)

    def _load_tokenizer(self, checkpoint: Checkpoint) -> None:
        self._tokenizer = load_tokenizer(checkpoint)
        override, form = self.config.model.chat_template, self.config.model.tool_call_format
        tool_format = None if form == "auto" else form
        if override is None:
            self._template = load_chat_template(checkpoint, self._tokenizer, tool_format)
            return
        path = Path(override)
        try:
            source = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"cannot read the chat template {path}: {error}", param="model.chat_template"
            ) from error
        self._template = ChatTemplate(path, self._tokenizer, {"default": source}, tool_format)

    def _make_card(self, checkpoint: Checkpoint, ready: BackendReady) -> ModelCard:
        return ModelCard(
            name=self.config.model.served_model_name or self.model.name,
            path=str(self.model.path),
            format=checkpoint.format,
            architecture=checkpoint.config.architecture,
            created=int(time.time()),
            vocab_size=ready.vocab_size,
            context_length=ready.context_length,
            kv_slots=ready.kv_slots,
            tool_format=self._template.tool_format,
            reasoning=self._template.reasoning,
            chat_template=self._template.source,
            embedding_length=checkpoint.config.hidden_size,
            pooling=checkpoint.config.pooling or Pooling.MEAN,
            end_id=checkpoint.config.end_id,
            page_size=self.config.cache.page_size,
        )

    async def _configure(self, generation: Generation) -> Backend:
        assert self._run_dir is not None
        self._generation += 1
        run_dir = self._run_dir / str(self._generation)
        return await Backend.configure(generation, self._context, run_dir, self.config, self._plan)

    async def _await_ready(self, backend: Backend) -> BackendReady:
        """The backend's first word. Raises `ChildDied` when a process ends before it."""
        word = asyncio.ensure_future(backend.channel.recv())
        death = asyncio.ensure_future(backend.generation.wait_for_death())
        try:
            await asyncio.wait({word, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done():
                raise death.result()
            message = word.result()
        finally:
            for task in (word, death):
                task.cancel()
            await asyncio.gather(word, death, return_exceptions=True)
        if not isinstance(message, BackendReady):
            raise StartupError(f"the scheduler began with {type(message).__name__}")
        self._heartbeat = time.monotonic()
        return message

    async def close(self, drain_seconds: float = 0.0) -> None:
        """Stop; with `drain_seconds`, running requests may finish first. Leaves no process."""
        if not self._down and drain_seconds > 0:
            await self._drain(drain_seconds)
        self._down = "the server is shutting down"
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        self._fail_all(Unavailable(self._down))
        await self._tear_down(2.0)

    async def _drain(self, seconds: float) -> None:
        assert self._backend is not None
        self._draining = True
        self._backend.channel.send(Drain())
        try:
            await asyncio.wait_for(self._drained.wait(), seconds)
        except TimeoutError:
            log.warning("%d requests were cut off by the shutdown", len(self._streams))

    async def _tear_down(self, grace_seconds: float) -> None:
        if self._backend is not None:
            await self._backend.stop(grace_seconds)
            self._backend = None
        if self._run_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self._run_dir, ignore_errors=True)
            self._run_dir = None
            self._context.destroy(linger=0)

    # ------------------------------------------------------------------ supervision

    async def _supervise(self) -> None:
        """Replace what dies, for as long as the engine lives."""
        while True:
            assert self._backend is not None
            death = await self._backend.generation.wait_for_death()
            self.restarts += 1
            if death.role == "grammar":
                log.warning("%s; a new one takes over", death)
                await self._pause_restarts()
                await self._backend.generation.restart("grammar", predecessor=death.code)
                continue
            log.error("%s; the backend starts anew", death)
            await self._start_anew(str(death))

    async def _start_anew(self, reason: str) -> None:
        listener = self._tasks[0]
        self._down = f"{reason}; the backend is being restarted"
        listener.cancel()
        await asyncio.gather(listener, return_exceptions=True)
        self._fail_all(Unavailable(self._down, retry_after=1.0))
        while True:
            if self._backend is not None:
                await self._backend.stop(0.2)
            await self._pause_restarts()
            generation = Generation()
            try:
                await generation.spawn()
                self._backend = await self._configure(generation)
                self._ready = await self._await_ready(self._backend)
            except (ChildDied, StartupError, OSError) as error:
                log.exception("the backend did not come up again")
                self._down = f"{error}; the backend is being restarted"
                await generation.stop(0.2)
                continue
            break
        self._tasks[0] = asyncio.create_task(self._listen(self._backend), name="phloem listener")
        self._down = ""

    async def _pause_restarts(self) -> None:
        """Longer and longer pauses while restarts follow each other closely."""
        now = time.monotonic()
        self._restart_times = [t for t in self._restart_times if now - t < 60.0] + [now]
        nth = min(len(self._restart_times), len(RESTART_PAUSES_S)) - 1
        await asyncio.sleep(RESTART_PAUSES_S[nth])

    async def _listen(self, backend: Backend) -> None:
        """Hand each message of the scheduler to whom it concerns."""
        while True:
            message = await backend.channel.recv()
            match message:
                case Tokens() | Accepted() | Failed():
                    stream = self._streams.get(message.rid)
                    if stream is not None:
                        stream.put_nowait(message)
                case StatsSnapshot():
                    self._stats = message
                    self._heartbeat = time.monotonic()
                case KvEvents():
                    self._watchers.deliver(message)
                case Drained():
                    self._drained.set()
                case BackendReady():
                    log.warning("the scheduler said twice that it is ready")
                case _:
                    self._questions.settle(message)

    def _fail_all(self, error: PhloemError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)
        self._questions.fail(error)
        self._watchers.fail(error)

    # ------------------------------------------------------------------ what it says of itself

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise Unavailable(self._down)
        return self._card

    @property
    def stats(self) -> StatsSnapshot:
        return self._stats

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the backend, by role."""
        return {} if self._backend is None else self._backend.generation.pids

    def health(self) -> Health:
        age = time.monotonic() - self._heartbeat
        reason = self._down
        if not reason and age > HEARTBEAT_LIMIT_S:
            reason = f"the scheduler has been silent for {age:.0f} s"
        return Health(
            live=not reason,
            ready=not reason and not self._draining,
            reason=reason or ("the server is draining" if self._draining else ""),
            restarts=self.restarts,
            heartbeat_age_s=age,
        )

    # ------------------------------------------------------------------ requests

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """Chunks of one request; see `EngineClient.generate`."""
        prompt = await self._prompt_ids(request.prompt)
        rid = request.rid or uuid.uuid4().hex
        if rid in self._streams:
            raise InvalidRequest(f"request id {rid!r} is in use", param="rid")
        channel = self._channel()
        stream = self._streams[rid] = asyncio.Queue()
        over = False
        try:
            channel.send(self._submit(rid, prompt, request))
            builder = AnswerBuilder(self._tokenizer, request, rid, len(prompt))
            while not over:
                match await stream.get():
                    case PhloemError() as error:
                        over = True
                        raise error
                    case Failed(_, info):
                        over = True
                        raise PhloemError.from_info(info)
                    case Accepted():
                        yield builder.accepted()
                    case Tokens() as message:
                        over = message.finish is not None
                        chunk = builder.add(message)
                        if chunk.finish is not None and not over:
                            over = True  # by a stop string, which the scheduler knows nothing of
                            channel.send(Abort(rid))
                        yield chunk
        finally:
            del self._streams[rid]
            if not over and self._backend is not None and channel is self._backend.channel:
                channel.send(Abort(rid))

    def _submit(self, rid: str, prompt: list[int], request: GenerateRequest) -> Submit:
        try:
            packed = pack(prompt)
        except OverflowError:
            raise InvalidRequest("a token id does not fit 32 bits", param="prompt") from None
        return Submit(
            rid,
            packed,
            request.sampling,
            constraint=request.constraint,
            namespace=request.namespace,
            priority=request.priority,
            deadline_s=request.deadline_s,
            prompt_logprobs_from=request.prompt_logprobs_from,
            tenant=request.tenant,
            program=request.program,
            plan=request.plan,
            # A logprob is that of a token that was drawn.
            jump=JumpForward.OFF if request.sampling.logprobs is not None else request.jump,
            embed=request.embed,
        )

    def _channel(self) -> AsyncChannel[ToScheduler, ToFrontend]:
        if self._down or self._backend is None:
            raise Unavailable(self._down, retry_after=1.0)
        if self._draining:
            raise Unavailable("the server is shutting down")
        return self._backend.channel

    async def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        if len(prompt) <= INLINE_TEXT:
            return self._tokenizer.encode_prompt(prompt)
        return await asyncio.to_thread(self._tokenizer.encode_prompt, prompt)

    async def tokenize(
        self, text: str, *, special: bool = True, opening: bool = True, inside: bool = False
    ) -> list[int]:
        if inside:
            return await asyncio.to_thread(self._tokenizer.encode_inside, text)
        if special and opening:
            return await self._prompt_ids(text)
        return await asyncio.to_thread(self._tokenizer.encode, text, special)

    async def infill(self, before: str, behind: str) -> InfillPrompt:
        return await asyncio.to_thread(infill_prompt, self._tokenizer, before, behind)

    async def detokenize(self, ids: list[int], *, skip_special: bool = False) -> str:
        bad = next((i for i in ids if not 0 <= i < self.card.vocab_size), None)
        if bad is not None:
            raise InvalidRequest(f"token id {bad} is outside the vocabulary", param="tokens")
        return await asyncio.to_thread(self._tokenizer.decode, ids, skip_special)

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
        return await asyncio.to_thread(
            self._template.encode_chat,
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
            documents=documents,
        )

    async def flush(self) -> int:
        answer = await self.ask(Flush(0))
        assert isinstance(answer, Flushed)
        return answer.tokens

    async def ask(self, question: Question) -> Answer:
        return await self._questions.ask(question, self._channel().send)

    def watch(self) -> AsyncGenerator[KvEvents, None]:
        return self._watchers.watch()

    def end_program(self, program: str) -> None:
        self._channel().send(EndProgram(program))

    def abort(self, rid: str) -> bool:
        if rid not in self._streams or self._down:
            return False
        self._channel().send(Abort(rid))
        return True

    def abort_all(self) -> int:
        return sum(self.abort(rid) for rid in list(self._streams))


class _Timer:
    """Where the time went: phase → seconds."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._began = self._last = time.monotonic()

    def mark(self, phase: str) -> None:
        now = time.monotonic()
        self.phases[phase] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return time.monotonic() - self._began

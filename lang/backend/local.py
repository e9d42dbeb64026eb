"""The engine in this process, without HTTP. The one module of `phloem.lang` that imports
`phloem.srt`, and itself imported only when an engine is given."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Literal, TypedDict, TypeVar, cast

import msgspec

from phloem.constrained.spec import Constraint, Plain
from phloem.lang.backend.base import (
    BackendInfo,
    Call,
    Delta,
    Prompt,
    TextPrompt,
    TokenLogprob,
    Usage,
)
from phloem.lang.backend.retry import backoff
from phloem.lang.choices import ChoiceScore, boundary
from phloem.lang.errors import BackendError, BackendUnavailable, RequestRefused
from phloem.lang.hints import take_hint
from phloem.lang.recording.spans import note_prompt, note_times
from phloem.lang.sampling import Sampling
from phloem.srt.errors import PhloemError, QueueFull
from phloem.srt.generation import ChatMessage, Chunk, EngineClient, GenerateRequest, Logprob
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.protocol import ChatRequest
from phloem.srt.http.reasoning import ReasoningPlan, plan_reasoning
from phloem.srt.http.tool_parser import AnswerParser, Reasoning, TextParser
from phloem.srt.messages import CallPlan, FinishReason, SamplingParams

T = TypeVar("T")

_FINISH: dict[FinishReason, Literal["stop", "length"]] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}

_Event = tuple[int, Chunk | BaseException | None]  # of which request; None: no more chunks


class LocalBackend:
    """Programs against `client`. `loop` is the event loop on which the client lives; None if that
    is the loop of the caller. A full queue is asked again up to `retries` times."""

    def __init__(
        self,
        client: EngineClient,
        *,
        loop: asyncio.AbstractEventLoop | None = None,
        retries: int = 8,
    ) -> None:
        self._client = client
        self.loop = loop
        self._retries = retries

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        prompt, reasoning = await self._on_loop(partial(self._generation_prompt, call.prompt))
        hint = _hint()
        requests = [
            reasoning.bound(
                GenerateRequest(
                    prompt=prompt,
                    sampling=_params(call.sampling, i),
                    constraint=_placed(call.constraint, reasoning),
                    stop=call.sampling.stop or (),
                    stop_regex=call.sampling.stop_regex or (),
                    **hint,
                )
            )
            for i in range(call.sampling.samples)
        ]
        make = reasoning.parser(TextParser)
        parsers = [make() for _ in requests]
        last: dict[int, Chunk] = {}
        async with aclosing(self._chunks(requests)) as chunks:
            async for index, chunk in chunks:
                last[index] = chunk
                yield _delta(index, chunk, parsers[index])
        note_times(min((chunk.queue_seconds for chunk in last.values()), default=0.0), None)
        yield Delta(usage=_usage(list(last.values())))

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        prompt_ids, *full = await self._on_loop(partial(self._tokenize, prompt, ("", *choices)))
        start = boundary(prompt_ids, full)
        hint = _hint()
        requests = [
            GenerateRequest(
                prompt=ids,
                sampling=SamplingParams(temperature=0.0, max_tokens=0),
                prompt_logprobs_from=start,
                **hint,
            )
            for ids in full
        ]
        scored: dict[int, list[Logprob | None]] = {}
        async with aclosing(self._chunks(requests)) as chunks:
            async for index, chunk in chunks:
                if chunk.finish is not None:
                    note_prompt(chunk.prompt_tokens, chunk.cached_tokens)
                if chunk.prompt_logprobs is not None:
                    scored[index] = chunk.prompt_logprobs
        return [_score(scored.get(i, []), len(ids) - start) for i, ids in enumerate(full)]

    async def info(self) -> BackendInfo:
        card = self._client.card
        return BackendInfo(card.name, card.context_length)

    async def end_program(self, program: str) -> None:
        """Tell the engine that no call of `program` follows."""

        def end() -> None:
            with suppress(PhloemError):  # the engine has ended, and all programs with it
                self._client.end_program(program)

        if self.loop is None:
            end()
        else:
            self.loop.call_soon_threadsafe(end)

    async def flush_cache(self) -> None:
        """Drop all KV that no running request holds."""
        await self._on_loop(self._client.flush)

    async def server_info(self) -> dict[str, Any]:
        """The model, as its card says."""
        info: dict[str, Any] = msgspec.to_builtins(self._client.card)
        return info

    async def aclose(self) -> None:
        """The engine belongs to whoever started it: nothing to let go of."""

    # ------------------------------------------------------------------ prompts

    async def _generation_prompt(self, prompt: Prompt) -> tuple[str | list[int], ReasoningPlan]:
        """And whether the answer begins with thoughts, as the server reads it off a chat."""
        if isinstance(prompt, TextPrompt):
            return prompt.text, ReasoningPlan()
        ids = await self._ids(prompt, "")
        options = ChatRequest(messages=[])
        return ids, await plan_reasoning(options, self._client, ids, prompt.partial or None)

    async def _tokenize(self, prompt: Prompt, continuations: Sequence[str]) -> list[list[int]]:
        return await asyncio.gather(*(self._ids(prompt, text) for text in continuations))

    async def _ids(self, prompt: Prompt, continuation: str) -> list[int]:
        if isinstance(prompt, TextPrompt):
            return await self._client.tokenize(prompt.text + continuation)
        messages = [ChatMessage(role=m.role, content=m.content) for m in prompt.messages]
        answer = prompt.partial + continuation
        if not answer:
            return await self._client.render_chat(messages)
        messages.append(ChatMessage(role="assistant", content=answer))
        return await self._client.render_chat(
            messages, add_generation_prompt=False, continue_final_message=True
        )

    # ------------------------------------------------------------------ across event loops

    async def _on_loop(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Await `work()` on the client's loop."""
        self._check_loop()
        try:
            if self.loop is None or self.loop is asyncio.get_running_loop():
                return await work()
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work(), self.loop))
        except PhloemError as exc:
            raise _translated(exc) from exc

    def _check_loop(self) -> None:
        if self.loop is not None and self.loop.is_closed():
            raise BackendUnavailable("the engine is closed")

    async def _chunks(
        self, requests: Sequence[GenerateRequest]
    ) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Chunks of all requests as they come, each with its request's index."""
        self._check_loop()
        here = asyncio.get_running_loop()
        events: asyncio.Queue[_Event] = asyncio.Queue()

        def put(event: _Event) -> None:
            here.call_soon_threadsafe(events.put_nowait, event)

        pumps = [
            asyncio.run_coroutine_threadsafe(self._pump(i, request, put), self.loop or here)
            for i, request in enumerate(requests)
        ]
        running = len(pumps)
        try:
            while running:
                index, item = await events.get()
                if item is None:
                    running -= 1
                elif isinstance(item, PhloemError):
                    raise _translated(item) from item
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield index, item
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(
        self, index: int, request: GenerateRequest, put: Callable[[_Event], None]
    ) -> None:
        """On the client's loop: one request's chunks to `put`, then its error if there is one."""
        delays = backoff(self._retries)
        try:
            while True:
                stream = cast("AsyncGenerator[Chunk, None]", self._client.generate(request))
                try:
                    async with aclosing(stream) as chunks:
                        async for chunk in chunks:
                            put((index, chunk))
                    return
                except QueueFull as exc:  # only ever before the first chunk
                    delay = next(delays, None)
                    if delay is None:
                        raise
                    await asyncio.sleep(max(delay, exc.retry_after or 0.0))
        except asyncio.CancelledError:
            put((index, BackendUnavailable("the engine's event loop was stopped")))
            raise
        except Exception as exc:
            put((index, exc))
        finally:
            put((index, None))


class _Hint(TypedDict, total=False):
    program: str
    plan: CallPlan


def _hint() -> _Hint:
    """The fields that say which program the call that runs here is of."""
    hint = take_hint()
    if hint is None:
        return {}
    plan = CallPlan(
        remaining=hint.remaining,
        group=hint.group,
        width=hint.width,
        next_constraints=list(hint.ahead),
    )
    return {"program": hint.program, "plan": plan}


def _params(sampling: Sampling, index: int) -> SamplingParams:
    """Options of the `index`-th answer: with a seed, each answer has its own."""
    given = msgspec.structs.asdict(sampling)
    for name in ("n", "stop", "stop_regex"):
        del given[name]
    if sampling.top_k == -1:
        given["top_k"] = 0
    if sampling.seed is not None:
        given["seed"] = sampling.seed + index
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _placed(constraint: Constraint | None, reasoning: ReasoningPlan) -> Constraint | None:
    """The constraint behind what is thought."""
    if not isinstance(constraint, Plain):
        return constraint
    found = reasoning.place(FoundConstraint("constraint", constraint))
    return None if found is None else found.for_engine()


def _delta(index: int, chunk: Chunk, parser: AnswerParser) -> Delta:
    finish = chunk.finish
    if finish is not None and finish.reason is FinishReason.ABORT:
        raise BackendUnavailable("the engine aborted the request")
    pieces = parser.feed(chunk.text) + ([] if finish is None else parser.finish())
    return Delta(
        index=index,
        text="".join(piece for piece in pieces if isinstance(piece, str)),
        reasoning="".join(piece.text for piece in pieces if isinstance(piece, Reasoning)),
        logprobs=tuple(
            TokenLogprob(entry.text, entry.logprob, tuple((t.text, t.logprob) for t in entry.top))
            for entry in chunk.logprobs or ()
        ),
        finish=None if finish is None else _FINISH[finish.reason],
        matched=None if finish is None else finish.matched,
    )


def _usage(last: Sequence[Chunk]) -> Usage:
    """Of a whole call: its prompt counts once, its answers add up."""
    return Usage(
        prompt_tokens=max((chunk.prompt_tokens for chunk in last), default=0),
        completion_tokens=sum(chunk.completion_tokens for chunk in last),
        cached_tokens=min((chunk.cached_tokens for chunk in last), default=0),
        forced_tokens=sum(chunk.forced_tokens for chunk in last),
    )


def _score(entries: Sequence[Logprob | None], length: int) -> ChoiceScore:
    known = [entry for entry in entries if entry is not None]
    if len(known) != length:
        raise BackendError(f"{len(known)} logprobs for {length} scored tokens")
    return ChoiceScore(
        tuple(entry.text for entry in known), tuple(entry.logprob for entry in known)
    )


def _translated(exc: PhloemError) -> BackendError:
    cls = BackendError
    if exc.status in (429, 503, 504):
        cls = BackendUnavailable
    elif exc.status < 500:
        cls = RequestRefused
    return cls(exc.message, status=exc.status, param=exc.param, code=exc.code)

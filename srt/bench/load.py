"""Asks a server what a workload wants to know, streamed, and keeps the time of every piece."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson

from phloem.srt.bench.workloads import Turn, Workload

Message = dict[str, str]
REASON_BYTES = 300  # of a server's error that are kept


class CallFailed(Exception):
    """The server refused, broke off, or left something out that the benchmark needs."""


@dataclass(kw_only=True)
class Call:
    """One request and what came of it. Times are `time.perf_counter` seconds: `pieces` has one
    for every piece of text that came. `cached_tokens` is None if the server does not say."""

    turn: Turn
    messages: list[Message]
    start: float = 0.0
    end: float = 0.0
    pieces: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = None
    error: str | None = None

    @property
    def answered(self) -> list[Message]:
        """The conversation with the answer."""
        return [*self.messages, {"role": "assistant", "content": self.text}]


@dataclass(frozen=True, kw_only=True)
class Run:
    """All calls of a workload, in the order in which they started, and how long it took."""

    workload: Workload
    seconds: float
    calls: list[Call]


class ChatClient:
    """`/v1/chat/completions` of one server.

    `ignore_eos` asks for answers of full length, so that servers are compared at equal work (a
    field that OpenAI itself does not know: turn it off there). `timeout_s` is for one request.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        model: str,
        *,
        ignore_eos: bool = True,
        timeout_s: float = 900.0,
    ) -> None:
        self._session = session
        self._url = f"{base_url.rstrip('/')}/v1/chat/completions"
        self._model = model
        self._ignore_eos = ignore_eos
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    def _body(self, call: Call) -> bytes:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": call.messages,
            "temperature": 0,
            "max_tokens": call.turn.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if call.turn.schema is not None:
            answer = {"name": "answer", "strict": True, "schema": call.turn.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": answer}
        elif self._ignore_eos:
            body["ignore_eos"] = True
        return orjson.dumps(body)

    async def ask(self, call: Call) -> None:
        """Send `call` and fill in what comes back. Never raises for what the server does wrong:
        that is the call's `error`."""
        body = self._body(call)  # before the clock starts
        call.start = time.perf_counter()
        try:
            await self._stream(call, body)
        except CallFailed as error:
            call.error = str(error)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            call.error = f"{type(error).__name__}: {error}"
        call.end = time.perf_counter()

    async def _stream(self, call: Call, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(
            self._url, data=body, headers=headers, timeout=self._timeout
        ) as response:
            if response.status != 200:
                reason = (await response.content.read(REASON_BYTES)).decode(errors="replace")
                raise CallFailed(f"HTTP {response.status}: {reason}")
            usage = None
            parts: list[str] = []
            async for event in _events(response.content):
                if "error" in event:
                    raise CallFailed(f"error in the stream: {event['error']}")
                usage = event.get("usage") or usage
                _take_choice(call, event, parts)
        call.text = "".join(parts)
        if usage is None:
            raise CallFailed("the server sent no usage, though asked to")
        call.prompt_tokens = usage["prompt_tokens"]
        call.completion_tokens = usage["completion_tokens"]
        details = usage.get("prompt_tokens_details") or {}
        call.cached_tokens = details.get("cached_tokens")


def _take_choice(call: Call, event: dict[str, Any], parts: list[str]) -> None:
    for choice in event.get("choices") or ():
        text = (choice.get("delta") or {}).get("content")
        if text:
            call.pieces.append(time.perf_counter())
            parts.append(text)
        call.finish_reason = choice.get("finish_reason") or call.finish_reason


async def _events(stream: aiohttp.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON of each server-sent event, up to `[DONE]`, without which the answer is cut off."""
    async for line in stream:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        if isinstance(event, dict):
            yield event
    raise CallFailed("the stream ended without [DONE]")


async def run_workload(client: ChatClient, workload: Workload) -> Run:
    """Run every turn; what follows from an answer starts when the answer is there. A turn whose
    predecessor failed fails with it, unasked."""
    gate = asyncio.Semaphore(workload.concurrency)
    calls: list[Call] = []

    async def go_on(turn: Turn, before: Call | None) -> None:
        messages = list(before.answered) if before else []
        if turn.system and not before:
            messages.append({"role": "system", "content": turn.system})
        messages.append({"role": "user", "content": turn.user})
        call = Call(turn=turn, messages=messages)
        if before is not None and before.error is not None:
            call.error = "the call before it failed"
            call.start = call.end = time.perf_counter()
            calls.append(call)
        else:
            async with gate:
                calls.append(call)
                await client.ask(call)
        async with asyncio.TaskGroup() as group:
            for following in turn.then:
                group.create_task(go_on(following, call))

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for turn in workload.turns:
            group.create_task(go_on(turn, None))
    return Run(workload=workload, seconds=time.perf_counter() - began, calls=calls)

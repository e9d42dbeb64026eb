"""Anthropic's Messages API, at Anthropic or at any server that has it (Phloem's is one)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Unpack

from phloem.lang.backend import anthropic_wire
from phloem.lang.backend.base import Call, Delta, Prompt, Usage
from phloem.lang.backend.dialects import unsupported
from phloem.lang.backend.generating import select_by_generation
from phloem.lang.backend.http_transport import Body, Transport, TransportOptions
from phloem.lang.backend.selecting import Selected, select_by_scores
from phloem.lang.backend.server import ServerBackend
from phloem.lang.choices import ChoiceScore, ChoicesMethod
from phloem.lang.errors import BackendUnavailable

_MESSAGES = "/v1/messages"


class AnthropicBackend(ServerBackend):
    """Chat programs against `model`, by Anthropic's Messages API.

    What the API does not have is refused at the variable, before anything is sent: plain text,
    `select`, regex, logprobs, seeds. With `n` above 1, that many requests are sent. A beginning of
    the assistant's message goes as its last message, which not all of Anthropic's models go on
    with: those refuse it.

    With `select_by_generation` there is a `select`: the model generates JSON that has one of the
    choices, which gives no scores and may be another one than any method of `select` prefers.
    """

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str = "https://api.anthropic.com",
        select_by_generation: bool = False,
        **options: Unpack[TransportOptions],
    ) -> None:
        headers = {"anthropic-version": "2023-06-01"}
        if api_key is not None:
            headers["x-api-key"] = api_key
        root = base_url.rstrip("/").removesuffix("/v1")
        super().__init__(Transport(root, headers, **options), model)
        self._model = model
        self._select_by_generation = select_by_generation

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        body = anthropic_wire.message_request(call, self._model)
        if call.sampling.samples > 1:
            body.pop("stream", None)  # nobody watches several answers
            for delta in await self._several(body, call.sampling.samples):
                yield delta
        elif not call.stream:
            for delta in await self._whole(body):
                yield delta
        else:
            async with aclosing(self._streamed(body)) as deltas:
                async for delta in deltas:
                    yield delta

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        raise unsupported(
            f"{anthropic_wire.TITLE} has no logprobs, which select judges by; "
            "AnthropicBackend(…, select_by_generation=True) lets the model generate a choice "
            "instead",
            "choices",
        )

    async def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
    ) -> Selected:
        if not self._select_by_generation:
            return await select_by_scores(self, prompt, choices, method)
        return await select_by_generation(
            self, anthropic_wire.TITLE, prompt, choices, method, as_json=True
        )

    async def _whole(self, body: Body) -> list[Delta]:
        return list(anthropic_wire.message_deltas(await self._transport.post(_MESSAGES, body)))

    async def _several(self, body: Body, count: int) -> list[Delta]:
        """`count` answers, and their usage: the prompt counts once, the answers add up."""
        tasks = [asyncio.create_task(self._whole(body)) for _ in range(count)]
        try:
            answers = await asyncio.gather(*tasks)
        finally:  # one failed, or nobody waits any more: the others end, too
            for task in tasks:
                task.cancel()
        deltas = [replace(d, index=i) for i, answer in enumerate(answers) for d in answer]
        usages = [delta.usage for delta in deltas if delta.usage is not None]
        total = Usage(
            max(usage.prompt_tokens for usage in usages),
            sum(usage.completion_tokens for usage in usages),
            min(usage.cached_tokens for usage in usages),
        )
        return [*(delta for delta in deltas if delta.usage is None), Delta(usage=total)]

    async def _streamed(self, body: Body) -> AsyncGenerator[Delta, None]:
        reader = anthropic_wire.StreamReader()
        async with aclosing(self._transport.events(_MESSAGES, body)) as events:
            async for data in events:
                for delta in reader.deltas(data):
                    yield delta
        if not reader.done:
            raise BackendUnavailable("the stream broke off before its end")

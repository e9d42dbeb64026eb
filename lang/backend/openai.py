"""Any server with OpenAI's API: OpenAI itself, vLLM, llama-server, Phloem, and whatever else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Unpack

from yarl import URL

from phloem.lang.backend import openai_wire
from phloem.lang.backend.base import BackendInfo, Call, ChatPrompt, Delta, Prompt, TextPrompt
from phloem.lang.backend.dialects import DIALECTS, Dialect, DialectName, unsupported
from phloem.lang.backend.generating import select_by_generation
from phloem.lang.backend.http_transport import Body, Transport, TransportOptions
from phloem.lang.backend.openai_scoring import echo_request, echo_scores, prompt_scores, scoring
from phloem.lang.backend.selecting import Selected, select_by_scores
from phloem.lang.backend.server import ServerBackend
from phloem.lang.backend.streaming import answer_deltas
from phloem.lang.checking import satisfied
from phloem.lang.choices import ChoiceScore, ChoicesMethod
from phloem.lang.errors import BackendError, RequestRefused
from phloem.lang.recording.spans import note_prompt

Kind = Literal["chat", "completions"]
"""The one kind of programs that a server can run: with roles, or of plain text."""


class OpenAIBackend(ServerBackend):
    """Programs against the server at `base_url`, as OpenAI's clients take it: with its `/v1`, which
    is added where the URL has no path.

    `dialect` says which server it is, and so which fields it takes beside OpenAI's; for servers not
    among them "openai" is right. What the server has no field for is refused at the variable,
    before anything is sent. `kind` says that it has only chat (no plain text programs), or only
    completions (no roles); None that it has both.

    `select` needs a server that tells the logprobs of a prompt. With `select_by_generation` the
    model generates one of the choices instead, greedily and constrained to them (in chats of
    dialect "openai", whose servers know no choices, to JSON with one of them): that gives no
    scores, and may prefer another choice than any method of `select` would.

    `max_tokens_field` overrides how the dialect spells `max_tokens` in chat ("openai" says
    `max_completion_tokens`; servers that are older than that ignore it). `extra_body` are fields
    for each generation, `headers` for each request. A constrained answer that is no JSON, none of
    the choices, or does not match the regex is a `BackendError`: the server knew the field as
    little as one that it ignores.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        kind: Kind | None = None,
        dialect: DialectName = "openai",
        select_by_generation: bool = False,
        max_tokens_field: Literal["max_tokens", "max_completion_tokens"] | None = None,
        extra_body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[TransportOptions],
    ) -> None:
        if dialect not in DIALECTS:
            raise ValueError(f"dialect must be one of {', '.join(DIALECTS)}, not {dialect!r}")
        if kind not in ("chat", "completions", None):
            raise ValueError(f"kind must be 'chat' or 'completions', not {kind!r}")
        key = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        super().__init__(
            Transport(_with_path(base_url), key | dict(headers or {}), **options), model
        )
        self._dialect: Dialect = DIALECTS[dialect]
        self._kind = kind
        self._select_by_generation = select_by_generation
        self._max_tokens_field = max_tokens_field or self._dialect.chat_max_tokens
        self._extra_body = dict(extra_body or {})

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        path, body = await self._request(call)
        most = self._dialect.alternatives(call)
        texts = [""] * call.sampling.samples
        async with aclosing(answer_deltas(self._transport, path, body, most)) as deltas:
            async for delta in deltas:
                if call.constraint is not None and 0 <= delta.index < len(texts):
                    texts[delta.index] += delta.text
                    if delta.finish == "stop":
                        self._check(call, texts[delta.index])
                yield delta

    async def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
    ) -> Selected:
        if not self._select_by_generation:
            return await select_by_scores(self, prompt, choices, method)
        dialect = self._dialect
        as_json = not dialect.chooses(chat=isinstance(prompt, ChatPrompt))
        return await select_by_generation(
            self, dialect.title, prompt, choices, method, as_json=as_json
        )

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        self._check_kind(prompt)
        way = scoring(self._dialect, prompt)
        model = (await self.info()).model
        if isinstance(prompt, TextPrompt):
            texts = [prompt.text, *(prompt.text + choice for choice in choices)]
            body = echo_request(texts, model, way)
            reply = await self._post(openai_wire.COMPLETIONS, body)
            return echo_scores(reply, len(texts), way)
        bodies = [self._scored_chat(prompt, choice, model) for choice in ("", *choices)]
        replies = await asyncio.gather(*(self._post(openai_wire.CHAT, body) for body in bodies))
        return prompt_scores([reply.prompt_logprobs for reply in replies])

    async def first_model(self) -> BackendInfo:
        """Asks the server anew. Raises `RequestRefused` when it serves several."""
        found = openai_wire.models(await self._transport.get("/models"))
        if len(found) > 1:
            raise RequestRefused(f"the server serves {len(found)} models: name one with model=…")
        return BackendInfo(*found[0])

    # ------------------------------------------------------------------ requests

    async def _request(self, call: Call) -> tuple[str, Body]:
        self._check_kind(call.prompt)
        path, body = self._dialect.generation(call, (await self.info()).model)
        self._spell_max_tokens(body)
        return path, body | self._extra_body

    def _spell_max_tokens(self, body: Body) -> None:
        spelt = self._dialect.chat_max_tokens
        if "messages" in body and spelt in body:
            body[self._max_tokens_field] = body.pop(spelt)

    def _scored_chat(self, prompt: ChatPrompt, choice: str, model: str) -> Body:
        scored = ChatPrompt(prompt.messages, prompt.partial + choice)
        body = {"model": model, **self._dialect.messages(scored), "temperature": 0}
        body |= {self._max_tokens_field: 1, "prompt_logprobs": 0}
        return body

    async def _post(self, path: str, body: Body) -> openai_wire.Reply:
        reply = openai_wire.read_reply(await self._transport.post(path, body))
        usage = openai_wire.usage_of(reply.usage)
        note_prompt(usage.prompt_tokens, usage.cached_tokens)
        return reply

    def _check_kind(self, prompt: Prompt) -> None:
        if self._kind == "chat" and isinstance(prompt, TextPrompt):
            raise unsupported("this server has chat only: put all text into roles", "prompt")
        if self._kind == "completions" and isinstance(prompt, ChatPrompt):
            raise unsupported("this server has completions only: no roles", "messages")

    def _check(self, call: Call, text: str) -> None:
        """Raises `BackendError` for a finished answer that breaks its constraint. One that may have
        been stopped before its end is not judged."""
        assert call.constraint is not None
        sampling = call.sampling
        if sampling.stop or sampling.stop_token_ids or sampling.stop_regex:
            return
        if satisfied(call.constraint, text) is False:
            raise BackendError(
                f"{self._dialect.title} did not enforce the constraint; the answer begins "
                f"{text[:80]!r}",
                code="constraint_violated",
            )


def _with_path(base_url: str) -> str:
    """Raises `ValueError` for what is no URL of HTTP."""
    if base_url.startswith(("http://", "https://")) and URL(base_url).path in ("", "/"):
        return base_url.rstrip("/") + "/v1"
    return base_url

"""A Phloem server over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, Unpack

from phloem.lang.backend import wire
from phloem.lang.backend.base import Call, Delta, Prompt
from phloem.lang.backend.dialects import DIALECTS
from phloem.lang.backend.http_transport import Body, Transport, TransportOptions
from phloem.lang.backend.selecting import Selected, select_by_scores
from phloem.lang.backend.server import ServerBackend
from phloem.lang.backend.streaming import answer_deltas
from phloem.lang.background import background
from phloem.lang.choices import ChoiceScore, ChoicesMethod, boundary
from phloem.lang.errors import RequestRefused
from phloem.lang.hints import Hint, take_hint
from phloem.lang.recording.spans import note_prompt

_PHLOEM = DIALECTS["phloem"]


class HttpBackend(ServerBackend):
    """Programs against the Phloem server at `base_url` (with or without `/v1`).

    For the options see `phloem.lang.backend.http_transport.TransportOptions`.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        model: str | None = None,
        **options: Unpack[TransportOptions],
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        root = base_url.rstrip("/").removesuffix("/v1")
        super().__init__(Transport(root, headers, **options), model)
        self._scores_at_once = True  # until the server turns out to be too old for it
        self._ends_programs = True  # likewise

    async def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        path, body = _PHLOEM.generation(call, await self._model())
        path, hint = "/v1" + path, take_hint()
        try:
            async with aclosing(self._answer(path, body | wire.hint_fields(hint))) as deltas:
                async for delta in deltas:
                    yield delta
            return
        except RequestRefused as exc:
            if not _of_the_plan(exc, hint):
                raise
        async with aclosing(self._answer(path, body | wire.hint_fields(_bare(hint)))) as deltas:
            async for delta in deltas:
                yield delta

    async def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
    ) -> Selected:
        """In one round trip, where the server has `/v1/score`."""
        if self._scores_at_once:
            body = wire.score_request(prompt, choices, method, await self._model())
            try:
                selected = wire.selected(await self._scores(body), len(choices))
            except RequestRefused as exc:
                if _judges_badly(exc):
                    raise ValueError(exc.message) from exc
                if exc.status not in (404, 405) or exc.param is not None:  # an unknown model
                    raise
                self._scores_at_once = False
            else:
                note_prompt(selected.usage.prompt_tokens, selected.usage.cached_tokens)
                return selected
        return await select_by_scores(self, prompt, choices, method)

    async def score(self, prompt: Prompt, choices: Sequence[str]) -> list[ChoiceScore]:
        if self._scores_at_once:
            method = ChoicesMethod.TOKEN_LENGTH_NORMALIZED
            return list((await self.select(prompt, choices, method)).scores)
        model = await self._model()
        bodies = [wire.tokenize_request(prompt, model, choice) for choice in ("", *choices)]
        replies = await asyncio.gather(
            *(self._transport.post("/tokenize", body) for body in bodies)
        )
        prompt_ids, *full = map(wire.token_ids, replies)
        start = boundary(prompt_ids, full)
        reply = await self._transport.post("/generate", wire.logprobs_request(full, start))
        return wire.choice_scores(reply, [len(ids) - start for ids in full])

    async def flush_cache(self) -> None:
        """Drop all KV that no running request holds."""
        await self._transport.post("/flush_cache", {})

    async def server_info(self) -> dict[str, Any]:
        """What runs there, as `/server_info` tells it."""
        info: dict[str, Any] = json.loads(await self._transport.get("/server_info"))
        return info

    async def run_program(self, body: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """The data of the events of `/programs/run`."""
        body = {"model": await self._model(), "stream": True, **body}
        async with aclosing(self._transport.events("/programs/run", body)) as events:
            async for data in events:
                yield data

    async def end_program(self, program: str) -> None:
        """Tell the server that no call of `program` follows, unless it is known not to listen."""
        if self._ends_programs:
            status = await self._transport.tell(f"/programs/{program}/end")
            self._ends_programs = status not in (404, 405)

    # ------------------------------------------------------------------ inside

    def _answer(self, path: str, body: Body) -> AsyncGenerator[Delta, None]:
        return answer_deltas(self._transport, path, body)

    async def _scores(self, body: Body) -> bytes:
        hint = take_hint()
        try:
            return await self._transport.post("/v1/score", body | wire.hint_fields(hint))
        except RequestRefused as exc:
            if not _of_the_plan(exc, hint):
                raise
        return await self._transport.post("/v1/score", body | wire.hint_fields(_bare(hint)))

    async def _model(self) -> str:
        return (self._info or await self.info()).model


def _of_the_plan(exc: RequestRefused, hint: Hint | None) -> bool:
    """Whether a call is refused for what it says of others, which fail by themselves."""
    return hint is not None and (exc.param or "").startswith("plan")


def _bare(hint: Hint | None) -> Hint | None:
    return None if hint is None else Hint(hint.program)


def _judges_badly(exc: RequestRefused) -> bool:
    """Whether a choice cannot be told apart from the prompt, or has nothing before it."""
    param = exc.param or ""
    return exc.code == "invalid_value" and (
        param in ("prompt", "messages") or param.startswith("choices")
    )


def connect(base_url: str, *, api_key: str | None = None, model: str | None = None) -> HttpBackend:
    """A backend for the server at `base_url`, after asking it what it serves.

    Raises `BackendUnavailable` when nobody answers there.
    """
    backend = HttpBackend(base_url, api_key=api_key, model=model)
    background.wait_for(backend.first_model())
    return backend

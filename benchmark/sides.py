"""The ways in which a program's calls reach a server, for `programs.py` to compare.

phloem        Phloem's protocol: choices are scored in one call, and calls carry hints
phloem-plain  the same server by calls that know of no program; choices are scored in three
              steps: tokenise with and without each one, find where they begin, score
llama-server  OpenAI's API. It tells no logprobs of a prompt, so a choice is generated
vllm          OpenAI's API; choices are scored by the prompt's logprobs
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import aiohttp
from own_server import metric

from phloem.lang.backend.http import HttpBackend
from phloem.lang.backend.http_transport import Body, Transport
from phloem.lang.backend.openai import OpenAIBackend
from phloem.lang.background import background

Client = HttpBackend | OpenAIBackend

HINTS = {"ids": "each call says of which program it is, and the server hears when that has ended"}

_program: ContextVar[str | None] = ContextVar("program", default=None)


class NamingTransport(Transport):
    """Names the program, where there is one, in every request with a body."""

    @asynccontextmanager
    async def request(
        self, method: str, path: str, body: Body | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        program = _program.get()
        if body is not None and program is not None:
            body = {**body, "program": program}
        async with super().request(method, path, body) as response:
            yield response


class NamingBackend(HttpBackend):
    """`HttpBackend` with program ids, for programs that run within `named`."""

    def __init__(self, base_url: str, *, model: str) -> None:
        super().__init__(base_url, model=model)
        self._transport = NamingTransport(base_url)

    @contextmanager
    def named(self, program: str) -> Iterator[None]:
        """What runs in here is the program of this id, which ends with it."""
        token = _program.set(program)
        try:
            yield
        finally:
            _program.reset(token)
            ended = self._transport.post(f"/programs/{program}/end", {})
            asyncio.run_coroutine_threadsafe(ended, background.loop).result()


class PlainBackend(HttpBackend):
    """What a client does that takes a Phloem server for any other."""

    def __init__(self, base_url: str, *, model: str) -> None:
        super().__init__(base_url, model=model)
        self._scores_at_once = False


def _phloem(url: str, model: str, hints: frozenset[str]) -> Client:
    return NamingBackend(url, model=model) if "ids" in hints else HttpBackend(url, model=model)


def _plain(url: str, model: str, hints: frozenset[str]) -> Client:
    return PlainBackend(url, model=model)


def _llama_server(url: str, model: str, hints: frozenset[str]) -> Client:
    return OpenAIBackend(url, model=model, dialect="llama-server", select_by_generation=True)


def _vllm(url: str, model: str, hints: frozenset[str]) -> Client:
    return OpenAIBackend(url, model=model, dialect="vllm")


@dataclass(frozen=True, kw_only=True)
class Side:
    """A client and its server: `peer` is a name in `peers.PEERS`, which is started with `flags`.

    `computed` takes from the text of `/metrics` how many prompt tokens the server has computed so
    far; it raises `KeyError` where that is not told.
    """

    peer: str
    connect: Callable[[str, str, frozenset[str]], Client]
    computed: Callable[[str], float]
    flags: tuple[str, ...] = ()


def _phloem_computed(text: str) -> float:
    return metric(text, "phloem_computed_prefill_tokens_total")


SIDES: dict[str, Side] = {
    "phloem": Side(peer="phloem", connect=_phloem, computed=_phloem_computed),
    "phloem-plain": Side(peer="phloem", connect=_plain, computed=_phloem_computed),
    "llama-server": Side(
        peer="llama-server",
        connect=_llama_server,
        computed=lambda text: metric(text, "llamacpp:prompt_tokens_total"),
        flags=("--metrics",),
    ),
    "vllm": Side(
        peer="vllm",
        connect=_vllm,
        computed=lambda text: (
            metric(text, "vllm:prompt_tokens_total") - metric(text, "vllm:prefix_cache_hits_total")
        ),
    ),
}

"""The ways in which a program's calls reach a server, for `programs.py` to compare.

phloem        Phloem's protocol: choices are scored in one call, and calls carry hints
phloem-plain  the same server by calls that know of no program; choices are scored in three
              steps: tokenise with and without each one, find where they begin, score
llama-server  OpenAI's API. It tells no logprobs of a prompt, so a choice is generated
vllm          OpenAI's API; choices are scored by the prompt's logprobs
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from own_server import metric

from phloem.lang.backend.base import Call, Delta, Prompt
from phloem.lang.backend.http import HttpBackend
from phloem.lang.backend.openai import OpenAIBackend
from phloem.lang.backend.selecting import Selected
from phloem.lang.choices import ChoicesMethod
from phloem.lang.hints import call_here

Client = HttpBackend | OpenAIBackend

HINTS = {"ids": "calls say what the DSL knows: program, fork, what is queued, the end"}


class PlainBackend(HttpBackend):
    """Its calls know of no program. Without `scores_at_once` it does what a client does that takes
    a Phloem server for any other."""

    def __init__(self, base_url: str, *, model: str, scores_at_once: bool) -> None:
        super().__init__(base_url, model=model)
        self._scores_at_once = scores_at_once

    def generate(self, call: Call) -> AsyncGenerator[Delta, None]:
        call_here.set(None)  # each call of a program has a context of its own
        return super().generate(call)

    async def select(
        self, prompt: Prompt, choices: Sequence[str], method: ChoicesMethod
    ) -> Selected:
        call_here.set(None)
        return await super().select(prompt, choices, method)


def _phloem(url: str, model: str, hints: frozenset[str]) -> Client:
    if "ids" in hints:
        return HttpBackend(url, model=model)
    return PlainBackend(url, model=model, scores_at_once=True)


def _plain(url: str, model: str, hints: frozenset[str]) -> Client:
    return PlainBackend(url, model=model, scores_at_once=False)


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

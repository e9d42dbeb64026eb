"""Counting tokens over the choices of one request."""

from __future__ import annotations

from phloem.srt.generation import Chunk
from phloem.srt.http.replies import PromptTokensDetails, Usage


class UsageCounter:
    """Totals over `prompts` × `n` sequences: each prompt counts once, each output counts.

    Of a prompt's n sequences the one with the fewest cached tokens says what was in the cache
    before the request: the others found what it had left there.
    """

    def __init__(self, n: int = 1) -> None:
        self._n = n
        self._latest: dict[int, Chunk] = {}

    def add(self, index: int, chunk: Chunk) -> None:
        """`chunk` of sequence `index` (= prompt index × n + choice) replaces its earlier counts."""
        self._latest[index] = chunk

    def usage(self) -> Usage:
        prompts: dict[int, tuple[int, int]] = {}
        for index, chunk in self._latest.items():
            cached = prompts.get(index // self._n, (0, chunk.cached_tokens))[1]
            prompts[index // self._n] = (chunk.prompt_tokens, min(cached, chunk.cached_tokens))
        prompt = sum(tokens for tokens, _ in prompts.values())
        completion = sum(chunk.completion_tokens for chunk in self._latest.values())
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(sum(c for _, c in prompts.values())),
        )

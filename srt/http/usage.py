"""Counting tokens over the choices of one request."""

from __future__ import annotations

from phloem.srt.generation import Chunk
from phloem.srt.http.replies import CompletionTokensDetails, PromptTokensDetails, Usage
from phloem.srt.messages import FinishReason


class UsageCounter:
    """Totals over `prompts` × `n` sequences: each prompt counts once, each output counts.

    Cached are the tokens of a prompt that the radix tree gave, so `prompt_tokens` less them were
    computed. Of a prompt's n sequences the one with the fewest says how many: it computed the rest,
    once, and the others took that from the tree as well. Sequences that say nothing yet, or that
    ended before they began, are left out.
    """

    def __init__(self, n: int = 1) -> None:
        self._n = n
        self._latest: dict[int, Chunk] = {}

    def add(self, index: int, chunk: Chunk) -> None:
        """`chunk` of sequence `index` (= prompt index × n + choice) replaces its earlier counts."""
        self._latest[index] = chunk

    def usage(self) -> Usage:
        lengths: dict[int, int] = {}
        cached: dict[int, int] = {}
        for index, chunk in self._latest.items():
            prompt = index // self._n
            lengths[prompt] = chunk.prompt_tokens
            if _was_admitted(chunk):
                cached[prompt] = min(cached.get(prompt, chunk.cached_tokens), chunk.cached_tokens)
        completion = sum(chunk.completion_tokens for chunk in self._latest.values())
        return Usage(
            prompt_tokens=sum(lengths.values()),
            completion_tokens=completion,
            total_tokens=sum(lengths.values()) + completion,
            prompt_tokens_details=PromptTokensDetails(sum(cached.values())),
            completion_tokens_details=CompletionTokensDetails(
                sum(chunk.forced_tokens for chunk in self._latest.values()),
                sum(chunk.reasoning_tokens for chunk in self._latest.values()),
                sum(chunk.accepted_guesses for chunk in self._latest.values()),
                sum(chunk.rejected_guesses for chunk in self._latest.values()),
            ),
        )


def _was_admitted(chunk: Chunk) -> bool:
    """Whether `cached_tokens` is known: it comes with the first token, or with the end."""
    if chunk.completion_tokens:
        return True
    return chunk.finish is not None and chunk.finish.reason is not FinishReason.ABORT

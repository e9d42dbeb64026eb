"""The engine's logprobs in the shapes of the two OpenAI routes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Final

from phloem.srt.generation import Logprob
from phloem.srt.http.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprobEntry,
    TopLogprob,
)

LOWEST: Final = -9999.0  # JSON has no -inf, which a masked token's logprob is


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(logprobs: Sequence[Logprob] | None) -> ChatLogprobs | None:
    if logprobs is None:
        return None
    return ChatLogprobs(
        [
            TokenLogprobEntry(
                one.text,
                finite(one.logprob),
                list(one.data),
                [TopLogprob(top.text, finite(top.logprob), list(top.data)) for top in one.top],
            )
            for one in logprobs
        ]
    )


class CompletionLogprobsBuilder:
    """Parallel lists for `/v1/completions`; offsets go on from one piece of a stream to the next.

    `top` is how many alternatives were asked for; 0 leaves `top_logprobs` null. The sampled token
    is always among them.
    """

    def __init__(self, top: int) -> None:
        self._top = top
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def build(self, logprobs: Sequence[Logprob]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[_name(one) for one in logprobs],
            token_logprobs=[finite(one.logprob) for one in logprobs],
            top_logprobs=[_top(one) for one in logprobs] if self._top else None,
            text_offset=[self._advance(one.data) for one in logprobs],
        )

    def build_echo(self, first: Logprob, rest: Sequence[Logprob | None]) -> CompletionLogprobs:
        """Of a prompt: its first token has no logprob, `first` only names it."""
        others = [one for one in rest if one is not None]
        built = self.build([first, *others])
        top = built.top_logprobs
        return CompletionLogprobs(
            tokens=built.tokens,
            token_logprobs=[None, *built.token_logprobs[1:]],
            top_logprobs=None if top is None else [None, *top[1:]],
            text_offset=built.text_offset,
        )

    def _advance(self, data: bytes) -> int:
        at = self._offset
        self._offset += len(self._utf8.decode(data))
        return at


def join(a: CompletionLogprobs | None, b: CompletionLogprobs | None) -> CompletionLogprobs | None:
    """Two neighbouring pieces as one."""
    if a is None or b is None:
        return a or b
    top = None
    if a.top_logprobs is not None and b.top_logprobs is not None:
        top = a.top_logprobs + b.top_logprobs
    return CompletionLogprobs(
        tokens=a.tokens + b.tokens,
        token_logprobs=a.token_logprobs + b.token_logprobs,
        top_logprobs=top,
        text_offset=a.text_offset + b.text_offset,
    )


def _top(one: Logprob) -> dict[str, float]:
    result: dict[str, float] = {}
    for candidate in one.top:
        result.setdefault(_name(candidate), finite(candidate.logprob))
    result.setdefault(_name(one), finite(one.logprob))
    return result


def _name(one: Logprob) -> str:
    """The token's text; part of a character is spelled in bytes, so that names stay distinct."""
    try:
        one.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.data)
    return one.text

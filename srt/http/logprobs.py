"""The engine's logprobs in the shapes of the two OpenAI routes."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec import UNSET

from phloem.srt.generation import Logprob
from phloem.srt.http.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprobEntry,
    TopLogprob,
)

LOWEST: Final = -9999.0  # JSON has no -inf, which a masked token's logprob is


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(
    logprobs: Sequence[Logprob] | None, *, as_ids: bool = False
) -> ChatLogprobs | None:
    """`as_ids` spells tokens `token_id:ID`, which also tells apart those of equal text."""
    if logprobs is None:
        return None
    return ChatLogprobs(
        [
            TokenLogprobEntry(
                _spelled(one, one.text, as_ids),
                finite(one.logprob),
                list(one.data),
                [
                    TopLogprob(_spelled(top, top.text, as_ids), finite(top.logprob), list(top.data))
                    for top in _others(one)
                ],
            )
            for one in logprobs
        ]
    )


def prompt_logprobs(logprobs: Sequence[Logprob | None], top: int) -> PromptLogprobs:
    """vLLM's shape, with `top` alternatives for each token of the prompt."""
    return [None if one is None else _prompt_entry(one, top) for one in logprobs]


def _prompt_entry(one: Logprob, top: int) -> dict[int, PromptLogprob]:
    ranks = {other.token_id: rank for rank, other in enumerate(one.top, 1)}
    return {
        entry.token_id: PromptLogprob(
            logprob=finite(entry.logprob),
            rank=ranks.get(entry.token_id, UNSET),
            decoded_token=entry.text,
        )
        for entry in (one, *one.top[:top], *one.chosen)
    }


class CompletionLogprobsBuilder:
    """Parallel lists for `/v1/completions`; offsets go on from one piece of a stream to the next.

    `top` is how many alternatives were asked for; 0 leaves `top_logprobs` null, unless tokens were
    chosen by their ids. The sampled token is always among them. `as_ids` as in `chat_logprobs`.
    """

    def __init__(self, top: int, *, as_ids: bool = False, chosen: bool = False) -> None:
        self._top = top
        self._as_ids = as_ids
        self._with_top = top > 0 or chosen
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def build(self, logprobs: Sequence[Logprob]) -> CompletionLogprobs:
        return CompletionLogprobs(
            tokens=[self._name(one) for one in logprobs],
            token_logprobs=[finite(one.logprob) for one in logprobs],
            top_logprobs=[self._best(one) for one in logprobs] if self._with_top else None,
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

    def _best(self, one: Logprob) -> dict[str, float]:
        result: dict[str, float] = {}
        for candidate in (*one.top[: self._top], *one.chosen, one):
            result.setdefault(self._name(candidate), finite(candidate.logprob))
        return result

    def _name(self, one: Logprob) -> str:
        """The token's text; part of a character is spelled in bytes, so that names stay
        distinct."""
        try:
            one.data.decode()
        except UnicodeDecodeError:
            spelled = "bytes:" + "".join(f"\\x{byte:02x}" for byte in one.data)
            return _spelled(one, spelled, self._as_ids)
        return _spelled(one, one.text, self._as_ids)

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


def _others(one: Logprob) -> Iterator[Logprob]:
    """The best alternatives, and the tokens that were chosen beside them."""
    yield from one.top
    best = {top.token_id for top in one.top}
    yield from (chosen for chosen in one.chosen if chosen.token_id not in best)


def _spelled(one: Logprob, text: str, as_ids: bool) -> str:
    return f"token_id:{one.token_id}" if as_ids else text

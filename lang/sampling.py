"""Sampling options: one struct, merged in one place.

A field that is None is left to the backend, except `max_tokens`, which is `DEFAULT_MAX_TOKENS`
when neither the `gen` nor the run says anything.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import TypedDict

import msgspec

DEFAULT_MAX_TOKENS = 128


class DrawingOptions(TypedDict, total=False):
    """How tokens are drawn, and what ends an answer."""

    temperature: float | None
    """0 is greedy; higher is more varied."""
    top_p: float | None
    """Draw from the likeliest tokens, as many as it takes to reach this probability together."""
    top_k: int | None
    """Draw from this many of the likeliest tokens; 0 or -1 is off."""
    min_p: float | None
    """Draw from tokens with at least this share of the likeliest one's probability."""
    repetition_penalty: float | None
    """Above 1, tokens that occurred, in the prompt too, become less likely; 1 is off."""
    presence_penalty: float | None
    """Subtracted from the logits of tokens that the answer has already."""
    frequency_penalty: float | None
    """The same, times how often the answer has them."""
    logit_bias: Mapping[int, float] | None
    """Token id → what is added to its logit."""
    seed: int | None
    """With the same one, a prompt and its options give the same answer."""
    stop: str | Sequence[str] | None
    """Texts that the answer ends before."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the answer."""
    stop_regex: str | Sequence[str] | None
    """Patterns whose match the answer ends before."""
    ignore_eos: bool | None
    """Go on behind the model's own end of text."""
    logprobs: int | None
    """Alternatives to report beside each token; 0 reports the token alone."""


class SamplingOverrides(DrawingOptions, total=False):
    """The options as keywords of `gen`, `run`, `run_batch` and `stream`."""

    max_tokens: int | None
    """The most tokens of an answer; 128 if neither the call nor the run says it."""
    min_tokens: int | None
    """The fewest: the answer does not end before."""
    n: int | None
    """Answers to one prompt. With more than one the value is a list."""


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one answer is drawn.

    `max_tokens` and `min_tokens` count tokens of the answer; `n` asks for that many answers to one
    prompt. `temperature` 0 is greedy; `top_k` 0 is off. Generation ends before the first of `stop`,
    before what a pattern of `stop_regex` matches, or after one of `stop_token_ids`. `logprobs` is
    how many alternatives to report beside each token: 0 reports the token alone, None nothing.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    stop_regex: tuple[str, ...] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None

    @property
    def samples(self) -> int:
        """The number of answers asked for."""
        return 1 if self.n is None else self.n

    def over(self, defaults: Sampling) -> Sampling:
        """These options, and those of `defaults` where these say nothing."""
        own = {f: v for f in self.__struct_fields__ if (v := getattr(self, f)) is not None}
        return msgspec.structs.replace(defaults, **own) if own else defaults


SAMPLING_FIELDS = frozenset(Sampling.__struct_fields__)

# field → (lowest, highest, lowest excluded?); the backend checks what depends on the model
_RANGES: dict[str, tuple[float, float, bool]] = {
    "max_tokens": (0, float("inf"), False),
    "min_tokens": (0, float("inf"), False),
    "n": (1, float("inf"), False),
    "temperature": (0, float("inf"), False),
    "top_p": (0, 1, True),
    "top_k": (-1, float("inf"), False),
    "min_p": (0, 1, False),
    "repetition_penalty": (0, float("inf"), True),
    "logprobs": (0, float("inf"), False),
}


def sampling_of(overrides: Mapping[str, object]) -> Sampling:
    """Keywords → `Sampling`.

    Raises `TypeError` for an unknown name or a wrong type, `ValueError` for a value out of range.
    """
    for name in overrides:
        if name not in SAMPLING_FIELDS:
            raise TypeError(unknown_option(name, SAMPLING_FIELDS))
    fields = dict(overrides)
    for name in ("stop", "stop_regex"):
        if isinstance(fields.get(name), str):
            fields[name] = (fields[name],)
    try:
        sampling = msgspec.convert(fields, Sampling, strict=True)
    except msgspec.ValidationError as exc:
        raise TypeError(f"sampling options: {exc}") from None
    for name, (low, high, above) in _RANGES.items():
        value = getattr(sampling, name)
        if value is None:
            continue
        # written so that NaN fails too
        if not (low <= value <= high) or (above and value == low):
            raise ValueError(f"{name} must be {_interval(low, high, above)}, not {value}")
    for pattern in sampling.stop_regex or ():
        check_regex(pattern, "stop_regex")
    return sampling


def check_regex(pattern: str, option: str) -> None:
    """Raise `ValueError` for a pattern that does not parse."""
    try:
        re.compile(pattern)
    except re.error as exc:
        raise ValueError(f"{option} {pattern!r}: {exc}") from exc


def unknown_option(name: str, known: frozenset[str]) -> str:
    """The message for an unknown keyword, with the nearest known one."""
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(sorted(known))})"
    return f"unknown option {name!r}{hint}"


def _interval(low: float, high: float, above: bool) -> str:
    lower = f"{'more than' if above else 'at least'} {low:g}"
    return lower if high == float("inf") else f"{lower} and at most {high:g}"

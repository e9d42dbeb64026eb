"""`options` and `keep_alive`: Ollama's knobs → fields of the inner request, with Ollama's defaults.

A penalty looks at the whole text, as with `repeat_last_n` -1; 0 turns penalties off, and another
window is refused where there is something to penalise. `num_ctx` bounds prompt and output
together; a prompt is never cut.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

import msgspec

from phloem.srt.errors import PromptTooLong
from phloem.srt.generation import GenerateRequest, ModelCard
from phloem.srt.http.body import invalid, unsupported
from phloem.srt.http.ollama.protocol import Options
from phloem.srt.http.responding import Call

TEMPERATURE: Final = 0.8
TOP_K: Final = 40
TOP_P: Final = 0.9
REPEAT_PENALTY: Final = 1.1

_NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "typical_p": (None, 1.0),
    "tfs_z": (None, 1.0),
    "mirostat": (None, 0),
    "penalize_newline": (None, True),
    "vocab_only": (None, False),
    "embedding_only": (None, False),
}
_DURATION: Final = re.compile(r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h))+)")


def sampling_fields(options: Options, card: ModelCard) -> dict[str, Any]:
    """Fields of a `GenerationFields` by name. Raises `InvalidRequest` with the option's path."""
    for name, values in _NEUTRAL.items():
        if getattr(options, name) not in values:
            raise unsupported(f"options.{name}", "there is no such sampler here")
    if options.num_ctx is not None and options.num_ctx > card.context_length:
        raise invalid(
            f"options.num_ctx {options.num_ctx} is more than the context of {card.context_length} "
            "tokens that this server was started with.",
            "options.num_ctx",
        )
    return {
        "seed": None if options.seed == -1 else options.seed,
        "temperature": _or(options.temperature, TEMPERATURE),
        "top_k": TOP_K if options.top_k is None else options.top_k,
        "top_p": _or(options.top_p, TOP_P),
        "min_p": options.min_p,
        "stop": options.stop,
        **_penalties(options, card),
    }


def max_tokens(options: Options) -> int | None:
    """`num_predict`; None (as -1 and -2 have it) is up to the context's end."""
    if options.num_predict == 0:
        raise invalid(
            "options.num_predict is at least 1, or -1 or -2 for as many as fit.",
            "options.num_predict",
        )
    return None if (options.num_predict or -1) < 0 else options.num_predict


def bounded(call: Call, options: Options) -> Call:
    """`call` with prompt (of ids) and output together within `num_ctx`. Raises `PromptTooLong`."""
    if options.num_ctx is None:
        return call
    return replace(call, requests=[_bounded(one, options.num_ctx) for one in call.requests])


def _bounded(request: GenerateRequest, num_ctx: int) -> GenerateRequest:
    room = num_ctx - len(request.prompt)
    if room < 1:
        raise PromptTooLong(
            f"the prompt has {len(request.prompt)} tokens; options.num_ctx lets prompt and output "
            f"together have {num_ctx}",
            param="options.num_ctx",
            code="context_length_exceeded",
        )
    limit = request.sampling.max_tokens
    sampling = msgspec.structs.replace(
        request.sampling, max_tokens=room if limit is None else min(limit, room)
    )
    return msgspec.structs.replace(request, sampling=sampling)


def asks_to_unload(keep_alive: float | str | None) -> bool:
    """Whether `keep_alive` asks that the model be unloaded at once. Raises `InvalidRequest` for
    what is no duration."""
    if isinstance(keep_alive, str) and not _DURATION.fullmatch(keep_alive):
        raise invalid(
            "keep_alive is a number of seconds or a duration like 5m or 1h30m, not "
            f"{keep_alive!r}.",
            "keep_alive",
        )
    return keep_alive is not None and not re.search(r"[1-9]", str(keep_alive))


def _penalties(options: Options, card: ModelCard) -> dict[str, float]:
    given = {
        "repetition_penalty": _or(options.repeat_penalty, REPEAT_PENALTY),
        "presence_penalty": _or(options.presence_penalty, 0.0),
        "frequency_penalty": _or(options.frequency_penalty, 0.0),
    }
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    window = options.repeat_last_n
    if window == 0:
        return neutral
    whole = window is None or window == -1 or window >= card.context_length
    if not whole and given != neutral:
        raise unsupported(
            "options.repeat_last_n",
            "penalties look at the whole text (-1), or at nothing (0)",
        )
    return given


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

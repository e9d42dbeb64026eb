"""Request fields → what the engine takes: sampling, stop conditions, and one request a choice."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from typing import Final

from phloem.constrained.spec import Regex
from phloem.srt.errors import InvalidRequest, NotFound
from phloem.srt.generation import GenerateRequest, ModelCard
from phloem.srt.http.caller import Caller
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.gathering import RunFields
from phloem.srt.http.protocol import MAX_STOP_STRINGS, GenerationFields
from phloem.srt.http.warning import Warnings
from phloem.srt.messages import JumpForward, LogprobsMode, SamplingParams
from phloem.srt.tokenizer.stop_patterns import check_patterns

MAX_BIAS: Final = 100.0
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_SEEDS: Final = 1 << 64


def check_model(name: str | None, card: ModelCard) -> None:
    """An absent name means the one model there is; a wrong one is a 404."""
    if name is not None and name != card.name:
        raise NotFound(
            f"The model {name!r} is not served here; {card.name!r} is.",
            param="model",
            code="model_not_found",
        )


def sampling_params(
    fields: GenerationFields, card: ModelCard, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """The common sampling fields. Raises `InvalidRequest` for what the types cannot say."""
    if fields.logprob_token_ids and logprobs is None and fields.prompt_logprobs is None:
        raise InvalidRequest(
            "logprob_token_ids without logprobs.", param="logprob_token_ids", code="invalid_value"
        )
    min_tokens = fields.min_tokens or 0
    check_min_tokens(min_tokens, max_tokens, "min_tokens", "max_tokens")
    return SamplingParams(
        temperature=_or(fields.temperature, 1.0),
        top_p=_or(fields.top_p, 1.0),
        top_k=top_k(fields.top_k, card, "top_k"),
        min_p=_or(fields.min_p, 0.0),
        repetition_penalty=_or(fields.repetition_penalty, 1.0),
        presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0),
        logit_bias=logit_bias(fields.logit_bias, card, "logit_bias"),
        seed=fields.seed,
        max_tokens=clamp_tokens(max_tokens, card),
        min_tokens=min(min_tokens, card.context_length),
        stop_token_ids=token_ids(fields.stop_token_ids or (), card, "stop_token_ids"),
        ignore_eos=bool(fields.ignore_eos),
        logprobs=logprobs,
        logprobs_mode=fields.logprobs_mode or LogprobsMode.RAW,
        allowed_token_ids=token_ids(fields.allowed_token_ids or (), card, "allowed_token_ids"),
        prompt_logprobs=_most(fields.prompt_logprobs, logprobs),
        logprob_token_ids=token_ids(fields.logprob_token_ids or (), card, "logprob_token_ids"),
    )


def openai_request(
    fields: GenerationFields,
    prompt: str | list[int],
    sampling: SamplingParams,
    constraint: FoundConstraint | None,
    caller: Caller,
    *,
    prompt_logprobs_from: int | None = None,
) -> GenerateRequest:
    """The engine's request of an OpenAI request's first choice."""
    return GenerateRequest(
        prompt=prompt,
        sampling=sampling,
        constraint=constraint.for_engine() if constraint else None,
        stop=stop_strings(fields.stop, "stop"),
        stop_regex=stop_patterns(fields.stop_regex, "stop_regex"),
        include_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        skip_special_tokens=fields.skip_special_tokens is not False,
        namespace=caller.tenant.namespace(fields.extra_key, fields.cache_salt),
        priority=caller.priority(fields.priority),
        deadline_s=fields.timeout,
        prompt_logprobs_from=prompt_logprobs_from,
        tenant=caller.tenant.name,
        program=caller.program,
        plan=caller.plan,
        jump=fields.jump_forward or JumpForward.CANONICAL,
    )


def choice_seeds(seed: int | None, n: int) -> list[int | None]:
    """Choice i draws with seed + i: repeatable, and not n times the same. Stays in int64."""
    if seed is None:
        return [None] * n
    half = _SEEDS // 2
    return [(seed + i + half) % _SEEDS - half for i in range(n)]


def response_id(fields: GenerationFields | RunFields, prefix: str) -> str:
    """The client's id for the request, or a fresh one."""
    return fields.rid or fields.request_id or f"{prefix}-{uuid.uuid4().hex}"


def stop_strings(stop: str | Sequence[str] | None, param: str) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            f"At most {MAX_STOP_STRINGS} stop strings, not {len(stops)}.",
            param=param,
            code="invalid_value",
        )
    if not all(stops):
        raise InvalidRequest("A stop string is empty.", param=param, code="invalid_value")
    return stops


def stop_patterns(patterns: str | Sequence[str] | None, param: str) -> tuple[str, ...]:
    """Regular expressions that end an answer; an empty string is none."""
    given = (patterns,) if isinstance(patterns, str) else tuple(patterns or ())
    return check_patterns([one for one in given if one], param)


def bad_words(words: Sequence[str] | None, param: str) -> FoundConstraint | None:
    """Texts that the answer must not have in it, however they are split into tokens: a constraint
    like any other. Raises `InvalidRequest` for an empty one."""
    if not words:
        return None
    for index, word in enumerate(words):
        if not word:
            raise InvalidRequest(
                "A bad word is empty.", param=f"{param}[{index}]", code="invalid_value"
            )
    forbidden = "|".join(map(re.escape, words))
    return FoundConstraint(param, Regex(pattern=rf"(?:(?!{forbidden})[\s\S])*"))


def cut_prompt(
    ids: list[int],
    fields: GenerationFields,
    max_tokens: int | None,
    card: ModelCard,
    warnings: Warnings,
) -> list[int]:
    """What `truncate_prompt_tokens` leaves of a prompt: so many tokens of its end, or of its
    beginning with `truncation_side` "right". -1 is what the context holds beside the answer."""
    name = "truncate_prompt_tokens"
    left = fields.truncate_prompt_tokens
    if left is None:
        if fields.truncation_side is not None:
            raise InvalidRequest(
                f"truncation_side without {name}.", param="truncation_side", code="invalid_value"
            )
        return ids
    if left == 0:
        raise InvalidRequest(
            f"{name} 0 leaves nothing of the prompt.", param=name, code="invalid_value"
        )
    if left == -1:
        left = max(1, card.context_length - max(1, max_tokens or 1))
    if left >= len(ids):
        return ids
    right = fields.truncation_side == "right"
    side = "end" if right else "beginning"
    warnings.add(name, f"{len(ids) - left} tokens were cut off at the prompt's {side}.")
    return ids[:left] if right else ids[-left:]


def token_ids(ids: Iterable[int], card: ModelCard, param: str) -> tuple[int, ...]:
    """Ids that are all in the vocabulary. Raises `InvalidRequest` for the first that is not."""
    checked = tuple(ids)
    for index, token in enumerate(checked):
        if not 0 <= token < card.vocab_size:
            raise InvalidRequest(
                f"{token} is not a token id of this model (0 to {card.vocab_size - 1}).",
                param=f"{param}[{index}]",
                code="token_id_out_of_range",
            )
    return checked


def logit_bias(bias: dict[str, float] | None, card: ModelCard, param: str) -> dict[int, float]:
    """Keys are token ids in decimal, values within ±100."""
    result: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not _TOKEN_ID.fullmatch(key) or int(key) >= card.vocab_size:
            raise InvalidRequest(
                f"{key!r} is not a token id of this model (0 to {card.vocab_size - 1}).",
                param=f"{param}.{key}",
                code="token_id_out_of_range",
            )
        if not -MAX_BIAS <= value <= MAX_BIAS:
            raise InvalidRequest(
                f"A bias lies within -100 and 100, not at {value}.",
                param=f"{param}.{key}",
                code="invalid_value",
            )
        result[int(key)] = value
    return result


def top_k(value: int | None, card: ModelCard, param: str) -> int:
    """-1, 0 and anything that cuts nothing off are 0, which is off."""
    if value is not None and value < -1:
        raise InvalidRequest(f"{param} is -1, 0 or more.", param=param, code="invalid_value")
    return value if value is not None and 0 < value < card.vocab_size else 0


def check_min_tokens(low: int, high: int | None, low_name: str, high_name: str) -> None:
    if high is not None and low > high:
        raise InvalidRequest(
            f"{low_name} ({low}) is more than {high_name} ({high}).",
            param=low_name,
            code="invalid_value",
        )


def clamp_tokens(value: int | None, card: ModelCard) -> int | None:
    """The engine stops at the context's end anyway; no number beyond it needs to travel."""
    return None if value is None else min(value, card.context_length)


def _most(a: int | None, b: int | None) -> int | None:
    """The larger count, where the first was given."""
    return None if a is None else max(a, b or 0)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

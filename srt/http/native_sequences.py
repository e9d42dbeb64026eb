"""What a native request asks of the engine: one sequence for each prompt, `n` times."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TypeVar

from phloem.srt.generation import EngineClient, GenerateRequest, ModelCard
from phloem.srt.http.body import invalid_at, unsupported
from phloem.srt.http.caller import Caller
from phloem.srt.http.completion_prompts import MAX_PROMPTS, first_token
from phloem.srt.http.constraint_fields import only_one, raw_constraints
from phloem.srt.http.fanout import part_rid
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.native_answer import Wanted
from phloem.srt.http.native_protocol import (
    DEFAULT_NEW_TOKENS,
    EMPTY_JSON,
    UNSUPPORTED_FLAGS,
    UNSUPPORTED_RAW,
    NativeRequest,
    NativeSampling,
    refuse_unsupported,
)
from phloem.srt.http.responding import MAX_SEQUENCES
from phloem.srt.http.sampling import (
    check_min_tokens,
    clamp_tokens,
    logit_bias,
    stop_patterns,
    stop_strings,
    token_ids,
    top_k,
)
from phloem.srt.http.warning import Warnings, longest_sequence
from phloem.srt.messages import JumpForward, SamplingParams

_GREEDY_BELOW = 1e-6
_T = TypeVar("_T")


@dataclass(frozen=True)
class NativeSequence:
    """One prompt's request for the engine, and how its answer is written."""

    request: GenerateRequest
    constraint: FoundConstraint | None
    n: int
    wanted: Wanted
    warnings: Warnings
    stream_interval: int


async def read_sequences(
    body: NativeRequest, engine: EngineClient, caller: Caller
) -> tuple[list[NativeSequence], bool]:
    """The sequences of a request, and whether its prompts came as a list (then so does the reply).
    Raises `InvalidRequest` with the field's path."""
    _refuse_unsupported(body)
    prompts, batched = _prompts(body, engine.card)
    chosen = _chosen(body, len(prompts), engine.card)
    sequences = [
        await _sequence(body, prompt, sampling, ids, engine, caller, at)
        for prompt, (sampling, at), ids in zip(
            prompts, _samplings(body, len(prompts)), chosen, strict=True
        )
    ]
    return sequences, batched


def _prompts(body: NativeRequest, card: ModelCard) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether they came as a list (then so does the reply)."""
    if (body.text is None) == (body.input_ids is None):
        raise invalid_at("Exactly one of text and input_ids is wanted.", "text")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        return [*_counted(body.text, "text")], True
    lists = [one for one in body.input_ids or () if isinstance(one, list)]
    flat = [one for one in body.input_ids or () if isinstance(one, int)]
    if lists and flat:
        raise invalid_at("input_ids is one list of ids or a list of such lists.", "input_ids")
    if lists:
        checked: list[str | list[int]] = [
            list(token_ids(one, card, f"input_ids[{i}]")) for i, one in enumerate(lists)
        ]
        return _counted(checked, "input_ids"), True
    return [list(token_ids(flat, card, "input_ids"))], False


def _counted(prompts: list[_T], param: str) -> list[_T]:
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise invalid_at(f"1 to {MAX_PROMPTS} prompts, not {len(prompts)}.", param)
    return prompts


def _samplings(body: NativeRequest, count: int) -> list[tuple[NativeSampling, str]]:
    """Per prompt, its sampling parameters and where they stand."""
    given = body.sampling_params
    if isinstance(given, list):
        if len(given) != count:
            raise invalid_at(f"{len(given)} for {count} prompts.", "sampling_params")
        return [(one, f"sampling_params[{i}].") for i, one in enumerate(given)]
    return [(given or NativeSampling(), "sampling_params.")] * count


def sequence_rids(
    body: NativeRequest, sequences: list[NativeSequence]
) -> tuple[str, list[list[str]]]:
    """The request's id, and the engine's id of each choice of each prompt."""
    total = sum(sequence.n for sequence in sequences)
    if total > MAX_SEQUENCES:
        raise invalid_at(f"More than {MAX_SEQUENCES} sequences.", "sampling_params.n")
    if isinstance(body.rid, list):
        if len(body.rid) != len(sequences) or len(set(body.rid)) != len(body.rid):
            raise invalid_at(f"{len(sequences)} different ids are wanted.", "rid")
        rids = [
            [part_rid(rid, i, sequence.n) for i in range(sequence.n)]
            for rid, sequence in zip(body.rid, sequences, strict=True)
        ]
        return f"batch-{uuid.uuid4().hex}", rids
    rid = body.rid or uuid.uuid4().hex
    names = iter([part_rid(rid, i, total) for i in range(total)])
    return rid, [[next(names) for _ in range(sequence.n)] for sequence in sequences]


def _chosen(body: NativeRequest, count: int, card: ModelCard) -> list[tuple[int, ...]]:
    """Per prompt, the tokens whose logprobs are wanted: one list for all, or a list for each."""
    name = "token_ids_logprob"
    given = body.token_ids_logprob or []
    if given and not body.return_logprob:
        raise invalid_at("It needs return_logprob.", name)
    flat = [one for one in given if isinstance(one, int)]
    lists = [one for one in given if isinstance(one, list)]
    if not lists:
        return [token_ids(flat, card, name)] * count
    if flat or len(lists) != count:
        raise invalid_at(f"One list of ids is wanted, or one for each of {count} prompts.", name)
    return [token_ids(one, card, f"{name}[{i}]") for i, one in enumerate(lists)]


async def _sequence(
    body: NativeRequest,
    prompt: str | list[int],
    sampling: NativeSampling,
    chosen: tuple[int, ...],
    engine: EngineClient,
    caller: Caller,
    at: str,
) -> NativeSequence:
    _refuse_unsupported_sampling(sampling, at)
    start = _prompt_logprobs_from(body, sampling)
    first = None
    if start == 0 or not prompt or body.return_prompt_token_ids:
        prompt = await engine.tokenize(prompt) if isinstance(prompt, str) else prompt
        if not prompt:
            param = "text" if body.text is not None else "input_ids"
            raise invalid_at("The prompt is empty.", param)
        first = await first_token(prompt[0], engine) if start == 0 else None
    constraint = only_one(
        list(
            raw_constraints(
                json_schema=sampling.json_schema,
                regex=sampling.regex,
                ebnf=sampling.ebnf,
                structural_tag=sampling.structural_tag,
                prefix=at,
            )
        )
    )
    logprobs = (body.top_logprobs_num or 0) if body.return_logprob else None
    request = GenerateRequest(
        prompt=prompt,
        sampling=_sampling_params(sampling, engine.card, at, logprobs, chosen),
        constraint=constraint.constraint if constraint else None,
        stop=stop_strings(sampling.stop, f"{at}stop"),
        stop_regex=stop_patterns(sampling.stop_regex, f"{at}stop_regex"),
        include_stop=bool(sampling.no_stop_trim),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        namespace=caller.tenant.namespace(body.extra_key, body.cache_salt),
        priority=caller.priority(body.priority),
        deadline_s=body.timeout,
        prompt_logprobs_from=start,
        tenant=caller.tenant.name,
        program=caller.program,
        plan=caller.plan,
        jump=body.jump_forward or JumpForward.CANONICAL,
    )
    warnings = _warnings(sampling, constraint, engine.card, caller, at)
    wanted = Wanted(
        logprobs=bool(body.return_logprob),
        top=logprobs or 0,
        chosen=bool(chosen),
        with_text=bool(body.return_text_in_logprobs),
        first=first,
        prompt=prompt if body.return_prompt_token_ids and isinstance(prompt, list) else None,
    )
    return NativeSequence(
        request, constraint, sampling.n or 1, wanted, warnings, sampling.stream_interval or 1
    )


def _warnings(
    sampling: NativeSampling,
    constraint: FoundConstraint | None,
    card: ModelCard,
    caller: Caller,
    at: str,
) -> Warnings:
    warnings = Warnings()
    if never := [i for i in sampling.stop_token_ids or () if i >= card.vocab_size]:
        warnings.add(f"{at}stop_token_ids", f"This model has no tokens {never}, so none stops it.")
    if sampling.max_new_tokens:
        longest = longest_sequence(card, caller.tenant)
        warnings.expect_length(f"{at}max_new_tokens", sampling.max_new_tokens, longest)
    if constraint is not None and sampling.ignore_eos:
        warnings.add(f"{at}ignore_eos", "A constrained answer ends when it is complete.")
    return warnings


def _prompt_logprobs_from(body: NativeRequest, sampling: NativeSampling) -> int | None:
    """-1 is "of the output only"; with no output at all that means the whole prompt."""
    if not body.return_logprob:
        return None
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if start < 0:
        return 0 if sampling.max_new_tokens == 0 else None
    return start


def _sampling_params(
    sampling: NativeSampling,
    card: ModelCard,
    at: str,
    logprobs: int | None,
    chosen: tuple[int, ...],
) -> SamplingParams:
    most = DEFAULT_NEW_TOKENS if sampling.max_new_tokens is None else sampling.max_new_tokens
    least = sampling.min_new_tokens or 0
    check_min_tokens(least, most, f"{at}min_new_tokens", f"{at}max_new_tokens")
    temperature = 1.0 if sampling.temperature is None else sampling.temperature
    return SamplingParams(
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=1.0 if sampling.top_p is None else sampling.top_p,
        top_k=top_k(sampling.top_k, card, f"{at}top_k"),
        min_p=sampling.min_p or 0.0,
        repetition_penalty=sampling.repetition_penalty or 1.0,
        presence_penalty=sampling.presence_penalty or 0.0,
        frequency_penalty=sampling.frequency_penalty or 0.0,
        logit_bias=logit_bias(sampling.logit_bias, card, f"{at}logit_bias"),
        seed=sampling.sampling_seed,
        max_tokens=clamp_tokens(most, card),
        min_tokens=min(least, card.context_length),
        stop_token_ids=tuple(i for i in sampling.stop_token_ids or () if i < card.vocab_size),
        ignore_eos=bool(sampling.ignore_eos),
        logprobs=logprobs,
        logprob_token_ids=chosen,
    )


def _refuse_unsupported(body: NativeRequest) -> None:
    refuse_unsupported(body, UNSUPPORTED_RAW, UNSUPPORTED_FLAGS)
    if body.session_id:
        raise unsupported("session_id")


def _refuse_unsupported_sampling(sampling: NativeSampling, at: str) -> None:
    for name in ("custom_params", "watermark"):
        if bytes(getattr(sampling, name)) not in EMPTY_JSON | {b"false"}:
            raise unsupported(at + name)
    if sampling.beam_width not in (None, 1):
        raise unsupported(f"{at}beam_width")

"""`POST /generate`: the native route, in SGLang's shapes."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from aiohttp import web

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import EngineClient, GenerateRequest, Logprob, ModelCard
from phloem.srt.http.body import BodyReader, unsupported
from phloem.srt.http.caller import Caller, caller_of
from phloem.srt.http.completions import MAX_PROMPTS, first_token
from phloem.srt.http.constraint_fields import only_one, raw_constraints
from phloem.srt.http.context import serving
from phloem.srt.http.enforcement import generate_constrained
from phloem.srt.http.errors import REQUEST_ID
from phloem.srt.http.fanout import part_rid
from phloem.srt.http.found_constraint import FoundConstraint
from phloem.srt.http.middleware import REQUEST_ID_HEADER
from phloem.srt.http.native_answer import NativeAnswer
from phloem.srt.http.native_protocol import (
    DEFAULT_NEW_TOKENS,
    EMPTY_JSON,
    UNSUPPORTED_FLAGS,
    UNSUPPORTED_RAW,
    NativeReply,
    NativeRequest,
    NativeSampling,
)
from phloem.srt.http.responding import MAX_SEQUENCES, located
from phloem.srt.http.sampling import (
    check_min_tokens,
    choice_seeds,
    clamp_tokens,
    logit_bias,
    stop_strings,
    token_ids,
    top_k,
)
from phloem.srt.http.stream import EventStream
from phloem.srt.messages import JumpForward, SamplingParams

_reader = BodyReader(NativeRequest)
_encoder = msgspec.json.Encoder()
_GREEDY_BELOW = 1e-6
_T = TypeVar("_T")


@dataclass(frozen=True)
class _Sequence:
    """One prompt's request for the engine, and how its answer is written."""

    request: GenerateRequest
    constraint: FoundConstraint | None
    n: int
    top: int
    first: Logprob | None


async def generate_route(request: web.Request) -> web.StreamResponse:
    ctx = serving(request)
    body = await _reader.read(request)
    _refuse_unsupported(body)
    caller = caller_of(request, body.program)
    prompts, batched = _prompts(body, ctx.engine.card)
    sequences = [
        await _sequence(body, prompt, sampling, ctx.engine, caller, at)
        for prompt, (sampling, at) in zip(prompts, _samplings(body, len(prompts)), strict=True)
    ]
    rid, rids = _rids(body, sequences)
    requests = [
        msgspec.structs.replace(
            sequence.request,
            rid=part,
            sampling=msgspec.structs.replace(sequence.request.sampling, seed=seed),
        )
        for sequence, parts in zip(sequences, rids, strict=True)
        for part, seed in zip(
            parts, choice_seeds(sequence.request.sampling.seed, sequence.n), strict=True
        )
    ]
    answers = [
        _answer(body, sequence, part)
        for sequence, parts in zip(sequences, rids, strict=True)
        for part in parts
    ]
    REQUEST_ID.set(rid)
    with located(next((s.constraint for s in sequences if s.constraint), None)):
        constraints = [s.constraint for s in sequences for _ in range(s.n)]
        return await _respond(request, rid, requests, answers, body, batched, constraints)


async def _respond(
    request: web.Request,
    rid: str,
    requests: list[GenerateRequest],
    answers: list[NativeAnswer],
    body: NativeRequest,
    batched: bool,
    constraints: list[FoundConstraint | None],
) -> web.StreamResponse:
    ctx = serving(request)
    several = batched or len(answers) > 1
    async with generate_constrained(ctx, rid, requests, constraints) as events:
        if not body.stream:
            async for index, chunk in events:
                answers[index].add(chunk)
            replies = [answer.reply() for answer in answers]
            return _json(replies if several else replies[0])
        headers = {REQUEST_ID_HEADER: rid}
        async with EventStream(request, headers, keepalive_s=ctx.keepalive_s) as stream:
            async for index, chunk in events:
                answers[index].add(chunk)
                if chunk.token_ids or chunk.text or chunk.finish is not None:
                    await stream.send(answers[index].reply(index if several else None))
        return stream.response


def _json(body: NativeReply | list[NativeReply]) -> web.Response:
    return web.Response(body=_encoder.encode(body), content_type="application/json")


def _answer(body: NativeRequest, sequence: _Sequence, rid: str) -> NativeAnswer:
    return NativeAnswer(
        rid,
        return_logprob=bool(body.return_logprob),
        top=sequence.top,
        with_text=bool(body.return_text_in_logprobs),
        first=sequence.first,
    )


# ----------------------------------------------------------------------- reading the request


def _prompts(body: NativeRequest, card: ModelCard) -> tuple[list[str | list[int]], bool]:
    """The prompts, and whether they came as a list (then so does the reply)."""
    if (body.text is None) == (body.input_ids is None):
        raise _invalid("Exactly one of text and input_ids is wanted.", "text")
    if isinstance(body.text, str):
        return [body.text], False
    if body.text is not None:
        return [*_counted(body.text, "text")], True
    lists = [one for one in body.input_ids or () if isinstance(one, list)]
    flat = [one for one in body.input_ids or () if isinstance(one, int)]
    if lists and flat:
        raise _invalid("input_ids is one list of ids or a list of such lists.", "input_ids")
    if lists:
        checked: list[str | list[int]] = [
            list(token_ids(one, card, f"input_ids[{i}]")) for i, one in enumerate(lists)
        ]
        return _counted(checked, "input_ids"), True
    return [list(token_ids(flat, card, "input_ids"))], False


def _counted(prompts: list[_T], param: str) -> list[_T]:
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise _invalid(f"1 to {MAX_PROMPTS} prompts, not {len(prompts)}.", param)
    return prompts


def _samplings(body: NativeRequest, count: int) -> list[tuple[NativeSampling, str]]:
    """Per prompt, its sampling parameters and where they stand."""
    given = body.sampling_params
    if isinstance(given, list):
        if len(given) != count:
            raise _invalid(f"{len(given)} for {count} prompts.", "sampling_params")
        return [(one, f"sampling_params[{i}].") for i, one in enumerate(given)]
    return [(given or NativeSampling(), "sampling_params.")] * count


def _rids(body: NativeRequest, sequences: list[_Sequence]) -> tuple[str, list[list[str]]]:
    """The request's id, and the engine's id of each choice of each prompt."""
    total = sum(sequence.n for sequence in sequences)
    if total > MAX_SEQUENCES:
        raise _invalid(f"More than {MAX_SEQUENCES} sequences.", "sampling_params.n")
    if isinstance(body.rid, list):
        if len(body.rid) != len(sequences) or len(set(body.rid)) != len(body.rid):
            raise _invalid(f"{len(sequences)} different ids are wanted.", "rid")
        rids = [
            [part_rid(rid, i, sequence.n) for i in range(sequence.n)]
            for rid, sequence in zip(body.rid, sequences, strict=True)
        ]
        return f"batch-{uuid.uuid4().hex}", rids
    rid = body.rid or uuid.uuid4().hex
    names = iter([part_rid(rid, i, total) for i in range(total)])
    return rid, [[next(names) for _ in range(sequence.n)] for sequence in sequences]


async def _sequence(
    body: NativeRequest,
    prompt: str | list[int],
    sampling: NativeSampling,
    engine: EngineClient,
    caller: Caller,
    at: str,
) -> _Sequence:
    _refuse_unsupported_sampling(sampling, at)
    start = _prompt_logprobs_from(body, sampling)
    first = None
    if start == 0 or not prompt:
        prompt = await engine.tokenize(prompt) if isinstance(prompt, str) else prompt
        if not prompt:
            raise _invalid("The prompt is empty.", "text" if body.text is not None else "input_ids")
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
    top = (body.top_logprobs_num or 0) if body.return_logprob else 0
    request = GenerateRequest(
        prompt=prompt,
        sampling=_sampling_params(sampling, engine.card, at, top if body.return_logprob else None),
        constraint=constraint.constraint if constraint else None,
        stop=stop_strings(sampling.stop, f"{at}stop"),
        include_stop=bool(sampling.no_stop_trim),
        skip_special_tokens=sampling.skip_special_tokens is not False,
        namespace=caller.tenant.namespace(body.extra_key, body.cache_salt),
        priority=caller.priority(body.priority),
        deadline_s=body.timeout,
        prompt_logprobs_from=start,
        tenant=caller.tenant.name,
        program=caller.program,
        jump=body.jump_forward or JumpForward.CANONICAL,
    )
    return _Sequence(request, constraint, sampling.n or 1, top, first)


def _prompt_logprobs_from(body: NativeRequest, sampling: NativeSampling) -> int | None:
    """-1 is "of the output only"; with no output at all that means the whole prompt."""
    if not body.return_logprob:
        return None
    start = -1 if body.logprob_start_len is None else body.logprob_start_len
    if start < 0:
        return 0 if sampling.max_new_tokens == 0 else None
    return start


def _sampling_params(
    sampling: NativeSampling, card: ModelCard, at: str, logprobs: int | None
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
        min_tokens=least,
        stop_token_ids=token_ids(sampling.stop_token_ids or (), card, f"{at}stop_token_ids"),
        ignore_eos=bool(sampling.ignore_eos),
        logprobs=logprobs,
    )


def _refuse_unsupported(body: NativeRequest) -> None:
    for name in UNSUPPORTED_RAW:
        if bytes(getattr(body, name)) not in EMPTY_JSON:
            raise unsupported(name)
    for name in UNSUPPORTED_FLAGS:
        if getattr(body, name):
            raise unsupported(name)
    if body.session_id:
        raise unsupported("session_id")


def _refuse_unsupported_sampling(sampling: NativeSampling, at: str) -> None:
    for name in ("custom_params", "watermark"):
        if bytes(getattr(sampling, name)) not in EMPTY_JSON | {b"false"}:
            raise unsupported(at + name)
    if sampling.stop_regex:
        raise unsupported(f"{at}stop_regex")
    if sampling.beam_width not in (None, 1):
        raise unsupported(f"{at}beam_width")
    if sampling.spaces_between_special_tokens is False:
        raise unsupported(f"{at}spaces_between_special_tokens")
    if sampling.stream_interval not in (None, 1):
        raise unsupported(f"{at}stream_interval")


def _invalid(message: str, param: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {message}", param=param, code="invalid_value")

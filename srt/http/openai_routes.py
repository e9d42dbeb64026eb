"""`POST /v1/chat/completions` and `POST /v1/completions`: decode → submit → encode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import msgspec
from aiohttp import web

from phloem.srt.errors import InvalidConstraint, InvalidRequest
from phloem.srt.generation import Chunk, GenerateRequest
from phloem.srt.http.body import BodyReader
from phloem.srt.http.caller import caller_of
from phloem.srt.http.chat import ChatAnswer
from phloem.srt.http.completions import CompletionAnswer, prompt_texts, read_prompts
from phloem.srt.http.constraint_fields import only_one, read_constraint
from phloem.srt.http.context import REQUEST_ID, serving
from phloem.srt.http.enforcement import generate_constrained, is_json
from phloem.srt.http.found_constraint import FoundConstraint, placed
from phloem.srt.http.messages import going_on_text, render_chat
from phloem.srt.http.middleware import REQUEST_ID_HEADER
from phloem.srt.http.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from phloem.srt.http.replies import reply_head
from phloem.srt.http.sampling import (
    check_model,
    choice_seeds,
    openai_request,
    response_id,
    sampling_params,
)
from phloem.srt.http.sse import EventStream
from phloem.srt.http.tools import plan_tools

MAX_SEQUENCES = 2048

_chat_reader = BodyReader(ChatRequest, unsupported=UNSUPPORTED_IN_CHAT)
_completion_reader = BodyReader(CompletionRequest, unsupported=UNSUPPORTED_IN_COMPLETIONS)
_encoder = msgspec.json.Encoder()


class Answer(Protocol):
    """What makes a reply of engine chunks, whole or in frames."""

    def add(self, index: int, chunk: Chunk) -> None: ...

    def whole(self) -> msgspec.Struct: ...

    def frames(self, index: int, chunk: Chunk) -> Iterator[msgspec.Struct]: ...

    def usage_frame(self) -> msgspec.Struct: ...


async def chat_completions(request: web.Request) -> web.StreamResponse:
    ctx = serving(request)
    body = await _chat_reader.read(request)
    caller = caller_of(request, body.program)
    options = stream_options(body)
    check_model(body.model, ctx.engine.card)
    plan = plan_tools(body)
    found = placed(read_constraint(body), body, [going_on_text(body)])
    check_fields(options, found)
    constraint = only_one([c for c in (found, plan.constraint) if c])
    sampling = sampling_params(
        body,
        ctx.engine.card,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=_top_logprobs(body),
    )
    prompt = await render_chat(body, plan.rendered, ctx.engine)
    base = openai_request(body, prompt, sampling, constraint, caller)
    rid = response_id(body, "chatcmpl")
    answer = ChatAnswer(
        reply_head(rid, ctx.engine.card.name),
        body.n or 1,
        plan.parser,
        continuous_usage=bool(options.continuous_usage_stats),
    )
    with located(constraint):
        return await _respond(request, rid, _choices([base], body), answer, body, constraint)


async def completions(request: web.Request) -> web.StreamResponse:
    ctx = serving(request)
    body = await _completion_reader.read(request)
    caller = caller_of(request, body.program)
    options = stream_options(body)
    check_model(body.model, ctx.engine.card)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest(
            "max_tokens 0 asks for nothing without echo.", param="max_tokens", code="invalid_value"
        )
    constraint = placed(read_constraint(body), body, prompt_texts(body))
    check_fields(options, constraint)
    sampling = sampling_params(body, ctx.engine.card, max_tokens=max_tokens, logprobs=body.logprobs)
    prompts = await read_prompts(body, ctx.engine)
    bases = [
        openai_request(
            body,
            prompt.value,
            sampling,
            constraint,
            caller,
            prompt_logprobs_from=None if prompt.first is None else 0,
        )
        for prompt in prompts
    ]
    rid = response_id(body, "cmpl")
    answer = CompletionAnswer(
        reply_head(rid, ctx.engine.card.name),
        prompts,
        body.n or 1,
        logprobs=body.logprobs,
        continuous_usage=bool(options.continuous_usage_stats),
    )
    with located(constraint):
        return await _respond(request, rid, _choices(bases, body), answer, body, constraint)


async def _respond(
    request: web.Request,
    rid: str,
    requests: Sequence[GenerateRequest],
    answer: Answer,
    fields: GenerationFields,
    constraint: FoundConstraint | None,
) -> web.StreamResponse:
    """Run the sequences and send the reply. The status goes out once all are accepted."""
    ctx = serving(request)
    REQUEST_ID.set(rid)
    constraints = [constraint] * len(requests)
    with_fields = bool(stream_options(fields).include_fields)
    async with generate_constrained(ctx, rid, requests, constraints, fields=with_fields) as events:
        if not fields.stream:
            async for index, chunk in events:
                answer.add(index, chunk)
            return json_response(answer.whole())
        headers = {REQUEST_ID_HEADER: rid}
        async with EventStream(request, headers, keepalive_s=ctx.keepalive_s) as stream:
            async for index, chunk in events:
                for frame in answer.frames(index, chunk):
                    await stream.send(frame)
            if stream_options(fields).include_usage:
                await stream.send(answer.usage_frame())
        return stream.response


def json_response(body: msgspec.Struct) -> web.Response:
    return web.Response(body=_encoder.encode(body), content_type="application/json")


@contextmanager
def located(constraint: FoundConstraint | None) -> Iterator[None]:
    """Report what is wrong in a constraint under the request field that it came from."""
    try:
        yield
    except InvalidConstraint as error:
        if constraint is None:
            raise
        path = constraint.inner_path(error.param or "")
        param = join_path(constraint.param, path)
        raise InvalidConstraint(error.message, param=param, code=error.code) from error


def join_path(prefix: str, path: str | None) -> str:
    """`path` (dotted, or a JSON pointer) below `prefix`; one that is there already stays."""
    if not path or path.startswith(prefix):
        return path or prefix
    pointer = path.removeprefix("#")
    if pointer.startswith("/"):
        steps = pointer[1:].split("/")
        return ".".join([prefix, *(s.replace("~1", "/").replace("~0", "~") for s in steps)])
    inner = path.removeprefix("$").removeprefix(".")
    return prefix + inner if inner.startswith("[") else f"{prefix}.{inner}"


def stream_options(fields: GenerationFields) -> StreamOptions:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest(
            "stream_options without stream.", param="stream_options", code="invalid_value"
        )
    return fields.stream_options or StreamOptions()


def check_fields(options: StreamOptions, constraint: FoundConstraint | None) -> None:
    """Raises `InvalidRequest` when fields are wanted of what has none."""
    if options.include_fields and (constraint is None or not is_json(constraint)):
        raise InvalidRequest(
            "include_fields needs a constraint to JSON.",
            param="stream_options.include_fields",
            code="invalid_value",
        )


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs is not None:
        raise InvalidRequest(
            "top_logprobs without logprobs.", param="top_logprobs", code="invalid_value"
        )
    return None


def _choices(bases: Sequence[GenerateRequest], fields: GenerationFields) -> list[GenerateRequest]:
    """`n` requests for each prompt, which differ in their seeds only."""
    n = fields.n or 1
    if len(bases) * n > MAX_SEQUENCES:
        raise InvalidRequest(
            f"{len(bases)} prompts times n {n} are more than {MAX_SEQUENCES} choices.",
            param="n",
            code="invalid_value",
        )
    return [
        msgspec.structs.replace(base, sampling=msgspec.structs.replace(base.sampling, seed=seed))
        for base in bases
        for seed in choice_seeds(fields.seed, n)
    ]

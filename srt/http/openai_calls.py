"""OpenAI bodies → what the engine is asked, and what makes the reply of its chunks.

Chat is what the other protocols translate to: a `ChatRequest` of theirs goes through
`prepare_chat`, and their own `Answer` takes the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import GenerateRequest
from phloem.srt.http.caller import Caller
from phloem.srt.http.chat import ChatAnswer
from phloem.srt.http.completions import CompletionAnswer, prompt_texts, read_prompts
from phloem.srt.http.constraint_fields import only_one, read_constraint
from phloem.srt.http.context import Serving
from phloem.srt.http.enforcement import is_json
from phloem.srt.http.found_constraint import FoundConstraint, placed
from phloem.srt.http.messages import going_on_text, render_chat
from phloem.srt.http.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from phloem.srt.http.replies import reply_head
from phloem.srt.http.responding import MAX_SEQUENCES, Answer, Call
from phloem.srt.http.sampling import (
    check_model,
    choice_seeds,
    openai_request,
    response_id,
    sampling_params,
)
from phloem.srt.http.tool_parser import AnswerParser
from phloem.srt.http.tools import plan_tools


@dataclass(frozen=True, kw_only=True)
class PreparedChat:
    """A chat ready to run: `parser` makes, for each choice, pieces of its text."""

    call: Call
    parser: Callable[[], AnswerParser]


async def prepare_chat(body: ChatRequest, ctx: Serving, caller: Caller, rid: str) -> PreparedChat:
    """Check, plan and render a chat. Raises `InvalidRequest` with the field's path, and `NotFound`
    for another model."""
    options = stream_options(body)
    check_model(body.model, ctx.engine.card)
    plan = plan_tools(body)
    found = placed(read_constraint(body), body, [going_on_text(body)])
    _check_fields(options, found)
    constraint = only_one([c for c in (found, plan.constraint) if c])
    sampling = sampling_params(
        body,
        ctx.engine.card,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=_top_logprobs(body),
    )
    prompt = await render_chat(body, plan.rendered, ctx.engine)
    base = openai_request(body, prompt, sampling, constraint, caller)
    call = Call(
        rid=rid,
        requests=_choices([base], body),
        constraint=constraint,
        with_fields=bool(options.include_fields),
    )
    return PreparedChat(call=call, parser=plan.parser)


async def chat_call(body: ChatRequest, ctx: Serving, caller: Caller) -> tuple[Call, Answer]:
    """`POST /v1/chat/completions`. Raises as `prepare_chat` does."""
    rid = response_id(body, "chatcmpl")
    prepared = await prepare_chat(body, ctx, caller, rid)
    options = stream_options(body)
    answer = ChatAnswer(
        reply_head(rid, ctx.engine.card.name),
        body.n or 1,
        prepared.parser,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )
    return prepared.call, answer


async def completion_call(
    body: CompletionRequest, ctx: Serving, caller: Caller
) -> tuple[Call, Answer]:
    """`POST /v1/completions`. Raises as `prepare_chat` does."""
    options = stream_options(body)
    check_model(body.model, ctx.engine.card)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0 and not body.echo:
        raise InvalidRequest(
            "max_tokens 0 asks for nothing without echo.", param="max_tokens", code="invalid_value"
        )
    constraint = placed(read_constraint(body), body, prompt_texts(body))
    _check_fields(options, constraint)
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
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
    )
    call = Call(
        rid=rid,
        requests=_choices(bases, body),
        constraint=constraint,
        with_fields=bool(options.include_fields),
    )
    return call, answer


def stream_options(fields: GenerationFields) -> StreamOptions:
    if fields.stream_options is not None and not fields.stream:
        raise InvalidRequest(
            "stream_options without stream.", param="stream_options", code="invalid_value"
        )
    return fields.stream_options or StreamOptions()


def _check_fields(options: StreamOptions, constraint: FoundConstraint | None) -> None:
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

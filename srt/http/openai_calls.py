"""OpenAI bodies → what the engine is asked, and what makes the reply of its chunks.

Chat is what the other protocols translate to: a `ChatRequest` of theirs goes through
`prepare_chat`, and their own `Answer` takes the chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from phloem.srt.generation import GenerateRequest
from phloem.srt.http.body import invalid, unsupported
from phloem.srt.http.caller import Caller
from phloem.srt.http.chat import ChatAnswer
from phloem.srt.http.completion_prompts import Prompt, prompt_texts, read_prompts
from phloem.srt.http.completions import CompletionAnswer
from phloem.srt.http.constraint_fields import only_one, read_constraint
from phloem.srt.http.context import Serving
from phloem.srt.http.enforcement import is_json
from phloem.srt.http.found_constraint import FoundConstraint, placed
from phloem.srt.http.messages import going_on_text, render_chat
from phloem.srt.http.plans import constraints_placed
from phloem.srt.http.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    GenerationFields,
    StreamOptions,
)
from phloem.srt.http.reasoning import plan_reasoning
from phloem.srt.http.replies import reply_head
from phloem.srt.http.reply_options import ReplyOptions
from phloem.srt.http.responding import MAX_SEQUENCES, Answer, Call
from phloem.srt.http.sampling import (
    bad_words,
    check_model,
    choice_seeds,
    cut_prompt,
    openai_request,
    response_id,
    sampling_params,
)
from phloem.srt.http.tool_parser import AnswerParser
from phloem.srt.http.tools import plan_tools
from phloem.srt.http.warning import Warnings, longest_sequence, warn_of_hints
from phloem.srt.messages import SamplingParams


@dataclass(frozen=True, kw_only=True)
class PreparedChat:
    """A chat ready to run: `parser` makes, for each choice, pieces of its text; `warnings` are what
    its reply is to say of the request."""

    call: Call
    parser: Callable[[], AnswerParser]
    warnings: Warnings
    prompt: list[int]


async def prepare_chat(
    body: ChatRequest,
    ctx: Serving,
    caller: Caller,
    rid: str,
    *,
    unknown: Sequence[str] = (),
) -> PreparedChat:
    """Check, plan and render a chat; `unknown` are fields that it came with beside the known ones.
    Raises `InvalidRequest` with the field's path, and `NotFound` for another model."""
    options, card = stream_options(body), ctx.engine.card
    check_model(body.model, card)
    plan = plan_tools(body, card.tool_format)
    found = placed(read_constraint(body), body, [going_on_text(body)])
    _check_fields(options, found)
    _check_chat(body)
    words = bad_words(body.bad_words, "bad_words")
    constraint = only_one([c for c in (found, words, plan.constraint) if c])
    max_tokens = body.max_completion_tokens or body.max_tokens
    logprobs = top_logprobs(body.logprobs, body.top_logprobs)
    sampling = sampling_params(body, card, max_tokens=max_tokens, logprobs=logprobs)
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    warnings = _warnings(body, constraint, ctx, caller, unknown, (name, max_tokens))
    if body.max_tokens not in (None, max_tokens):
        warnings.add("max_tokens", "max_completion_tokens counts, not max_tokens.")
    prompt = await render_chat(body, plan.rendered, ctx.engine)
    prompt = cut_prompt(prompt, body, max_tokens, card, warnings)
    reasoning = await plan_reasoning(body, ctx.engine, prompt, going_on_text(body))
    constraint = reasoning.place(constraint)
    base = openai_request(
        body,
        prompt,
        sampling,
        constraint,
        caller,
        prompt_logprobs_from=None if body.prompt_logprobs is None else 0,
    )
    base = reasoning.bound(base)
    base = msgspec.structs.replace(base, plan=constraints_placed(base.plan, reasoning.place))
    if base.constraint is not None:
        _check_allowed(body, "thinking_token_budget" if constraint is None else constraint.param)
    call = Call(
        rid=rid,
        requests=_choices([base], body, body.n or 1),
        constraint=constraint,
        with_fields=bool(options.include_fields),
        names={"prompt": "messages", "max_tokens": name, "rid": _rid_name(body)},
        stream_interval=body.stream_interval or 1,
    )
    parser = reasoning.parser(plan.parser)
    return PreparedChat(call=call, parser=parser, warnings=warnings, prompt=prompt)


async def chat_call(
    body: ChatRequest, ctx: Serving, caller: Caller, *, unknown: Sequence[str] = ()
) -> tuple[Call, Answer]:
    """`POST /v1/chat/completions`. Raises as `prepare_chat` does."""
    rid = response_id(body, "chatcmpl")
    prepared = await prepare_chat(body, ctx, caller, rid, unknown=unknown)
    answer = ChatAnswer(
        reply_head(rid, ctx.engine.card.name),
        body.n or 1,
        prepared.parser,
        ReplyOptions.of(body, stream_options(body), prepared.warnings),
        prompt=prepared.prompt,
        echo=going_on_text(body) or "" if body.echo else "",
    )
    return prepared.call, answer


async def completion_call(
    body: CompletionRequest, ctx: Serving, caller: Caller, *, unknown: Sequence[str] = ()
) -> tuple[Call, Answer]:
    """`POST /v1/completions`. Raises as `prepare_chat` does."""
    options, card = stream_options(body), ctx.engine.card
    check_model(body.model, card)
    max_tokens = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    best_of = _check_completion(body)
    found = placed(read_constraint(body), body, prompt_texts(body))
    _check_fields(options, found)
    constraint = only_one([c for c in (found, bad_words(body.bad_words, "bad_words")) if c])
    ranked = best_of > (body.n or 1)  # by the logprobs of their tokens
    sampling = sampling_params(
        body, card, max_tokens=max_tokens, logprobs=body.logprobs or 0 if ranked else body.logprobs
    )
    warnings = _warnings(
        body, constraint, ctx, caller, unknown, ("max_tokens", body.max_tokens or None)
    )
    prompts = await read_prompts(body, ctx.engine, warnings)
    bases = [_completion_request(body, one, sampling, constraint, caller) for one in prompts]
    rid = response_id(body, "cmpl")
    answer = CompletionAnswer(
        reply_head(rid, card.name),
        prompts,
        body.n or 1,
        ReplyOptions.of(body, options, warnings),
        best_of=best_of,
        logprobs=body.logprobs,
        chosen=bool(body.logprob_token_ids),
    )
    call = Call(
        rid=rid,
        requests=_choices(bases, body, best_of),
        constraint=constraint,
        with_fields=bool(options.include_fields),
        names={"rid": _rid_name(body)},
        stream_interval=body.stream_interval or 1,
    )
    return call, answer


def _completion_request(
    body: CompletionRequest,
    prompt: Prompt,
    sampling: SamplingParams,
    constraint: FoundConstraint | None,
    caller: Caller,
) -> GenerateRequest:
    if prompt.stop_token_ids:
        stop_ids = (*sampling.stop_token_ids, *prompt.stop_token_ids)
        sampling = msgspec.structs.replace(sampling, stop_token_ids=stop_ids)
    scored = prompt.first is not None or body.prompt_logprobs is not None
    return openai_request(
        body,
        prompt.value,
        sampling,
        constraint,
        caller,
        prompt_logprobs_from=0 if scored else None,
    )


def _check_chat(body: ChatRequest) -> None:
    """What chat has not, or not with each other."""
    _check_common(body)
    if body.best_of not in (None, body.n or 1):
        raise unsupported("best_of", "a chat has as many answers as n")
    if body.add_special_tokens:
        raise unsupported("add_special_tokens", "the chat template writes them")
    if body.echo and not body.continue_final_message:
        raise invalid(
            "echo repeats the assistant's text that the answer goes on with"
            " (continue_final_message).",
            "echo",
        )


def _check_completion(body: CompletionRequest) -> int:
    """What completions have not, or not with each other; how many sequences a prompt gets."""
    _check_common(body)
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise invalid(
            "max_tokens 0 asks for nothing without echo or prompt_logprobs.", "max_tokens"
        )
    n = body.n or 1
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        raise invalid(f"best_of ({best_of}) is less than n ({n}).", "best_of")
    if best_of > n and body.stream:
        raise invalid("Which choices are best is known at their end, not in a stream.", "best_of")
    return best_of


def _check_common(body: GenerationFields) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise invalid("prompt_logprobs are not told in a stream.", "prompt_logprobs")
    if body.stream_interval is not None and not body.stream:
        raise invalid("stream_interval without stream.", "stream_interval")


def _warnings(
    body: GenerationFields,
    constraint: FoundConstraint | None,
    ctx: Serving,
    caller: Caller,
    unknown: Sequence[str],
    length: tuple[str, int | None],
) -> Warnings:
    """What is to be said of a request before it runs; `length` is the field that bounds its answer,
    and its value. Raises `InvalidRequest` where a warning would not do."""
    warnings = Warnings(unknown)
    warn_of_hints(body, warnings)
    if constraint is not None:
        _check_allowed(body, constraint.param)
        if body.ignore_eos:
            warnings.add("ignore_eos", "A constrained answer ends when it is complete.")
    param, most = length
    if most is not None:
        warnings.expect_length(param, most, longest_sequence(ctx.engine.card, caller.tenant))
    return warnings


def _check_allowed(body: GenerationFields, param: str) -> None:
    """Tokens that are allowed and a constraint might leave none between them."""
    if body.allowed_token_ids:
        raise invalid(f"allowed_token_ids and {param} exclude each other.", "allowed_token_ids")


def _rid_name(fields: GenerationFields) -> str:
    return "request_id" if fields.rid is None and fields.request_id is not None else "rid"


def stream_options(fields: GenerationFields) -> StreamOptions:
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options without stream.", "stream_options")
    return fields.stream_options or StreamOptions()


def _check_fields(options: StreamOptions, constraint: FoundConstraint | None) -> None:
    """Raises `InvalidRequest` when fields are wanted of what has none."""
    if options.include_fields and (constraint is None or not is_json(constraint)):
        raise invalid("include_fields needs a constraint to JSON.", "stream_options.include_fields")


def top_logprobs(logprobs: bool | None, top: int | None) -> int | None:
    """How many alternatives a chat wants of each token; None for no logprobs at all."""
    if logprobs:
        return top or 0
    if top is not None:
        raise invalid("top_logprobs without logprobs.", "top_logprobs")
    return None


def _choices(
    bases: Sequence[GenerateRequest], fields: GenerationFields, count: int
) -> list[GenerateRequest]:
    """`count` requests for each prompt, which differ in their seeds only."""
    if len(bases) * count > MAX_SEQUENCES:
        name = "n" if count == (fields.n or 1) else "best_of"
        raise invalid(
            f"{len(bases)} prompts times {name} {count} are more than {MAX_SEQUENCES} choices.",
            name,
        )
    return [
        msgspec.structs.replace(base, sampling=msgspec.structs.replace(base.sampling, seed=seed))
        for base in bases
        for seed in choice_seeds(fields.seed, count)
    ]

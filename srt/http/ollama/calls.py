"""Bodies of `/api/generate` and `/api/chat` → what the engine is asked, and what makes the reply.

Both are chats of the inner request, rendered by the model's own template; a raw prompt is an inner
completion. What is wrong is reported under the names of this protocol.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import msgspec

from phloem.srt.errors import InvalidRequest, NotFound, Unavailable
from phloem.srt.generation import ModelCard
from phloem.srt.http.body import unsupported
from phloem.srt.http.caller import Caller
from phloem.srt.http.context import Serving
from phloem.srt.http.gathering import RunFields
from phloem.srt.http.ollama.answer import ChatAnswer, GenerateAnswer, Stopwatch
from phloem.srt.http.ollama.options import (
    asks_to_unload,
    bounded,
    max_tokens,
    sampling_fields,
)
from phloem.srt.http.ollama.protocol import (
    AnswerFields,
    ChatBody,
    GenerateBody,
    KeptFields,
    Options,
)
from phloem.srt.http.ollama.turns import inner_messages
from phloem.srt.http.openai_calls import completion_call, prepare_chat, top_logprobs
from phloem.srt.http.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
)
from phloem.srt.http.responding import Answer, Call
from phloem.srt.http.sampling import response_id, token_ids
from phloem.srt.http.tool_parser import TextParser
from phloem.srt.http.warning import Warnings, longest_sequence

_RUN_FIELDS: Final = [field.name for field in msgspec.structs.fields(RunFields)][1:]
"""All but the model's name."""

_OPTIONS: Final = {
    "max_tokens": "options.num_predict",
    "stop": "options.stop",
    "top_k": "options.top_k",
    "reasoning_effort": "think",
}
_MESSAGE_FIELD: Final = re.compile(r"(messages\[\d+\])\.(name|reasoning_content)")


def chat_name(param: str) -> str:
    """The name of an inner field in `/api/chat`."""
    if match := _MESSAGE_FIELD.fullmatch(param):
        return f"{match[1]}.{'tool_name' if match[2] == 'name' else 'thinking'}"
    return _option_name(param)


def generate_name(param: str) -> str:
    """The name of an inner field in `/api/generate`."""
    return "prompt" if param.startswith("messages") else _option_name(param)


def _option_name(param: str) -> str:
    head = re.split(r"[.\[]", param, maxsplit=1)[0]
    return _OPTIONS.get(head, head) + param[len(head) :]


def plain_name(name: str) -> str:
    """A model's name without the tag that says nothing."""
    return name.removesuffix(":latest")


def check_name(name: str | None, card: ModelCard) -> str:
    """The model's name as the client has it; an absent one means the model there is. Raises
    `NotFound`."""
    if name is not None and plain_name(name) != plain_name(card.name):
        raise NotFound(
            f"model {name!r} not found: {card.name!r} is served here",
            param="model",
            code="model_not_found",
        )
    return name or card.name


def served_model(body: KeptFields, ctx: Serving, *, load: bool) -> str:
    """The model's name as the client has it. With `load` it asks for nothing but that the model be
    loaded, as it is. Raises `InvalidRequest` when it is to be unloaded, `Unavailable` when nothing
    is served now."""
    name = check_name(body.model, ctx.engine.card)
    sampling_fields(body.options or Options(), ctx.engine.card)
    unload = asks_to_unload(body.keep_alive)
    if load and unload:
        raise InvalidRequest(
            "keep_alive 0 cannot be honoured: the model stays loaded while the server runs.",
            param="keep_alive",
            code="unsupported_parameter",
        )
    health = ctx.engine.health()
    if load and not (health.live and health.ready):
        raise Unavailable(health.reason)
    return name


async def chat_call(
    body: ChatBody, unknown: Sequence[str], ctx: Serving, caller: Caller, watch: Stopwatch
) -> tuple[Call, Answer]:
    """`POST /api/chat` with messages; `unknown` are fields that it came with beside the known ones.
    Raises `InvalidRequest` with the field's path."""
    card = ctx.engine.card
    name = check_name(body.model, card)
    options = body.options or Options()
    request = ChatRequest(
        messages=inner_messages(body.messages or []),
        tools=body.tools or None,
        **_chat_fields(body, options, card),
    )
    prepared = await prepare_chat(request, ctx, caller, response_id(request, "ollama"))
    warnings = _warnings(options, unknown, card, caller)
    answer = ChatAnswer(name, prepared.parser(), watch, warnings)
    return bounded(prepared.call, options), answer


async def generate_call(
    body: GenerateBody, unknown: Sequence[str], ctx: Serving, caller: Caller, watch: Stopwatch
) -> tuple[Call, Answer]:
    """`POST /api/generate` with a prompt. Arguments and errors as of `chat_call`."""
    card = ctx.engine.card
    name = check_name(body.model, card)
    options = body.options or Options()
    warnings = _warnings(options, unknown, card, caller)
    if body.raw or body.suffix:
        call = await _untemplated(body, options, ctx, caller)
        answer = GenerateAnswer(name, TextParser(), watch, warnings, None)
        return bounded(call, options), answer
    system = [Message(role="system", content=body.system)] if body.system else []
    turn = [*system, Message(role="user", content=body.prompt)]
    request = ChatRequest(messages=turn, **_chat_fields(body, options, card))
    prepared = await prepare_chat(request, ctx, caller, response_id(request, "ollama"))
    call = prepared.call
    if body.context:
        history = token_ids(body.context, card, "context")
        call = _with_prompt(call, [*history, *await _next_turn(request, ctx, caller)])
    call = bounded(call, options)
    return call, GenerateAnswer(name, prepared.parser(), watch, warnings, _prompt(call))


async def _untemplated(body: GenerateBody, options: Options, ctx: Serving, caller: Caller) -> Call:
    """A raw prompt, as it is, or what is missing between the prompt and its suffix."""
    kind = "a raw prompt" if body.raw else "a prompt with a suffix"
    misplaced = {
        "system": body.system,
        "context": body.context,
        "think": body.think is not None,
        "suffix": body.raw and body.suffix,
    }
    for name, value in misplaced.items():
        if value:
            raise InvalidRequest(f"{name} has no place in {kind}.", param=name)
    prompt = body.prompt or ""
    ends: tuple[int, ...] = ()
    if body.suffix:
        ids, ends = await ctx.engine.infill(prompt, body.suffix)
    else:
        ids = await ctx.engine.tokenize(prompt)
    limit = max_tokens(options)
    request = CompletionRequest(
        prompt=[*ids],
        stop_token_ids=list(ends),
        max_tokens=ctx.engine.card.context_length if limit is None else limit,
        logprobs=top_logprobs(body.logprobs, body.top_logprobs),
        **_fields(body, options, ctx.engine.card),
    )
    request.rid = response_id(request, "ollama")
    call, _ = await completion_call(request, ctx, caller)
    return call


async def _next_turn(request: ChatRequest, ctx: Serving, caller: Caller) -> list[int]:
    """The ids that the template puts behind an answer for the messages of `request`: what two
    conversations have in common that differ in the answer before. Raises `InvalidRequest` when the
    template does not show that answer."""
    rendered = []
    for word in ("yes", "no"):
        before = [Message(role="user", content="?"), Message(role="assistant", content=word)]
        longer = msgspec.structs.replace(request, messages=[*before, *request.messages])
        prepared = await prepare_chat(longer, ctx, caller, "")
        rendered.append(_prompt(prepared.call))
    one, other = rendered
    common = 0
    while common < min(len(one), len(other)) and one[-1 - common] == other[-1 - common]:
        common += 1
    if not common or common == len(one):
        raise InvalidRequest(
            "The model's chat template cannot go on from `context`.",
            param="context",
            code="unsupported_parameter",
        )
    return one[-common:]


def _with_prompt(call: Call, prompt: list[int]) -> Call:
    return replace(call, requests=[msgspec.structs.replace(call.requests[0], prompt=prompt)])


def _prompt(call: Call) -> list[int]:
    """The rendered prompt: of a chat it is always ids."""
    prompt = call.requests[0].prompt
    assert not isinstance(prompt, str)
    return prompt


def _chat_fields(body: AnswerFields, options: Options, card: ModelCard) -> dict[str, Any]:
    return {
        **_fields(body, options, card),
        "max_tokens": max_tokens(options),
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        **_thinking(body.think, card),
    }


def _fields(body: AnswerFields, options: Options, card: ModelCard) -> dict[str, Any]:
    return {
        **sampling_fields(options, card),
        "format": body.format,
        **{name: getattr(body, name) for name in _RUN_FIELDS},
    }


def _thinking(think: bool | str | None, card: ModelCard) -> dict[str, Any]:
    """Fields of a `ChatRequest`. An effort is as good as true where the template knows none."""
    if think is None:
        return {}
    if think is False:
        return {"reasoning_effort": "none"}
    if card.reasoning is None:
        raise unsupported("think", f"{card.name!r} does not think before it answers")
    if think is True:
        switch = card.reasoning.switch
        return {} if switch is None else {"chat_template_kwargs": {switch: True}}
    return {"reasoning_effort": think}


def _warnings(
    options: Options, unknown: Sequence[str], card: ModelCard, caller: Caller
) -> Warnings:
    warnings = Warnings(unknown)
    limit = max_tokens(options)
    if limit is not None:
        longest = longest_sequence(card, caller.tenant)
        longest = min(longest, options.num_ctx or longest)
        warnings.expect_length("options.num_predict", limit, longest)
    return warnings

"""A request of the Responses API → the chat that is run for it, and the response to begin with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import ModelCard
from phloem.srt.http.body import given, invalid, unsupported
from phloem.srt.http.caller import Caller
from phloem.srt.http.context import Serving
from phloem.srt.http.openai_calls import PreparedChat, prepare_chat
from phloem.srt.http.protocol import ChatRequest, GenerationFields
from phloem.srt.http.responding import Call
from phloem.srt.http.responses.conversation import Conversation, beginnings, without_oldest
from phloem.srt.http.responses.inputs import Placed
from phloem.srt.http.responses.paths import Paths
from phloem.srt.http.responses.protocol import (
    LOGPROBS,
    ReasoningOptions,
    ResponsesRequest,
    TextFormat,
)
from phloem.srt.http.responses.replies import FormatEcho, ReasoningEcho, Response, TextEcho
from phloem.srt.http.responses.tool_fields import chat_tools
from phloem.srt.http.tool_parser import AnswerParser
from phloem.srt.http.warning import Warnings

_VACUOUS: Final = frozenset(
    {
        "web_search_call.action.sources",
        "web_search_call.results",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "message.input_image.image_url",
    }
)
"""What can be included of items that no response of this server has."""

_CHAT_DETAILS: Final = (
    "prompt_logprobs",
    "return_token_ids",
    "return_tokens_as_token_ids",
    "return_metrics",
)
"""What the reply of a chat may have beside the answer."""

_FORMAT: Final = {
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
}
_PATHS: Final = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    "messages": "input",
}


@dataclass(frozen=True, kw_only=True)
class PreparedResponse:
    """What is run, what reads its text, and the response before anything came of it. `paths` tell
    where errors and warnings belong."""

    call: Call
    parser: Callable[[], AnswerParser]
    warnings: Warnings
    blank: Response
    paths: Paths


async def prepare_response(
    body: ResponsesRequest,
    ctx: Serving,
    caller: Caller,
    id_: str,
    items: Sequence[Placed],
    unknown: Sequence[str],
) -> PreparedResponse:
    """The request `body`, whose conversation is `items`, to be answered as response `id_`;
    `unknown` are fields that it came with beside the known ones. Raises `InvalidRequest` with the
    field's path, and `NotFound` for another model."""
    translation = _Translation(body, ctx, caller, id_, unknown)
    (prepared, paths), dropped = await translation.fitted(items)
    blank = _blank(body, id_, ctx.engine.card.name, prepared.call)
    if dropped:
        blank = msgspec.structs.replace(blank, truncated_items=dropped)
    return PreparedResponse(
        call=prepared.call,
        parser=prepared.parser,
        warnings=prepared.warnings,
        blank=blank,
        paths=paths,
    )


class _Translation:
    """One request, to be put to the engine with more or fewer items."""

    def __init__(
        self,
        body: ResponsesRequest,
        ctx: Serving,
        caller: Caller,
        id_: str,
        unknown: Sequence[str],
    ) -> None:
        self._body, self._ctx, self._caller, self._unknown = body, ctx, caller, unknown
        self._rid = body.rid or body.request_id or id_
        _check(body)
        tools = chat_tools(body.tools, body.tool_choice)
        self._paths = {**_PATHS, **tools.paths}
        # Every other field of a generation means here what it means there.
        self._fields: dict[str, Any] = {
            name: getattr(body, name) for name in GenerationFields.__struct_fields__
        }
        self._fields |= {
            **dict.fromkeys(("stream_options", "store", "metadata")),
            "tools": tools.tools,
            "tool_choice": tools.choice,
            "parallel_tool_calls": body.parallel_tool_calls,
            "max_completion_tokens": body.max_output_tokens,
            "chat_template_kwargs": body.chat_template_kwargs,
            "documents": body.documents,
            "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
            "thinking_token_budget": body.thinking_token_budget,
        }
        if _wants_logprobs(body):
            self._fields |= {"logprobs": True, "top_logprobs": body.top_logprobs}
        text_format = body.text.format if body.text is not None else None
        response_format = None if text_format is None else _response_format(text_format)
        if response_format is not None:
            if given(body.response_format):
                raise InvalidRequest(
                    "Only one constraint may be given, not `text.format` and `response_format`.",
                    param="response_format",
                    code="several_constraints",
                )
            self._fields["response_format"] = response_format
            self._paths |= _FORMAT

    async def fitted(self, items: Sequence[Placed]) -> tuple[tuple[PreparedChat, Paths], int]:
        """The chat, and how many of the oldest items were left out so that it fits the context:
        with truncation `auto` as few as possible, in whole turns, without it none."""
        whole = await self.prepared(items)
        if self._body.truncation != "auto" or self._fits(whole[0]):
            return whole, 0
        counts = [start for start in beginnings(items) if start > 0]
        best, dropped = whole, 0
        low, high = 0, len(counts)
        while low < high:  # more left out is never longer
            middle = (low + high) // 2
            tried = await self.prepared(without_oldest(items, counts[middle]))
            if self._fits(tried[0]) or middle == len(counts) - 1:
                best, dropped, high = tried, counts[middle], middle
            else:
                low = middle + 1
        return best, dropped

    async def prepared(self, items: Sequence[Placed]) -> tuple[PreparedChat, Paths]:
        conversation = Conversation(self._body.instructions, items)
        paths = Paths({**self._paths, **conversation.paths})
        if not conversation.messages:
            raise InvalidRequest("There is no input.", param="input", code="invalid_value")
        with paths.translated():
            chat = ChatRequest(messages=conversation.messages, **self._fields)
            prepared = await prepare_chat(
                chat, self._ctx, self._caller, self._rid, unknown=self._unknown
            )
        return prepared, paths

    def _fits(self, prepared: PreparedChat) -> bool:
        (request,) = prepared.call.requests
        return len(request.prompt) + self._room() <= _capacity(self._ctx.engine.card)

    def _room(self) -> int:
        """Tokens that are kept free for the output: what may come, at most half of the context."""
        capacity = _capacity(self._ctx.engine.card)
        return min(self._body.max_output_tokens or 1, capacity // 2)


def _capacity(card: ModelCard) -> int:
    return min(card.context_length, card.kv_slots)


def _check(body: ResponsesRequest) -> None:
    """Raises `InvalidRequest` for what is known and not offered, and for what does not fit."""
    _check_names(body)
    if body.stream_options is not None:
        if not body.stream:
            raise invalid("stream_options without stream.", "stream_options")
        for name in ("include_obfuscation", "continuous_usage_stats", "include_fields"):
            if getattr(body.stream_options, name):
                raise unsupported(f"stream_options.{name}")
    if body.background and body.store is False:
        raise invalid("What runs in the background has to be stored.", "store")
    check_include(body.include or ())
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise unsupported("text.verbosity", "the model has no such setting")
    _check_reasoning(body.reasoning or ReasoningOptions())


def check_include(names: Sequence[str]) -> None:
    """Raises `InvalidRequest` for details that there are, but not here."""
    for i, name in enumerate(names):
        if name != LOGPROBS and name not in _VACUOUS:
            raise unsupported(f"include[{i}]", f"{name!r} is not supported")


def _check_names(body: ResponsesRequest) -> None:
    """Fields that ask for more than one answer, or for what the reply of a chat has beside it."""
    for name in ("n", "best_of"):
        if getattr(body, name) not in (None, 1):
            raise unsupported(name, "a response has one answer")
    for name in _CHAT_DETAILS:
        if getattr(body, name) not in (None, False):
            raise unsupported(name, "a response has no place for it")


def _check_reasoning(reasoning: ReasoningOptions) -> None:
    for name in ("summary", "generate_summary"):
        if getattr(reasoning, name) not in (None, "auto"):
            raise unsupported(f"reasoning.{name}", "reasoning is given whole")


def _wants_logprobs(body: ResponsesRequest) -> bool:
    return LOGPROBS in (body.include or ()) or bool(body.top_logprobs)


def _response_format(form: TextFormat) -> Raw | None:
    """A chat's `response_format`; None for free text. Raises `InvalidRequest` for a schema that is
    missing, or is not wanted."""
    if form.type not in ("text", "json_object", "json_schema"):
        raise invalid(
            f"text.format.type is {form.type!r}; known are text, json_object and json_schema.",
            "text.format.type",
        )
    if given(form.schema) != (form.type == "json_schema"):
        there = "has no" if given(form.schema) else "needs a"
        raise InvalidRequest(
            f"text.format of type {form.type} {there} schema.",
            param="text.format.schema",
            code="unknown_constraint" if given(form.schema) else "missing_schema",
        )
    if form.type == "text":
        return None
    inner: dict[str, object] = {"type": form.type}
    if form.type == "json_schema":
        inner["json_schema"] = {"name": form.name, "schema": form.schema, "strict": form.strict}
    return Raw(msgspec.json.encode(inner))


def _blank(body: ResponsesRequest, id_: str, model: str, call: Call) -> Response:
    """The response to `body` before anything came of it."""
    sampling = call.requests[0].sampling
    return Response(
        id=id_,
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningEcho(effort=body.reasoning.effort if body.reasoning else None),
        safety_identifier=body.safety_identifier,
        store=body.store is not False,
        temperature=sampling.temperature,
        text=TextEcho(format=_format_echo(body)),
        tool_choice=body.tool_choice if given(body.tool_choice) else Raw(b'"auto"'),
        tools=body.tools or [],
        top_logprobs=sampling.logprobs or 0,
        top_p=sampling.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def _format_echo(body: ResponsesRequest) -> FormatEcho:
    form = body.text.format if body.text is not None else None
    if form is None or form.type != "json_schema":
        return FormatEcho() if form is None else FormatEcho(type=form.type)
    return FormatEcho(
        type=form.type,
        name=form.name if form.name is not None else UNSET,
        description=form.description if form.description is not None else UNSET,
        schema=form.schema,
        strict=form.strict is not False,
    )

"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Final

from aiohttp import web

from phloem.srt.http.anthropic.answer import MessageAnswer
from phloem.srt.http.anthropic.protocol import (
    UNSUPPORTED_IN_MESSAGES,
    CountRequest,
    MessagesRequest,
)
from phloem.srt.http.anthropic.replies import MessageReply, Ping, StreamEvent, TokenCount
from phloem.srt.http.anthropic.translate import shows_thinking, translated
from phloem.srt.http.body import BodyReader
from phloem.srt.http.caller import caller_of
from phloem.srt.http.context import serving
from phloem.srt.http.errors import REQUEST_ID, ErrorShape, shape_for
from phloem.srt.http.framing import NamedFrames
from phloem.srt.http.openai_calls import prepare_chat
from phloem.srt.http.responding import json_response, respond
from phloem.srt.http.routes import Access, Route

_HI: Final = [{"role": "user", "content": "Hi"}]
EVENTS: Final = NamedFrames(ErrorShape.ANTHROPIC, ping=Ping())
REQUEST_ID_HEADER: Final = "request-id"

messages_reader = BodyReader(MessagesRequest, unsupported=UNSUPPORTED_IN_MESSAGES)
count_reader = BodyReader(CountRequest, unsupported=UNSUPPORTED_IN_MESSAGES)


async def messages(request: web.Request) -> web.StreamResponse:
    body, unknown = await messages_reader.read_noting(request)
    ctx, caller = serving(request), caller_of(request, body.program, body.plan)
    rid = body.rid or body.request_id or f"msg_{uuid.uuid4().hex}"
    inner = translated(body)
    with inner.paths.reported():
        prepared = await prepare_chat(inner.chat, ctx, caller, rid, unknown=unknown)
        call = prepared.call
        if call.constraint is not None:
            param = inner.paths.outer(call.constraint.param)
            call = replace(call, constraint=replace(call.constraint, param=param))
        answer = MessageAnswer(
            rid,
            ctx.engine.card.name,
            prepared.parser(),
            prepared.warnings,
            max_tokens=body.max_tokens,
            show_thinking=shows_thinking(body),
        )
        return await respond(request, call, answer, stream=bool(body.stream), framing=EVENTS)


async def count_tokens(request: web.Request) -> web.Response:
    """As many as `/v1/messages` counts for the same body, cached or not."""
    body = await count_reader.read(request)
    inner = translated(body)
    with inner.paths.reported():
        prepared = await prepare_chat(
            inner.chat, serving(request), caller_of(request, body.program, body.plan), "count"
        )
    return json_response(TokenCount(len(prepared.prompt)))


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Give the responses that Anthropic's clients read the header that they look for."""
    if shape_for(request) is ErrorShape.ANTHROPIC:
        response.headers.setdefault(REQUEST_ID_HEADER, REQUEST_ID.get())


ROUTES: Final = (
    Route(
        "POST",
        "/v1/messages",
        messages,
        Access.INFERENCE,
        "Answer a conversation",
        body=messages_reader,
        reply=MessageReply,
        events=StreamEvent,
        framing=EVENTS,
        example={"max_tokens": 8, "messages": _HI},
    ),
    Route(
        "POST",
        "/v1/messages/count_tokens",
        count_tokens,
        Access.INFERENCE,
        "Count the tokens of a conversation",
        body=count_reader,
        reply=TokenCount,
        example={"messages": _HI},
    ),
)

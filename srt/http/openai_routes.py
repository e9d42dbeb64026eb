"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from aiohttp import web

from phloem.srt.http.body import BodyReader
from phloem.srt.http.caller import caller_of
from phloem.srt.http.context import serving
from phloem.srt.http.openai_calls import chat_call, completion_call
from phloem.srt.http.protocol import (
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    ChatRequest,
    CompletionRequest,
)
from phloem.srt.http.responding import respond

chat_reader = BodyReader(ChatRequest, unsupported=UNSUPPORTED_IN_CHAT)
completion_reader = BodyReader(CompletionRequest, unsupported=UNSUPPORTED_IN_COMPLETIONS)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    body = await chat_reader.read(request)
    call, answer = await chat_call(body, serving(request), caller_of(request, body.program))
    return await respond(request, call, answer, stream=bool(body.stream))


async def completions(request: web.Request) -> web.StreamResponse:
    body = await completion_reader.read(request)
    call, answer = await completion_call(body, serving(request), caller_of(request, body.program))
    return await respond(request, call, answer, stream=bool(body.stream))

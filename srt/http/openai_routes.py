"""`POST /v1/chat/completions` and `POST /v1/completions`."""

from __future__ import annotations

from typing import Final

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
from phloem.srt.http.replies import ChatChunk, ChatCompletion, Completion
from phloem.srt.http.responding import respond
from phloem.srt.http.routes import Access, Route

chat_reader = BodyReader(ChatRequest, unsupported=UNSUPPORTED_IN_CHAT)
completion_reader = BodyReader(CompletionRequest, unsupported=UNSUPPORTED_IN_COMPLETIONS)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    body, unknown = await chat_reader.read_noting(request)
    caller = caller_of(request, body.program, body.plan)
    call, answer = await chat_call(body, serving(request), caller, unknown=unknown)
    return await respond(request, call, answer, stream=bool(body.stream))


async def completions(request: web.Request) -> web.StreamResponse:
    body, unknown = await completion_reader.read_noting(request)
    caller = caller_of(request, body.program, body.plan)
    call, answer = await completion_call(body, serving(request), caller, unknown=unknown)
    return await respond(request, call, answer, stream=bool(body.stream))


ROUTES: Final = (
    Route(
        "POST",
        "/v1/chat/completions",
        chat_completions,
        Access.INFERENCE,
        "Answer a chat",
        body=chat_reader,
        reply=ChatCompletion,
        events=ChatChunk,
        example={"messages": [{"role": "user", "content": "Hi"}]},
    ),
    Route(
        "POST",
        "/v1/completions",
        completions,
        Access.INFERENCE,
        "Continue prompts",
        body=completion_reader,
        reply=Completion,
        events=Completion,
        example={"prompt": "Once upon a time", "max_tokens": 8},
    ),
)

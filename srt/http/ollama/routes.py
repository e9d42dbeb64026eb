"""Ollama's native API: `/api/*`."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Final

from aiohttp import web

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import EngineClient
from phloem.srt.http.body import BodyReader
from phloem.srt.http.caller import caller_of
from phloem.srt.http.context import serving
from phloem.srt.http.errors import REQUEST_ID
from phloem.srt.http.framing import NDJSON
from phloem.srt.http.middleware import REQUEST_ID_HEADER
from phloem.srt.http.ollama import embedding, models
from phloem.srt.http.ollama.answer import Stopwatch
from phloem.srt.http.ollama.calls import (
    chat_call,
    chat_name,
    generate_call,
    generate_name,
    plain_name,
    served_model,
)
from phloem.srt.http.ollama.protocol import (
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_GENERATE,
    UNSUPPORTED_IN_PULL,
    UNSUPPORTED_IN_SHOW,
    ChatBody,
    GenerateBody,
    ModelBody,
    PullBody,
)
from phloem.srt.http.ollama.pulling import pulling
from phloem.srt.http.ollama.replies import (
    AnswerTurn,
    ChatReply,
    GenerateReply,
    Processes,
    PullLine,
    Show,
    Tags,
    Version,
    timestamp,
)
from phloem.srt.http.ops import package_version
from phloem.srt.http.responding import json_response, renamed, respond
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.stream import EventStream

API_VERSION: Final = "0.12.11"
"""The release of Ollama whose API this is: the first with logprobs."""

_generate_reader = BodyReader(GenerateBody, unsupported=UNSUPPORTED_IN_GENERATE)
_chat_reader = BodyReader(ChatBody, unsupported=UNSUPPORTED_IN_CHAT)
_show_reader = BodyReader(ModelBody, unsupported=UNSUPPORTED_IN_SHOW)
_delete_reader = BodyReader(ModelBody)
_pull_reader = BodyReader(PullBody, unsupported=UNSUPPORTED_IN_PULL)


async def generate(request: web.Request) -> web.StreamResponse:
    """Without a prompt it loads the model, which is loaded."""
    watch = Stopwatch()
    body, unknown = await _generate_reader.read_noting(request)
    ctx = serving(request)
    name = served_model(body, ctx, load=not body.prompt)
    if not body.prompt:
        return json_response(
            GenerateReply(
                model=name, created_at=timestamp(), response="", done=True, done_reason="load"
            )
        )
    with renamed(generate_name):
        caller = caller_of(request, body.program, body.plan)
        call, answer = await generate_call(body, unknown, ctx, caller, watch)
        watch.submit()
        stream = body.stream is not False
        return await respond(request, call, answer, stream=stream, framing=NDJSON)


async def chat(request: web.Request) -> web.StreamResponse:
    """Without messages it loads the model, which is loaded."""
    watch = Stopwatch()
    body, unknown = await _chat_reader.read_noting(request)
    ctx = serving(request)
    name = served_model(body, ctx, load=not body.messages)
    if not body.messages:
        return json_response(
            ChatReply(
                model=name,
                created_at=timestamp(),
                message=AnswerTurn(content=""),
                done=True,
                done_reason="load",
            )
        )
    with renamed(chat_name):
        caller = caller_of(request, body.program, body.plan)
        call, answer = await chat_call(body, unknown, ctx, caller, watch)
        watch.submit()
        stream = body.stream is not False
        return await respond(request, call, answer, stream=stream, framing=NDJSON)


async def tags(request: web.Request) -> web.Response:
    return json_response(await asyncio.to_thread(models.tags, serving(request).engine.card))


async def processes(request: web.Request) -> web.Response:
    return json_response(await asyncio.to_thread(models.processes, serving(request).engine.card))


async def version(request: web.Request) -> web.Response:
    return json_response(Version(version=API_VERSION, phloem=package_version()))


async def show(request: web.Request) -> web.Response:
    name = _name(await _show_reader.read(request))
    engine = serving(request).engine
    inserts = await _inserts(engine)
    return json_response(await asyncio.to_thread(models.show, name, engine.card, inserts=inserts))


async def _inserts(engine: EngineClient) -> bool:
    """Whether the served model fills in what is missing before a suffix."""
    try:
        await engine.infill("", "")
    except InvalidRequest:
        return False
    return True


async def delete(request: web.Request) -> web.Response:
    name = _name(await _delete_reader.read(request))
    await asyncio.to_thread(models.delete, name, serving(request).engine.card)
    return web.Response()


async def pull(request: web.Request) -> web.StreamResponse:
    """The status goes out with the first progress: an unknown name is a 404."""
    body = await _pull_reader.read(request)
    ctx = serving(request)
    async with aclosing(pulling(_hub_name(_name(body)))) as lines:
        if body.stream is False:
            return json_response([line async for line in lines][-1])
        opening = [await anext(lines), await anext(lines)]
        headers = {REQUEST_ID_HEADER: REQUEST_ID.get()}
        async with EventStream(
            request, headers, keepalive_s=ctx.keepalive_s, framing=NDJSON
        ) as out:
            for line in opening:
                await out.send(line)
            async for line in lines:
                await out.send(line)
        return out.response


def _name(body: ModelBody) -> str:
    """The model that is meant. Raises `InvalidRequest` when none is, or two are."""
    if body.model and body.name and body.model != body.name:
        raise InvalidRequest("model and name differ.", param="name", code="invalid_value")
    name = body.model or body.name
    if not name:
        raise InvalidRequest("model is required", param="model", code="invalid_value")
    return name


def _hub_name(name: str) -> str:
    """A name as the hub has it: Ollama puts a host in front of those on Hugging Face."""
    return plain_name(name).removeprefix("hf.co/").removeprefix("huggingface.co/")


ROUTES: Final = (
    Route(
        "POST",
        "/api/generate",
        generate,
        Access.INFERENCE,
        "Answer a prompt",
        body=_generate_reader,
        reply=GenerateReply,
        events=GenerateReply,
        framing=NDJSON,
        example={"prompt": "Once upon a time"},
    ),
    Route(
        "POST",
        "/api/chat",
        chat,
        Access.INFERENCE,
        "Answer a chat",
        body=_chat_reader,
        reply=ChatReply,
        events=ChatReply,
        framing=NDJSON,
        example={"messages": [{"role": "user", "content": "Hi"}]},
    ),
    *embedding.ROUTES,
    Route("GET", "/api/tags", tags, Access.KEY, "The models that are here", reply=Tags),
    Route("GET", "/api/ps", processes, Access.KEY, "The served model", reply=Processes),
    Route("GET", "/api/version", version, Access.KEY, "The version of the API", reply=Version),
    Route(
        "POST",
        "/api/show",
        show,
        Access.KEY,
        "A model's particulars",
        body=_show_reader,
        reply=Show,
        example={"model": "smollm2-135m-instruct"},
    ),
    Route(
        "POST",
        "/api/pull",
        pull,
        Access.ADMIN,
        "Fetch a model into the store",
        body=_pull_reader,
        reply=PullLine,
        events=PullLine,
        framing=NDJSON,
        example={"model": "smollm2-135m-instruct"},
    ),
    Route(
        "DELETE",
        "/api/delete",
        delete,
        Access.ADMIN,
        "Remove a model from the store",
        body=_delete_reader,
        example={"model": "smollm2-135m-instruct"},
    ),
)

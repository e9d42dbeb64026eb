"""`/v1/responses`: create, retrieve, cancel, delete, list the input, count its tokens."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final, Literal, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from phloem.srt.errors import InvalidRequest
from phloem.srt.http.access import CALLER
from phloem.srt.http.body import read_query, unsupported
from phloem.srt.http.caller import caller_of
from phloem.srt.http.context import serving
from phloem.srt.http.errors import REQUEST_ID, known_error
from phloem.srt.http.middleware import REQUEST_ID_HEADER
from phloem.srt.http.protocol import Count
from phloem.srt.http.responding import json_response, streaming
from phloem.srt.http.responses.asked import Asked
from phloem.srt.http.responses.frames import ResponseFrames
from phloem.srt.http.responses.protocol import ResponsesRequest, responses_reader
from phloem.srt.http.responses.replies import (
    AnyEvent,
    DeletedResponse,
    InputTokens,
    ItemList,
    Response,
)
from phloem.srt.http.responses.runs import Run
from phloem.srt.http.responses.service import Responses, responses_of
from phloem.srt.http.responses.translate import check_include
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.stream import EventStream

_INCLUDE: Final = ("include", "include[]")
Q = TypeVar("Q", bound=msgspec.Struct)


class RetrieveQuery(msgspec.Struct, kw_only=True):
    stream: bool = False
    starting_after: Count | None = None
    include_obfuscation: bool = False


class ItemsQuery(msgspec.Struct, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None
    before: str | None = None


async def create(request: web.Request) -> web.StreamResponse:
    """Whole, streamed, or in the background."""
    body, unknown = await responses_reader.read_noting(request)
    service, ctx = responses_of(request), serving(request)
    asked = await service.ask(body, unknown, ctx, caller_of(request, body.program, body.plan))
    REQUEST_ID.set(asked.prepared.call.rid)
    if body.background:
        return await _in_background(request, body, service, asked)
    if not body.stream:
        return json_response(await service.whole(asked, ctx, request[CALLER].name))
    with asked.prepared.paths.translated():
        return await _streamed(request, service, asked)


async def _streamed(request: web.Request, service: Responses, asked: Asked) -> web.StreamResponse:
    """An error after the 200 is told by the last event, `response.failed`."""
    answer, frames, call = asked.answer(), ResponseFrames(), asked.prepared.call
    async with streaming(serving(request), call) as events:
        async with _stream(request, call.rid, frames) as out:
            await out.write(b"".join(map(frames.frame, answer.opening())))
            try:
                with asked.prepared.paths.translated():
                    async for one in events:
                        await out.write(b"".join(map(frames.frame, answer.frames(*one))))
            except ConnectionResetError:  # the client is gone
                raise
            except Exception as error:
                answer.failed(known_error(error, "A response"))
            await service.keep(asked, answer.response, request[CALLER].name)
            await out.write(b"".join(map(frames.frame, answer.closing())))
        return out.response


async def _in_background(
    request: web.Request, body: ResponsesRequest, service: Responses, asked: Asked
) -> web.StreamResponse:
    run = Run(request[CALLER].name, asked, log=bool(body.stream))
    await service.runs.start(serving(request), run)
    if body.stream:
        return await _relay(request, run.follow(0))
    return json_response(run.answer.response)


async def retrieve(request: web.Request) -> web.StreamResponse:
    """The response as it is by now; with `stream`, its events again, and those to come."""
    query = _query(request, RetrieveQuery)
    if query.starting_after is not None and not query.stream:
        raise InvalidRequest(
            "starting_after without stream.", param="starting_after", code="invalid_value"
        )
    if query.include_obfuscation:
        raise unsupported("include_obfuscation", "events are not padded")
    service, tenant, id_ = _named(request)
    run = service.runs.get(tenant, id_)
    if not query.stream:
        found = await service.store.get(tenant, id_) if run is None else run.answer.response
        return json_response(found)
    start = 0 if query.starting_after is None else query.starting_after + 1
    if run is not None and run.log is not None:
        return await _relay(request, run.follow(start))
    events = await service.store.events(tenant, id_)
    if events is None:
        raise InvalidRequest(
            "Only a response that was created with `background` and `stream` can be streamed.",
            param="stream",
            code="invalid_value",
        )
    return await _relay(request, _each(events[start:]))


async def cancel(request: web.Request) -> web.Response:
    """End what runs in the background; what is over is replied as it is."""
    service, tenant, id_ = _named(request)
    run = service.runs.get(tenant, id_)
    if run is not None:
        return json_response(await service.runs.cancel(run))
    response = await service.store.get(tenant, id_)
    if not response.background:
        raise InvalidRequest(
            "Only a response that was created with `background` can be cancelled.",
            param="response_id",
            code="invalid_value",
        )
    return json_response(response)


async def delete(request: web.Request) -> web.Response:
    """Forget a response; if it still runs, end it first."""
    service, tenant, id_ = _named(request)
    run = service.runs.get(tenant, id_)
    if run is not None:
        await service.runs.cancel(run)
    await service.store.delete(tenant, id_)
    return json_response(DeletedResponse(id=id_))


async def input_items(request: web.Request) -> web.Response:
    """What a response was given, with what was said before it; newest first, unless asked."""
    query = _query(request, ItemsQuery)
    service, tenant, id_ = _named(request)
    items = await service.store.input_items(tenant, id_)
    if query.order == "desc":
        items.reverse()
    ids = [item.id for item in items]
    start, end = 0, len(items)
    for name, cursor in (("after", query.after), ("before", query.before)):
        if cursor is None:
            continue
        if cursor not in ids:
            raise InvalidRequest(f"There is no item {cursor!r}.", param=name, code="invalid_value")
        if name == "after":
            start = ids.index(cursor) + 1
        else:
            end = ids.index(cursor)
    page = items[start:end][: query.limit]
    return json_response(
        ItemList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=start + len(page) < end,
        )
    )


async def count(request: web.Request) -> web.Response:
    """How many tokens the input of such a request has."""
    body = await responses_reader.read(request)
    ctx = serving(request)
    asked = await responses_of(request).ask(
        body, (), ctx, caller_of(request, body.program, body.plan)
    )
    (one,) = asked.prepared.call.requests
    return json_response(InputTokens(input_tokens=len(one.prompt)))


def _query(request: web.Request, type_: type[Q]) -> Q:
    """The query, whose `include` may come often: all that is stored is replied anyway. Raises
    `InvalidRequest`."""
    for key in _INCLUDE:
        check_include(request.query.getall(key, []))
    bare = request.rel_url.without_query_params(*_INCLUDE)
    return read_query(request.clone(rel_url=bare), type_)


def _named(request: web.Request) -> tuple[Responses, str, str]:
    """The service, whose response it is about, and its id."""
    return responses_of(request), request[CALLER].name, request.match_info["id"]


def _stream(request: web.Request, rid: str, frames: ResponseFrames) -> EventStream:
    keepalive_s = serving(request).keepalive_s
    return EventStream(request, {REQUEST_ID_HEADER: rid}, keepalive_s=keepalive_s, framing=frames)


async def _relay(request: web.Request, events: AsyncIterator[bytes]) -> web.StreamResponse:
    """Send events that are JSON already."""
    frames = ResponseFrames()
    async with _stream(request, REQUEST_ID.get(), frames) as out:
        async for event in events:
            await out.write(frames.encoded(event))
    return out.response


async def _each(events: list[bytes]) -> AsyncIterator[bytes]:
    for event in events:
        yield event


ROUTES: Final = (
    Route(
        "POST",
        "/v1/responses",
        create,
        Access.INFERENCE,
        "Answer, and keep the conversation",
        body=responses_reader,
        reply=Response,
        events=AnyEvent,
        framing=ResponseFrames(),
        example={"input": "Hi", "max_output_tokens": 16},
    ),
    Route(
        "POST",
        "/v1/responses/input_tokens",
        count,
        Access.INFERENCE,
        "How many tokens an input has",
        body=responses_reader,
        reply=InputTokens,
        example={"input": "Hi"},
    ),
    Route(
        "GET",
        "/v1/responses/{id}",
        retrieve,
        Access.INFERENCE,
        "A response, or its events once more",
        query=RetrieveQuery,
        reply=Response,
        events=AnyEvent,
        framing=ResponseFrames(),
    ),
    Route(
        "DELETE",
        "/v1/responses/{id}",
        delete,
        Access.INFERENCE,
        "Forget a response",
        reply=DeletedResponse,
    ),
    Route(
        "POST",
        "/v1/responses/{id}/cancel",
        cancel,
        Access.INFERENCE,
        "End a response that runs in the background",
        reply=Response,
    ),
    Route(
        "GET",
        "/v1/responses/{id}/input_items",
        input_items,
        Access.INFERENCE,
        "What a response was given",
        query=ItemsQuery,
        reply=ItemList,
    ),
)

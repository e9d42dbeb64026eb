"""Which routes a batch may go to: a table from the URL to what makes a reply of a body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import msgspec
from aiohttp import web

from phloem.srt.http.body import BodyReader, invalid
from phloem.srt.http.caller import Caller
from phloem.srt.http.context import SERVING, Serving
from phloem.srt.http.embeddings.routes import embeddings_reader, embeddings_reply
from phloem.srt.http.openai_calls import chat_call, completion_call
from phloem.srt.http.openai_routes import chat_reader, completion_reader
from phloem.srt.http.protocol import GenerationFields, PlanFields
from phloem.srt.http.responding import Answer, Call, whole
from phloem.srt.http.responses.protocol import responses_reader
from phloem.srt.http.responses.service import RESPONSES
from phloem.srt.http.sampling import response_id
from phloem.srt.tenants import Tenant

BATCH_PRIORITY: Final = -100
"""Added to the priority that a request of a batch would have alone: it waits behind those that
somebody waits for, and makes room for them when the server is full."""

F = TypeVar("F", bound=GenerationFields)
F_contra = TypeVar("F_contra", bound=GenerationFields, contravariant=True)


@dataclass(frozen=True, kw_only=True)
class Work:
    """A request that was read: how many sequences it is, and what runs it once."""

    request_id: str
    sequences: int
    run: Callable[[], Awaitable[msgspec.Struct]]


Endpoint = Callable[[bytes, web.Application, Tenant, float], Awaitable[Work]]
"""Reads a body for a tenant; seconds are the deadline of a request without one of its own. Raises
`PhloemError` for what the route would refuse, and for a stream."""


class _Prepare(Protocol[F_contra]):
    async def __call__(
        self, body: F_contra, ctx: Serving, caller: Caller, *, unknown: Sequence[str] = ()
    ) -> tuple[Call, Answer]: ...


def generation(reader: BodyReader[F], prepare: _Prepare[F]) -> Endpoint:
    """The endpoint of a route whose reply is an `Answer`."""

    async def read(body: bytes, app: web.Application, tenant: Tenant, deadline_s: float) -> Work:
        ctx = app[SERVING]
        fields, unknown = reader.decode_noting(body)
        _fit(fields, deadline_s)
        caller = _caller(tenant, fields.program, fields.plan)
        call, answer = await prepare(fields, ctx, caller, unknown=unknown)
        return Work(
            request_id=call.rid,
            sequences=len(call.requests),
            run=lambda: whole(ctx, call, answer),
        )

    return read


async def _responses(body: bytes, app: web.Application, tenant: Tenant, deadline_s: float) -> Work:
    """The response is stored, as it would be without a batch."""
    ctx, service = app[SERVING], app[RESPONSES]
    fields, unknown = responses_reader.decode_noting(body)
    _fit(fields, deadline_s)
    if fields.background:
        raise invalid("A request of a batch runs in no other background.", "background")
    asked = await service.ask(fields, unknown, ctx, _caller(tenant, fields.program, fields.plan))
    call = asked.prepared.call
    return Work(
        request_id=call.rid,
        sequences=len(call.requests),
        run=lambda: service.whole(asked, ctx, tenant.name),
    )


async def _embeddings(body: bytes, app: web.Application, tenant: Tenant, deadline_s: float) -> Work:
    ctx, fields = app[SERVING], embeddings_reader.decode(body)
    fields.timeout = fields.timeout or deadline_s
    fields.rid = response_id(fields, "embd")
    several = not isinstance(fields.input, str) and not any(
        isinstance(i, int) for i in fields.input
    )
    return Work(
        request_id=fields.rid,
        sequences=len(fields.input) if several else 1,
        run=lambda: embeddings_reply(fields, ctx, _caller(tenant, fields.program, fields.plan)),
    )


def _fit(fields: GenerationFields, deadline_s: float) -> None:
    if fields.stream:
        raise invalid("A request of a batch has a whole reply, not a stream.", "stream")
    if fields.timeout is None:
        fields.timeout = deadline_s


def _caller(tenant: Tenant, program: str | None, plan: PlanFields | None) -> Caller:
    behind = msgspec.structs.replace(tenant, priority=tenant.priority + BATCH_PRIORITY)
    return Caller.of(behind, program, plan)


ENDPOINTS: Final[Mapping[str, Endpoint]] = {
    "/v1/chat/completions": generation(chat_reader, chat_call),
    "/v1/completions": generation(completion_reader, completion_call),
    "/v1/responses": _responses,
    "/v1/embeddings": _embeddings,
}

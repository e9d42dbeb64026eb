"""`/cache/…`: what the radix tree holds, why it hits or misses; pin, warm, flush and watch it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

import msgspec
from aiohttp import web

from phloem.radix import Cleared, KvEvent, NodeRemoved, NodeSplit, NodeStored
from phloem.srt.errors import InvalidRequest, NotFound
from phloem.srt.generation import GenerateRequest
from phloem.srt.http.access import CALLER
from phloem.srt.http.body import BodyReader, read_query
from phloem.srt.http.cache_protocol import (
    ClearedEvent,
    ExplainReply,
    ExplainRequest,
    FlushRequest,
    Node,
    PinReply,
    PinRequest,
    RemovedEvent,
    SpaceFields,
    SplitEvent,
    StatsReply,
    StoredEvent,
    TenantQuery,
    TreeQuery,
    TreeReply,
    UnpinReply,
    Warmed,
    WarmReply,
    WarmRequest,
)
from phloem.srt.http.context import Serving, serving
from phloem.srt.http.explain import explain_reply
from phloem.srt.http.fanout import generate
from phloem.srt.http.framing import named
from phloem.srt.http.ops import FlushReply
from phloem.srt.http.prompts import read_prompt, read_warm_prompts
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Route
from phloem.srt.http.stream import EventStream
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import Flush, Flushed, SamplingParams
from phloem.srt.questions import (
    AskExplain,
    AskStats,
    AskTree,
    CacheExplanation,
    CacheStats,
    CacheTree,
    MissReason,
    Pin,
    Pinned,
    TreeNode,
    Unpin,
    Unpinned,
)
from phloem.srt.tenants import Tenant, scoped
from phloem.srt.wire import pack, unpack

PREVIEW: Final = 32
"""Tokens of an edge that `/cache/tree` shows as text."""

_EVENTS_A_WRITE: Final = 64

_explain_reader = BodyReader(ExplainRequest)
_pin_reader = BodyReader(PinRequest)
_warm_reader = BodyReader(WarmRequest)
_flush_reader = BodyReader(FlushRequest)


async def stats(request: web.Request) -> web.Response:
    answer = await serving(request).ask(AskStats(0), CacheStats)
    return json_response(msgspec.convert(answer, StatsReply, from_attributes=True))


async def tree(request: web.Request) -> web.Response:
    ctx = serving(request)
    query = read_query(request, TreeQuery)
    prefix = await ctx.engine.tokenize(query.prompt) if query.prompt else []
    answer = await ctx.ask(
        AskTree(
            0,
            namespace=query.namespace,
            prefix=pack(prefix),
            min_tokens=query.min_tokens,
            limit=query.limit,
            preview=PREVIEW if query.text else 0,
        ),
        CacheTree,
    )
    nodes = [await _node(node, ctx, with_text=query.text) for node in answer.nodes]
    return json_response(TreeReply(nodes=nodes, truncated=answer.truncated))


async def _node(node: TreeNode, ctx: Serving, *, with_text: bool) -> Node:
    public = msgspec.convert(node, Node, from_attributes=True)
    if not with_text:
        return public
    text = await ctx.engine.detokenize(unpack(node.preview))
    return msgspec.structs.replace(public, text=text)


# ----------------------------------------------------------------------- explain


async def explain(request: web.Request) -> web.Response:
    """Why a prompt would hit or miss now, or why a request that was served did."""
    ctx = serving(request)
    body = await _explain_reader.read(request)
    tenant = ctx.keyring.acting_for(request[CALLER], body.tenant)
    if body.rid is not None:
        if any(one is not None for one in (body.prompt, body.input_ids, body.messages)):
            raise InvalidRequest("rid comes alone, without a prompt.", param="rid")
        return await _explain_past(request, tenant, body.rid)
    prompt = await read_prompt(body, ctx.engine)
    question = AskExplain(
        0,
        prompt=pack(prompt),
        namespace=_namespace(tenant, body),
        elsewhere=request[CALLER].admin,
    )
    answer = await ctx.ask(question, CacheExplanation)
    return json_response(await explain_reply(answer, request[CALLER], ctx.engine))


async def explain_past(request: web.Request) -> web.Response:
    query = read_query(request, TenantQuery)
    tenant = serving(request).keyring.acting_for(request[CALLER], query.tenant)
    return await _explain_past(request, tenant, request.match_info["rid"])


async def _explain_past(request: web.Request, tenant: Tenant, rid: str) -> web.Response:
    ctx, reader = serving(request), request[CALLER]
    unknown = NotFound(
        f"Nothing is remembered of a request {rid!r}.", param="rid", code="request_not_found"
    )
    try:
        question = AskExplain(0, rid=scoped(tenant.name, rid), elsewhere=reader.admin)
        answer = await ctx.ask(question, CacheExplanation)
    except NotFound:
        raise unknown from None  # its message has the id as the engine knows it
    if not reader.admin and not reader.owns(answer.namespace):
        raise unknown
    return json_response(await explain_reply(answer, reader, ctx.engine))


# ----------------------------------------------------------------------- pin, warm, flush


async def pin(request: web.Request) -> web.Response:
    """Keep a prompt's KV from eviction; it is computed first if the tree does not have it."""
    ctx = serving(request)
    body = await _pin_reader.read(request)
    tenant = ctx.keyring.acting_for(request[CALLER], body.tenant)
    prompt, namespace = await read_prompt(body, ctx.engine), _namespace(tenant, body)
    packed = pack(prompt)
    if body.compute:
        question = AskExplain(0, prompt=packed, namespace=namespace, elsewhere=False)
        known = await ctx.ask(question, CacheExplanation)
        if known.reason is not MissReason.WHOLE:
            await _compute(ctx, [prompt], tenant, namespace)
    name = body.name or f"pin-{uuid.uuid4().hex}"
    answer = await ctx.ask(
        Pin(0, name=name, prompt=packed, namespace=namespace, ttl_s=body.ttl_s), Pinned
    )
    return json_response(
        PinReply(
            name=name,
            prompt_tokens=len(prompt),
            tokens=answer.tokens,
            ttl_s=body.ttl_s,
            pinned=answer.pinned,
            budget=answer.budget,
        )
    )


async def unpin(request: web.Request) -> web.Response:
    name = request.match_info["name"]
    answer = await serving(request).ask(Unpin(0, name=name), Unpinned)
    return json_response(UnpinReply(name=name, tokens=answer.tokens))


async def warm(request: web.Request) -> web.Response:
    """Prefill prompts now; the reply comes when all are in the tree."""
    ctx = serving(request)
    body = await _warm_reader.read(request)
    tenant = ctx.keyring.acting_for(request[CALLER], body.tenant)
    prompts = await read_warm_prompts(body, ctx.engine)
    warmed = await _compute(ctx, prompts, tenant, _namespace(tenant, body))
    return json_response(WarmReply(prompts=warmed))


async def _compute(
    ctx: Serving, prompts: Sequence[list[int]], tenant: Tenant, namespace: str
) -> list[Warmed]:
    requests = [
        GenerateRequest(
            prompt=prompt,
            sampling=SamplingParams(max_tokens=0),
            namespace=namespace,
            priority=tenant.priority,
            tenant=tenant.name,
        )
        for prompt in prompts
    ]
    cached = [0] * len(prompts)
    async with generate(ctx, f"warm-{uuid.uuid4().hex}", requests) as chunks:
        async for index, chunk in chunks:
            cached[index] = chunk.cached_tokens
    return [
        Warmed(prompt_tokens=len(prompt), cached_tokens=taken, computed_tokens=len(prompt) - taken)
        for prompt, taken in zip(prompts, cached, strict=True)
    ]


async def flush(request: web.Request) -> web.Response:
    """Drop all KV that no running request holds, of one namespace or of all."""
    ctx = serving(request)
    body = await _flush_reader.read_or(request, FlushRequest())
    tenant = ctx.keyring.acting_for(request[CALLER], body.tenant)
    fields = any(one is not None for one in (body.cache_salt, body.extra_key, body.tenant))
    if fields and body.namespace is not None:
        raise InvalidRequest("namespace comes alone.", param="namespace", code="invalid_value")
    namespace = _namespace(tenant, body) if fields else body.namespace
    answer = await ctx.ask(Flush(0, namespace=namespace), Flushed)
    return json_response(FlushReply(flushed_tokens=answer.tokens))


def _namespace(tenant: Tenant, body: SpaceFields) -> str:
    return tenant.namespace(body.extra_key, body.cache_salt)


# ----------------------------------------------------------------------- events


async def events(request: web.Request) -> web.StreamResponse:
    """The tree as it is, then every change of it, for as long as the client listens."""
    ctx = serving(request)
    async with aclosing(ctx.engine.watch()) as messages:
        whole = await anext(messages)  # before the status: a backend that is down is a 503
        async with EventStream(request, {}, keepalive_s=ctx.keepalive_s) as stream:
            await _send(stream, whole)
            async for message in messages:
                await _send(stream, message)
        return stream.response


async def _send(stream: EventStream, message: KvEvents) -> None:
    """A whole tree is a long message: others get their turn while it is written."""
    for start in range(0, len(message.events), _EVENTS_A_WRITE):
        some = message.events[start : start + _EVENTS_A_WRITE]
        await stream.write(b"".join(named(*_public(message.sequence, event)) for event in some))
        await asyncio.sleep(0)


def _public(sequence: int, event: KvEvent) -> tuple[str, msgspec.Struct]:
    match event:
        case NodeStored(node, parent, namespace, tokens):
            stored = StoredEvent(
                sequence=sequence,
                node=node,
                parent=parent,
                namespace=namespace,
                tokens=unpack(tokens),
            )
            return "stored", stored
        case NodeSplit(node, upper, at):
            return "split", SplitEvent(sequence=sequence, node=node, upper=upper, at=at)
        case NodeRemoved(node, keep):
            return "removed", RemovedEvent(sequence=sequence, node=node, keep=keep)
        case Cleared():
            return "cleared", ClearedEvent(sequence=sequence)


ROUTES: Final = (
    Route(
        "POST",
        "/cache/explain",
        explain,
        Access.INFERENCE,
        "Why a prompt would hit or miss",
        body=_explain_reader,
        reply=ExplainReply,
        example={"prompt": "Once upon a time"},
    ),
    Route(
        "GET",
        "/cache/explain/{rid:.+}",
        explain_past,
        Access.INFERENCE,
        "Why a request that was served hit or missed",
        query=TenantQuery,
        reply=ExplainReply,
    ),
    Route("GET", "/cache/stats", stats, Access.ADMIN, "What the cache holds", reply=StatsReply),
    Route(
        "GET",
        "/cache/tree",
        tree,
        Access.ADMIN,
        "The nodes of the radix tree",
        query=TreeQuery,
        reply=TreeReply,
    ),
    Route(
        "POST",
        "/cache/pin",
        pin,
        Access.ADMIN,
        "Keep a prompt's KV from eviction",
        body=_pin_reader,
        reply=PinReply,
        example={"name": "story", "prompt": "Once upon a time", "ttl_s": 3600},
    ),
    Route(
        "DELETE",
        "/cache/pin/{name:.+}",
        unpin,
        Access.ADMIN,
        "Let a pinned prompt go",
        reply=UnpinReply,
    ),
    Route(
        "POST",
        "/cache/warm",
        warm,
        Access.ADMIN,
        "Prefill prompts now",
        body=_warm_reader,
        reply=WarmReply,
        example={"prompts": ["Once upon a time", "In the beginning"]},
    ),
    Route(
        "POST",
        "/cache/flush",
        flush,
        Access.ADMIN,
        "Drop cached KV, of one namespace or of all",
        body=_flush_reader,
        optional_body=True,
        reply=FlushReply,
        example={"cache_salt": "team-7"},
    ),
    Route(
        "GET",
        "/cache/events",
        events,
        Access.ADMIN,
        "Every change of the tree, as it happens",
        events=StoredEvent | SplitEvent | RemovedEvent | ClearedEvent,
    ),
)

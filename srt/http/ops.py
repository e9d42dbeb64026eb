"""Operating the server: health, tokens, cache, abort, metrics, what it is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final, Literal

import msgspec
from aiohttp import web
from msgspec import UNSET, UnsetType

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import Health, ToolFormatName
from phloem.srt.http.access import CALLER
from phloem.srt.http.body import BodyReader, unsupported
from phloem.srt.http.context import serving
from phloem.srt.http.messages import render_chat
from phloem.srt.http.protocol import ChatRequest
from phloem.srt.http.responding import json_response
from phloem.srt.http.routes import Access, Content, Route
from phloem.srt.http.sampling import check_model, token_ids
from phloem.srt.http.tools import plan_tools
from phloem.srt.metrics.prometheus import CONTENT_TYPE

HealthStatus = Literal["ok", "not_ready", "unhealthy"]


class HealthReply(msgspec.Struct, frozen=True, kw_only=True):
    status: HealthStatus
    live: bool
    ready: bool
    reason: str
    restarts: int
    heartbeat_age_s: float


class AbortRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    rid: str | None = None
    abort_all: bool | None = None
    tenant: str | None = None


class AbortReply(msgspec.Struct, frozen=True):
    aborted: int


class FlushReply(msgspec.Struct, frozen=True, kw_only=True):
    success: bool = True
    flushed_tokens: int


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """One text, under any of the names that servers use, or a chat."""

    model: str | None = None
    text: str | None = None
    prompt: str | None = None
    content: str | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    messages: list[msgspec.Raw] | None = None


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """`token_strs` are the texts of the tokens, one by one, if they were asked for."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | UnsetType = UNSET


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class DetokenizeReply(msgspec.Struct, frozen=True):
    """The same text under the names that clients look for."""

    text: str
    prompt: str


class VersionReply(msgspec.Struct, frozen=True):
    version: str


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    is_generation: bool = True
    architecture: str
    format: str
    context_length: int
    max_model_len: int
    vocab_size: int


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str
    model_path: str
    served_model_name: str
    context_length: int
    kv_slots: int
    page_size: int
    tool_call_format: ToolFormatName
    reasoning: bool
    status: Literal["ready", "not_ready"]
    restarts: int
    running: int
    waiting: int
    kv_free: int
    kv_evictable: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int


_abort_reader = BodyReader(AbortRequest)
_tokenize_reader = BodyReader(TokenizeRequest)
_tokenize_chat_reader = BodyReader(ChatRequest)
_detokenize_reader = BodyReader(DetokenizeRequest)


def package_version() -> str:
    try:
        return version("phloem")
    except PackageNotFoundError:  # run from a tree that was never installed
        return "0+unknown"


async def root(request: web.Request) -> web.Response:
    name = serving(request).engine.card.name
    return web.Response(
        text=f"Phloem {package_version()} serves {name}. "
        "POST /v1/chat/completions, /v1/completions or /generate.\n"
    )


async def health(request: web.Request) -> web.Response:
    """Liveness: 503 when the backend is down or makes no progress, and only then."""
    state = serving(request).engine.health()
    return _health(state, good=state.live)


async def ready(request: web.Request) -> web.Response:
    """Readiness: 503 while requests would be refused (starting, restarting, draining)."""
    state = serving(request).engine.health()
    return _health(state, good=state.live and state.ready)


def _health(state: Health, *, good: bool) -> web.Response:
    status: HealthStatus = "ok" if state.ready else "not_ready"
    return health_response(state, status if state.live else "unhealthy", state.reason, good=good)


def health_response(
    state: Health, status: HealthStatus, reason: str, *, good: bool
) -> web.Response:
    """200, or 503 for what is not `good`."""
    response = json_response(
        HealthReply(
            status=status,
            live=state.live,
            ready=state.ready,
            reason=reason,
            restarts=state.restarts,
            heartbeat_age_s=state.heartbeat_age_s,
        )
    )
    response.set_status(200 if good else 503)
    return response


async def metrics(request: web.Request) -> web.Response:
    body = serving(request).metrics.render()
    return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


async def flush_cache(request: web.Request) -> web.Response:
    """Drop all KV that no running request holds; what runs is not touched."""
    return json_response(FlushReply(flushed_tokens=await serving(request).engine.flush()))


async def abort(request: web.Request) -> web.Response:
    """End one request with all its choices, or every request: the caller's own, of all tenants for
    an admin who names none. An unknown id aborts none."""
    ctx = serving(request)
    body = await _abort_reader.read(request)
    if bool(body.abort_all) == (body.rid is not None):
        raise InvalidRequest("Either rid or abort_all is wanted.", param="rid")
    tenant = ctx.keyring.acting_for(request[CALLER], body.tenant)
    if body.rid is None and body.tenant is None and tenant.admin:
        return json_response(AbortReply(ctx.engine.abort_all()))
    if body.rid is None:
        parts = ctx.in_flight.all_parts(tenant.name)
    else:
        parts = list(ctx.in_flight.parts(tenant.name, body.rid))
    return json_response(AbortReply(sum(map(ctx.engine.abort, parts))))


async def tokenize(request: web.Request) -> web.Response:
    """Text or a chat → exactly the ids that a completion or a chat completion would begin with."""
    ctx = serving(request)
    body = await _tokenize_reader.read(request)
    check_model(body.model, ctx.engine.card)
    texts = [text for text in (body.text, body.prompt, body.content) if text is not None]
    if len(texts) + (body.messages is not None) != 1:
        raise InvalidRequest(
            "Exactly one of text, prompt, content and messages is wanted.", param="text"
        )
    if texts:
        ids = await ctx.engine.tokenize(
            texts[0],
            special=body.parse_special is not False,
            opening=body.add_special_tokens is not False,
        )
    else:
        if body.add_special_tokens:
            raise unsupported("add_special_tokens", "the chat template writes them")
        ids = await _tokenize_chat(request)
    strings: list[str] | UnsetType = UNSET
    if body.return_token_strs:
        strings = [await ctx.engine.detokenize([one]) for one in ids]
    return json_response(
        TokenizeReply(
            tokens=ids,
            count=len(ids),
            max_model_len=ctx.engine.card.context_length,
            token_strs=strings,
        )
    )


async def _tokenize_chat(request: web.Request) -> list[int]:
    body = await _tokenize_chat_reader.read(request)
    return await render_chat(body, plan_tools(body).rendered, serving(request).engine)


async def detokenize(request: web.Request) -> web.Response:
    ctx = serving(request)
    body = await _detokenize_reader.read(request)
    check_model(body.model, ctx.engine.card)
    ids = token_ids(body.tokens, ctx.engine.card, "tokens")
    text = await ctx.engine.detokenize(list(ids), skip_special=bool(body.skip_special_tokens))
    return json_response(DetokenizeReply(text, text))


async def version_route(request: web.Request) -> web.Response:
    return json_response(VersionReply(package_version()))


async def model_info(request: web.Request) -> web.Response:
    card = serving(request).engine.card
    return json_response(
        ModelInfo(
            model_path=card.path,
            tokenizer_path=card.path,
            served_model_name=card.name,
            architecture=card.architecture,
            format=card.format,
            context_length=card.context_length,
            max_model_len=card.context_length,
            vocab_size=card.vocab_size,
        )
    )


async def server_info(request: web.Request) -> web.Response:
    engine = serving(request).engine
    stats, state, card = engine.stats, engine.health(), engine.card
    return json_response(
        ServerInfo(
            version=package_version(),
            model_path=card.path,
            served_model_name=card.name,
            context_length=card.context_length,
            kv_slots=card.kv_slots,
            tool_call_format=card.tool_format,
            reasoning=card.reasoning is not None,
            page_size=card.page_size,
            status="ready" if state.ready else "not_ready",
            restarts=state.restarts,
            running=stats.running,
            waiting=stats.waiting,
            kv_free=stats.kv_free,
            kv_evictable=stats.kv_evictable,
            prompt_tokens_total=stats.prompt_tokens_total,
            cached_tokens_total=stats.cached_tokens_total,
            generated_tokens_total=stats.generated_tokens_total,
        )
    )


TEXT: Final = Content("text/plain")

ROUTES: Final = (
    *(
        Route("GET", path, handler, Access.OPEN, what, reply=HealthReply, error=HealthReply)
        for path, handler, what in (
            ("/health", health, "Whether the backend lives"),
            ("/ready", ready, "Whether requests are served"),
        )
    ),
    Route("GET", "/", root, Access.KEY, "What runs here, in a sentence", reply=TEXT),
    Route("GET", "/metrics", metrics, Access.KEY, "Prometheus metrics", reply=TEXT),
    Route("GET", "/version", version_route, Access.KEY, "The version", reply=VersionReply),
    *(
        Route("GET", path, model_info, Access.KEY, "The served model", reply=ModelInfo)
        for path in ("/model_info", "/get_model_info")
    ),
    *(
        Route("GET", path, server_info, Access.KEY, "Server and load", reply=ServerInfo)
        for path in ("/server_info", "/get_server_info")
    ),
    *(
        Route(
            "POST",
            path,
            abort,
            Access.INFERENCE,
            "End a request, or all",
            body=_abort_reader,
            reply=AbortReply,
            example={"rid": "chatcmpl-1"},
        )
        for path in ("/abort", "/abort_request")
    ),
    *(
        Route(method, "/flush_cache", flush_cache, Access.ADMIN, "Drop cached KV", reply=FlushReply)
        for method in ("GET", "POST")
    ),
)

TOKEN_ROUTES: Final = (
    *(
        Route(
            "POST",
            path,
            tokenize,
            Access.INFERENCE,
            "Text or a chat to token ids",
            body=_tokenize_reader,
            reply=TokenizeReply,
            example={"text": "Once upon a time"},
        )
        for path in ("/tokenize", "/v1/tokenize")
    ),
    *(
        Route(
            "POST",
            path,
            detokenize,
            Access.INFERENCE,
            "Token ids to text",
            body=_detokenize_reader,
            reply=DetokenizeReply,
            example={"tokens": [72, 105]},
        )
        for path in ("/detokenize", "/v1/detokenize")
    ),
)

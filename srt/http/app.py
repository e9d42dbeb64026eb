"""The web application: routes, middlewares, and a runner that notices when clients leave."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Final

from aiohttp import web

from phloem.srt.config import ServerOptions
from phloem.srt.generation import EngineClient
from phloem.srt.http import cache_routes, native_routes, openai_routes, ops, scheduler_routes
from phloem.srt.http.access import Access, Keyring, access_middleware, add_routes
from phloem.srt.http.context import SERVING, Serving
from phloem.srt.http.middleware import (
    error_middleware,
    metrics_middleware,
    request_id_middleware,
)
from phloem.srt.metrics.prometheus import ServerMetrics
from phloem.srt.tenants import load_tenants

KEEPALIVE_SECONDS: Final = 15.0
SHUTDOWN_SECONDS: Final = 5.0


def create_app(
    engine: EngineClient,
    options: ServerOptions,
    *,
    keepalive_s: float = KEEPALIVE_SECONDS,
    data_dir: Path | None = None,
) -> web.Application:
    """The application over `engine`. It reads `engine.card` per request, so the engine may still
    be starting. `keepalive_s` is the silence after which a stream gets a comment; what clients
    store is kept in `data_dir`, which need not exist, or without one in memory. Raises
    `InvalidRequest` for a file of tenants that cannot be used.
    """
    tenants = {} if options.tenants is None else load_tenants(options.tenants)
    keyring = Keyring(options.api_key, tenants)
    app = web.Application(
        client_max_size=options.max_body_bytes,
        middlewares=[
            request_id_middleware,
            metrics_middleware,
            error_middleware,
            access_middleware(keyring),
        ],
    )
    app[SERVING] = Serving(
        engine=engine,
        options=options,
        keyring=keyring,
        metrics=ServerMetrics(lambda: engine.stats, engine.health),
        keepalive_s=keepalive_s,
        data_dir=data_dir,
    )
    add_routes(app, _routes())
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a handler when its client is gone, which aborts its requests.

    Signals are the caller's business; open connections get `SHUTDOWN_SECONDS` at cleanup.
    """
    return web.AppRunner(
        app,
        handler_cancellation=True,
        handle_signals=False,
        access_log=None,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


def listen_on(runner: web.AppRunner, listener: socket.socket) -> web.SockSite:
    """A site that accepts connections on a bound socket, once started."""
    return web.SockSite(runner, listener, backlog=1024)


def _routes() -> dict[Access, list[web.RouteDef]]:
    """Every route there is, under what it asks for."""
    routes: dict[Access, list[web.RouteDef]] = {access: [] for access in Access}
    for table in (_own_routes(),):
        for access, definitions in table.items():
            routes[access] += definitions
    return routes


def _own_routes() -> dict[Access, list[web.RouteDef]]:
    return {
        Access.OPEN: [
            web.get("/health", ops.health),
            web.get("/ready", ops.ready),
        ],
        Access.KEY: [
            web.get("/", ops.root),
            web.get("/metrics", ops.metrics),
            web.get("/version", ops.version_route),
            web.get("/model_info", ops.model_info),
            web.get("/get_model_info", ops.model_info),
            web.get("/server_info", ops.server_info),
            web.get("/get_server_info", ops.server_info),
            web.get("/v1/models", ops.models),
            web.get("/v1/models/{model:.+}", ops.model),
        ],
        Access.INFERENCE: [
            web.post("/v1/chat/completions", openai_routes.chat_completions),
            web.post("/v1/completions", openai_routes.completions),
            web.post("/generate", native_routes.generate_route),
            web.put("/generate", native_routes.generate_route),
            web.post("/tokenize", ops.tokenize),
            web.post("/detokenize", ops.detokenize),
            web.post("/abort", ops.abort),
            web.post("/abort_request", ops.abort),
            web.post("/programs/{program}/end", scheduler_routes.end_program),
            web.post("/cache/explain", cache_routes.explain),
            web.get("/cache/explain/{rid:.+}", cache_routes.explain_past),
        ],
        Access.ADMIN: [
            web.post("/flush_cache", ops.flush_cache),
            web.get("/flush_cache", ops.flush_cache, allow_head=False),
            web.get("/cache/stats", cache_routes.stats),
            web.get("/cache/tree", cache_routes.tree),
            web.post("/cache/pin", cache_routes.pin),
            web.delete("/cache/pin/{name:.+}", cache_routes.unpin),
            web.post("/cache/warm", cache_routes.warm),
            web.post("/cache/flush", cache_routes.flush),
            web.get("/cache/events", cache_routes.events, allow_head=False),
            web.get("/scheduler/policy", scheduler_routes.policy),
            web.post("/scheduler/policy", scheduler_routes.set_policy),
        ],
    }

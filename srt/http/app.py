"""The web application: routes, middlewares, and a runner that notices when clients leave."""

from __future__ import annotations

import socket
from typing import Final

from aiohttp import web

from phloem.srt.config import ServerOptions
from phloem.srt.generation import EngineClient
from phloem.srt.http import native_routes, openai_routes, ops
from phloem.srt.http.context import SERVING, Serving
from phloem.srt.http.middleware import (
    api_key_middleware,
    error_middleware,
    metrics_middleware,
    request_id_middleware,
)
from phloem.srt.metrics.prometheus import ServerMetrics

KEEPALIVE_SECONDS: Final = 15.0
SHUTDOWN_SECONDS: Final = 5.0


def create_app(
    engine: EngineClient, options: ServerOptions, *, keepalive_s: float = KEEPALIVE_SECONDS
) -> web.Application:
    """The application over `engine`. It reads `engine.card` per request, so the engine may still
    be starting. `keepalive_s` is the silence after which a stream gets a comment.
    """
    app = web.Application(
        client_max_size=options.max_body_bytes,
        middlewares=[
            request_id_middleware,
            metrics_middleware,
            error_middleware,
            api_key_middleware,
        ],
    )
    app[SERVING] = Serving(
        engine=engine,
        options=options,
        metrics=ServerMetrics(lambda: engine.stats, engine.health),
        keepalive_s=keepalive_s,
    )
    app.add_routes(_routes())
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


def _routes() -> list[web.RouteDef]:
    return [
        web.get("/", ops.root),
        web.get("/health", ops.health),
        web.get("/ready", ops.ready),
        web.get("/metrics", ops.metrics),
        web.get("/version", ops.version_route),
        web.get("/model_info", ops.model_info),
        web.get("/get_model_info", ops.model_info),
        web.get("/server_info", ops.server_info),
        web.get("/get_server_info", ops.server_info),
        web.get("/v1/models", ops.models),
        web.get("/v1/models/{model:.+}", ops.model),
        web.post("/v1/chat/completions", openai_routes.chat_completions),
        web.post("/v1/completions", openai_routes.completions),
        web.post("/generate", native_routes.generate_route),
        web.put("/generate", native_routes.generate_route),
        web.post("/tokenize", ops.tokenize),
        web.post("/detokenize", ops.detokenize),
        web.post("/flush_cache", ops.flush_cache),
        web.get("/flush_cache", ops.flush_cache, allow_head=False),
        web.post("/abort", ops.abort),
        web.post("/abort_request", ops.abort),
    ]

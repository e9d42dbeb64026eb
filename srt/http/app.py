"""The web application: routes, middlewares, and a runner that notices when clients leave.

A route is added by a `Route` (see `routes`) in the `ROUTES` of its handler's module, which `GROUPS`
lists: who may call it and what it reads and replies stand there, so that the access check and
`/openapi.json` know of it.
"""

from __future__ import annotations

import socket
import ssl
from pathlib import Path
from typing import Final

from aiohttp import web

from phloem.srt.config import ServerOptions
from phloem.srt.generation import EngineClient
from phloem.srt.http import (
    cache_routes,
    model_routes,
    native_ops,
    native_routes,
    openai_routes,
    openapi,
    ops,
    program_routes,
    scheduler_routes,
    scoring_routes,
)
from phloem.srt.http.access import Keyring, access_middleware
from phloem.srt.http.anthropic import routes as anthropic_routes
from phloem.srt.http.batches import routes as batch_routes
from phloem.srt.http.batches import service as batch_service
from phloem.srt.http.connections import GATES, Gates, Listener, name_server
from phloem.srt.http.context import SERVING, Serving
from phloem.srt.http.cors import Cors
from phloem.srt.http.embeddings import routes as embedding_routes
from phloem.srt.http.middleware import (
    error_middleware,
    metrics_middleware,
    request_id_middleware,
    tell_quotas,
)
from phloem.srt.http.ollama import routes as ollama_routes
from phloem.srt.http.rate_limits import Quotas
from phloem.srt.http.responses import routes as responses_routes
from phloem.srt.http.responses.service import responses_context
from phloem.srt.http.routes import Route, add_routes
from phloem.srt.metrics.prometheus import ServerMetrics
from phloem.srt.tenants import load_tenants

GROUPS: Final[dict[str, tuple[Route, ...]]] = {
    "OpenAI": (
        *openai_routes.ROUTES,
        *responses_routes.ROUTES,
        *embedding_routes.ROUTES,
        *model_routes.ROUTES,
    ),
    "Files and batches": batch_routes.ROUTES,
    "Anthropic": anthropic_routes.ROUTES,
    "Ollama": ollama_routes.ROUTES,
    "Native": (
        *native_routes.ROUTES,
        *native_ops.ROUTES,
        *embedding_routes.NATIVE_ROUTES,
        *scoring_routes.ROUTES,
        *ops.TOKEN_ROUTES,
    ),
    "Cache": cache_routes.ROUTES,
    "Programs": program_routes.ROUTES,
    "Scheduler": scheduler_routes.ROUTES,
    "Server": (*ops.ROUTES, *openapi.ROUTES),
}
"""Every route there is, by the protocol that it belongs to, in the documentation's order."""

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
    cors, gates = Cors(options.cors_origin), Gates(options)
    app = web.Application(
        client_max_size=options.max_body_bytes,
        middlewares=[
            gates.handling,
            request_id_middleware,
            metrics_middleware,
            cors.preflight,
            error_middleware,
            access_middleware(keyring),
            gates.reading,
        ],
    )
    app[GATES] = gates
    app.on_response_prepare.append(name_server)
    app.on_response_prepare.append(tell_quotas)
    cors.attach(app)
    app[SERVING] = Serving(
        engine=engine,
        options=options,
        keyring=keyring,
        quotas=Quotas(tenants),
        metrics=ServerMetrics(lambda: engine.stats, engine.health),
        keepalive_s=keepalive_s,
        data_dir=data_dir,
    )
    app.on_response_prepare.append(anthropic_routes.add_request_id)
    app.cleanup_ctx.append(responses_context)
    batch_service.install(app)
    add_routes(app, GROUPS)
    version = ops.package_version()
    app[openapi.DOCUMENT] = openapi.ApiDocument(GROUPS, version, keys=keyring.asks)
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """A runner that cancels a handler when its client is gone, which aborts its requests.

    Signals are the caller's business; open connections get `SHUTDOWN_SECONDS` at cleanup.
    """
    return web.AppRunner(
        app,
        keepalive_timeout=app[SERVING].options.keep_alive_timeout,
        handler_cancellation=True,
        handle_signals=False,
        access_log=None,
        shutdown_timeout=SHUTDOWN_SECONDS,
    )


def listen_on(
    runner: web.AppRunner, bound: socket.socket, tls: ssl.SSLContext | None = None
) -> Listener:
    """What accepts connections on a bound socket, once started, and keeps to the limits that there
    are for them."""
    return Listener(runner, bound, tls)

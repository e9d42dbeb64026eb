"""The server: an engine, the HTTP app on it, and the signals that end it in good order."""

from __future__ import annotations

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from phloem.srt.config import ServeConfig, ServerOptions
from phloem.srt.engine import Engine
from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import ModelCard
from phloem.srt.hub import SILENT, Progress
from phloem.srt.hub.store import Store
from phloem.srt.resolve import Resolved

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReadyInfo:
    """What is known once the server answers. `startup` is phase → seconds."""

    url: str
    card: ModelCard
    resolved: Resolved
    startup: dict[str, float]


def serve(
    config: ServeConfig,
    on_ready: Callable[[ReadyInfo], None],
    *,
    progress: Progress = SILENT,
) -> int:
    """Serve until SIGINT or SIGTERM; the exit code.

    Raises what `Engine.start` raises, and `InvalidRequest` when the port cannot be had.
    """
    return asyncio.run(_serve(config, on_ready, progress))


async def _serve(
    config: ServeConfig, on_ready: Callable[[ReadyInfo], None], progress: Progress
) -> int:
    listener = _bind(config.server)  # before the model is loaded: a taken port is told at once
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    engine = Engine(config, progress=progress)
    starting = asyncio.create_task(engine.start())
    stopping = asyncio.create_task(stop.wait())
    app = await asyncio.to_thread(_import_app)
    await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        listener.close()
        return 0
    try:
        starting.result()
    except BaseException:
        stopping.cancel()
        listener.close()
        raise
    web_app = app.create_app(engine, config.server, data_dir=_data_dir(config.server))
    runner = app.make_runner(web_app)
    await runner.setup()
    site = app.listen_on(runner, listener)
    await site.start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    on_ready(
        ReadyInfo(
            url=f"http://{shown}:{port}",
            card=engine.card,
            resolved=engine.resolved,
            startup=engine.startup,
        )
    )
    await stopping
    await _shut_down(engine, runner, site, config.server.drain_seconds)
    return 0


def _import_app() -> ModuleType:
    """The HTTP layer, imported while the engine's processes start."""
    return import_module("phloem.srt.http.app")


async def _shut_down(
    engine: Engine, runner: web.AppRunner, site: web.SockSite, drain_seconds: float
) -> None:
    """Take no new connection, let running requests finish, then end everything. A second signal
    ends the waiting."""
    again = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, again.set)
    log.info("shutting down: running requests have %g s to finish", drain_seconds)
    await site.stop()
    draining = asyncio.create_task(engine.close(drain_seconds))
    hurry = asyncio.create_task(again.wait())
    await asyncio.wait({draining, hurry}, return_when=asyncio.FIRST_COMPLETED)
    if not draining.done():
        draining.cancel()
        await asyncio.gather(draining, return_exceptions=True)
        await engine.close()
    hurry.cancel()
    await runner.cleanup()


def _bind(options: ServerOptions) -> socket.socket:
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.host, options.port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidRequest(
                f"port {options.port} of {options.host} is in use; choose another with --port",
                param="server.port",
            ) from None
        raise InvalidRequest(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}",
            param="server.host",
        ) from None
    return listener


def _data_dir(options: ServerOptions) -> Path:
    if options.data_dir is None:
        return Store.default().root / "data"
    return Path(options.data_dir).expanduser().absolute()

"""The server: an engine, the HTTP app on it, and the signals that end it in good order."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Final

from phloem.srt.config import ServeConfig, ServerOptions
from phloem.srt.engine import Engine
from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import ModelCard
from phloem.srt.hub import SILENT, Progress
from phloem.srt.hub.store import Store
from phloem.srt.resolve import Resolved

if TYPE_CHECKING:
    from aiohttp import web

    from phloem.srt.http.connections import Listener

OTHER_FILES: Final = 512
"""Files that may be open beside connections: sockets of the processes, models, what is stored."""

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
    tls = _tls_context(config.server)
    listener = _bind(config.server)  # before the model is loaded: a taken port is told at once
    _allow_files(config.server.max_connections)
    data_dir = _data_dir(config.server)
    config = replace(config, server=replace(config.server, data_dir=str(data_dir)))
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
    web_app = app.create_app(engine, _server_options(config), data_dir=data_dir)
    runner = app.make_runner(web_app)
    await runner.setup()
    site = app.listen_on(runner, listener, tls)
    await site.start()
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    on_ready(
        ReadyInfo(
            url=f"{'http' if tls is None else 'https'}://{shown}:{port}",
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
    engine: Engine, runner: web.AppRunner, site: Listener, drain_seconds: float
) -> None:
    """Take no new connection, let running requests finish, then end everything. A second signal
    ends the waiting."""
    again = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, again.set)
    log.info("shutting down: running requests have %g s to finish", drain_seconds)
    await site.stop()
    await runner.shutdown()  # what runs for nobody who waits need not finish
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


def _server_options(config: ServeConfig) -> ServerOptions:
    """The HTTP face's options, with the default that hangs on the scheduler's."""
    share = max(1, config.scheduler.max_running // 4)
    return replace(config.server, batch_running=config.server.batch_running or share)


def _tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """What HTTPS is served with, if it is. Raises `InvalidRequest` naming the file at fault."""
    if options.tls_cert is None:
        if options.tls_key is not None:
            raise InvalidRequest("tls_key needs tls_cert beside it", param="server.tls_cert")
        return None
    for option, path in (("tls_cert", options.tls_cert), ("tls_key", options.tls_key)):
        try:
            if path is not None:
                Path(path).read_bytes()
        except OSError as error:
            raise InvalidRequest(
                f"cannot read {path}: {error.strerror or error}", param=f"server.{option}"
            ) from error
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)  # TLS 1.2 or later
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key, password=_no_password)
    except ssl.SSLError as error:
        files = " and ".join(filter(None, (options.tls_cert, options.tls_key)))
        raise InvalidRequest(
            f"{files} are no certificate and its key in PEM ({error.reason or error})",
            param="server.tls_cert",
        ) from error
    return context


def _no_password() -> str:
    raise InvalidRequest(
        "the key is encrypted; a server cannot be asked for its password", param="server.tls_key"
    )


def _allow_files(connections: int) -> None:
    """Raise the limit of open files, if it is lower, so that so many connections can be open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < wanted:
        log.warning(
            "the system allows %d open files, too few for %d connections", most, connections
        )


def _data_dir(options: ServerOptions) -> Path:
    if options.data_dir is None:
        return Store.default().root / "data"
    return Path(options.data_dir).expanduser().absolute()

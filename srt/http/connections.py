"""Connections under limits: how many there are, how long a request may take to arrive, and how
long a reply may wait to be read.

aiohttp closes connections that idle. Here are the limits that it lacks: a `Gate` in front of each
connection's protocol, told by a middleware when a request's head is in. Requests come in turn, so
what comes while one is being answered is its body, or waits.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from http import HTTPStatus
from typing import Final

import msgspec
from aiohttp import StreamReader, hdrs, web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from phloem.srt.config import ServerOptions
from phloem.srt.errors import InternalError, InvalidRequest, PhloemError, Unavailable
from phloem.srt.http.body import BodyReader
from phloem.srt.http.errors import (
    ErrorBody,
    ErrorEnvelope,
    ErrorShape,
    error_body,
    error_response,
    shape_of,
)
from phloem.srt.http.routes import Content, route_of

logger = logging.getLogger(__name__)

BACKLOG: Final = 1024
SERVER: Final = "phloem"
"""Of the header `Server`: what runs here, and nothing of what it is made of."""

_REFUSAL_S: Final = 1.0
"""How long a refused client may take to send what its refusal answers."""

_encoder = msgspec.json.Encoder()


class Gates:
    """The gates of one server."""

    def __init__(self, options: ServerOptions) -> None:
        self.read_timeout = options.read_timeout
        self.write_timeout = options.write_timeout
        self._max = options.max_connections
        self._open: dict[RequestHandler, Gate] = {}

    @property
    def full(self) -> bool:
        return len(self._open) >= self._max

    def enter(self, gate: Gate) -> None:
        self._open[gate.inner] = gate

    def leave(self, gate: Gate) -> None:
        self._open.pop(gate.inner, None)

    @web.middleware
    async def handling(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The outermost middleware: the head of `request` is in."""
        gate = self._open.get(request.protocol)
        if gate is not None:
            gate.head_is_in(request.content)
        try:
            return await handler(request)
        finally:
            if gate is not None:
                gate.answered()

    @web.middleware
    async def reading(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Take in the body of a route that reads it whole; one that a handler takes in bit by bit
        may take longer, but not stand still. Raises aiohttp's 408 and 413."""
        route = route_of(request)
        gate = self._open.get(request.protocol)
        if gate is not None and route is not None and isinstance(route.body, Content):
            gate.watch_body()
        if route is not None and isinstance(route.body, BodyReader):
            try:
                async with asyncio.timeout(self.read_timeout):
                    await request.read()
            except TimeoutError:
                raise web.HTTPRequestTimeout(
                    reason=f"The body did not arrive within {self.read_timeout:g} s"
                ) from None
        return await handler(request)


GATES: Final = web.AppKey("gates", Gates)


class Connection(RequestHandler):
    """aiohttp's protocol, whose own replies, to what is not HTTP, are errors like all others."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The reply, after which the connection is closed. Raises `ConnectionError` where one has
        begun."""
        error: PhloemError
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR or request.writer.output_size > 0:
            super().handle_error(request, status, exc, message)  # it logs
            error = InternalError("The server failed; its log has the reason.")
        else:
            logger.debug("what came is not HTTP: %s", message)
            error = InvalidRequest("The request is not HTTP as it is read here.", code="bad_http")
        response = error_response(error, ErrorShape.OPENAI)
        response.headers[hdrs.SERVER] = SERVER
        response.force_close()
        return response


async def name_server(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Give every response its `Server`."""
    response.headers[hdrs.SERVER] = SERVER


class Gate(asyncio.Protocol):
    """One connection: everything goes through to aiohttp's protocol, or to nobody if there are too
    many connections."""

    def __init__(self, gates: Gates, inner: RequestHandler) -> None:
        self.inner = inner
        self._gates = gates
        self._refused = gates.full
        self._transport: asyncio.Transport | None = None
        self._handling = False
        self._body: StreamReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._refused:
            self._start_timer(_REFUSAL_S)
            return
        self._gates.enter(self)
        self.inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._refuse(data)
            return
        self._heard = asyncio.get_running_loop().time()
        if self._awaits_head and self._timer is None:
            self._start_timer(self._gates.read_timeout)
        self.inner.data_received(data)

    def eof_received(self) -> None:
        if not self._refused:
            self.inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_unread()
        self._transport = None
        if not self._refused:
            self._gates.leave(self)
            self.inner.connection_lost(exc)

    def pause_writing(self) -> None:
        """The client is slow to read, and the buffer is full."""
        if self._refused or self._transport is None:
            return
        loop = asyncio.get_running_loop()
        self._unread = loop.call_later(self._gates.write_timeout, self._transport.abort)
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self._stop_unread()
        if not self._refused:
            self.inner.resume_writing()

    @property
    def _awaits_head(self) -> bool:
        """Whether what comes is the head of a request, and not the rest of a body that nobody
        wanted to read."""
        return not self._handling and (self._body is None or self._body.is_eof())

    def head_is_in(self, body: StreamReader) -> None:
        self._handling = True
        self._body = body
        self._stop_timer()

    def watch_body(self) -> None:
        """From now on, cut the connection if no more of the body comes for a while."""
        loop = asyncio.get_running_loop()
        limit = self._gates.read_timeout
        if self._body is None or self._body.is_eof() or self._transport is None:
            return
        silent = loop.time() - self._heard
        if silent < limit or not self._transport.is_reading():  # then we are slow, not the client
            rest = limit - silent if silent < limit else limit
            self._timer = loop.call_later(rest, self.watch_body)
        else:
            self._transport.abort()

    def answered(self) -> None:
        self._handling = False
        self._stop_timer()

    def _start_timer(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._give_up)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _stop_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _give_up(self) -> None:
        """The head did not arrive in time."""
        self._timer = None
        if self._transport is None or self._transport.is_closing():
            return
        if not self._refused:
            message = f"The request did not arrive within {self._gates.read_timeout:g} s."
            body = ErrorBody(message=message, type="invalid_request_error", code="request_timeout")
            self._transport.write(_reply("408 Request Timeout", ErrorEnvelope(body)))
        self._transport.close()

    def _refuse(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        error = Unavailable(
            "The server has as many connections as it may have.", code="too_many_connections"
        )
        path = data.partition(b" ")[2].partition(b" ")[0].partition(b"?")[0]
        shaped = error_body(error, shape_of(path.decode("latin-1")))
        self._transport.write(_reply("503 Service Unavailable", shaped, "Retry-After: 1\r\n"))
        self._transport.close()


class Listener:
    """Accepts connections on a bound socket, through gates; plain, or under TLS."""

    def __init__(
        self, runner: web.AppRunner, bound: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        self._runner = runner
        self._bound = bound
        self._tls = tls
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Begin to accept; the runner is set up."""
        server = self._runner.server
        assert server is not None
        gates, loop = self._runner.app[GATES], asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Gate(gates, Connection(server, loop=loop, **server._kwargs)),
            sock=self._bound,
            ssl=self._tls,
            backlog=BACKLOG,
            ssl_handshake_timeout=None if self._tls is None else gates.read_timeout,
        )

    async def stop(self) -> None:
        """Accept no more; connections that there are stay."""
        if self._server is not None:
            self._server.close()


def _reply(status: str, body: msgspec.Struct, headers: str = "") -> bytes:
    """A whole HTTP reply that ends its connection."""
    content = _encoder.encode(body)
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        f"Server: {SERVER}\r\n{headers}Connection: close\r\n\r\n"
    )
    return head.encode() + content

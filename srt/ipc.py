"""Sockets between the processes: ZeroMQ over `ipc://` in a directory only the user can enter.

A `Channel` is one typed, two-way link: it encodes one union and decodes another. Sizes are
bounded, a malformed message is counted and skipped, and nothing here ever unpickles.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

Out = TypeVar("Out")
In = TypeVar("In")

MAX_MESSAGE_BYTES = 256 << 20


def make_run_dir() -> Path:
    """A fresh directory of mode 0700 for one server's sockets and mask buffer.

    Unix socket paths are limited to about 107 bytes, so a long temporary directory is passed over.
    """
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if base and len(base) < 60 and os.path.isdir(base) and os.access(base, os.W_OK):
            return Path(tempfile.mkdtemp(prefix="phloem-", dir=base))
    return Path(tempfile.mkdtemp(prefix="phloem-"))


def configure(socket: zmq.Socket[Any] | zmq.asyncio.Socket) -> None:
    """Bounds and timings that every socket of Phloem has.

    No high-water mark: both ends bound what they send by requests in flight, and a blocking send
    in the scheduler's loop would stall every request.
    """
    socket.setsockopt(zmq.LINGER, 200)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 10)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)


class Channel(Generic[Out, In]):
    """A blocking, typed link over one socket.

    `kind` is a ZeroMQ socket type: PAIR on both sides for a two-way link (it takes one peer and
    turns others away), PUSH and PULL for a one-way one. `incoming` is the union that `recv`
    decodes.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        incoming: Any,
        *,
        kind: int = zmq.PAIR,
        bind: bool = False,
    ) -> None:
        self.socket = context.socket(kind)
        configure(self.socket)
        (self.socket.bind if bind else self.socket.connect)(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self.bad_messages = 0

    def send(self, message: Out) -> bool:
        """Queue `message`; False when there is no peer any more (its death is told elsewhere)."""
        try:
            self.socket.send(self._encoder.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def recv(self, timeout_ms: int | None = None) -> In | None:
        """The next good message; None when none came within `timeout_ms` (0 polls, None waits)."""
        while self.socket.poll(timeout_ms):
            try:
                return self._decoder.decode(self.socket.recv())
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.bad_messages += 1
        return None

    def close(self) -> None:
        self.socket.close()


class AsyncChannel(Generic[Out, In]):
    """`Channel` for asyncio. A send never waits: there is no high-water mark, and the connecting
    side has a queue from the start."""

    def __init__(self, context: zmq.asyncio.Context, address: str, incoming: Any) -> None:
        self.socket = context.socket(zmq.PAIR)
        configure(self.socket)
        self.socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[In] = msgspec.msgpack.Decoder(incoming)
        self.bad_messages = 0

    def send(self, message: Out) -> None:
        self.socket.send(self._encoder.encode(message))

    async def recv(self) -> In:
        while True:
            data = await self.socket.recv()
            try:
                return self._decoder.decode(data)
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.bad_messages += 1

    def close(self) -> None:
        self.socket.close()

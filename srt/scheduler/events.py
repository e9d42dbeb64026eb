"""Changes of the tree, for who mirrors it: the frontend while it watches, and a ZeroMQ publisher.

A published message has two frames: the topic `kv`, and a MessagePack `KvEvents` array
`[sequence, [event, ...]]`. Each event is an array that begins with its tag: `stored`, `split`,
`removed` or `cleared` (`phloem.radix.events`). When somebody subscribes, a `cleared` and the whole
tree follow, for everybody. Who finds a gap in the sequence subscribes again.
"""

from __future__ import annotations

import msgspec
import zmq

from phloem.srt.errors import InvalidRequest
from phloem.srt.kv_events import KvEvents
from phloem.srt.scheduler.core import Scheduler

TOPIC = b"kv"


class EventStream:
    """Takes the tree's changes after each turn of the scheduler's loop. `address` None: nothing is
    published, and the frontend gets what it asked for."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str | None) -> None:
        self.socket: zmq.Socket[bytes] | None = None
        """Readable when somebody subscribed."""
        self._sequence = 0
        self._encoder = msgspec.msgpack.Encoder()
        if address is None:
            return
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.XPUB_VERBOSE, 1)  # tell of every subscription
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            self.socket.close()
            raise InvalidRequest(
                f"cannot publish KV events at {address!r}: {error}", param="cache.kv_events"
            ) from error

    def publish(self, scheduler: Scheduler) -> None:
        """Send what has changed since the last call to whom it concerns."""
        tree = scheduler.ledger.tree
        if self._subscribed():
            scheduler.published = True
            tree.watch(True)
        if not tree.events:
            return
        message = KvEvents(self._sequence, list(tree.events))
        tree.events.clear()
        self._sequence += 1
        if self.socket is not None:
            self.socket.send_multipart([TOPIC, self._encoder.encode(message)], zmq.NOBLOCK)
        if scheduler.watched:
            scheduler.to_frontend.append(message)

    def _subscribed(self) -> bool:
        """Whether somebody subscribed since the last call."""
        new = False
        while self.socket is not None and self.socket.poll(0, zmq.POLLIN):
            new = self.socket.recv().startswith(b"\x01") or new
        return new

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close()

"""The publisher of the tree's changes: who subscribes has the tree, whatever the frontend does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from phloem.radix import TreeMirror
from phloem.srt.errors import InvalidRequest
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import Watch
from phloem.srt.scheduler.events import TOPIC, EventStream

Build = Callable[..., Any]
PROMPT = [1, 2, 3, 4, 5, 6]


class Subscriber:
    """A router: it mirrors what `stream` publishes."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.mirror = TreeMirror()
        self.sequences: list[int] = []
        self._decoder = msgspec.msgpack.Decoder(KvEvents)
        self.socket = context.socket(zmq.SUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.socket.subscribe(TOPIC)

    def hear(self) -> None:
        """The next message, which has to come."""
        assert self.socket.poll(5000), "nothing was published"
        _, body = self.socket.recv_multipart()
        message = self._decoder.decode(body)
        self.sequences.append(message.sequence)
        self.mirror.apply(message.events)


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    with zmq.Context() as made:
        yield made


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/events"


def subscribed(
    context: zmq.Context[zmq.Socket[bytes]], stream: EventStream, address: str
) -> Subscriber:
    subscriber = Subscriber(context, address)
    assert stream.socket is not None
    assert stream.socket.poll(5000), "the subscription did not arrive"
    return subscriber


def test_a_subscriber_has_the_tree_and_its_changes(
    harness: Build, context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    h, stream = harness(), EventStream(context, address)
    h.submit("before", PROMPT, 2)
    h.run()
    router = subscribed(context, stream, address)
    stream.publish(h.scheduler)
    router.hear()
    assert router.mirror.match([*PROMPT, 0]) == len(PROMPT)
    h.submit("after", [9, *PROMPT], 2)
    h.run()
    stream.publish(h.scheduler)
    router.hear()
    assert router.mirror.match([9, *PROMPT, 0]) == len(PROMPT) + 1
    assert router.sequences == [0, 1]
    assert not h.scheduler.to_frontend, "the frontend did not ask"
    router.socket.close()
    stream.close()


def test_the_frontend_may_come_and_go(
    harness: Build, context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    """A reader of `/cache/events` that leaves takes nothing from those who subscribed."""
    h, stream = harness(), EventStream(context, address)
    router = subscribed(context, stream, address)
    stream.publish(h.scheduler)
    router.hear()
    h.scheduler.receive(Watch(True))
    stream.publish(h.scheduler)
    assert isinstance(h.scheduler.to_frontend.pop(), KvEvents)
    h.scheduler.receive(Watch(False))
    h.submit("a", PROMPT, 2)
    h.run()
    stream.publish(h.scheduler)
    assert not h.scheduler.to_frontend
    while router.socket.poll(0) or not router.mirror.nodes:
        router.hear()
    assert router.mirror.match([*PROMPT, 0]) == len(PROMPT)
    router.socket.close()
    stream.close()


def test_without_an_address_only_the_frontend_hears(
    harness: Build, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    h, stream = harness(), EventStream(context, None)
    h.submit("a", PROMPT, 2)
    h.run()
    stream.publish(h.scheduler)
    assert not h.scheduler.to_frontend
    h.scheduler.receive(Watch(True))
    stream.publish(h.scheduler)
    (message,) = h.scheduler.to_frontend
    mirror = TreeMirror()
    mirror.apply(message.events)
    assert mirror.match([*PROMPT, 0]) == len(PROMPT)
    h.scheduler.to_frontend.clear()
    h.scheduler.receive(Watch(False))
    h.submit("b", [7, 7, 7], 2)
    h.run()
    stream.publish(h.scheduler)
    assert not h.scheduler.to_frontend


def test_an_address_that_cannot_be_had_is_named(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    with pytest.raises(InvalidRequest, match="nowhere"):
        EventStream(context, "nowhere")

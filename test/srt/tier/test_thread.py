"""The thread over a real socket, with a fake pool."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from phloem.srt.ipc import Channel, make_run_dir
from phloem.srt.tier import fingerprint
from phloem.srt.tier.chain import BLOCK_TOKENS, KEY_BYTES
from phloem.srt.tier.fingerprint import look_at
from phloem.srt.tier.options import TierOptions
from phloem.srt.tier.thread import TierThread
from phloem.srt.tier_messages import (
    FromTier,
    KvDropped,
    KvLoad,
    KvLoaded,
    KvSave,
    KvSaved,
    StopTier,
    TierOff,
    TierReady,
    ToTier,
)

SLOT_BYTES = 8
BLOCK_BYTES = BLOCK_TOKENS * SLOT_BYTES
LIMIT = 100_000
TIMEOUT_MS = 20_000

Slots = NDArray[np.int32]


class FakeKv:
    """A pool of rows of bytes. `before_read` is called, in the tier's thread, before it is read."""

    kv_slot_bytes = SLOT_BYTES

    def __init__(self) -> None:
        self.rows = np.zeros((1000, SLOT_BYTES), np.uint8)
        self.before_read: Callable[[], object] = lambda: None

    def read_kv(self, slots: Slots, out: NDArray[np.uint8]) -> None:
        self.before_read()
        out[:] = self.rows[slots].reshape(-1)

    def write_kv(self, slots: Slots, data: NDArray[np.uint8]) -> None:
        self.rows[slots] = data.reshape(-1, SLOT_BYTES)


class Server:
    """What lives as long as a server does: the scheduler's side of the socket, the thread."""

    def __init__(self, model: Path, folder: Path, *, kv: FakeKv, limit: int = LIMIT) -> None:
        self.run_dir = make_run_dir()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = f"ipc://{self.run_dir}/tier.sock"
        self.channel: Channel[ToTier, FromTier] = Channel(
            self.context, address, FromTier, bind=True
        )
        options = TierOptions(folder=str(folder), limit_bytes=limit)
        facts: dict[str, str | int] = {"isa": "generic"}
        self._stopped = False
        self.thread = TierThread(self.context, address, options, kv, look_at(model), facts)

    def start(self) -> None:
        self.thread.start()

    def hear(self) -> FromTier:
        message = self.channel.recv(TIMEOUT_MS)
        assert message is not None
        return message

    def ready(self) -> TierReady:
        message = self.hear()
        assert isinstance(message, TierReady)
        return message

    def stop(self) -> None:
        if not self._stopped:
            self._stopped = True
            self.thread.stop()

    def close(self) -> None:
        self.stop()
        self.channel.close()
        self.context.term()
        shutil.rmtree(self.run_dir)


@pytest.fixture
def kv() -> FakeKv:
    return FakeKv()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


@pytest.fixture
def start(tmp_path: Path, model: Path, kv: FakeKv) -> Iterator[Callable[..., Server]]:
    """Starts servers on one folder."""
    running: list[Server] = []

    def started(limit: int = LIMIT) -> Server:
        server = Server(model, tmp_path / "kv", kv=kv, limit=limit)
        running.append(server)
        server.start()
        return server

    yield started
    for server in running:
        server.close()


def key(number: int) -> bytes:
    return number.to_bytes(KEY_BYTES, "little")


def slots(block: int) -> Slots:
    return np.arange(1 + block * BLOCK_TOKENS, 1 + (block + 1) * BLOCK_TOKENS, dtype=np.int32)


def test_it_says_what_there_is_then_does_what_it_is_told(
    start: Callable[..., Server], kv: FakeKv
) -> None:
    server = start()
    assert server.ready() == TierReady(BLOCK_TOKENS, BLOCK_BYTES, LIMIT, KEY_BYTES, b"")
    data = np.random.default_rng(0).integers(0, 256, (BLOCK_TOKENS, SLOT_BYTES), np.uint8)
    kv.rows[slots(3)] = data
    server.channel.send(KvSave(1, [key(1)], slots(3).tobytes()))
    assert server.hear() == KvSaved(1, 1)
    server.channel.send(KvLoad(2, [key(1)], slots(5).tobytes()))
    assert server.hear() == KvLoaded(2, 1)
    assert np.array_equal(kv.rows[slots(5)], data)


def test_a_later_server_has_what_an_earlier_one_kept(
    start: Callable[..., Server], kv: FakeKv
) -> None:
    first = start()
    first.ready()
    kv.rows[slots(0)] = 7
    order = np.concatenate([slots(0), slots(1)]).tobytes()
    first.channel.send(KvSave(1, [key(8), key(9)], order))
    first.hear()
    first.channel.send(StopTier())
    first.stop()  # it has ended by itself or does so now
    second = start()
    assert second.ready().keys == key(8) + key(9)
    second.channel.send(KvLoad(1, [key(8)], slots(2).tobytes()))
    assert second.hear() == KvLoaded(1, 1)
    assert (kv.rows[slots(2)] == 7).all()


@pytest.mark.parametrize("by_message", [True, False])
def test_it_ends_when_all_that_was_ordered_is_written(
    start: Callable[..., Server], kv: FakeKv, by_message: bool
) -> None:
    server = start()
    server.ready()
    go = threading.Event()
    kv.before_read = lambda: go.wait(20)
    for number in range(5):
        server.channel.send(KvSave(number, [key(number)], slots(number).tobytes()))
    if by_message:
        server.channel.send(StopTier())
    threading.Timer(0.05, go.set).start()
    server.stop()
    if by_message:
        assert [server.hear() for _ in range(5)] == [KvSaved(number, 1) for number in range(5)]


def test_a_load_overtakes_saves(start: Callable[..., Server], kv: FakeKv) -> None:
    server = start()
    server.ready()
    server.channel.send(KvSave(0, [key(0)], slots(0).tobytes()))
    server.hear()
    reading, go = threading.Event(), threading.Event()

    def wait() -> None:
        reading.set()
        go.wait(20)

    kv.before_read = wait
    order = np.concatenate([slots(block) for block in range(1, 4)]).tobytes()
    server.channel.send(KvSave(1, [key(1), key(2), key(3)], order))
    assert reading.wait(20)
    server.channel.send(KvLoad(2, [key(0)], slots(4).tobytes()))
    server.channel.send(KvSave(3, [key(5)], slots(5).tobytes()))
    go.set()
    assert [server.hear() for _ in range(3)] == [KvLoaded(2, 1), KvSaved(1, 3), KvSaved(3, 1)]


def test_what_gives_way_is_told(start: Callable[..., Server]) -> None:
    server = start(limit=3000)  # four blocks
    server.ready()
    for number in range(6):
        server.channel.send(KvSave(number, [key(number)], slots(number).tobytes()))
    heard = [server.hear() for _ in range(8)]
    assert [m.order for m in heard if isinstance(m, KvSaved)] == list(range(6))
    gone = [k for m in heard if isinstance(m, KvDropped) for k in m.keys]
    assert gone == [key(0), key(1)]


def test_a_second_server_on_the_folder_goes_without(
    start: Callable[..., Server], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = start(), None
    first.ready()
    second = start()
    off = second.hear()
    assert isinstance(off, TierOff)
    assert "another server keeps its KV in" in off.reason
    assert f"no KV is kept on disk: {off.reason}" in caplog.text
    first.channel.send(KvSave(1, [key(1)], slots(1).tobytes()))
    assert first.hear() == KvSaved(1, 1)


def test_a_folder_that_cannot_be(
    start: Callable[..., Server], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kv").write_text("")
    off = start().hear()
    assert isinstance(off, TierOff)
    assert "kv" in off.reason
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


def test_a_model_that_changed_under_way(tmp_path: Path, model: Path, kv: FakeKv) -> None:
    server = Server(model, tmp_path / "kv", kv=kv)
    model.write_bytes(b"other weights")
    server.start()
    off = server.hear()
    assert isinstance(off, TierOff)
    assert "changed while it was being loaded" in off.reason
    server.close()


def test_what_is_no_order_is_passed_over(start: Callable[..., Server]) -> None:
    server = start()
    server.ready()
    server.channel.socket.send(b"\xff nonsense")
    server.channel.send(KvSave(1, [b"short"], slots(1).tobytes()))
    answer = server.hear()
    assert isinstance(answer, KvSaved)
    assert answer.stored == 0
    assert answer.error == f"a key of 5 bytes, a block of {BLOCK_BYTES}"


def test_one_may_wait_for_it(start: Callable[..., Server]) -> None:
    """Until it has told what there is, or that there is nothing."""
    for kind in (TierReady, TierOff):  # the second finds the folder taken
        server = start()
        server.thread.wait(20)
        assert isinstance(server.channel.recv(2000), kind)


def test_waiting_has_an_end(start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    monkeypatch.setattr(fingerprint, "_hash", lambda _: str(go.wait(20)))
    server = start()
    server.thread.wait(0.01)
    assert server.channel.recv(0) is None
    go.set()
    server.ready()

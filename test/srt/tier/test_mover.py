"""Orders over a store and a fake pool: what moves where, in which order, and one answer each."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from phloem.srt.tier.chain import BLOCK_TOKENS, KEY_BYTES
from phloem.srt.tier.mover import (
    COMMIT_BLOCKS,
    MOST_REST_SECONDS,
    REST,
    WARNING_SECONDS,
    Mover,
)
from phloem.srt.tier.segment import FILE_BYTES, BlockFormat
from phloem.srt.tier.store import DiskStore
from phloem.srt.tier_messages import FromTier, KvDropped, KvLoad, KvLoaded, KvSave, KvSaved

SLOT_BYTES = 12
SLOTS = 1 + 64 * BLOCK_TOKENS
FORM = BlockFormat(b"m" * 16, BLOCK_TOKENS * SLOT_BYTES)

Slots = NDArray[np.int32]


class FakeKv:
    """A pool of rows of bytes; a block is those of its slots, one after another."""

    kv_slot_bytes = SLOT_BYTES

    def __init__(self) -> None:
        self.rows = np.zeros((SLOTS, SLOT_BYTES), np.uint8)
        self.reads = 0
        self.before_read: Callable[[], None] = lambda: None

    def read_kv(self, slots: Slots, out: NDArray[np.uint8]) -> None:
        self._check(slots)
        self.reads += 1
        self.before_read()
        out[:] = self.rows[slots].reshape(-1)

    def write_kv(self, slots: Slots, data: NDArray[np.uint8]) -> None:
        self._check(slots)
        self.rows[slots] = data.reshape(-1, SLOT_BYTES)

    def _check(self, slots: Slots) -> None:
        if not 1 <= slots.min() <= slots.max() < SLOTS:
            raise IndexError("a slot that is not there")


class Bench:
    """A mover with its store, its pool and what it said."""

    def __init__(self, root: Path, blocks: int) -> None:
        limit = blocks * (FILE_BYTES + FORM.record_bytes)
        self.store = DiskStore.open(root, FORM, limit)
        self.kv = FakeKv()
        self.sent: list[FromTier] = []
        self.now = 0.0
        self.mover = Mover(self.store, self.kv, self.sent.append, lambda: self.now)
        self._orders = 0

    def save(self, *blocks: int, slots: Slots | None = None) -> int:
        """Order blocks to be saved, their content put into slots of their own before."""
        self._orders += 1
        chosen = self.slots(blocks) if slots is None else slots
        if slots is None:
            for block, own in zip(blocks, chosen, strict=True):
                self.kv.rows[own] = content(block)
        keys = [key(block) for block in blocks]
        self.mover.take(KvSave(self._orders, keys, chosen.tobytes()))
        return self._orders

    def load(self, *blocks: int, slots: Slots | None = None) -> int:
        self._orders += 1
        chosen = self.slots(blocks) if slots is None else slots
        keys = [key(block) for block in blocks]
        self.mover.take(KvLoad(self._orders, keys, chosen.tobytes()))
        return self._orders

    def slots(self, blocks: tuple[int, ...]) -> Slots:
        rng = np.random.default_rng(blocks)
        count = len(blocks) * BLOCK_TOKENS
        order = rng.permutation(np.arange(1, SLOTS, dtype=np.int32))[:count]
        return order.reshape(-1, BLOCK_TOKENS)

    def finish(self) -> list[FromTier]:
        """Do all that is ordered; what was said since the last call."""
        while not self.mover.idle:
            self.mover.step()
        said, self.sent[:] = self.sent[:], []
        return said

    def close(self) -> None:
        self.store.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with closing(Bench(tmp_path, 1000)) as made:
        yield made


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Bench]:
    """Room for five blocks, one a segment."""
    with closing(Bench(tmp_path, 5)) as made:
        yield made


def key(block: int) -> bytes:
    return block.to_bytes(KEY_BYTES, "little")


def content(block: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(block)
    return rng.integers(0, 256, (BLOCK_TOKENS, SLOT_BYTES), np.uint8)


def keys(*blocks: int) -> list[bytes]:
    return [key(block) for block in blocks]


def test_what_was_saved_is_loaded_into_other_slots(bench: Bench) -> None:
    saved = bench.save(1, 2, 3)
    assert bench.finish() == [KvSaved(saved, 3)]
    bench.kv.rows[:] = 0xAA
    slots = bench.slots((7, 8, 9))
    loaded = bench.load(1, 2, 3, slots=slots)
    assert bench.finish() == [KvLoaded(loaded, 3)]
    for block, own in zip((1, 2, 3), slots, strict=True):
        assert np.array_equal(bench.kv.rows[own], content(block))
    others = np.setdiff1d(np.arange(SLOTS), slots)
    assert (bench.kv.rows[others] == 0xAA).all()


def test_a_load_ends_at_the_first_block_that_is_not_there(bench: Bench) -> None:
    bench.save(1, 2, 4)
    bench.finish()
    slots = bench.slots((1, 2, 3, 4))
    before = bench.kv.rows[slots[3]].copy()
    loaded = bench.load(1, 2, 3, 4, slots=slots)
    assert bench.finish() == [KvLoaded(loaded, 2)]
    assert np.array_equal(bench.kv.rows[slots[3]], before)


def test_loads_overtake_saves_after_the_block_in_hand(bench: Bench) -> None:
    bench.save(1)
    bench.finish()
    saves = [bench.save(10, 11, 12), bench.save(13)]
    bench.mover.step()
    loads = [bench.load(1), bench.load(1)]
    assert bench.finish() == [
        KvLoaded(loads[0], 1),
        KvLoaded(loads[1], 1),
        KvSaved(saves[0], 3),
        KvSaved(saves[1], 1),
    ]
    assert bench.kv.reads == 5


@pytest.mark.parametrize("seconds", [0.002, 10.0])
def test_saves_rest_between_blocks_and_loads_do_not(bench: Bench, seconds: float) -> None:
    def take_time() -> None:
        bench.now += seconds

    bench.kv.before_read = take_time
    first = bench.save(1, 2, 3)
    bench.mover.step()
    rest = min(seconds * REST, MOST_REST_SECONDS)
    assert bench.mover.wait_seconds() == pytest.approx(rest)
    bench.now += rest * 0.9
    bench.mover.step()  # not yet
    assert bench.kv.reads == 1
    load = bench.load(1)
    assert bench.mover.wait_seconds() == 0
    bench.mover.step()
    assert bench.sent == [KvLoaded(load, 1)]
    assert 0 < bench.mover.wait_seconds() < rest / 5
    bench.now += rest * 0.11
    assert bench.mover.wait_seconds() == 0
    bench.mover.step()
    assert bench.kv.reads == 2
    bench.mover.step(hurry=True)
    assert bench.sent[1:] == [KvSaved(first, 3)]


def test_a_block_that_is_there_is_not_read_from_the_pool(bench: Bench) -> None:
    bench.save(1, 2)
    bench.finish()
    order = bench.save(1, 2, 3)
    assert bench.finish() == [KvSaved(order, 3)]
    assert bench.kv.reads == 3


def test_what_gave_way_is_told_after_what_came(small: Bench) -> None:
    first = small.save(1, 2, 3)
    assert small.finish() == [KvSaved(first, 3)]
    second = small.save(4, 5, 6)
    assert small.finish() == [KvSaved(second, 3), KvDropped(keys(1))]
    # Its own first blocks give way to its last ones; a load comes in between.
    third = small.save(*range(10, 18))
    for _ in range(5):
        small.mover.step()
    load = small.load(10)
    said = small.finish()
    assert said == [
        KvLoaded(load, 1),
        KvSaved(third, 8),
        KvDropped(keys(2, 3, 4, 5, 6, 11, 12, 13)),
    ]
    assert set(small.store.oldest_first()) == set(keys(10, 14, 15, 16, 17))


def test_a_block_that_went_and_came_again_is_not_told_gone(small: Bench) -> None:
    small.save(1)
    small.finish()
    small.save(*range(10, 15))
    for _ in range(4):
        small.mover.step()
    assert key(1) in small.store
    small.finish()
    assert key(1) not in small.store
    order = small.save(1)
    assert small.finish()[0] == KvSaved(order, 1)
    assert key(1) in small.store


def test_a_damaged_block_is_told_and_what_follows_stays(bench: Bench) -> None:
    bench.save(1, 2, 3, 4)
    bench.finish()
    (segment,) = bench.store.folder.glob("segment-*")
    with segment.open("r+b") as file:
        file.seek(FILE_BYTES + 3 * FORM.record_bytes - 1)
        (last,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([last ^ 1]))
    loaded = bench.load(1, 2, 3, 4)
    assert bench.finish() == [KvLoaded(loaded, 2, keys(3)), KvDropped(keys(3))]
    loaded = bench.load(1, 2, 3, 4)
    assert bench.finish() == [KvLoaded(loaded, 2)]
    saved = bench.save(3)
    assert bench.finish() == [KvSaved(saved, 1)]
    loaded = bench.load(1, 2, 3, 4)
    assert bench.finish() == [KvLoaded(loaded, 4)]


def test_a_disk_that_takes_no_more(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The order fails from there on, is warned of once a minute, and later ones may succeed."""
    room = 1
    put = bench.store.put

    def putting(key: bytes, data: memoryview) -> None:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        room -= 1
        put(key, data)

    monkeypatch.setattr(bench.store, "put", putting)
    orders = [bench.save(1, 2, 3), bench.save(4)]
    error = "[Errno 28] No space left on device"
    assert bench.finish() == [KvSaved(orders[0], 1, error), KvSaved(orders[1], 0, error)]
    assert bench.store.oldest_first() == keys(1)
    assert len(caplog.records) == 1
    assert "KV cannot be written to the disk: [Errno 28]" in caplog.text
    bench.now += WARNING_SECONDS
    bench.save(5)
    bench.finish()
    assert len(caplog.records) == 2
    room = 100
    last = bench.save(2, 3, 4)
    assert bench.finish() == [KvSaved(last, 3)]


@pytest.mark.parametrize(
    "slots", [np.zeros((1, 3), np.int32), np.full((1, BLOCK_TOKENS), SLOTS, np.int32)]
)
def test_an_order_that_makes_no_sense_is_answered(bench: Bench, slots: Slots) -> None:
    saved, loaded = bench.save(1, slots=slots), bench.load(2, slots=slots)
    said = bench.finish()
    assert said[0] == KvLoaded(loaded, 0)
    assert isinstance(said[1], KvSaved)
    assert (said[1].order, said[1].stored) == (saved, 0)
    assert said[1].error
    bench.save(3)
    bench.finish()
    loaded = bench.load(3, slots=slots)
    assert bench.finish() == [KvLoaded(loaded, 0)]
    nothing = [bench.save(), bench.load()]
    assert bench.finish() == [KvLoaded(nothing[1], 0), KvSaved(nothing[0], 0)]


def test_the_index_is_written_in_pauses_and_now_and_then(bench: Bench) -> None:
    bench.save(1)
    bench.finish()
    assert bench.store.uncommitted == 0
    for block in range(2, COMMIT_BLOCKS + 10):
        bench.save(block)
    for _ in range(COMMIT_BLOCKS + 1):
        bench.mover.step()
        assert bench.store.uncommitted < COMMIT_BLOCKS
    assert bench.store.uncommitted > 0
    bench.finish()
    assert bench.store.uncommitted == 0


def test_an_index_that_cannot_be_written_holds_nothing_up(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(bench.store, "commit", _fail)
        orders = [bench.save(1), bench.load(1)]
        bench.finish()
        load = bench.load(1)
        assert bench.finish() == [KvLoaded(load, 1)]
        assert [record.message for record in caplog.records] == ["the index is lost"]
    assert orders == [1, 2]
    bench.save(2)
    bench.finish()
    assert bench.store.uncommitted == 0


def _fail() -> None:
    raise OSError("the index is lost")


@pytest.mark.parametrize("seed", range(5))
def test_the_sender_can_follow(tmp_path: Path, seed: int) -> None:
    """A sender that believes what it is told knows at rest exactly what there is, and whatever it
    believes in between is given or refused, never wrong."""
    rng = random.Random(seed)
    with closing(Bench(tmp_path, 12)) as bench:
        believed: set[bytes] = set()
        saving: dict[int, list[bytes]] = {}
        for _ in range(150):
            for _ in range(rng.randrange(4)):
                chosen = rng.sample(range(30), rng.randrange(1, 6))
                if rng.random() < 0.5:
                    busy = {k for order in saving.values() for k in order} | believed
                    chosen = [block for block in chosen if key(block) not in busy]
                    saving[bench.save(*chosen)] = keys(*chosen)
                else:
                    bench.load(*chosen)
            for _ in range(rng.randrange(10)):
                bench.mover.step()
            said, bench.sent[:] = bench.sent[:], []
            if rng.random() < 0.2:
                said += bench.finish()
            for message in said:
                if isinstance(message, KvSaved):
                    assert message.error is None
                    believed |= set(saving.pop(message.order)[: message.stored])
                elif isinstance(message, KvDropped):
                    believed -= set(message.keys)
            if bench.mover.idle:
                assert believed == set(bench.store.oldest_first())

"""Readers of KV events, against a scheduler that keeps a tree of its own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from itertools import pairwise

import pytest

from phloem.radix import Cleared, KvEvent, NodeRemoved, NodeStored
from phloem.srt.errors import PhloemError, Unavailable
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import Watch
from phloem.srt.watching import Watchers
from phloem.srt.wire import pack, unpack

Tree = dict[int, tuple[int, ...]]


class Scheduler:
    """A flat tree, its changes, and whether somebody wants them."""

    def __init__(self) -> None:
        self.tree: Tree = {}
        self.sequence = 0
        self.on = False
        self.told: list[bool] = []
        self.out: list[KvEvents] = []
        self.down = False

    def take(self, message: Watch) -> None:
        if self.down:
            raise Unavailable("down")
        self.told.append(message.on)
        self.on = message.on
        if self.on:
            self.say(Cleared(), *(stored(node, self.tree[node]) for node in self.tree))

    def say(self, *events: KvEvent) -> None:
        if self.on:
            self.sequence += 1
            self.out.append(KvEvents(self.sequence, list(events)))

    def change(self, rng: random.Random) -> None:
        node = rng.randrange(20)
        if node in self.tree and rng.random() < 0.5:
            keep = rng.randrange(len(self.tree[node]))
            self.tree[node] = self.tree[node][:keep]
            self.say(NodeRemoved(node, keep))
            if not keep:
                del self.tree[node]
            return
        more = tuple(rng.randrange(9) for _ in range(rng.randint(1, 3)))
        self.tree[node] = self.tree.get(node, ()) + more
        self.say(stored(node, more))


def stored(node: int, tokens: tuple[int, ...]) -> NodeStored:
    return NodeStored(node, 0, "", pack(tokens))


class Reader:
    """Keeps its mirror from what it reads, as a router does."""

    def __init__(self, stream: AsyncGenerator[KvEvents, None]) -> None:
        self.stream = stream
        self.mirror: Tree = {}
        self.sequences: list[int] = []
        self.error: PhloemError | None = None
        self.task = asyncio.create_task(self.read())

    async def read(self) -> None:
        try:
            async for message in self.stream:
                if not self.sequences:
                    assert isinstance(message.events[0], Cleared)
                self.sequences.append(message.sequence)
                for event in message.events:
                    self.apply(event)
        except PhloemError as error:
            self.error = error

    def apply(self, event: KvEvent) -> None:
        match event:
            case Cleared():
                self.mirror.clear()
            case NodeStored(node, _, _, tokens):
                self.mirror[node] = self.mirror.get(node, ()) + tuple(unpack(tokens))
            case NodeRemoved(node, keep):
                self.mirror[node] = self.mirror[node][:keep]
                if not keep:
                    del self.mirror[node]

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.stream.aclose()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(8))
async def test_every_reader_has_the_tree_at_any_time(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler()
    watchers = Watchers(scheduler.take)
    readers: list[Reader] = []
    for _ in range(300):
        choice = rng.random()
        if choice < 0.1 and len(readers) < 4:
            readers.append(Reader(watchers.watch()))
        elif choice < 0.18 and readers:
            await readers.pop(rng.randrange(len(readers))).leave()
        elif choice < 0.6:
            scheduler.change(rng)
        else:  # messages are on their way for some time
            for message in scheduler.out[: rng.randint(0, 4)]:
                watchers.deliver(message)
                scheduler.out.remove(message)
        if rng.random() < 0.5:
            await settle()
    await settle()
    for message in scheduler.out:
        watchers.deliver(message)
    await settle()
    assert len(watchers) == len(readers)
    assert scheduler.on == bool(readers)
    for reader in readers:
        assert reader.error is None
        assert reader.mirror == scheduler.tree
        first = reader.sequences[0]
        assert reader.sequences == list(range(first, scheduler.sequence + 1))
        await reader.leave()
    assert not scheduler.on
    assert len(watchers) == 0
    assert all(before or after for before, after in pairwise(scheduler.told)), "stopped twice"


async def test_a_slow_reader_is_told_and_cut_off_and_delays_nobody() -> None:
    scheduler, rng = Scheduler(), random.Random(0)
    watchers = Watchers(scheduler.take, backlog=3)
    slow, quick = watchers.watch(), Reader(watchers.watch())
    first = asyncio.ensure_future(anext(slow))
    await settle()
    for message in scheduler.out:
        watchers.deliver(message)
    assert isinstance((await first).events[0], Cleared)
    scheduler.out.clear()
    for _ in range(6):
        scheduler.change(rng)
        watchers.deliver(scheduler.out.pop())
        await settle()
    with pytest.raises(Unavailable) as cut:
        await anext(slow)
    assert cut.value.code == "slow_reader"
    assert quick.mirror == scheduler.tree
    assert (len(watchers), scheduler.on) == (1, True)
    quick.task.cancel()
    await quick.leave()
    assert not scheduler.on


async def test_the_last_reader_to_be_cut_off_ends_the_stream() -> None:
    scheduler, rng = Scheduler(), random.Random(0)
    watchers = Watchers(scheduler.take, backlog=1)
    slow = watchers.watch()
    first = asyncio.ensure_future(anext(slow))
    await settle()
    watchers.deliver(scheduler.out.pop())
    await first
    for _ in range(3):
        scheduler.change(rng)
    for message in scheduler.out:
        watchers.deliver(message)
    assert scheduler.told == [True, False]
    await slow.aclose()
    assert scheduler.told == [True, False]


async def test_a_backend_that_goes_takes_its_readers_along() -> None:
    scheduler = Scheduler()
    watchers = Watchers(scheduler.take)
    reader = Reader(watchers.watch())
    await settle()
    scheduler.down = True
    watchers.fail(Unavailable("gone"))
    await settle()
    assert isinstance(reader.error, Unavailable)
    with pytest.raises(Unavailable):
        await anext(watchers.watch())
    assert len(watchers) == 0
    scheduler.down = False
    again = Reader(watchers.watch())
    await settle()
    assert scheduler.told == [True, True]
    await again.leave()

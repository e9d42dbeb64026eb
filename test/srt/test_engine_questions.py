"""The engine and the scheduler's answers, with no process behind the channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phloem.radix import Cleared
from phloem.srt.engine import Engine
from phloem.srt.errors import Conflict, PhloemError, Unavailable
from phloem.srt.generation import GenerateRequest
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import (
    BackendReady,
    EndProgram,
    Flush,
    Flushed,
    StatsSnapshot,
    Submit,
    Watch,
)
from phloem.srt.questions import AskPolicy, AskStats, Policy, Refused


class FakeBackend:
    """Both ends of the channel: `sent` by the engine, `incoming` for it."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.send: Callable[[Any], None] = self.sent.append
        self.recv = self.incoming.get

    @property
    def channel(self) -> FakeBackend:
        return self

    async def stop(self, grace_seconds: float) -> None:
        self.send = self.refuse

    def refuse(self, message: object) -> None:
        raise AssertionError(f"{message} to a closed channel")

    def say(self, *messages: object) -> None:
        for message in messages:
            self.incoming.put_nowait(message)


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def engine(backend: FakeBackend) -> AsyncIterator[Engine]:
    """An engine that believes it was started."""
    running = Engine()
    running._backend = cast("Any", backend)
    running._down = ""
    running._tasks = [asyncio.create_task(running._listen(cast("Any", backend)))]
    yield running
    await running.close()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_answers_among_other_messages(engine: Engine, backend: FakeBackend) -> None:
    flushing = asyncio.create_task(engine.flush())
    asking = asyncio.create_task(engine.ask(AskPolicy(0, policy="lpm")))
    refused = asyncio.create_task(engine.ask(AskStats(0)))
    await settle()
    flush, ask, stats = backend.sent
    assert flush == Flush(flush.id)
    assert ask == AskPolicy(ask.id, policy="lpm")
    backend.say(
        StatsSnapshot(running=3),
        Refused(stats.id, Conflict("not now").to_info()),
        Policy(ask.id, "lpm", ["fair", "lpm"]),
        Flushed(99, 1),
        BackendReady(1, 1, 1, 1, {}),
        Flushed(flush.id, 12),
    )
    assert await flushing == 12
    assert (await asking) == Policy(ask.id, "lpm", ["fair", "lpm"])
    with pytest.raises(Conflict, match="not now"):
        await refused
    assert engine.stats.running == 3


async def test_an_engine_that_goes_leaves_nobody_waiting(
    engine: Engine, backend: FakeBackend
) -> None:
    asking = asyncio.create_task(engine.ask(AskStats(0)))
    watching = engine.watch()
    first = asyncio.ensure_future(anext(watching))
    await settle()
    await engine.close()
    for outcome in await asyncio.gather(asking, first, return_exceptions=True):
        assert isinstance(outcome, Unavailable)
    with pytest.raises(Unavailable):
        await engine.ask(AskStats(0))
    with pytest.raises(Unavailable):
        await anext(engine.watch())
    with pytest.raises(Unavailable):
        engine.end_program("p")
    await watching.aclose()
    assert [type(message) for message in backend.sent] == [AskStats, Watch]


async def test_readers_share_one_stream(engine: Engine, backend: FakeBackend) -> None:
    one, two = engine.watch(), engine.watch()
    firsts = [asyncio.ensure_future(anext(stream)) for stream in (one, two)]
    await settle()
    assert backend.sent == [Watch(True), Watch(True)]
    whole = KvEvents(1, [Cleared()])
    backend.say(whole)
    assert await asyncio.gather(*firsts) == [whole, whole]
    await one.aclose()
    assert backend.sent == [Watch(True), Watch(True)]
    await two.aclose()
    assert backend.sent[2:] == [Watch(False)]


async def test_what_a_request_is_of_reaches_the_scheduler(
    engine: Engine, backend: FakeBackend
) -> None:
    no_text = SimpleNamespace(token_bytes=bytes, special_ids=frozenset())
    engine._tokenizer = cast("Any", no_text)  # ids go in, and nothing comes out
    request = GenerateRequest(
        prompt=[1, 2], rid="r", namespace="@acme", priority=3, tenant="acme", program="acme p"
    )
    stream = engine.generate(request)
    waiting = asyncio.ensure_future(anext(stream))
    await settle()
    submit = backend.sent[0]
    assert isinstance(submit, Submit)
    assert (submit.tenant, submit.program, submit.priority) == ("acme", "acme p", 3)
    assert submit.namespace == "@acme"
    engine.end_program("acme p")
    assert backend.sent[1] == EndProgram("acme p")
    await engine.close()
    with pytest.raises(PhloemError):
        await waiting

"""Reading along while a program runs."""

from __future__ import annotations

import asyncio
import threading

import pytest

import phloem
from phloem.lang.backend.base import Call
from phloem.lang.feed import Feed
from phloem.lang.state import State

pytestmark = pytest.mark.timeout(20)


@phloem.function
def chat(s: State) -> None:
    s += phloem.user("Hello?")
    s += phloem.assistant("Well, " + phloem.gen("reply") + phloem.select("mark", ["!", "?"]))


BACKEND = phloem.MockBackend({"reply": "good morning"}, piece_chars=5)


def test_pieces_are_the_text() -> None:
    stream = chat.stream(backend=BACKEND)
    pieces = list(stream)
    state = stream.result()
    assert "".join(pieces) == state.text() == "user: Hello?\nassistant: Well, good morning!"
    assert all(pieces)
    assert list(stream.text_iter("reply")) == ["good ", "morni", "ng"]
    assert list(stream.text_iter("mark")) == ["!"]
    assert "".join(state.text_iter()) == state.text()
    assert stream["reply"] == "good morning"
    assert BACKEND.calls[-1].stream


async def test_the_same_on_an_event_loop() -> None:
    stream = chat.stream(backend=BACKEND)
    pieces = [piece async for piece in stream]
    assert "".join(pieces) == (await stream.aresult()).text()
    assert [piece async for piece in stream.text_async_iter("reply")] == ["good ", "morni", "ng"]
    with pytest.raises(KeyError, match="nothing"):
        [piece async for piece in stream.text_async_iter("nothing")]


def test_pieces_come_before_the_end() -> None:
    """The second call waits until the reader has seen the first one's text."""
    seen = threading.Event()

    @phloem.function
    def program(s: State) -> None:
        s += phloem.gen("first")
        assert seen.wait(10)
        s += phloem.gen("second")

    backend = phloem.MockBackend({"first": "one", "second": "two"})
    text = ""
    for piece in program.stream(backend=backend):
        text += piece
        if text == "one":
            seen.set()
    assert text == "onetwo"


def test_waits_for_a_variable_that_is_not_defined_yet() -> None:
    go = threading.Event()

    @phloem.function
    def program(s: State) -> None:
        assert go.wait(10)
        s += phloem.gen("x")
        s["y"] = "assigned"

    stream = program.stream(backend=phloem.MockBackend({"x": "late"}))
    threading.Timer(0.05, go.set).start()
    assert "".join(stream.text_iter("x")) == "late"
    assert "".join(stream.text_iter("y")) == "assigned"
    with pytest.raises(KeyError, match="'z'"):
        stream["z"]


def test_a_list_is_no_text() -> None:
    @phloem.function
    def program(s: State) -> None:
        s += phloem.gen("x", n=2)
        s["number"] = 3

    stream = program.stream(backend=phloem.MockBackend({"x": "a"}))
    for name in ("x", "number"):
        with pytest.raises(phloem.UsageError, match="is no text"):
            list(stream.text_iter(name))


def test_errors_end_the_text() -> None:
    @phloem.function
    def failing(s: State) -> None:
        s += "a" + phloem.gen("x") + "b"

    backend = phloem.MockBackend({"x": ValueError("no")})
    pieces = iter(failing.stream(backend=backend))
    assert next(pieces) == "a"
    with pytest.raises(phloem.GenerationError, match="no"):
        next(pieces)

    @phloem.function
    def broken(s: State) -> None:
        s += "a"
        raise LookupError("mine")

    stream = broken.stream(backend=backend)
    with pytest.raises(LookupError, match="mine"):
        "".join(stream)
    with pytest.raises(LookupError, match="mine"):
        stream.result()
    with pytest.raises(phloem.GenerationError, match="LookupError: mine"):
        list(stream.text_iter("never"))


async def test_errors_end_the_text_on_an_event_loop() -> None:
    @phloem.function
    def failing(s: State) -> None:
        s += "a" + phloem.gen("x") + "b"

    stream = failing.stream(backend=phloem.MockBackend({"x": ValueError("no")}))
    got: list[str] = []

    async def read() -> None:
        async for piece in stream:
            got.append(piece)  # noqa: PERF401  (what came before the error is looked at)

    with pytest.raises(phloem.GenerationError, match="no"):
        await read()
    assert got == ["a"]
    with pytest.raises(phloem.GenerationError, match="no"):
        [piece async for piece in stream.text_async_iter("x")]


def test_leaving_the_block_cancels() -> None:
    backend = phloem.MockBackend(lambda call: "x" * 10, latency_s=latency)
    with chat.stream(backend=backend) as stream:
        assert next(iter(stream)) == "user: "
    with pytest.raises(phloem.GenerationError, match="cancelled"):
        stream.result()["reply"]


def latency(call: Call) -> float:
    return 3600


async def test_feed_readers_see_everything_and_end() -> None:
    feed: Feed[int] = Feed([0])

    async def read() -> list[int]:
        return [item async for item in feed]

    readers = [asyncio.create_task(read()) for _ in range(3)]
    in_thread = asyncio.create_task(asyncio.to_thread(list, feed))
    for i in range(1, 200):
        feed.push(i)
        if i % 50 == 0:
            await asyncio.sleep(0.001)
    feed.close()
    feed.push(-1)  # after the end: nothing
    for reader in (*readers, in_thread):
        assert await reader == list(range(200))
    assert await read() == list(range(200))


@phloem.function
def extract(s: State) -> None:
    s += phloem.gen("person", json_schema={"type": "object"}) + phloem.gen("word")


PERSON = '{"name": "Ada", "tags": [1, {}], "age": 36}'
PAIRS = [("/name", "Ada"), ("/tags/0", 1), ("/tags/1", {}), ("/age", 36)]


def test_fields_come_before_the_end() -> None:
    received = threading.Event()

    def answer(call: Call) -> str:
        if call.name == "word":  # its prompt needs the whole person
            return "x"
        return PERSON

    backend = phloem.MockBackend(answer, piece_chars=3)
    stream = extract.stream(backend=backend)
    for pair in stream.fields_iter("person"):
        assert pair == PAIRS[0]
        received.set()
        break
    assert received.is_set()
    assert list(stream.fields_iter("person")) == PAIRS
    state = stream.result()
    assert list(state.fields_iter("person")) == PAIRS
    with pytest.raises(phloem.UsageError, match="no fields"):
        list(state.fields_iter("word"))


async def test_fields_on_an_event_loop() -> None:
    backend = phloem.MockBackend({"person": PERSON, "word": "1"}, piece_chars=1)
    stream = extract.stream(backend=backend)
    assert [pair async for pair in stream.fields_async_iter("person")] == PAIRS
    state = await stream.aresult()
    assert [pair async for pair in state.fields_async_iter("person")] == PAIRS
    assert [pair async for pair in state.fields_async_iter("word")] == [("", 1)]

"""The parts of `/v1/responses` alone: the answer as a property, the store, paths of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import Chunk, Finish
from phloem.srt.http.responses.answer import ResponseAnswer
from phloem.srt.http.responses.items import FunctionCallItem, InputText, MessageItem
from phloem.srt.http.responses.paths import Paths
from phloem.srt.http.responses.replies import ReasoningEcho, Response, StateEvent, TextEcho
from phloem.srt.http.responses.store import ResponseStore
from phloem.srt.http.tool_formats import FORMATS
from phloem.srt.http.tool_parser import CallsParser, Piece, Reasoning, ToolArguments, ToolStart
from phloem.srt.messages import FinishReason

CALL = ['<tool_call>\n{"name": "get_weather", "argu', 'ments": {"city": ', '"Oslo"}}\n</tool_call>']

BLANK = Response(
    id="resp_1",
    created_at=1,
    status="in_progress",
    background=False,
    instructions=None,
    max_output_tokens=None,
    metadata={},
    model="tiny",
    parallel_tool_calls=True,
    previous_response_id=None,
    reasoning=ReasoningEcho(),
    store=True,
    temperature=1.0,
    text=TextEcho(),
    tool_choice=msgspec.Raw(b'"auto"'),
    top_logprobs=0,
    top_p=1.0,
    truncation="disabled",
)


def plain(value: Any) -> Any:
    """As a client reads it."""
    return msgspec.json.decode(msgspec.json.encode(value))


class Scripted:
    """A parser whose pieces are given: each text is the number of a list of them."""

    named = False

    def __init__(self, script: list[list[Piece]]) -> None:
        self._script = script

    def feed(self, text: str) -> list[Piece]:
        return self._script[int(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


@st.composite
def scripts(draw: st.DrawFn) -> list[list[Piece]]:
    """Pieces as a parser may give them: arguments only of the newest call, and only in it."""
    calls = 0
    in_call = False
    script: list[list[Piece]] = []
    for _ in range(draw(st.integers(0, 6))):
        pieces: list[Piece] = []
        for kind in draw(st.lists(st.sampled_from(["text", "think", "call", "args"]), max_size=4)):
            text = draw(st.text(max_size=3))
            if kind == "args" and in_call:
                pieces.append(ToolArguments(calls - 1, text))
            elif kind == "call":
                pieces.append(ToolStart(calls, f"call_{calls}", "f"))
                calls += 1
                in_call = True
            elif kind in ("text", "think"):
                pieces.append(text if kind == "text" else Reasoning(text))
                in_call = False
        script.append(pieces)
    return script


@given(scripts(), st.sampled_from(FinishReason))
def test_a_stream_tells_what_the_whole_has(script: list[list[Piece]], reason: FinishReason) -> None:
    chunks = [Chunk(rid="r", prompt_tokens=3)]
    chunks += [
        Chunk(rid="r", text=str(i), prompt_tokens=3, completion_tokens=i + 1)
        for i in range(len(script))
    ]
    chunks += [
        Chunk(rid="r", finish=Finish(reason), prompt_tokens=3, completion_tokens=len(script))
    ]
    whole = ResponseAnswer(BLANK, lambda: Scripted(script))
    streamed = ResponseAnswer(BLANK, lambda: Scripted(script))
    events: list[Any] = list(streamed.opening())
    for chunk in chunks:
        whole.add(0, chunk)
        events += streamed.frames(0, chunk)
    events += streamed.closing()
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert isinstance(events[-1], StateEvent)
    times = {"completed_at": None}
    response = msgspec.structs.replace(events[-1].response, **times)
    assert response == msgspec.structs.replace(whole.response, **times)
    assert not any(
        item.status == "in_progress" for item in response.output if item.status is not None
    )
    built = rebuilt([plain(e) for e in events])
    assert built == plain(response)["output"]


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client builds it of the deltas; what is `done` has to be the same."""
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
        if "output_index" not in event or kind == "output_item.added":
            continue
        item = output[-1]
        assert event["output_index"] == len(output) - 1
        assert event.get("item_id", item["id"]) == item["id"]
        if kind == "content_part.added":
            item["content"].append(event["part"])
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert item["content"][event["content_index"]]["text"] == event["text"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (item["arguments"], item["name"]) == (event["arguments"], event["name"])
        elif kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert item == event["item"]
    return output


@given(st.lists(st.sampled_from(["<tool_", "call>", *CALL, " ", "x", '{"a'])))
def test_any_text_through_the_parser_of_tools(texts: list[str]) -> None:
    answer = ResponseAnswer(BLANK, lambda: CallsParser(FORMATS["json"].syntax))
    events: list[Any] = list(answer.opening())
    for text in texts:
        events += answer.frames(0, Chunk(rid="r", text=text))
    events += answer.frames(0, Chunk(rid="r", finish=Finish(FinishReason.STOP)))
    events += answer.closing()
    assert rebuilt([plain(e) for e in events]) == [plain(item) for item in answer.response.output]


def test_reasoning_is_an_item_of_its_own() -> None:
    script: list[list[Piece]] = [[Reasoning("a")], [], [Reasoning("b")], ["c"], ["d"]]
    answer = ResponseAnswer(BLANK, lambda: Scripted(script))
    for i in range(len(script)):
        answer.add(0, Chunk(rid="r", text=str(i), completion_tokens=i + 1))
    answer.add(0, Chunk(rid="r", completion_tokens=5, finish=Finish(FinishReason.STOP)))
    reasoning, message = answer.response.output
    assert plain(reasoning) == {
        "type": "reasoning",
        "id": "rs_10000",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "ab"}],
    }
    assert message.id == "msg_10001"


def response(number: int, *, previous: int | None = None, **changes: Any) -> Response:
    return msgspec.structs.replace(
        BLANK,
        id=f"resp_{number}",
        status="completed",
        previous_response_id=None if previous is None else f"resp_{previous}",
        **changes,
    )


def message(text: str) -> MessageItem:
    return MessageItem(id=f"msg_{text[:9]}", role="user", content=[InputText(text)])


async def test_the_store_is_bounded_and_the_least_used_goes_first(tmp_path: Path) -> None:
    store = ResponseStore(tmp_path / "s.sqlite", max_responses=3)
    try:
        for number in range(3):
            await store.save("t", response(number), [message(str(number))])
        await store.conversation("t", "resp_0")
        await store.save("t", response(3), [])
        with pytest.raises(InvalidRequest, match="resp_1"):
            await store.conversation("t", "resp_1")
        assert await store.item("t", "msg_1") is None
        assert await store.conversation("t", "resp_0") == [message("0")]
        running = response(4, background=True)
        await store.save("t", msgspec.structs.replace(running, status="queued"), [])
        for number in range(5, 9):
            await store.save("t", response(number), [])
        assert (await store.get("t", "resp_4")).status == "queued"
    finally:
        await store.close()


async def test_servers_that_live_keep_what_they_run(tmp_path: Path) -> None:
    first, second = (ResponseStore(tmp_path / "s.sqlite") for _ in range(2))
    running = msgspec.structs.replace(response(0), status="queued")
    await first.save("t", running, [])
    assert (await second.get("t", "resp_0")).status == "queued"
    await second.close()
    await first.close()
    third = ResponseStore(tmp_path / "s.sqlite")
    failed = await third.get("t", "resp_0")
    assert (failed.status, failed.error is not None) == ("failed", True)
    await third.close()


async def test_the_store_is_bounded_in_bytes(tmp_path: Path) -> None:
    store = ResponseStore(None, max_bytes=10_000)
    try:
        await store.save("t", response(0), [])
        await store.save("t", response(1), [message("x" * 9_000)])
        assert (await store.get("t", "resp_1")).id == "resp_1"
        with pytest.raises(Exception, match="resp_0"):
            await store.get("t", "resp_0")
    finally:
        await store.close()


async def test_a_long_conversation_is_read_in_order(tmp_path: Path) -> None:
    store = ResponseStore(None)
    call = FunctionCallItem(id="fc", call_id="c", name="f", arguments="{}")
    try:
        for i in range(50):
            one = response(i, previous=i - 1 if i else None, output=[call])
            await store.save("t", one, [message(str(i))])
        items = await store.conversation("t", "resp_49")
        assert items == [item for i in range(50) for item in (message(str(i)), call)]
        assert await store.input_items("t", "resp_49") == items[:-1]
    finally:
        await store.close()


def test_paths_take_the_longest_prefix_at_a_boundary() -> None:
    paths = Paths({"tools[1]": "tools[3]", "tools[1].function": "tools[3]", "max_tokens": "m"})
    assert paths.outer("tools[1].function.parameters.function") == "tools[3].parameters.function"
    assert paths.outer("tools[1].type") == "tools[3].type"
    assert paths.outer("tools[10].type") == "tools[10].type"
    assert paths.outer("max_tokens_x") == "max_tokens_x"
    with pytest.raises(InvalidRequest, match="m is bad") as caught, paths.translated():
        raise InvalidRequest("max_tokens is bad", param="max_tokens")
    assert caught.value.param == "m"

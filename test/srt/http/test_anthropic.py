"""The Messages API: its replies, whole and streamed, which say the same."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained.spec import JsonSchema
from phloem.srt.errors import InternalError
from phloem.srt.generation import Chunk, Finish
from phloem.srt.http.anthropic.answer import MessageAnswer
from phloem.srt.http.tool_parser import Piece, Reasoning, ToolArguments, ToolStart
from phloem.srt.http.warning import Warnings
from phloem.srt.messages import FinishReason

HI: dict[str, Any] = {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}
CITY = {"type": "object", "properties": {"city": {"enum": ["Oslo", "}O"]}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "Now.", "input_schema": CITY}
OSLO = {"format": {"type": "json_schema", "schema": CITY}}
TIME = {"name": "get_time", "input_schema": {"type": "object", "properties": {}}}


async def ask(api: Any, **body: object) -> Any:
    return await api.call("POST", "/v1/messages", {**HI, **body})


def parsed(raw: str) -> list[tuple[str, dict[str, Any]]]:
    """The events of a stream; each is named by its type."""
    assert raw.endswith("\n\n")
    events: list[tuple[str, dict[str, Any]]] = []
    for block in raw[:-2].split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert (name, data[:6]) == (f"event: {event['type']}", "data: ")
        events.append((event["type"], event))
    return events


def joined(events: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """The message that a client makes of a stream's events; their order is checked."""
    assert [kind for kind, _ in events if kind.startswith("message")] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    assert (events[0][0], events[-1][0], events[-2][0]) == (
        "message_start",
        "message_stop",
        "message_delta",
    )
    message: dict[str, Any] = {}
    texts: list[str] | None = None
    for kind, event in events:
        match kind:
            case "message_start":
                message = event["message"]
                assert (message["content"], message["stop_reason"]) == ([], None)
            case "content_block_start":
                assert (texts, event["index"]) == (None, len(message["content"]))
                message["content"].append(event["content_block"])
                texts = []
            case "content_block_delta":
                assert texts is not None
                texts += added(message["content"][event["index"]], event["delta"])
            case "content_block_stop":
                if texts:
                    try:
                        message["content"][event["index"]]["input"] = json.loads("".join(texts))
                    except ValueError:
                        assert events[-2][1]["delta"]["stop_reason"] == "max_tokens"
                texts = None
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
                message |= {"constraint": event["constraint"]} if "constraint" in event else {}
    return message


def added(block: dict[str, Any], delta: dict[str, Any]) -> list[str]:
    """Put a delta into its block; the JSON of a call is handed back."""
    match block["type"], delta["type"]:
        case "text", "text_delta":
            block["text"] += delta["text"]
        case "thinking", "thinking_delta":
            block["thinking"] += delta["thinking"]
        case "thinking", "signature_delta":
            block["signature"] = delta["signature"]
        case "tool_use", "input_json_delta":
            return [delta["partial_json"]]
        case other:
            raise AssertionError(other)
    return []


async def both(api: Any, **body: object) -> dict[str, Any]:
    """The whole reply, which is that of the stream joined, but for the ids."""
    whole: dict[str, Any] = (await ask(api, **body)).json
    streamed = joined(parsed((await ask(api, **body, stream=True)).raw))
    for message in (whole, streamed):
        assert message.pop("id").startswith("msg_")
        for block in message["content"]:
            if block["type"] == "tool_use":
                assert block.pop("id").startswith("toolu_")
    assert streamed == whole
    return whole


async def test_a_whole_reply(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(cached_tokens=3)
    reply = await ask(api, model="tiny")
    assert (reply.status, reply.headers["Content-Type"]) == (200, "application/json")
    message = reply.json
    assert reply.headers["request-id"] == reply.headers["X-Request-Id"] == message.pop("id")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hello world."}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len("<user>Hi") - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 4,
            "service_tier": "standard",
        },
    }


async def test_a_stream(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["Hel", "", "lo"], cached_tokens=3)
    reply = await ask(api, stream=True, rid="my-1")
    assert reply.headers["Content-Type"].startswith("text/event-stream")
    assert reply.headers["request-id"] == "my-1"
    usage = {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 3,
        "service_tier": "standard",
    }
    start: dict[str, Any] = {
        "id": "my-1",
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage | {"output_tokens": 1},
    }
    block = {"index": 0}
    assert [event for _, event in parsed(reply.raw)] == [
        {"type": "message_start", "message": start},
        {"type": "content_block_start", "content_block": {"type": "text", "text": ""}} | block,
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "Hel"}} | block,
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "lo"}} | block,
        {"type": "content_block_stop"} | block,
        {
            "type": "message_delta",
            "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": usage,
        },
        {"type": "message_stop"},
    ]


async def test_the_silence_of_a_stream_is_pings(serve: Any, engine: Any, script: Any) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    api = await serve(keepalive_s=0.01)
    body = json.dumps({**HI, "stream": True})
    headers = {"Content-Type": "application/json"}
    async with api.session.post(f"{api.base}/v1/messages", data=body, headers=headers) as response:
        first = await response.content.readuntil(b"\n\n")
        assert first == b'event: ping\ndata: {"type":"ping"}\n\n'
        hold.set()
        rest = (await response.content.read()).decode()
    joined([event for event in parsed(rest) if event[0] != "ping"])


@pytest.mark.parametrize(
    ("finish", "matched", "max_tokens", "stop_reason", "stop_sequence"),
    [
        (FinishReason.STOP, None, 50, "end_turn", None),
        (FinishReason.STOP, 7, 50, "end_turn", None),
        (FinishReason.STOP, "END", 50, "stop_sequence", "END"),
        (FinishReason.LENGTH, None, 4, "max_tokens", None),
        (FinishReason.LENGTH, None, 50, "model_context_window_exceeded", None),
    ],
)
async def test_stop_reasons(
    api: Any,
    engine: Any,
    script: Any,
    finish: FinishReason,
    matched: str | int | None,
    max_tokens: int,
    stop_reason: str,
    stop_sequence: str | None,
) -> None:
    engine.script = lambda r: script(finish=finish, matched=matched)
    message = await both(api, max_tokens=max_tokens, stop_sequences=["END", "\n\n"])
    assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)
    assert engine.requests[0].stop == ("END", "\n\n")
    assert engine.requests[0].sampling.max_tokens == max_tokens


async def test_nothing_is_generated_with_max_tokens_0(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script([], FinishReason.LENGTH, cached_tokens=2)
    message = await both(api, max_tokens=0)
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    assert message["usage"]["cache_read_input_tokens"] == 2
    assert engine.requests[0].sampling.max_tokens == 0


async def test_an_aborted_answer_is_an_error(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(["Hel"], FinishReason.ABORT)
    reply = await ask(api)
    assert (reply.status, reply.json["error"]["code"]) == (400, "aborted")
    kind, event = parsed((await ask(api, stream=True)).raw)[-1]
    assert (kind, event["error"]["type"]) == ("error", "invalid_request_error")


# ------------------------------------------------------------------ tools


async def test_a_named_tool(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(['{"ci', 'ty":', ' "Oslo"}'])
    choice = {"type": "tool", "name": "get_weather"}
    message = await both(api, tools=[WEATHER, TIME], tool_choice=choice)
    assert message["content"] == [
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Oslo"}}
    ]
    assert message["stop_reason"] == "tool_use"
    assert engine.requests[0].constraint == JsonSchema(schema=msgspec.json.encode(CITY).decode())
    assert engine.rendered[0]["tools"][0] == {
        "type": "function",
        "function": {"name": "get_weather", "description": "Now.", "parameters": CITY},
    }


async def test_any_tool(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(['{"name": "get_time", "arg', 'uments": {', "}}"])
    message = await both(api, tools=[WEATHER, TIME], tool_choice={"type": "any"})
    assert message["content"] == [{"type": "tool_use", "name": "get_time", "input": {}}]
    assert "anyOf" in engine.requests[0].constraint.schema


async def test_text_and_calls_keep_their_order(api: Any, engine: Any, script: Any) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    answer = f"Let me see.{call}\nAnd:{call}"
    engine.script = lambda r: script([answer[i : i + 4] for i in range(0, len(answer), 4)])
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = await both(api, tools=[WEATHER], tool_choice=choice)
    use = {"type": "tool_use", "name": "get_weather", "input": {"city": "Oslo"}}
    texts = [block.get("text", "").strip() or block for block in message["content"]]
    assert texts == ["Let me see.", use, "And:", use]
    assert json.loads(engine.requests[0].constraint.format)["stop_after_first"] is True


async def test_no_tools_may_be_called(api: Any, engine: Any) -> None:
    message = await both(api, tools=[WEATHER], tool_choice={"type": "none"})
    assert message["content"] == [{"type": "text", "text": "Hello world."}]
    assert engine.requests[0].constraint is None
    assert len(engine.rendered[0]["tools"]) == 1
    assert (await ask(api, tools=[])).status == 200


async def test_a_call_that_was_cut_off_has_no_input(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(['{"city": "O'], FinishReason.LENGTH)
    choice = {"type": "tool", "name": "get_weather"}
    message = await both(api, max_tokens=1, tools=[WEATHER], tool_choice=choice)
    assert message["content"] == [{"type": "tool_use", "name": "get_weather", "input": {}}]
    assert message["stop_reason"] == "max_tokens"


# ------------------------------------------------------------------ errors in streams


async def test_an_answer_that_breaks_its_schema(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(['{"city": ', '"Rome"}'])
    kind, event = parsed((await ask(api, output_config=OSLO, stream=True)).raw)[-1]
    assert kind == "error"
    assert event["error"]["type"] == "api_error"
    assert event["error"]["param"] == "output_config.format.schema"


async def test_an_error_behind_the_status_is_the_last_event(
    api: Any, engine: Any, script: Any
) -> None:
    engine.script = lambda r: script(["Hel"], failure=InternalError("Gone."))
    reply = await ask(api, stream=True)
    events = parsed(reply.raw)
    assert [kind for kind, _ in events] == [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "error",
    ]
    assert events[-1][1]["error"] == {
        "type": "api_error",
        "message": "Gone.",
        "code": "internal_error",
    }
    assert events[-1][1]["request_id"] == reply.headers["request-id"]


async def test_a_client_that_leaves(api: Any, engine: Any, script: Any, eventually: Any) -> None:
    engine.script = lambda r: script(["x"] * 1000, hold=asyncio.Event())
    data = json.dumps({**HI, "stream": True, "rid": "left"})
    headers = {"Content-Type": "application/json"}
    async with api.session.post(f"{api.base}/v1/messages", data=data, headers=headers) as response:
        assert response.status == 200
        assert engine.running == {"left"}
    await eventually(lambda: engine.closed == ["left"])


# ------------------------------------------------------------------ blocks, of any pieces


@dataclass
class Pieces:
    """A parser that gives what it was given."""

    pieces: list[Piece]
    named: bool = False

    def feed(self, text: str) -> list[Piece]:
        return self.pieces if text else []

    def finish(self) -> list[Piece]:
        return []


def chunks() -> list[Chunk]:
    end = Finish(FinishReason.STOP)
    return [
        Chunk(rid="r", prompt_tokens=5),
        Chunk(rid="r", prompt_tokens=5, text="x", completion_tokens=1),
        Chunk(rid="r", prompt_tokens=5, completion_tokens=1, finish=end),
    ]


def answer(pieces: list[Piece], *, show: bool = True) -> MessageAnswer:
    return MessageAnswer(
        "msg_1", "tiny", Pieces(pieces), Warnings(), max_tokens=9, show_thinking=show
    )


def whole(pieces: list[Piece], *, show: bool = True) -> dict[str, Any]:
    reply = answer(pieces, show=show)
    for chunk in chunks():
        reply.add(0, chunk)
    result: dict[str, Any] = json.loads(msgspec.json.encode(reply.whole()))
    return result


def streamed(pieces: list[Piece], *, show: bool = True) -> list[tuple[str, dict[str, Any]]]:
    reply = answer(pieces, show=show)
    frames = [frame for chunk in chunks() for frame in reply.frames(0, chunk)]
    events = [json.loads(msgspec.json.encode(frame)) for frame in [*frames, *reply.closing()]]
    return [(event["type"], event) for event in events]


_texts = st.text(alphabet="ab é", min_size=1, max_size=3)
_call = st.tuples(_texts, st.dictionaries(_texts, st.integers(), max_size=2))


@given(parts=st.lists(_texts | _texts.map(Reasoning) | _call, max_size=8), show=st.booleans())
def test_the_events_of_any_pieces_are_the_whole_message(parts: list[Any], show: bool) -> None:
    pieces: list[Piece] = []
    calls = 0
    for part in parts:
        if isinstance(part, tuple):
            arguments = json.dumps(part[1])
            pieces.append(ToolStart(calls, f"call_{calls}", part[0]))
            pieces += [ToolArguments(calls, arguments[:3]), ToolArguments(calls, arguments[3:])]
            calls += 1
        else:
            pieces.append(part)
    message = joined(streamed(pieces, show=show))
    assert message == whole(pieces, show=show)
    blocks = message["content"]
    said = "".join(piece for piece in pieces if isinstance(piece, str))
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
    assert "".join(b["text"] for b in blocks if b["type"] == "text") == said
    thinking = [b for b in blocks if b["type"] == "thinking"]
    assert "".join(b["thinking"] for b in thinking) == (thought if show else "")
    assert all(b["signature"] for b in thinking)
    inputs = [b["input"] for b in blocks if b["type"] == "tool_use"]
    assert inputs == [part[1] for part in parts if isinstance(part, tuple)]
    kinds = [b["type"] for b in blocks]
    assert all(a != b or a == "tool_use" for a, b in pairwise(kinds))


def test_a_thinking_block_ends_in_its_signature() -> None:
    events = streamed([Reasoning("Hm"), Reasoning("."), "Yes."])
    deltas = [e["delta"]["type"] for kind, e in events if kind == "content_block_delta"]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    hidden = whole([Reasoning("Hm."), "Yes."], show=False)["content"]
    shown = whole([Reasoning("Hm."), "Yes."])["content"]
    assert (hidden[0]["thinking"], shown[0]["thinking"]) == ("", "Hm.")
    assert hidden[0]["signature"] == shown[0]["signature"]

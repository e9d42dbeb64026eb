"""Responses that are stored, continued, and made in the background."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from phloem.srt.config import ServerOptions
from phloem.srt.errors import InternalError
from phloem.srt.generation import Chunk
from phloem.srt.http.app import create_app, make_runner

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "name": "get_weather", "parameters": CITY}
CALL = ['<tool_call>\n{"name": "get_weather", "argu', 'ments": {"city": ', '"Oslo"}}\n</tool_call>']


async def post(api: Any, **body: object) -> Any:
    return await api.call("POST", "/v1/responses", {"input": "Hi", **body})


def named(raw: str) -> list[dict[str, Any]]:
    """The events of a stream; its framing and its numbers are checked."""
    blocks = [b for b in raw.split("\n\n") if b and not b.startswith(":")]
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    return events


async def finished(api: Any, path: str) -> Any:
    """The response at `path`, when it is over."""
    while True:
        polled = (await api.call("GET", path)).json
        if polled["status"] not in ("queued", "in_progress"):
            return polled


def settled(value: Any) -> Any:
    """Without what differs between two runs of one request: ids and times."""
    if isinstance(value, list):
        return [settled(one) for one in value]
    if not isinstance(value, dict):
        return value
    known = ("id", "item_id", "call_id", "created_at", "completed_at")
    return {key: settled(one) for key, one in value.items() if key not in known}


def prompt_of(engine: Any) -> str:
    return bytes(engine.requests[-1].prompt).decode()


# --------------------------------------------------------------------------------------- the store


async def test_a_conversation_goes_on(api: Any, engine: Any, script: Any) -> None:
    first = (await post(api, input="One", instructions="Be brief")).json
    second = (await post(api, input="Two", previous_response_id=first["id"])).json
    assert prompt_of(engine) == "<user>One<assistant>Hello world.<user>Two"
    assert second["previous_response_id"] == first["id"]
    assert second["instructions"] is None
    await post(api, input="Three", previous_response_id=second["id"], instructions="Now")
    assert prompt_of(engine).startswith("<system>Now<user>One<assistant>")
    assert prompt_of(engine).endswith("<assistant>Hello world.<user>Three")
    await post(api, input="Branch", previous_response_id=first["id"])
    assert prompt_of(engine) == "<user>One<assistant>Hello world.<user>Branch"


async def test_calls_go_on_with_their_outputs(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(CALL)
    first = (await post(api, tools=[WEATHER])).json
    (call,) = first["output"]
    unanswered = await post(api, previous_response_id=first["id"], tools=[WEATHER])
    assert unanswered.status == 400
    assert unanswered.json["error"]["param"] == "previous_response_id"
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    engine.script = lambda r: script()
    reply = await post(api, previous_response_id=first["id"], input=[output], tools=[WEATHER])
    assert reply.status == 200, reply.raw
    _, turn, result = engine.rendered[-1]["messages"]
    assert turn["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}
    assert result == {"role": "tool", "content": "rain", "tool_call_id": call["call_id"]}


async def test_a_call_that_was_cut_off_was_not_made(api: Any, engine: Any, script: Any) -> None:
    engine.script = lambda r: script(CALL)
    first = (await post(api, tools=[WEATHER], max_output_tokens=2)).json
    assert first["output"][0]["status"] == "incomplete"
    engine.script = lambda r: script()
    assert (await post(api, previous_response_id=first["id"])).status == 200


async def test_items_can_be_referred_to(api: Any, engine: Any) -> None:
    first = (await post(api, input="One")).json
    (message,) = first["output"]
    sent = [{"role": "user", "content": "One"}, {"type": "item_reference", "id": message["id"]}]
    reply = await post(api, input=[*sent, {"role": "user", "content": "Two"}])
    assert reply.status == 200
    assert prompt_of(engine) == "<user>One<assistant>Hello world.<user>Two"


async def test_input_items(api: Any) -> None:
    first = (await post(api, input="One")).json
    given_item = {"id": "msg_mine", "role": "user", "content": "Two"}
    second = (await post(api, input=[given_item], previous_response_id=first["id"])).json
    path = f"/v1/responses/{second['id']}/input_items"
    listed = (await api.call("GET", f"{path}?order=asc")).json
    texts = [item["content"][0]["text"] for item in listed["data"]]
    assert texts == ["One", "Hello world.", "Two"]
    assert listed["data"][2] == {
        "type": "message",
        "id": "msg_mine",
        "status": "completed",
        "role": "user",
        "content": [{"type": "input_text", "text": "Two"}],
    }
    assert listed["data"][1] == first["output"][0]
    assert (listed["last_id"], listed["has_more"]) == ("msg_mine", False)
    page = (await api.call("GET", f"{path}?limit=2")).json
    assert [item["id"] for item in page["data"]] == ["msg_mine", first["output"][0]["id"]]
    assert page["has_more"] is True
    rest = (await api.call("GET", f"{path}?after={page['last_id']}")).json
    assert [item["content"][0]["text"] for item in rest["data"]] == ["One"]
    assert (await api.call("GET", f"{path}?after=x")).json["error"]["param"] == "after"
    assert (await api.call("GET", f"{path}?limit=0")).status == 400
    include = "include[]=message.output_text.logprobs&include[]=file_search_call.results"
    assert (await api.call("GET", f"{path}?{include}")).status == 200
    refused = await api.call("GET", f"{path}?include=reasoning.encrypted_content")
    assert refused.json["error"]["param"] == "include[0]"


async def test_deleted_is_gone(api: Any) -> None:
    first = (await post(api)).json
    second = (await post(api, previous_response_id=first["id"])).json
    reply = await api.call("DELETE", f"/v1/responses/{first['id']}")
    assert reply.json == {"id": first["id"], "object": "response", "deleted": True}
    for method, path in (
        ("GET", ""),
        ("DELETE", ""),
        ("GET", "/input_items"),
        ("POST", "/cancel"),
        ("GET", "?stream=true"),
    ):
        gone = await api.call(method, f"/v1/responses/{first['id']}{path}")
        assert gone.status == 404
        assert gone.json["error"]["code"] == "response_not_found"
    for previous in (first, second):
        reply = await post(api, previous_response_id=previous["id"])
        assert (reply.status, reply.json["error"]["code"]) == (
            400,
            "previous_response_not_found",
        )


async def test_what_is_not_stored_cannot_be_found(api: Any) -> None:
    response = (await post(api, store=False)).json
    assert response["store"] is False
    assert (await api.call("GET", f"/v1/responses/{response['id']}")).status == 404


async def test_tenants_see_their_own_only(serve: Any, tmp_path: Path) -> None:
    hashes = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("ann", "bob")}
    file = tmp_path / "tenants.toml"
    file.write_text(
        "\n".join(f"[tenants.{name}]\nkey_sha256 = '{key}'" for name, key in hashes.items())
    )
    api = await serve(tenants=str(file))

    async def call(who: str, method: str, path: str, body: object = None) -> Any:
        return await api.call(method, path, body, headers={"Authorization": f"Bearer {who}"})

    mine = (await call("ann", "POST", "/v1/responses", {"input": "secret"})).json
    path = f"/v1/responses/{mine['id']}"
    assert (await call("ann", "GET", path)).status == 200
    for method, more in (("GET", ""), ("GET", "/input_items"), ("DELETE", ""), ("POST", "/cancel")):
        assert (await call("bob", method, path + more)).status == 404
    item = mine["output"][0]["id"]
    for body in (
        {"input": "a", "previous_response_id": mine["id"]},
        {"input": [{"type": "item_reference", "id": item}]},
    ):
        assert (await call("bob", "POST", "/v1/responses", body)).status == 400
    assert (await call("ann", "GET", path)).status == 200


async def test_the_tokens_of_an_input(api: Any, engine: Any) -> None:
    first = (await post(api, input="One")).json
    body = {"input": "Two", "previous_response_id": first["id"], "tools": [WEATHER]}
    reply = await api.call("POST", "/v1/responses/input_tokens", body)
    text = "<user>One<assistant>Hello world.<user>Two"
    assert reply.json == {"object": "response.input_tokens", "input_tokens": len(text)}
    assert len(engine.requests) == 1


async def test_truncation_leaves_out_whole_turns(api: Any, engine: Any) -> None:
    turns = [
        item
        for i in range(30)
        for item in (
            {"role": "user", "content": f"question {i:02}"},
            {"type": "function_call", "call_id": f"c{i}", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": f"c{i}", "output": "out"},
            {"role": "assistant", "content": f"answer {i:02}"},
        )
    ]
    sent = [*turns, {"role": "user", "content": "last"}]
    cut = await post(api, input=sent, truncation="auto", instructions="Hey", max_output_tokens=50)
    assert cut.status == 200, cut.raw
    prompt = prompt_of(engine)
    assert prompt.startswith("<system>Hey<user>question ")
    assert prompt.endswith("<user>last")
    assert len(prompt) + 50 <= 512
    turn = len("<user>question 00<assistant>None<tool>out<assistant>answer 00")
    assert len(prompt) + turn + 50 > 512
    kept = int(prompt[len("<system>Hey<user>question ") :][:2])
    assert cut.json["truncated_items"] == 4 * kept
    fits = (await post(api, input=sent[-5:], truncation="auto")).json
    assert "truncated_items" not in fits


# ---------------------------------------------------------------------------------- the background


async def test_a_background_response_can_be_polled(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    first = (await post(api, background=True)).json
    assert (first["status"], first["background"]) == ("queued", True)
    path = f"/v1/responses/{first['id']}"
    assert (await api.call("GET", path)).json["status"] == "queued"
    chained = await post(api, previous_response_id=first["id"])
    assert chained.json["error"]["code"] == "previous_response_running"
    hold.set()
    polled = await finished(api, path)
    whole = (await post(api)).json
    assert settled(polled) == {**settled(whole), "background": True}
    assert (await api.call("POST", f"{path}/cancel")).json == polled
    sync = await api.call("POST", f"/v1/responses/{whole['id']}/cancel")
    assert sync.status == 400


async def test_a_background_response_can_be_cancelled(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    first = (await post(api, background=True)).json
    path = f"/v1/responses/{first['id']}"
    cancelled = await api.call("POST", f"{path}/cancel")
    assert cancelled.status == 200
    assert cancelled.json["status"] == "cancelled"
    assert not engine.running
    assert engine.closed == [first["id"]]
    assert (await api.call("GET", path)).json == cancelled.json
    assert (await api.call("POST", f"{path}/cancel")).json == cancelled.json
    running = (await post(api, background=True)).json
    gone = await api.call("DELETE", f"/v1/responses/{running['id']}")
    assert gone.json["deleted"] is True
    assert not engine.running
    assert (await api.call("GET", f"/v1/responses/{running['id']}")).status == 404


async def test_a_background_stream_outlives_its_client(api: Any, engine: Any, script: Any) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    body = {"input": "Hi", "background": True, "stream": True}
    response = await api.session.post(api.base + "/v1/responses", json=body)
    seen = b""
    while seen.count(b"\n\n") < 2:
        seen += await response.content.readany()
    events = named(seen.decode())
    assert [e["type"] for e in events] == ["response.created", "response.queued"]
    assert events[0]["response"]["status"] == "queued"
    response.close()
    id_ = events[0]["response"]["id"]
    path = f"/v1/responses/{id_}?stream=true"
    following = asyncio.create_task(api.call("GET", path))
    await asyncio.sleep(0.01)
    hold.set()
    whole = (await following).raw
    events = named(whole)
    assert events[2]["type"] == "response.in_progress"
    assert events[-1]["type"] == "response.completed"
    again = (await api.call("GET", path)).raw
    assert again == whole
    later = (await api.call("GET", f"{path}&starting_after=4")).raw
    assert whole.endswith(later)
    assert json.loads(later.split("data: ")[1].split("\n")[0])["sequence_number"] == 5
    assert (await api.call("GET", path.split("?")[0])).json == events[-1]["response"]


async def test_what_was_not_streamed_cannot_be_streamed_again(api: Any) -> None:
    for body in ({}, {"background": True}):
        id_ = (await post(api, **body)).json["id"]
        reply = await api.call("GET", f"/v1/responses/{id_}?stream=true")
        assert (reply.status, reply.json["error"]["param"]) == (400, "stream")
    reply = await api.call("GET", f"/v1/responses/{id_}?starting_after=1")
    assert reply.json["error"]["param"] == "starting_after"


async def test_a_failure_in_the_background_is_told(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    engine.script = lambda r: script(failure=InternalError("it broke"))
    first = (await post(api, background=True)).json
    path = f"/v1/responses/{first['id']}"
    polled = await finished(api, path)
    assert polled["status"] == "failed"
    assert polled["error"] == {"code": "server_error", "message": "it broke"}


async def test_a_client_that_leaves_before_it_is_accepted_starts_nothing(
    api: Any, engine: Any, eventually: Any
) -> None:
    waiting = asyncio.Event()

    async def never(request: Any) -> AsyncIterator[Chunk]:
        waiting.set()
        try:
            await asyncio.Event().wait()
            yield Chunk(rid="r")
        finally:
            engine.closed.append(request.rid)

    engine.generate = never
    with pytest.raises(TimeoutError):
        await api.session.post(
            api.base + "/v1/responses",
            json={"input": "a", "background": True},
            timeout=aiohttp.ClientTimeout(total=0.2),
        )
    assert waiting.is_set()
    await eventually(lambda: bool(engine.closed))
    path = f"/v1/responses/{engine.closed[0]}"
    while (await api.call("GET", path)).status != 404:
        continue


class Restartable:
    """Servers over one folder, one after the other."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        self.runner: web.AppRunner | None = None

    async def start(self) -> str:
        app = create_app(self.engine, ServerOptions(), data_dir=self.folder)
        self.runner = make_runner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        host, port = self.runner.addresses[0][:2]
        return f"http://{host}:{port}/v1/responses"

    async def stop(self) -> None:
        assert self.runner is not None
        await self.runner.cleanup()


async def test_a_restart_keeps_what_is_done_and_fails_what_was_not(
    engine: Any, script: Any, tmp_path: Path
) -> None:
    server = Restartable(engine, tmp_path / "data")
    url = await server.start()
    async with aiohttp.ClientSession() as session:

        async def ask(method: str, url: str, **body: object) -> Any:
            async with session.request(method, url, json=body or None) as reply:
                return await reply.json()

        done = await ask("POST", url, input="One")
        hold = asyncio.Event()
        engine.script = lambda r: script(hold=hold)
        cut = await ask("POST", url, input="Two", background=True)
        await server.stop()
        assert not engine.running
        url = await server.start()
        try:
            assert await ask("GET", f"{url}/{done['id']}") == done
            failed = await ask("GET", f"{url}/{cut['id']}")
            assert failed["status"] == "failed"
            assert "restarted" in failed["error"]["message"]
            engine.script = lambda r: script()
            await ask("POST", url, input="Two", previous_response_id=done["id"])
            assert prompt_of(engine) == "<user>One<assistant>Hello world.<user>Two"
        finally:
            await server.stop()

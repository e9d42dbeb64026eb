"""Clients that leave, clients that dawdle, silence, and aborts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from phloem.srt.generation import Chunk, Finish
from phloem.srt.messages import FinishReason

CHAT = {"messages": [{"role": "user", "content": "a"}]}
PATHS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
    ("/generate", {"text": "a"}),
]


@pytest.mark.parametrize(("path", "body"), PATHS)
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_a_stream_ends_its_requests(
    api: Any,
    engine: Any,
    script: Any,
    eventually: Any,
    path: str,
    body: dict[str, object],
    n: int,
) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    sent = {"sampling_params": {"n": n}} if path == "/generate" else {"n": n}
    response = await api.session.post(api.base + path, json={**body, **sent, "stream": True})
    assert response.status == 200
    assert response.headers["X-Request-Id"]
    count = len(engine.running)
    assert count >= n
    response.close()
    await eventually(lambda: not engine.running)
    assert len(engine.closed) == count


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_a_client_that_leaves_a_plain_request_ends_it_too(
    api: Any, engine: Any, script: Any, eventually: Any, path: str, body: dict[str, object]
) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    timeout = aiohttp.ClientTimeout(total=0.2)
    with pytest.raises(TimeoutError):
        await api.session.post(api.base + path, json=body, timeout=timeout)
    await eventually(lambda: bool(engine.closed) and not engine.running)


async def test_many_that_leave_count_as_aborted(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    responses = [
        await api.session.post(
            api.base + "/v1/completions", json={"prompt": "a", "n": 2, "stream": True}
        )
        for _ in range(10)
    ]
    for response in responses:
        response.close()
    await eventually(lambda: not engine.running)
    await eventually(lambda: len(engine.closed) == 20)
    metrics = (await api.call("GET", "/metrics")).raw
    assert 'route="/v1/completions",status="200"' in metrics or 'status="499"' in metrics
    assert 'phloem_request_finished_total{finish_reason="abort"} 20.0' in metrics
    engine.script = lambda r: script()
    assert (await api.chat()).status == 200


async def test_silence_is_filled_with_comments(
    serve: Any, engine: Any, script: Any, eventually: Any
) -> None:
    api = await serve(keepalive_s=0.02)
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    async with api.session.post(
        api.base + "/v1/chat/completions", json={**CHAT, "stream": True}
    ) as (response):
        lines = [(await response.content.readline()).decode() for _ in range(6)]
        hold.set()
        rest = (await response.content.read()).decode()
    assert lines[0].startswith('data: {"id"')
    assert lines[2::2] == [": keep-alive\n"] * 2
    assert rest.endswith("data: [DONE]\n\n")


async def test_a_slow_reader_holds_back_its_own_request_only(
    api: Any, engine: Any, script: Any
) -> None:
    """The server stops taking chunks from the engine when the client's socket is full."""
    taken = 0

    async def endless(request: Any) -> Any:
        nonlocal taken
        yield Chunk(rid="r")
        for _ in range(2000):
            taken += 1
            yield Chunk(rid="r", text="x" * 65536, token_ids=[1])
        yield Chunk(rid="r", finish=Finish(FinishReason.LENGTH))

    plain = engine.generate
    engine.generate = endless
    response = await api.session.post(
        api.base + "/v1/completions", json={"prompt": "a", "stream": True}
    )
    before = -1
    while taken != before:
        before = taken
        await asyncio.sleep(0.1)
    assert 0 < taken < 1000
    engine.generate = plain
    assert (await api.chat()).status == 200
    response.close()


async def test_abort_ends_all_choices_of_an_id(
    api: Any, engine: Any, script: Any, eventually: Any
) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold)
    running = asyncio.create_task(api.chat(n=2, rid="job-1"))
    other = asyncio.create_task(api.chat(rid="job-10"))
    await eventually(lambda: len(engine.running) == 3)
    for path in ("/abort", "/abort_request"):
        reply = await api.call("POST", path, {"rid": "job-1"})
        assert (reply.status, reply.json) == (200, {"aborted": 2})
    assert set(engine.aborted) == {"job-1-0", "job-1-1"}
    assert (await api.call("POST", "/abort", {"abort_all": True})).json == {"aborted": 3}
    assert (await api.call("POST", "/abort", {"rid": "unknown"})).json == {"aborted": 0}
    assert (await api.call("POST", "/abort", {})).status == 400
    assert (await api.call("POST", "/abort", {"rid": "a", "abort_all": True})).status == 400
    hold.set()
    await asyncio.gather(running, other)


async def test_one_slow_choice_does_not_hold_back_the_others(
    api: Any, engine: Any, script: Any
) -> None:
    hold = asyncio.Event()
    engine.script = lambda r: script(hold=hold) if r.rid == "t-0" else script()
    body = {**CHAT, "n": 2, "stream": True, "rid": "t"}
    async with api.session.post(api.base + "/v1/chat/completions", json=body) as response:
        seen = b""
        while b'"finish_reason":"stop"' not in seen:
            seen += await response.content.readany()
        hold.set()
        seen += await response.content.read()
    assert seen.count(b'"finish_reason":"stop"') == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        *PATHS,
        ("/v1/messages", {**CHAT, "max_tokens": 9}),
        ("/v1/responses", {"input": "a"}),
        ("/api/generate", {"prompt": "a"}),
        ("/api/chat", CHAT),
        ("/programs/run", {"steps": [{"text": "a"}, {"gen": {"name": "x"}}]}),
    ],
)
async def test_a_frame_is_one_line_to_any_reader(
    api: Any, engine: Any, script: Any, path: str, body: dict[str, object]
) -> None:
    """Clients break lines where Python's `splitlines` does: Ollama's and all else that is built on
    httpx."""
    text = "a\x85b\u2028c\u2029d\x0be\x1cf\u00e9"
    engine.script = lambda r: script(pieces=(text, text))
    reply = await api.call("POST", path, {**body, "stream": True})
    assert reply.status == 200
    events = [
        json.loads(line.removeprefix("data: "))
        for line in reply.raw.splitlines()
        if line and not line.startswith(("event: ", "data: [DONE]"))
    ]
    assert any(text in one for one in strings(events))


def strings(value: Any) -> list[str]:
    """All strings in a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in inner for text in strings(one)]

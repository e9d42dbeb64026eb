"""`/v1/batches`: requests in, replies out."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from phloem.srt.errors import InvalidConstraint, QueueFull, RateLimited, Unavailable
from phloem.srt.generation import GenerateRequest, Health
from phloem.srt.http.batches.lines import MAX_PROBLEMS

CHAT = "/v1/chat/completions"
GOOD = {"custom_id": "b", "method": "POST", "url": CHAT, "body": {}}


async def test_a_batch(client: Any, engine: Any) -> None:
    asked = [client.line(f"r{i}", max_tokens=2) for i in range(40)]
    batch = await client.create(asked, metadata={"for": "tea"})
    assert set(batch) >= {"errors", "output_file_id", "cancelled_at", "request_counts"}
    done = await client.ended(batch)
    assert (done["status"], done["error_file_id"], done["errors"]) == ("completed", None, None)
    assert done["metadata"] == {"for": "tea"}
    assert done["created_at"] <= done["in_progress_at"] <= done["completed_at"]
    assert done["expires_at"] == done["created_at"] + 86_400
    output, errors = await client.results(done)
    assert client.names(output) == Counter(line["custom_id"] for line in asked)
    assert errors == []
    for line in output:
        assert set(line) == {"id", "custom_id", "response", "error"}
        assert (line["response"]["status_code"], line["error"]) == (200, None)
        body = line["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "Hello"
        assert body["usage"]["completion_tokens"] == 2
        assert line["response"]["request_id"] == body["id"]
    assert {client.asked(one) for one in engine.requests} == {f"r{i}" for i in range(40)}
    file = (await client.ask("GET", f"/v1/files/{done['output_file_id']}"))[1]
    assert file["purpose"] == "batch_output"
    assert len({line["id"] for line in output}) == 40


async def test_completions_in_a_batch(client: Any) -> None:
    url = "/v1/completions"
    lines = [{"custom_id": "a", "method": "POST", "url": url, "body": {"prompt": ["x", "y"]}}]
    done = await client.ended(await client.create(lines, endpoint=url))
    output, _ = await client.results(done)
    assert [c["text"] for c in output[0]["response"]["body"]["choices"]] == ["Hello world."] * 2


async def test_responses_in_a_batch(client: Any) -> None:
    url = "/v1/responses"
    line = {"method": "POST", "url": url}
    first = {**line, "custom_id": "a", "body": {"input": "Hi"}}
    done = await client.ended(await client.create([first], endpoint=url))
    output, _ = await client.results(done)
    response = output[0]["response"]["body"]
    assert (response["object"], response["status"]) == ("response", "completed")
    kept = await client.ask("GET", f"/v1/responses/{response['id']}")
    assert kept[1]["output"] == response["output"]
    follow = {"input": "And?", "previous_response_id": response["id"], "store": False}
    bad = {"input": "Hi", "background": True}
    both = [{**line, "custom_id": name, "body": body} for name, body in (("b", follow), ("c", bad))]
    done = await client.ended(await client.create(both, endpoint=url))
    output, errors = await client.results(done)
    assert client.names(output) == Counter(["b"])
    assert errors[0]["response"]["body"]["error"]["param"] == "background"


async def test_embeddings_in_a_batch(client: Any, engine: Any) -> None:
    url = "/v1/embeddings"
    line = {"custom_id": "a", "method": "POST", "url": url, "body": {"input": ["x", "y"]}}
    done = await client.ended(await client.create([line], endpoint=url))
    output, _ = await client.results(done)
    assert [one["index"] for one in output[0]["response"]["body"]["data"]] == [0, 1]
    assert {request.priority for request in engine.requests} == {-100}


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        ("{", "invalid_json_line", None),
        ("[]", "invalid_json_line", None),
        (
            b"\xff".decode("latin1").encode("latin1").decode("latin1") + "{",
            "invalid_json_line",
            None,
        ),
        ({"method": "POST", "url": CHAT, "body": {}}, "missing_required_parameter", "custom_id"),
        ({"custom_id": "b", "method": "POST", "url": CHAT}, "missing_required_parameter", "body"),
        ({**GOOD, "custom_id": 7}, "invalid_custom_id", "custom_id"),
        ({**GOOD, "custom_id": ""}, "invalid_custom_id", "custom_id"),
        ({**GOOD, "method": "GET"}, "invalid_method", "method"),
        ({**GOOD, "url": "/v1/completions"}, "invalid_url", "url"),
        ({**GOOD, "body": []}, "invalid_body", "body"),
        ({**GOOD, "custom_id": "a"}, "duplicate_custom_id", "custom_id"),
        ({**GOOD, "body": {"padding": "x" * 5000}}, "line_too_long", None),
    ],
)
async def test_a_file_is_valid_as_a_whole(
    start: Any, engine: Any, line: Any, code: str, param: str | None
) -> None:
    client = await start(max_body_bytes=4000)
    batch = await client.create([client.line("a"), "", line, client.line("c")])
    done = await client.ended(batch)
    assert done["status"] == "failed"
    assert done["failed_at"] is not None
    assert (done["output_file_id"], done["error_file_id"]) == (None, None)
    (problem,) = done["errors"]["data"]
    assert (problem["line"], problem["code"], problem["param"]) == (3, code, param)
    assert done["request_counts"]["total"] == 0
    assert not engine.requests


async def test_empty_and_hopeless_files(client: Any) -> None:
    done = await client.ended(await client.create(["", "  "]))
    assert [p["code"] for p in done["errors"]["data"]] == ["empty_file"]
    assert done["errors"]["data"][0]["line"] is None
    done = await client.ended(await client.create(["x"] * 1000))
    assert [p["line"] for p in done["errors"]["data"]] == list(range(1, MAX_PROBLEMS + 1))


async def test_what_a_batch_must_be(client: Any) -> None:
    file = (await client.upload(b"x"))[1]["id"]
    other = (await client.upload(b"x", purpose="vision"))[1]["id"]
    good = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    for change, status, param in (
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"input_file_id": other}, 400, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
        ({"completion_window": "soon"}, 400, "completion_window"),
        ({"completion_window": "31d"}, 400, "completion_window"),
        ({"metadata": {"a": 1}}, 400, "metadata"),
        ({"output_expires_after": {"anchor": "x"}}, 400, "output_expires_after.anchor"),
    ):
        got, body = await client.ask("POST", "/v1/batches", {**good, **change})
        assert (got, body["error"]["param"]) == (status, param) or (
            param == "metadata" and body["error"]["param"].startswith("metadata")
        ), body
    assert (await client.ask("GET", "/v1/batches/batch_x"))[0] == 404
    assert (await client.ask("POST", "/v1/batches/batch_x/cancel"))[0] == 404


async def test_a_request_fails_alone(client: Any, engine: Any, script: Any) -> None:
    def refuse(asked: GenerateRequest) -> Any:
        if client.asked(asked) == "bad":
            return script(refusal=InvalidConstraint("no", param="regex"))
        if client.asked(asked) == "fault":
            return script(refusal=RuntimeError("no"))
        return script()

    engine.script = refuse
    bad = [
        client.line("stream", stream=True),
        client.line("model", model="other"),
        client.line("type", temperature="hot"),
        client.line("guided", guided_jason={"type": "object"}),
        client.line("bad"),
        client.line("fault"),
    ]
    done = await client.ended(await client.create([client.line("a"), *bad, client.line("z")]))
    assert done["status"] == "completed"
    output, errors = await client.results(done)
    assert client.names(output) == Counter(["a", "z"])
    found = {line["custom_id"]: line["response"] for line in errors}
    assert all(line["error"] is None for line in errors)
    told = {
        name: (reply["status_code"], reply["body"]["error"]["param"])
        for name, reply in found.items()
    }
    assert told == {
        "stream": (400, "stream"),
        "model": (404, "model"),
        "type": (400, "temperature"),
        "guided": (400, "guided_jason"),
        "bad": (400, "regex"),
        "fault": (500, None),
    }
    done = await client.ended(await client.create([client.line("stream", stream=True)]))
    assert (done["status"], done["output_file_id"]) == ("completed", None)


async def test_few_run_at_once(
    start: Any, engine: Any, script: Any, eventually: Callable[..., Any]
) -> None:
    hold = asyncio.Event()
    most = 0

    def count(asked: GenerateRequest) -> Any:
        nonlocal most
        most = max(most, len(engine.running) + 1)
        return script(hold=hold)

    engine.script = count
    client = await start(batch_running=3)
    batches = [
        await client.create([client.line(f"{b}{i}", n=1 + i % 2) for i in range(10)]) for b in "ab"
    ]
    await eventually(lambda: len(engine.running) == 3)
    await asyncio.sleep(0.05)
    assert len(engine.running) == 3
    hold.set()
    for batch in batches:
        assert (await client.ended(batch))["request_counts"]["completed"] == 10
    assert most == 3


async def test_server_load_is_not_the_requests_fault(
    client: Any, engine: Any, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phloem.srt.http.batches.job.PAUSES_S", (0.0,))
    tries: Counter[str] = Counter()

    def busy(asked: GenerateRequest) -> Any:
        name = client.asked(asked)
        tries[name] += 1
        if name == "deadly":
            restarts = engine.health_now.restarts + 1
            engine.health_now = Health(live=True, ready=True, restarts=restarts)
            return script(failure=Unavailable("the worker died"))
        if tries[name] < 6:
            again = (QueueFull("full"), Unavailable("down"), RateLimited("fast", retry_after=0.01))
            return script(refusal=again[tries[name] % 3])
        return script()

    engine.script = busy
    done = await client.ended(await client.create([client.line("a")]))
    assert done["request_counts"]["completed"] == 1
    done = await client.ended(await client.create([client.line("deadly")]))
    _, (line,) = await client.results(done)
    assert line["response"]["status_code"] == 503
    assert tries == {"a": 6, "deadly": 3}

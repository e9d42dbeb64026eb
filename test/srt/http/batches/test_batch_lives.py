"""Batches that are cancelled, late, interrupted, and other tenants'."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.http.batches import service

CHAT = "/v1/chat/completions"


async def test_cancel(
    client: Any, engine: Any, script: Any, eventually: Callable[..., Any]
) -> None:
    hold = asyncio.Event()
    engine.script = lambda asked: script(hold=None if client.asked(asked) < "r10" else hold)
    asked = [client.line(f"r{i}") for i in range(10, 60)]
    batch = await client.create([client.line("r0"), *asked])
    await eventually(lambda: len(engine.running) == 8)
    status, body = await client.ask("POST", f"/v1/batches/{batch['id']}/cancel")
    assert (status, body["status"]) == (200, "cancelling")
    done = await client.ended(batch)
    assert done["status"] == "cancelled"
    assert done["cancelling_at"] <= done["cancelled_at"]
    assert not engine.running
    output, errors = await client.results(done)
    assert client.names(output) == Counter(["r0"])
    assert client.names(errors) == Counter(line["custom_id"] for line in asked)
    assert {line["error"]["code"] for line in errors} == {"batch_cancelled"}
    assert all(line["response"] is None for line in errors)
    status, body = await client.ask("POST", f"/v1/batches/{batch['id']}/cancel")
    assert (status, body["error"]["code"]) == (409, "batch_not_cancellable")


async def test_expiry(client: Any, engine: Any, script: Any) -> None:
    hold = asyncio.Event()
    engine.script = lambda asked: script(hold=hold)
    batch = await client.create([client.line(f"r{i}") for i in range(20)], completion_window="1s")
    done = await client.ended(batch)
    assert done["status"] == "expired"
    assert done["expired_at"] is not None
    _, errors = await client.results(done)
    assert client.names(errors) == Counter(f"r{i}" for i in range(20))
    assert {line["error"]["code"] for line in errors} == {"batch_expired"}
    assert not engine.running


async def test_a_batch_goes_on_after_a_restart(
    start: Any, engine: Any, script: Any, tmp_path: Path, eventually: Callable[..., Any]
) -> None:
    hold = asyncio.Event()
    first: Any = await start(tmp_path)
    engine.script = lambda asked: script(hold=None if first.asked(asked) < "r30" else hold)
    batch = await first.create([first.line(f"r{i}") for i in range(10, 60)])
    await eventually(lambda: len(engine.running) == 8)
    await first.completed(batch, 20)
    status, body = await first.ask("DELETE", f"/v1/files/{batch['input_file_id']}")
    assert (status, body["error"]["code"]) == (409, "file_in_use")
    await first.runner.cleanup()
    assert not engine.running
    again = len(engine.requests)
    hold.set()
    second = await start(tmp_path)
    done = await second.ended(batch)
    assert done["status"] == "completed"
    output, _ = await second.results(done)
    assert first.names(output) == Counter(f"r{i}" for i in range(10, 60))
    assert Counter(map(first.asked, engine.requests[again:])) == Counter(
        f"r{i}" for i in range(30, 60)
    )
    assert not list((tmp_path / "batches" / "uploads").iterdir())


async def test_a_server_killed_before_the_last_word(
    start: Any, engine: Any, tmp_path: Path
) -> None:
    """All lines are in the files, and the tables know of none."""
    first = await start(tmp_path)
    lines = [first.line("a"), first.line("b", stream=True), first.line("c")]
    batch = await first.ended(await first.create(lines))
    await first.runner.cleanup()
    with closing(sqlite3.connect(tmp_path / "batches" / "state.sqlite")) as tables, tables:
        tables.execute("DELETE FROM files WHERE purpose = 'batch_output'")
        tables.execute(
            "UPDATE batches SET status = 'in_progress', completed = 0, failed = 0,"
            " owner = 'gone', output_file_id = NULL, error_file_id = NULL"
        )
    again = len(engine.requests)
    second = await start(tmp_path)
    done = await second.ended(batch)
    output, errors = await second.results(done)
    assert second.names(output, errors) == Counter("abc")
    assert len(engine.requests) == again


async def test_two_servers_on_one_folder(
    start: Any,
    engine: Any,
    script: Any,
    tmp_path: Path,
    eventually: Callable[..., Any],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "IDLE_TICK_S", 0.05)
    monkeypatch.setattr(service, "BUSY_TICK_S", 0.05)
    hold = asyncio.Event()
    engine.script = lambda asked: script(hold=hold)
    first = await start(tmp_path)
    kept = await first.create([first.line(f"r{i}") for i in range(4)])
    dropped = await first.create([first.line(f"d{i}") for i in range(4)])
    await eventually(lambda: len(engine.running) == 8)
    with caplog.at_level(logging.WARNING, logger="phloem.srt.http.batches.service"):
        second = await start(tmp_path)
        await eventually(lambda: "the 2 batches that are theirs" in caplog.text)
    await asyncio.sleep(0.2)
    assert len(engine.requests) == 8
    assert (await second.ask("POST", f"/v1/batches/{dropped['id']}/cancel"))[0] == 200
    assert (await second.ended(dropped))["status"] == "cancelled"
    await first.runner.cleanup()
    hold.set()
    done = await second.ended(kept)
    output, _ = await second.results(done)
    assert first.names(output) == Counter(f"r{i}" for i in range(4))


async def test_a_folder_that_cannot_be_had(
    start: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    client = await start(tmp_path / "file")
    assert "Files and batches are not served" in caplog.text
    for method, path in (("GET", "/v1/files"), ("GET", "/v1/batches")):
        status, body = await client.ask(method, path)
        assert (status, body["error"]["type"]) == (503, "unavailable_error")
    assert (await client.ask("POST", CHAT, client.line("a")["body"]))[0] == 200


async def test_requests_are_the_tenants_and_wait_behind_others(
    start: Any, engine: Any, tenants: str
) -> None:
    client = await start(tenants=tenants)
    body = client.line("r", priority=2, program="p", cache_salt="s")
    lines = [body, client.line("own", timeout=7)]
    await client.ended(await client.create(lines, key="k-acme"), key="k-acme")
    batched, own = sorted(engine.requests, key=lambda r: r.deadline_s or 0, reverse=True)
    assert own.deadline_s == 7
    assert 86_000 < batched.deadline_s < 87_000
    await client.ask("POST", CHAT, body["body"], key="k-acme")
    alone = engine.requests[-1]
    assert batched.priority == alone.priority - 100 == 5 + 2 - 100
    for name in ("tenant", "program", "namespace", "prompt", "sampling"):
        assert getattr(batched, name) == getattr(alone, name), name
    assert batched.tenant == "acme"


async def test_tenants_do_not_see_each_other(start: Any, tenants: str) -> None:
    client = await start(tenants=tenants)
    batch = await client.create([client.line("a")], key="k-acme")
    done = await client.ended(batch, key="k-acme")
    file, output = done["input_file_id"], done["output_file_id"]
    hidden = [("GET", f"/v1/batches/{done['id']}"), ("POST", f"/v1/batches/{done['id']}/cancel")]
    for one in (file, output):
        hidden += [("GET", f"/v1/files/{one}"), ("GET", f"/v1/files/{one}/content")]
        hidden += [("DELETE", f"/v1/files/{one}")]
    for method, path in hidden:
        assert (await client.ask(method, path, key="k-beta"))[0] == 404, path
    body = {"input_file_id": file, "endpoint": CHAT, "completion_window": "24h"}
    assert (await client.ask("POST", "/v1/batches", body, key="k-beta"))[0] == 404
    for path in ("/v1/files", "/v1/batches"):
        assert (await client.ask("GET", path, key="k-beta"))[1]["data"] == []
        assert (await client.ask("GET", path, key="k-acme"))[1]["data"] != []
    assert (await client.ask("GET", f"/v1/files/{output}", key="k-acme"))[0] == 200


async def test_nobody_waits_for_a_tenant_with_many(
    start: Any, engine: Any, script: Any, tenants: str, eventually: Callable[..., Any]
) -> None:
    hold = asyncio.Event()
    engine.script = lambda asked: script(hold=hold if asked.tenant == "acme" else None)
    client = await start(tenants=tenants)
    many = [await client.create([client.line("a")], key="k-acme") for _ in range(6)]
    await eventually(lambda: len(engine.running) == service.ACTIVE_PER_TENANT)
    other = await client.create([client.line("b")], key="k-beta")
    assert (await client.ended(other, key="k-beta"))["status"] == "completed"
    waiting = [await client.batch(batch, key="k-acme") for batch in many]
    assert [b["status"] for b in waiting] == ["in_progress"] * 4 + ["validating"] * 2
    status, page = await client.ask("GET", "/v1/batches?limit=2", key="k-acme")
    assert [b["id"] for b in page["data"]] == [b["id"] for b in many[:3:-1]]
    assert (status, page["has_more"]) == (200, True)
    hold.set()
    for batch in many:
        await client.ended(batch, key="k-acme")

"""`/v1/files`: what is kept, for whom, and within which bounds."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.http.batches import service

CHAT = "/v1/chat/completions"


async def test_a_file_from_upload_to_deletion(client: Any) -> None:
    status, file = await client.upload(b"some\ntext", purpose="user_data")
    assert status == 200
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": 9,
        "created_at": file["created_at"],
        "filename": "in.jsonl",
        "purpose": "user_data",
        "status": "processed",
        "status_details": None,
    }
    path = f"/v1/files/{file['id']}"
    assert await client.ask("GET", path) == (200, file)
    assert await client.ask("GET", f"{path}/content") == (200, b"some\ntext")
    listed = {"object": "list", "data": [file], "has_more": False}
    listed |= {"first_id": file["id"], "last_id": file["id"]}
    assert await client.ask("GET", "/v1/files") == (200, listed)
    gone = {"id": file["id"], "object": "file", "deleted": True}
    assert await client.ask("DELETE", path) == (200, gone)
    for method, where in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
        status, body = await client.ask(method, where)
        assert (status, body["error"]["code"]) == (404, "file_not_found")
    assert (await client.ask("GET", "/v1/files"))[1]["data"] == []


async def test_pages(client: Any) -> None:
    ids = [(await client.upload(b"x", purpose="user_data"))[1]["id"] for _ in range(5)]
    ids.append((await client.upload(b"x"))[1]["id"])

    async def page(query: str) -> tuple[list[str], bool]:
        status, body = await client.ask("GET", f"/v1/files?{query}")
        assert status == 200, body
        return [file["id"] for file in body["data"]], body["has_more"]

    assert await page("limit=4") == (ids[:1:-1], True)
    assert await page(f"limit=4&after={ids[2]}") == (ids[1::-1], False)
    assert await page(f"order=asc&limit=2&after={ids[1]}") == (ids[2:4], True)
    assert await page("purpose=batch") == (ids[5:], False)
    assert await page("purpose=vision") == ([], False)
    for query, param in (("limit=0", "limit"), ("after=x", "after"), ("order=up", "order")):
        status, body = await client.ask("GET", f"/v1/files?{query}")
        assert (status, body["error"]["param"]) == (400, param)


async def test_an_upload_has_a_limit_of_its_own(start: Any, tmp_path: Path) -> None:
    client = await start(tmp_path, max_body_bytes=1000, max_file_bytes=200_000)
    assert (await client.upload(b"x" * 200_000))[1]["bytes"] == 200_000
    for content in (b"x" * 200_001, b"x" * 300_000):
        status, body = await client.upload(content)
        assert (status, body["error"]["param"]) == (413, "file")
    assert not list((tmp_path / "batches" / "uploads").iterdir())
    assert len(list((tmp_path / "batches" / "files").iterdir())) == 1
    status, body = await client.ask("POST", "/v1/batches", {"input_file_id": "x" * 2000})
    assert status == 413  # the other routes keep theirs


async def test_an_upload_is_never_whole_in_memory(client: Any) -> None:
    async def content() -> AsyncIterator[bytes]:
        for _ in range(256):
            yield bytes(1 << 17)

    tracemalloc.start()
    try:
        status, file = await client.upload(content())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (status, file["bytes"]) == (200, 32 << 20)
    assert peak < 8 << 20


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "cooking"}, "purpose"),
        ({"colour": "red"}, "colour"),
        ({"expires_after[anchor]": "created_at"}, "expires_after"),
        ({"expires_after[anchor]": "now", "expires_after[seconds]": "3600"}, None),
        ({"expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, None),
        ({"purpose": "x" * 5000}, "purpose"),
    ],
)
async def test_bad_forms(client: Any, fields: dict[str, str], param: str | None) -> None:
    status, body = await client.upload(b"x", **fields)
    assert status == 400, body
    assert body["error"]["param"] == (
        param or next(f for f in fields if f in body["error"]["param"])
    )


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 415),
        ("multipart/form-data", b"{}", 400),
        ("multipart/form-data; boundary=b", b"", 400),
        ("multipart/form-data; boundary=b", b"--b--\r\n", 400),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Disposition: form-data; nam", 400),
        (
            "multipart/form-data; boundary=b",
            b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nabc',
            400,
        ),
        ("multipart/form-data; boundary=b", b"--b\r\nContent-Type: multipart/mixed\r\n\r\n", 400),
    ],
)
@pytest.mark.filterwarnings("ignore::aiohttp.multipart.BadContentDispositionHeader")
async def test_malformed_forms(client: Any, content_type: str, body: bytes, status: int) -> None:
    headers = {"Content-Type": content_type}
    async with client.session.post(f"{client.base}/v1/files", data=body, headers=headers) as reply:
        assert reply.status == status, await reply.text()
        assert (await reply.json())["error"]["type"] == "invalid_request_error"


async def test_pages_of_other_origins_upload_nothing(start: Any) -> None:
    client = await start(cors_origin=["https://app.example"])
    boundary = {"Content-Type": "multipart/form-data; boundary=b"}
    for site, origin, status in (
        ("cross-site", "https://other.example", 403),
        ("same-site", "http://localhost:3000", 403),
        ("cross-site", "https://app.example", 400),  # the form is empty
        ("same-origin", client.base, 400),
    ):
        headers = {**boundary, "Sec-Fetch-Site": site, "Origin": origin}
        async with client.session.post(
            f"{client.base}/v1/files", data=b"--b--\r\n", headers=headers
        ) as reply:
            assert reply.status == status, (site, origin)


async def test_files_expire(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., Any]
) -> None:
    client = await start(tmp_path)
    until = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    file = (await client.upload(b"x", **until))[1]
    assert file["expires_at"] == file["created_at"] + 3600
    clock = file["created_at"] + 3600
    monkeypatch.setattr("phloem.srt.http.batches.store.time.time", lambda: clock)
    assert (await client.ask("GET", f"/v1/files/{file['id']}"))[0] == 404
    assert (await client.ask("GET", "/v1/files"))[1]["data"] == []
    client.runner.app[service.BATCHES].wake()
    files = tmp_path / "batches" / "files"
    await eventually(lambda: not list(files.iterdir()))

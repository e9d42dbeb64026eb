"""Ollama's native API: the models that are here, and how others come."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.errors import Unavailable
from phloem.srt.http.ollama import pulling
from phloem.srt.hub import Progress
from phloem.srt.hub.catalogue import CATALOGUE, Entry
from phloem.srt.hub.store import Manifest, Store, StoredFile


async def pull(api: Any, **body: Any) -> Any:
    return await api.call("POST", "/api/pull", body)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, and a catalogue whose one model is adopted from it."""
    monkeypatch.setenv("PHLOEM_HOME", str(tmp_path))
    return Store.default()


def put(store: Store, name: str, data: bytes, *, register: bool = True) -> StoredFile:
    file = StoredFile(name="model.gguf", size=len(data), sha256=hashlib.sha256(data).hexdigest())
    staged = store.staging(name)
    (staged / file.name).write_bytes(data)
    manifest = Manifest(
        name=name, source="here", license="MIT", files=(file,), open_as="model.gguf"
    )
    store.commit(manifest, staged)
    if not register:
        (store.root / "manifests" / f"{name}.json").unlink()
    return file


async def test_version(api: Any) -> None:
    version = (await api.call("GET", "/api/version")).json
    assert all(part.isdigit() for part in version["version"].split("."))


async def test_lists(api: Any, store: Store) -> None:
    file = put(store, "other", b"GGUF and so on")
    first, second = (await api.call("GET", "/api/tags")).json["models"]
    assert first["name"] == first["model"] == "tiny:latest"
    assert "digest" not in first
    assert second["name"] == "other:latest"
    assert (second["size"], second["digest"]) == (14, file.sha256)
    (running,) = (await api.call("GET", "/api/ps")).json["models"]
    assert running["name"] == "tiny:latest"
    assert (running["context_length"], running["size_vram"]) == (512, 0)


async def test_show(api: Any, store: Store) -> None:
    put(store, "other", b"GGUF and so on")
    shown = (await api.call("POST", "/api/show", {"model": "other:latest"})).json
    assert shown["license"] == "MIT"
    assert (await api.call("POST", "/api/show", {"name": "tiny"})).status == 200
    for body, status in (
        ({"model": "nowhere"}, 404),
        ({}, 400),
        ({"model": "a", "name": "b"}, 400),
        ({"model": "tiny", "verbose": True}, 400),
    ):
        reply = await api.call("POST", "/api/show", body)
        assert (reply.status, set(reply.json)) == (status, {"error"})


async def test_delete(api: Any, store: Store) -> None:
    put(store, "other", b"GGUF and so on")
    served = await api.call("DELETE", "/api/delete", {"model": "tiny"})
    assert served.status == 409
    assert "being served" in served.json["error"]
    assert (await api.call("DELETE", "/api/delete", {"model": "other"})).raw == ""
    assert store.manifests() == []
    assert (await api.call("DELETE", "/api/delete", {"model": "other"})).status == 404


async def test_pull_of_what_the_store_has(
    api: Any, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = put(store, "spare", b"GGUF and so on", register=False)
    entry = Entry(
        name="spare",
        title="A model",
        license="MIT",
        file=file.name,
        size=file.size,
        sha256=file.sha256,
        sources=(),
    )
    monkeypatch.setitem(CATALOGUE, "spare", entry)
    reply = await pull(api, model="spare:latest")
    assert reply.headers["Content-Type"] == "application/x-ndjson"
    said = [json.loads(line)["status"] for line in reply.raw.splitlines()]
    assert said == ["pulling manifest", "verifying sha256 digest", "success"]
    assert [manifest.name for manifest in store.manifests()] == ["spare"]
    whole = await pull(api, model="spare", stream=False)
    assert whole.json == {"status": "success"}


async def test_a_pull_ends_with_its_client(
    api: Any, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    ended: list[str] = []

    def endless(name: str, progress: Progress) -> None:
        try:
            with progress.bar("weights", 1 << 30) as done:
                for count in itertools.count():
                    done(count)
                    time.sleep(0.001)
        except Unavailable:
            ended.append(name)
            raise

    monkeypatch.setattr(pulling, "pull", endless)
    body = {"model": "endless"}
    async with api.session.post(f"{api.base}/api/pull", json=body) as response:
        first = [json.loads(await response.content.readline()) for _ in range(2)]
    assert first[0] == {"status": "pulling manifest"}
    assert (first[1]["status"], first[1]["total"]) == ("pulling weights", 1 << 30)
    await eventually(lambda: ended == ["endless"])


async def test_an_error_behind_the_first_progress_is_a_line(
    api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(name: str, progress: Progress) -> None:
        with progress.bar("weights", 3) as done:
            for count in range(3):
                done(count)
            raise Unavailable("the hub went away")

    monkeypatch.setattr(pulling, "pull", failing)
    reply = await pull(api, model="failing")
    said = [json.loads(line) for line in reply.raw.splitlines()]
    assert reply.status == 200
    assert said[-1] == {"error": "the hub went away"}
    assert said[-2]["completed"] == 2  # the bar's last word, however few came before it
    assert (await pull(api, model="failing", stream=False)).status == 503


async def test_a_pull_of_an_unknown_model_is_a_404(api: Any, store: Store) -> None:
    for stream in (True, False):
        reply = await pull(api, model="nowhere", stream=stream)
        assert reply.status == 404
        assert "nowhere" in reply.json["error"]
    insecure = await pull(api, model="nowhere", insecure=True)
    assert insecure.status == 400
    assert "insecure" in insecure.json["error"]


async def test_routes_that_there_are_not(api: Any) -> None:
    reply = await api.call("POST", "/api/create", {"model": "mine"})
    assert (reply.status, set(reply.json)) == (404, {"error"})
    assert (await api.call("HEAD", "/")).status == 200

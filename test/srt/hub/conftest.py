"""A package index and a Hugging Face hub, both on this machine and made up for the test."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from phloem.srt.hub.catalogue import CATALOGUE, Entry, HubSource, WheelPart, WheelSource
from phloem.srt.hub.store import Manifest, Store, StoredFile

COMMIT = "c0ffee" + "0" * 34


@dataclass
class Recorder:
    """A `Progress` that keeps what it was told."""

    said: list[str] = field(default_factory=list)
    bars: dict[str, list[int]] = field(default_factory=dict)

    def say(self, text: str) -> None:
        self.said.append(text)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Callable[[int], None]]:
        yield self.bars.setdefault(label, []).append


@pytest.fixture
def progress() -> Recorder:
    return Recorder()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and nothing of the user's hub configuration."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PHLOEM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    return tmp_path / "home"


@dataclass
class FakeHub:
    """The endpoints of a Hugging Face hub that a pull uses, for repository `org/name`.

    `stall_after` stops each file's body after that many bytes until `released`; `ranges` are the
    Range headers of GETs; `tokens` the Authorization headers by path; `storage`, if set, is where
    files are redirected to.
    """

    files: dict[str, bytes] = field(default_factory=dict)
    served: dict[str, bytes] = field(default_factory=dict)
    tags: list[str] = field(default_factory=lambda: ["license:mit"])
    stall_after: int | None = None
    released: threading.Event = field(default_factory=threading.Event)
    ranges: list[str | None] = field(default_factory=list)
    tokens: list[tuple[str, str | None]] = field(default_factory=list)
    storage: str | None = None
    url: str = ""

    def info(self) -> bytes:
        siblings = []
        for name, data in self.files.items():
            sibling: dict[str, object] = {
                "rfilename": name,
                "size": len(data),
                "blobId": hashlib.sha1(data).hexdigest(),
            }
            if name.endswith((".safetensors", ".gguf")):
                sha256 = hashlib.sha256(data).hexdigest()
                sibling["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 134}
            siblings.append(sibling)
        return json.dumps(
            {"id": "org/name", "sha": COMMIT, "tags": self.tags, "siblings": siblings}
        ).encode()


class _Server(ThreadingHTTPServer):
    def __init__(self, hub: FakeHub) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.hub = hub


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        hub = self.server.hub
        path = self.path.partition("?")[0]
        hub.tokens.append((path, self.headers["Authorization"]))
        if path == "/api/models/org/name/revision/main":
            self._send(200, hub.info(), {"Content-Type": "application/json"}, body)
        elif path.startswith(f"/org/name/resolve/{COMMIT}/"):
            self._file(path.rpartition("/")[2], body)
        else:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"}, body)

    def _file(self, name: str, body: bool) -> None:
        hub = self.server.hub
        data = hub.served.get(name, hub.files[name])
        digest = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}
        if hub.storage is not None:
            headers["X-Linked-Size"] = str(len(data))
            headers["Location"] = f"{hub.storage}{self.path}"
            self._send(302, b"", headers, body)
            return
        status = 200
        asked = self.headers["Range"]
        if body:
            hub.ranges.append(asked)
        if asked is not None:
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            status, data = 206, data[start:]
        self._send(status, data, headers, body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not body:
            return
        hub = self.server.hub
        if hub.stall_after is not None and len(data) > hub.stall_after:
            self.wfile.write(data[: hub.stall_after])
            self.wfile.flush()
            hub.released.wait(60)
            self.close_connection = True
            return
        self.wfile.write(data)


@contextmanager
def serving(hub: FakeHub) -> Iterator[FakeHub]:
    with _Server(hub) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield hub
        finally:
            hub.released.set()
            server.shutdown()
            thread.join()


@pytest.fixture
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that `HF_ENDPOINT` leads to."""
    with serving(FakeHub()) as fake:
        monkeypatch.setenv("HF_ENDPOINT", fake.url)
        yield fake


@pytest.fixture
def storage_host() -> Iterator[FakeHub]:
    """A second host, as a hub's storage is."""
    with serving(FakeHub()) as fake:
        yield fake


@pytest.fixture
def no_hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`HF_ENDPOINT` leads to a port where nobody listens."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")


def make_wheel(folder: Path, package: str, members: dict[str, bytes]) -> Path:
    stem = package.replace("-", "_")
    info = f"{stem}-1.0.dist-info"
    path = folder / f"{stem}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
            "Requires-Dist: a-dependency-that-nobody-publishes\n",
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


@dataclass
class FakeIndex:
    """Wheels of a model in two pieces, and the catalogue entry that describes them."""

    folder: Path
    pieces: tuple[bytes, bytes]
    entry: Entry

    def write(self, number: int, data: bytes) -> Path:
        return make_wheel(self.folder, f"tiny-part{number}", {f"tiny/part{number}": data})

    def stock(self) -> None:
        """Put the model's file into the store, as if it had been pulled long ago."""
        store = Store.default()
        staged = store.staging("stock")
        (staged / "tiny.gguf").write_bytes(b"".join(self.pieces))
        file = StoredFile(name="tiny.gguf", size=self.entry.size, sha256=self.entry.sha256)
        store.commit(
            Manifest(
                name="tiny", source="stock", license="MIT", files=(file,), open_as="tiny.gguf"
            ),
            staged,
        )


@pytest.fixture
def index(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    """pip sees two wheels and no network; `tiny` is in the catalogue."""
    folder = tmp_path / "index"
    folder.mkdir()
    pieces = (b"GGUF" + bytes(range(256)) * 40, b"second" * 999)
    entry = Entry(
        name="tiny",
        title="A made-up model",
        license="MIT",
        file="tiny.gguf",
        size=sum(map(len, pieces)),
        sha256=hashlib.sha256(b"".join(pieces)).hexdigest(),
        sources=(
            HubSource(repo="org/name", file="tiny.gguf"),
            WheelSource(
                parts=tuple(
                    WheelPart(
                        package=f"tiny-part{number}",
                        version="1.0",
                        member=f"tiny/part{number}",
                        size=len(piece),
                        wheel_bytes=len(piece),
                    )
                    for number, piece in enumerate(pieces)
                )
            ),
        ),
    )
    fake = FakeIndex(folder=folder, pieces=pieces, entry=entry)
    for number, piece in enumerate(pieces):
        fake.write(number, piece)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    return fake

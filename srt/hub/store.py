"""The local store: files by content, models by name.

    $PHLOEM_HOME (by default ~/.cache/phloem)
    ├── blobs/sha256/HEX             every file once, whatever models share it
    ├── manifests/NAME.json          which files make the model, and where they came from
    ├── models/NAME/FILE             links to blobs: the file or folder that gets opened
    ├── partial/NAME/                what an unfinished pull left, to be resumed
    └── locks/NAME.lock              held while NAME is pulled

NAME is percent-encoded, so that `org/name:file.gguf` is one path component. The manifest is
written last and by rename: a model is there in full or not at all, whenever a pull was killed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import msgspec

from phloem.srt.disk import sync
from phloem.srt.errors import InvalidRequest, NotFound
from phloem.srt.hub.progress import SILENT, Progress

_CHUNK = 1 << 20


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file of a model: its name in the model's folder, bytes, and SHA-256 (hex)."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What the store knows of a model. `open_as` is the one file to open, or None for the folder
    of all of them."""

    name: str
    source: str
    license: str
    files: tuple[StoredFile, ...]
    open_as: str | None = None

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def sha256(self) -> str:
        """The file's hash; of several files, the hash of their `sha256sum`-style list."""
        if len(self.files) == 1:
            return self.files[0].sha256
        lines = "".join(f"{file.sha256}  {file.name}\n" for file in self.files)
        return hashlib.sha256(lines.encode()).hexdigest()


def hash_file(path: Path, progress: Progress = SILENT) -> str:
    """SHA-256 of a file, hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file, progress.bar(f"checking {path.name}", _size(path)) as done:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            done(file.tell())
    return digest.hexdigest()


def _size(path: Path) -> int:
    return path.stat().st_size


class Store:
    """The store under one root folder. Safe against other processes that use the same root."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._blobs = root / "blobs" / "sha256"
        self._manifests = root / "manifests"
        self._models = root / "models"

    @classmethod
    def default(cls) -> Store:
        """The user's store: `$PHLOEM_HOME`, else `~/.cache/phloem` (or under `XDG_CACHE_HOME`)."""
        if home := os.environ.get("PHLOEM_HOME"):
            return cls(Path(home).expanduser().absolute())
        cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return cls(Path(cache).expanduser().absolute() / "phloem")

    def manifests(self) -> list[Manifest]:
        """Every model in the store, by name."""
        found = [self._read(path) for path in self._manifests.glob("*.json")]
        return sorted(found, key=lambda manifest: manifest.name)

    def manifest(self, name: str) -> Manifest | None:
        """The model's manifest, None when the store does not have it."""
        path = self._manifest_path(name)
        return self._read(path) if path.exists() else None

    def path(self, manifest: Manifest) -> Path:
        """What to open: a link to the model's one file, or the folder with links to all.

        Raises `InvalidRequest` naming the file when one is missing or of the wrong size.
        """
        if problems := self._sizes(manifest):
            raise InvalidRequest(
                f"model {manifest.name!r} is damaged: {'; '.join(problems)}. "
                f"`phloem pull {manifest.name}` fetches it again",
                param="model",
                code="damaged_file",
            )
        self._link(manifest)
        return self.location(manifest)

    def location(self, manifest: Manifest) -> Path:
        """Where `path` leads, unchecked."""
        folder = self._folder(manifest.name)
        return folder if manifest.open_as is None else folder / manifest.open_as

    def problems(self, manifest: Manifest, progress: Progress = SILENT) -> list[str]:
        """What is wrong with a model's files, each read in full; empty when all is well."""
        found = self._sizes(manifest)
        if found:
            return found
        for file in manifest.files:
            actual = hash_file(self._blob(file), progress)
            if actual != file.sha256:
                found.append(f"{self._blob(file)} ({file.name}) has SHA-256 {actual}")
        return found

    def _sizes(self, manifest: Manifest) -> list[str]:
        found = []
        for file in manifest.files:
            blob = self._blob(file)
            if not blob.exists():
                found.append(f"{blob} ({file.name}) is missing")
            elif _size(blob) != file.size:
                found.append(
                    f"{blob} ({file.name}) has {_size(blob):,} bytes instead of {file.size:,}"
                )
        return found

    def staging(self, name: str) -> Path:
        """The folder where a pull of `name` collects files until it commits; kept over a kill."""
        folder = self.root / "partial" / _encode(name)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def commit(self, manifest: Manifest, staged: Path) -> None:
        """Take the manifest's files from the folder `staged` into the store, then drop `staged`.

        The caller has checked sizes and hashes.
        """
        for file in manifest.files:
            sync(staged / file.name)
        with self._locked("store"):
            self._blobs.mkdir(parents=True, exist_ok=True)
            for file in manifest.files:
                (staged / file.name).replace(self._blob(file))
            sync(self._blobs)
            self._register(manifest)
        shutil.rmtree(staged, ignore_errors=True)

    def adopt(self, manifest: Manifest, progress: Progress = SILENT) -> bool:
        """Register a model whose files are all here already and whole; False if they are not."""
        with self._locked("store"):
            if self.problems(manifest, progress):
                return False
            self._register(manifest)
        return True

    def remove(self, name: str) -> int:
        """Forget a model and drop the files that no other model has; the bytes freed."""
        with self._locked("store"):
            manifest = self.manifest(name)
            if manifest is None:
                raise NotFound(f"no model {name!r} in {self.root}", param="model")
            self._manifest_path(name).unlink()
            shutil.rmtree(self._folder(name), ignore_errors=True)
            shutil.rmtree(self.root / "partial" / _encode(name), ignore_errors=True)
            kept = {file.sha256 for other in self.manifests() for file in other.files}
            freed = 0
            for file in manifest.files:
                blob = self._blob(file)
                if file.sha256 not in kept and blob.exists():
                    freed += _size(blob)
                    blob.unlink()
            return freed

    @contextmanager
    def pulling(self, name: str, on_wait: Callable[[], None]) -> Iterator[None]:
        """Hold the model's lock; `on_wait` is called once if another process has it."""
        with self._locked(_encode(name), on_wait):
            yield

    @contextmanager
    def _locked(self, name: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is not None:
                    on_wait()
                fcntl.flock(file, fcntl.LOCK_EX)
            yield  # closing the file releases the lock, as does a kill

    def _register(self, manifest: Manifest) -> None:
        self._link(manifest)
        self._manifests.mkdir(parents=True, exist_ok=True)
        _write(self._manifest_path(manifest.name), msgspec.json.encode(manifest))

    def _link(self, manifest: Manifest) -> None:
        """Make the links that are not there or lead elsewhere."""
        folder = self._folder(manifest.name)
        for file in manifest.files:
            link, target = folder / file.name, os.path.relpath(self._blob(file), folder)
            if link.is_symlink() and os.readlink(link) == target:
                continue
            folder.mkdir(parents=True, exist_ok=True)
            temporary = folder / f".{file.name}.{os.getpid()}"
            temporary.unlink(missing_ok=True)
            temporary.symlink_to(target)
            temporary.replace(link)

    def _read(self, path: Path) -> Manifest:
        try:
            return msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidRequest(
                f"{path} is damaged ({error}); delete it and pull the model again",
                param="model",
                code="damaged_file",
            ) from error

    def _blob(self, file: StoredFile) -> Path:
        return self._blobs / file.sha256

    def _folder(self, name: str) -> Path:
        return self._models / _encode(name)

    def _manifest_path(self, name: str) -> Path:
        return self._manifests / f"{_encode(name)}.json"


def _encode(name: str) -> str:
    return quote(name, safe="")


def _write(path: Path, data: bytes) -> None:
    """Replace a file by rename, so that it is never seen half written."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        os.fsync(file.fileno())
    Path(temporary).replace(path)
    sync(path.parent)

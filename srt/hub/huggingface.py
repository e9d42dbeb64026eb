"""Models from a Hugging Face hub: what a repository holds, and its files, resumable.

`HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE` mean what they mean to huggingface_hub. Its own
downloader starts over when the process was killed, so the bytes are kept in a file of ours, named
after what they are part of, and its `http_get` is asked for the rest.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from phloem.srt.errors import InvalidRequest, NotFound, PhloemError, Unavailable
from phloem.srt.hub.progress import Progress

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_TIMEOUT_SECONDS = 10.0
_CHECKPOINT_NAMES = frozenset(
    {
        "added_tokens.json",
        "chat_template.jinja",
        "chat_template.json",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    }
)


@dataclass(frozen=True, kw_only=True)
class RepoFile:
    """A file of a repository. `tag` changes with its content; `sha256` is known of large files."""

    name: str
    size: int
    tag: str
    sha256: str | None


@dataclass(frozen=True, kw_only=True)
class Repo:
    """A repository at one commit."""

    name: str
    commit: str
    license: str
    files: dict[str, RepoFile]


def inspect(name: str, revision: str = "main") -> Repo:
    """What repository `name` holds at `revision`.

    Raises `NotFound` for a repository that is not there (or private), `Unavailable` when the hub
    cannot be reached.
    """
    from huggingface_hub import HfApi

    with _translated(name):
        info = HfApi(endpoint=_endpoint()).model_info(
            name, revision=revision, files_metadata=True, timeout=_TIMEOUT_SECONDS
        )
    files = {}
    for sibling in info.siblings or []:
        sha256 = sibling.lfs.sha256 if sibling.lfs is not None else None
        tag = sha256 or sibling.blob_id or info.sha or revision
        files[sibling.rfilename] = RepoFile(
            name=sibling.rfilename, size=sibling.size or 0, tag=tag, sha256=sha256
        )
    license = next((tag[8:] for tag in info.tags or [] if tag.startswith("license:")), "unknown")
    return Repo(name=name, commit=info.sha or revision, license=license, files=files)


def choose_files(repo: Repo, file: str | None) -> list[RepoFile]:
    """The files that make the model: the named one, else the safetensors checkpoint at the top of
    the repository, else its one GGUF file.

    Raises `NotFound` or `InvalidRequest` with the names there are.
    """
    ggufs = sorted(name for name in repo.files if name.lower().endswith(".gguf"))
    if file is not None:
        if file not in repo.files:
            there = ", ".join(ggufs) or "none"
            raise NotFound(f"no file {file!r} in {repo.name}; GGUF files: {there}", param="model")
        return [repo.files[file]]
    top = [name for name in repo.files if len(PurePosixPath(name).parts) == 1]
    weights = [name for name in top if name.endswith(".safetensors")]
    if weights:
        if len(weights) > 1:  # some repositories also carry the original, consolidated file
            weights = [name for name in weights if not name.startswith("consolidated")]
        indices = [name for name in top if name.endswith(".safetensors.index.json")]
        others = [name for name in top if name in _CHECKPOINT_NAMES]
        return [repo.files[name] for name in sorted({*weights, *indices, *others})]
    if len(ggufs) == 1:
        return [repo.files[ggufs[0]]]
    if ggufs:
        raise InvalidRequest(
            f"{repo.name} has several GGUF files; name one as {repo.name}:FILE, "
            f"FILE one of: {', '.join(ggufs)}",
            param="model",
        )
    raise InvalidRequest(
        f"{repo.name} has neither safetensors nor GGUF files at its top", param="model"
    )


def fetch(repo: Repo, file: RepoFile, folder: Path, progress: Progress) -> Path:
    """Download `file` into `folder`, going on where an earlier try stopped; its path there.

    The size is checked here, the hash by the caller. Raises `Unavailable` when the download
    breaks off: what came is kept for the next try.
    """
    target = folder / PurePosixPath(file.name).name
    if target.exists() and target.stat().st_size == file.size:
        return target
    part = folder / f"{target.name}.{file.tag[:16]}.part"
    have = part.stat().st_size if part.exists() else 0
    if have > file.size:
        part.unlink()
        have = 0
    _check_space(folder, file, have)
    with progress.bar(target.name, file.size) as done, _Reported(part, done) as output:
        if have < file.size:
            _download(repo, file, output, have)
    if part.stat().st_size != file.size:
        size = part.stat().st_size
        part.unlink()
        raise Unavailable(
            f"{file.name} of {repo.name} came as {size:,} bytes instead of {file.size:,}",
            param="model",
            code="download_failed",
        )
    part.replace(target)
    return target


def _download(repo: Repo, file: RepoFile, output: io.BufferedRandom, have: int) -> None:
    from huggingface_hub import get_hf_file_metadata, get_token, hf_hub_url
    from huggingface_hub.file_download import http_get

    with _translated(repo.name), _no_bars():
        endpoint = _endpoint()
        url = hf_hub_url(repo.name, file.name, revision=repo.commit, endpoint=endpoint)
        location = get_hf_file_metadata(url, timeout=_TIMEOUT_SECONDS, endpoint=endpoint).location
        own_host = urlsplit(location).netloc == urlsplit(url).netloc
        token = get_token() if own_host else None  # a storage host has no business with it
        headers = {"authorization": f"Bearer {token}"} if token else {}
        http_get(location, output, resume_size=have, headers=headers, expected_size=file.size)


class _Reported(io.BufferedRandom):
    """A file opened for appending that tells its size as it grows."""

    def __init__(self, path: Path, report: Callable[[int], None]) -> None:
        path.touch()
        super().__init__(io.FileIO(path, "r+"))
        self._report = report
        report(self.seek(0, os.SEEK_END))

    def write(self, data: ReadableBuffer, /) -> int:
        count = super().write(data)
        self._report(self.tell())
        return count


def _endpoint() -> str | None:
    """Read at each call: huggingface_hub reads it once, when it is imported."""
    return os.environ.get("HF_ENDPOINT", "").rstrip("/") or None


def _check_space(folder: Path, file: RepoFile, have: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < file.size - have:
        raise Unavailable(
            f"{file.name} needs {file.size - have:,} more bytes; {folder} has {free:,} free",
            param="model",
            code="disk_full",
        )


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep huggingface_hub's own bars off: ours is drawn by the caller."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    before = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


@contextmanager
def _translated(repo: str) -> Iterator[None]:
    """Turn what huggingface_hub and its HTTP client raise into errors of ours."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except PhloemError:
        raise
    except GatedRepoError as error:
        raise NotFound(
            f"{repo} is gated: accept its terms on the hub and set HF_TOKEN", param="model"
        ) from error
    except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
        raise NotFound(f"{repo}: {_first_line(error)}", param="model") from error
    except Exception as error:  # the HTTP client underneath differs between versions
        raise Unavailable(
            f"Hugging Face could not be reached for {repo}: {_first_line(error)}",
            param="model",
            code="download_failed",
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

"""What the bits of KV depend on, as 16 bytes: two servers share stored KV only if all of it agrees.

The contents of the model's files are hashed in full. That is remembered by what the file system
tells of them, so that only the first start with a model reads all of it.
"""

from __future__ import annotations

import logging
import os
import platform
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

import msgspec

from phloem.srt.checkpoint.config import ModelConfig
from phloem.srt.models.options import ComputeOptions
from phloem.srt.tier.chain import BLOCK_TOKENS, KEY_BYTES
from phloem.srt.tier.errors import TierError

log = logging.getLogger(__name__)

LAYOUT_VERSION = 1
"""Of the names of blocks and of the order of bytes in them: raise it when either changes."""

_HASHES = "hashes.json"
_MOST_HASHES = 256
_CHUNK = 4 << 20
_NICENESS = 10
_PARTS = ("config.json", "*.safetensors", "*.safetensors.index.json")


class FileState(msgspec.Struct, frozen=True, array_like=True):
    """A file as the file system tells of it: if none of this changed, its content did not."""

    path: str
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @staticmethod
    def of(path: Path) -> FileState:
        """Raises `OSError`."""
        path = path.resolve()
        seen = path.stat()
        return FileState(str(path), seen.st_size, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_ino)


class _Hash(msgspec.Struct, frozen=True, array_like=True):
    file: FileState
    hash: str


def look_at(model: Path) -> list[FileState]:
    """The files that decide what a checkpoint (a file or a folder) computes, as they are now. To be
    called before they are loaded. Raises `OSError`."""
    if not model.is_dir():
        return [FileState.of(model)]
    return [FileState.of(path) for part in _PARTS for path in sorted(model.glob(part))]


def compute_facts(
    compute: ComputeOptions, config: ModelConfig, kv_slot_bytes: int
) -> dict[str, str | int]:
    """What KV depends on beside the contents of files."""
    facts: dict[str, str | int] = {
        "phloem": version("phloem"),
        "machine": platform.machine(),
        "backend": compute.backend,
        "dtype": compute.dtype,
        "kv_dtype": compute.kv_dtype,
        "quantization": compute.quantization or "",
        "isa": compute.isa,
        "layers": config.num_layers,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "kv_slot_bytes": kv_slot_bytes,
    }
    if compute.backend == "torch":  # whose products may be cut by threads
        facts |= {"torch": version("torch"), "threads": compute.threads}
    return facts


def fingerprint(files: Sequence[FileState], facts: Mapping[str, str | int], root: Path) -> bytes:
    """16 bytes for the contents of `files` and for `facts`, whatever else KV depends on.

    `root` keeps what was hashed before. Raises `OSError`, and `TierError` for a file that changed
    since it was looked at.
    """
    hashes = content_hashes(files, root)
    told = {
        **facts,
        "block_tokens": BLOCK_TOKENS,
        "key_bytes": KEY_BYTES,
        "layout": LAYOUT_VERSION,
        "byteorder": sys.byteorder,
    }
    data = msgspec.json.encode((hashes, sorted(told.items())))
    return blake2b(data, digest_size=16, person=b"phloem tier").digest()


def content_hashes(files: Sequence[FileState], root: Path) -> list[str]:
    """Hashes of the contents, hex. Raises as `fingerprint` does."""
    known = _read_hashes(root / _HASHES)
    hashes, fresh = [], False
    for file in files:
        _check_unchanged(file)
        found = known.pop(file, None)
        if found is None:
            fresh = True
            found = _hash_quietly(Path(file.path))
            _check_unchanged(file)
        known[file] = found  # now the newest
        hashes.append(found)
    if fresh:
        latest = list(known.items())[-_MOST_HASHES:]
        _write_hashes(root / _HASHES, [_Hash(file, found) for file, found in latest])
    return hashes


def _check_unchanged(file: FileState) -> None:
    if FileState.of(Path(file.path)) != file:
        raise TierError(f"{file.path} changed while it was being loaded")


def _hash_quietly(path: Path) -> str:
    """`_hash` in a thread that yields to those that compute, where threads have priorities."""

    def work() -> str:
        if sys.platform == "linux":
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        return _hash(path)

    with ThreadPoolExecutor(1, "tier-hash") as pool:
        return pool.submit(work).result()


def _hash(path: Path) -> str:
    digest = blake2b()
    buffer = memoryview(bytearray(_CHUNK))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def _read_hashes(path: Path) -> dict[FileState, str]:
    """Empty if there are none, or none that make sense. Raises `OSError`."""
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=list[_Hash])
    except FileNotFoundError:
        return {}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        log.warning("%s is not used: %s", path, error)
        return {}
    return {entry.file: entry.hash for entry in kept}


def _write_hashes(path: Path, hashes: list[_Hash]) -> None:
    """By rename, so that nobody sees half of it. Raises `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_HASHES, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(msgspec.json.encode(hashes))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise

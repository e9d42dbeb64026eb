"""Stores beside each other under one root, one for each thing that the bits of KV depend on. They
share the limit: a store that no server has open makes room for the one that grows."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

_LOCK = "lock"
_STORE = re.compile(r"[0-9a-f]{32}")
_REMOVED = re.compile(r"removed-[0-9a-f]{32}")


def take_lock(folder: Path) -> int | None:
    """A handle that holds the store in `folder` until it is closed; None if another has it. Its
    file's time is when the store was opened last. Raises `OSError`."""
    path = folder / _LOCK
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        if _is_still(path, handle):
            os.utime(handle)
            return handle
        os.close(handle)  # the store was removed meanwhile, its lock with it


def _is_still(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(handle))
    except FileNotFoundError:
        return False


def shrink_others(own: Path, budget: int) -> None:
    """Remove stores beside `own` that no server has open, those not opened for longest first, until
    the others take at most `budget` bytes. What cannot be removed stays, with a warning."""
    root = own.parent
    others = []
    for folder in root.iterdir():
        if _REMOVED.fullmatch(folder.name):
            shutil.rmtree(folder, ignore_errors=True)  # a kill came in between
        elif folder != own and _STORE.fullmatch(folder.name):
            others.append(folder)
    sizes = {folder: _size(folder) for folder in others}
    total = sum(sizes.values())
    for folder in sorted(others, key=_opened):
        if total <= budget:
            return
        try:
            if _remove(folder):
                total -= sizes[folder]
        except OSError as error:
            log.warning("%s, KV of another model or version, stays: %s", folder, error)


def _opened(folder: Path) -> float:
    """When the store was opened last, in seconds of the system's clock."""
    try:
        return (folder / _LOCK).stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _size(folder: Path) -> int:
    """Bytes of its segments."""
    size = 0
    for path in folder.glob("segment-*"):
        try:
            size += path.stat().st_size
        except FileNotFoundError:
            continue
    return size


def _remove(folder: Path) -> bool:
    """Remove a store; False if a server has it open."""
    lock = take_lock(folder)
    if lock is None:
        return False
    try:
        removed = folder.with_name(f"removed-{folder.name}")
        folder.rename(removed)
        shutil.rmtree(removed)
    finally:
        os.close(lock)
    log.info("removed %s: KV of another model, option or version", folder)
    return True

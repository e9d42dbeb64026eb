"""What is written is on the disk before anything relies on it."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Have a file, or the names in a folder, outlive a power cut. Blocks; raises `OSError`."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(file: int, data: bytes | bytearray) -> None:
    """Write all of `data` to a descriptor, whatever the system takes at once. Blocks."""
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

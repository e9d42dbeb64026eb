"""Why a checkpoint cannot be served. Raised at start-up only, so it is not a request's error."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(Exception):
    """A model file or folder that is damaged, incomplete or of a kind not supported.

    The message begins with the file; `path` and `reason` are its two halves.
    """

    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path = str(path)
        self.reason = reason

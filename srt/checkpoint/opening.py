"""Opens a checkpoint of either kind."""

from __future__ import annotations

from pathlib import Path

from phloem.srt.checkpoint.base import Checkpoint
from phloem.srt.checkpoint.errors import CheckpointError


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file, or a Hugging Face folder (config.json, *.safetensors, tokenizer.json).

    Reads headers only, and checks that the weights are complete and of the right shapes.

    Raises:
        CheckpointError: missing, damaged, incomplete or not supported; the message says what.
    """
    path = Path(path)
    if path.is_dir():
        from phloem.srt.checkpoint.hf_checkpoint import HfCheckpoint

        return HfCheckpoint(path)
    if not path.exists():
        raise CheckpointError(path, "no such file or folder")
    from phloem.srt.checkpoint.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(path)

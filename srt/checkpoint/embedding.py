"""What a checkpoint that was made for embeddings says of them.

GGUF files have it in their metadata, Hugging Face folders in the files of sentence-transformers. A
model that was made to generate has neither.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from phloem.srt.checkpoint.errors import CheckpointError
from phloem.srt.checkpoint.gguf_config import Metadata
from phloem.srt.checkpoint.hf_config import JsonFile
from phloem.srt.messages import Pooling

_GGUF_POOLING = {1: Pooling.MEAN, 3: Pooling.LAST}  # as llama.cpp numbers them; 0 is none
_MODULES = ("Transformer", "Pooling", "Normalize")


class _Module(msgspec.Struct):
    type: str


def gguf_pooling(meta: Metadata) -> Pooling | None:
    """Raises `CheckpointError` for a way of pooling, or of attention, that is not supported."""
    if meta.find(f"{meta.architecture}.attention.causal", bool) is False:
        raise meta.fail("attention to later tokens is not supported")
    kind = meta.find(f"{meta.architecture}.pooling_type", int)
    if not kind:
        return None
    if kind not in _GGUF_POOLING:
        raise meta.fail(f"pooling_type {kind} is not supported (supported: 1, mean, and 3, last)")
    return _GGUF_POOLING[kind]


def folder_pooling(folder: Path, config: JsonFile) -> Pooling | None:
    """That of a folder with this config.json. Raises `CheckpointError` as `gguf_pooling` does."""
    if config.get("is_causal", bool, True) is False:
        raise config.fail("is_causal", "false: attention to later tokens is not supported")
    _check_modules(folder)
    pooling = JsonFile.read(folder / "1_Pooling" / "config.json", optional=True)
    modes = [key for key, on in pooling.values.items() if key.startswith("pooling_mode_") and on]
    match modes:
        case []:
            return None
        case ["pooling_mode_mean_tokens"]:
            return Pooling.MEAN
        case ["pooling_mode_lasttoken"]:
            return Pooling.LAST
    raise pooling.fail(", ".join(modes), "is not supported (mean_tokens and lasttoken are)")


def _check_modules(folder: Path) -> None:
    """modules.json lists what a text passes through, as names of classes."""
    path = folder / "modules.json"
    if not path.exists():
        return
    try:
        listed = msgspec.json.decode(path.read_bytes(), type=list[_Module])
    except msgspec.DecodeError as error:
        raise CheckpointError(path, f"damaged or not supported: {error}") from None
    for module in listed:
        kind = module.type.rpartition(".")[2]
        if kind not in _MODULES:
            raise CheckpointError(path, f"{kind} is not supported ({', '.join(_MODULES)} are)")

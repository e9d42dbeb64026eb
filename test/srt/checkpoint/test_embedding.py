"""Checkpoints that were made for embeddings: how they are pooled, and the token behind a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from phloem.srt.checkpoint import CheckpointError, open_checkpoint
from phloem.srt.messages import Pooling

Write = Callable[..., Path]
QWEN3_EMBEDDING = {
    "type": "TemplateProcessing",
    "single": [
        {"Sequence": {"id": "A", "type_id": 0}},
        {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
    ],
    "pair": [],
    "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": []}},
}


@pytest.mark.parametrize(
    ("kind", "pooling"), [(None, None), (0, None), (1, Pooling.MEAN), (3, Pooling.LAST)]
)
def test_gguf(write_gguf: Write, kind: int | None, pooling: Pooling | None) -> None:
    config = open_checkpoint(write_gguf(llama__pooling_type=kind)).config
    assert (config.pooling, config.end_id) == (pooling, None)


@pytest.mark.parametrize(("kind", "end"), [(None, None), (3, 2)])
def test_gguf_end_token(write_gguf: Write, kind: int | None, end: int | None) -> None:
    """It counts for models that were made for embeddings only."""
    path = write_gguf(llama__pooling_type=kind, tokenizer__ggml__add_eos_token=True)
    assert open_checkpoint(path).config.end_id == end


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__pooling_type": 2}, "pooling_type 2"),
        ({"llama__attention__causal": False}, "later tokens"),
    ],
)
def test_gguf_refused(write_gguf: Write, metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write_gguf(**metadata))


def made_for_it(folder: Path, **modes: bool) -> Path:
    """What sentence-transformers puts beside a model."""
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 32} | modes)
    )
    names = ("Transformer", "Pooling", "Normalize")
    modules = [{"idx": i, "type": f"sentence_transformers.models.{n}"} for i, n in enumerate(names)]
    (folder / "modules.json").write_text(json.dumps(modules))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["post_processor"] = QWEN3_EMBEDDING
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def test_folder(write_folder: Write) -> None:
    plain = open_checkpoint(write_folder()).config
    assert (plain.pooling, plain.end_id) == (None, None)
    folder = made_for_it(
        write_folder(), pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False
    )
    config = open_checkpoint(folder).config
    assert (config.pooling, config.end_id) == (Pooling.LAST, 0)
    assert not config.add_bos
    made_for_it(folder, pooling_mode_mean_tokens=True)
    assert open_checkpoint(folder).config.pooling is Pooling.MEAN


def test_folder_saved_without_its_head(
    write_folder: Write, weights: dict[str, NDArray[np.float32]]
) -> None:
    bare = {name.removeprefix("model."): values for name, values in weights.items()}
    found = {
        t.name: t.numpy_float32() for t in open_checkpoint(write_folder(tensors=bare)).tensors()
    }
    assert found.keys() == weights.keys()
    for name, values in weights.items():
        assert np.array_equal(found[name], values)


def test_folder_refused(write_folder: Write) -> None:
    folder = made_for_it(write_folder(), pooling_mode_cls_token=True)
    with pytest.raises(CheckpointError, match="pooling_mode_cls_token"):
        open_checkpoint(folder)
    made_for_it(folder, pooling_mode_mean_tokens=True)
    dense = [{"idx": 0, "type": "sentence_transformers.models.Dense"}]
    (folder / "modules.json").write_text(json.dumps(dense))
    with pytest.raises(CheckpointError, match="Dense is not supported"):
        open_checkpoint(folder)
    (folder / "modules.json").write_text("{")
    with pytest.raises(CheckpointError, match="damaged"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="is_causal"):
        open_checkpoint(write_folder(is_causal=False))

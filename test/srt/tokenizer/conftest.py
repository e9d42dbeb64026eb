"""Tiny tokenizers over made-up token tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from phloem.srt.checkpoint import ModelConfig, RopeConfig, TokenizerData
from phloem.srt.checkpoint.tokenizer_data import (
    ByteLevelBpe,
    SentencePieceBpe,
    byte_level_piece,
    sentencepiece_piece,
)
from phloem.srt.tokenizer import Tokenizer

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

Make = Callable[..., Tokenizer]


@pytest.fixture
def make_config() -> Callable[..., ModelConfig]:
    """A model configuration of which only the tokenizer's part matters."""

    def make(vocab_size: int, **changes: Any) -> ModelConfig:
        values: dict[str, Any] = {
            "architecture": "llama",
            "vocab_size": vocab_size,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_layers": 1,
            "num_heads": 1,
            "num_kv_heads": 1,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "rope": RopeConfig(theta=1e4),
            "context_length": 64,
            "tie_embeddings": True,
            "eos_ids": (2, 0),
            "bos_id": 1,
        }
        return ModelConfig(**values | changes)

    return make


@pytest.fixture
def make_byte_level(make_config: Callable[..., ModelConfig]) -> Make:
    """Three control tokens, all bytes, some merges (as pairs), and `added` ordinary tokens."""

    def make(
        merges: tuple[str, ...] = ("a b", "ab c", "Ġ ab", "1 2"),
        *,
        pre: str = "smollm",
        added: tuple[str, ...] = (),
        controls: tuple[str, ...] = tuple(CONTROLS),
        **config: Any,
    ) -> Tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        merged = [merge.replace(" ", "") for merge in merges]
        texts = [*controls, *alphabet, *merged, *added]
        control_ids = frozenset(range(len(controls)))
        added_ids = frozenset(range(len(texts) - len(added), len(texts)))
        literal = control_ids | added_ids
        data = TokenizerData(
            texts=texts,
            pieces=[
                text.encode() if i in literal else byte_level_piece(text)
                for i, text in enumerate(texts)
            ],
            model=ByteLevelBpe(list(merges), pre),
            control_ids=control_ids,
            added_ids=added_ids,
            bos_id=1,
            eos_id=2,
            unk_id=0,
        )
        return Tokenizer(Path("tiny.gguf"), data, make_config(len(texts) + 5, **config))

    return make


@pytest.fixture
def byte_level(make_byte_level: Make) -> Tokenizer:
    return make_byte_level()


@pytest.fixture
def make_sentencepiece(make_config: Callable[..., ModelConfig]) -> Make:
    """<unk>, <s>, </s>, all byte tokens, then ordinary `pieces`, best score first."""

    def make(pieces: list[str], *, add_space_prefix: bool = True, **config: Any) -> Tokenizer:
        texts = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
        scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
        control_ids = frozenset({0, 1, 2})
        data = TokenizerData(
            texts=texts,
            pieces=[
                text.encode() if i in control_ids else sentencepiece_piece(text)
                for i, text in enumerate(texts)
            ],
            model=SentencePieceBpe(tuple(scores), add_space_prefix),
            control_ids=control_ids,
            bos_id=1,
            eos_id=2,
            unk_id=0,
            strip_leading_space=add_space_prefix,
        )
        return Tokenizer(Path("tiny.gguf"), data, make_config(len(texts), **config))

    return make

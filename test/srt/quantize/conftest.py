"""Tiny checkpoints with rows that K-quants divide: folders as transformers has them, and GGUF."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from phloem.srt.checkpoint import ModelConfig, RopeConfig, expected_tensors
from phloem.srt.tokenizer.splitting import SPLIT_RULES

Weights = dict[str, NDArray[np.float32]]

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
HIDDEN, INNER, HEADS, KV_HEADS, LAYERS, ROWS = 256, 512, 4, 2, 1, 320


def byte_level(pre: str = "gpt-2", *, whole_words: bool | None = None) -> Tokenizer:
    """A byte-level BPE that splits words by one of the known rules."""
    rule = SPLIT_RULES[pre]
    tokens = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġt", "Ġthe", "12"]
    merges = [("h", "e"), ("Ġ", "t"), ("Ġt", "he"), ("1", "2")]
    ignore = rule.whole_words if whole_words is None else whole_words
    tokenizer = Tokenizer(
        models.BPE({text: i for i, text in enumerate(tokens)}, merges, ignore_merges=ignore)
    )
    normalizer = rule.normalizer()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in rule.patterns]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROLS)
    tokenizer.add_tokens(["<tool>"])
    return tokenizer


def sentencepiece(merges: list[tuple[str, str]] | None = None) -> Tokenizer:
    """What transformers makes of Llama 2's tokenizer."""
    if merges is None:
        merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "the"), ("t", "he")]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    made = list(dict.fromkeys(left + right for left, right in merges))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *made]
    vocab = {text: i for i, text in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def model_config(architecture: str, **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": ROWS,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_layers": LAYERS,
        "num_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "rms_norm_eps": 1e-5,
        "rope": RopeConfig(theta=10000.0),
        "context_length": 256,
        "tie_embeddings": False,
        "attention_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
    }
    return ModelConfig(**values | changes)


def random_weights(config: ModelConfig, seed: int = 0) -> Weights:
    """Small numbers for matrices, ones and a bit for norms."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * 0.1 + (len(shape) == 1)).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }


@pytest.fixture
def make_byte_level() -> Callable[..., Tokenizer]:
    return byte_level


@pytest.fixture
def make_sentencepiece() -> Callable[..., Tokenizer]:
    return sentencepiece


FolderWriter = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path) -> FolderWriter:
    """A checkpoint folder; keyword arguments change config.json."""

    def write(
        architecture: str = "llama",
        *,
        tokenizer: Tokenizer | None = None,
        tokenizer_config: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        folder = tmp_path / architecture
        folder.mkdir(exist_ok=True)
        settings = {
            "architectures": [f"{architecture.capitalize()}ForCausalLM"],
            "model_type": architecture,
            "vocab_size": ROWS,
            "hidden_size": HIDDEN,
            "intermediate_size": INNER,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HIDDEN // HEADS,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "eos_token_id": 2,
        } | changes
        (folder / "config.json").write_text(json.dumps(settings))
        names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
        (folder / "tokenizer_config.json").write_text(
            json.dumps(names if tokenizer_config is None else tokenizer_config)
        )
        (tokenizer or byte_level()).save(str(folder / "tokenizer.json"))
        tied, bias = settings["tie_word_embeddings"], bool(settings.get("attention_bias", False))
        config = model_config(
            architecture,
            tie_embeddings=tied,
            attention_bias=bias or architecture == "qwen2",
            attention_out_bias=bias,
        )
        safetensors.numpy.save_file(random_weights(config), folder / "model.safetensors")
        return folder

    return write


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """A GGUF file of a tiny Qwen3 with `fields` (key → value, type, element type) on top;
    `kind` is the type of its matrices."""

    def write(
        name: str = "source.gguf",
        *,
        kind: str = "F32",
        fields: dict[str, tuple[Any, gguf.GGUFValueType, gguf.GGUFValueType | None]] | None = None,
        alignment: int | None = None,
        tensors: dict[str, NDArray[np.float32]] | None = None,
    ) -> Path:
        writer = gguf.GGUFWriter(tmp_path / name, "qwen3")
        for key, count in {
            "block_count": 1,
            "context_length": 64,
            "embedding_length": HIDDEN,
            "feed_forward_length": INNER,
            "attention.head_count": HEADS,
            "attention.head_count_kv": KV_HEADS,
        }.items():
            writer.add_uint32(f"qwen3.{key}", count)
        writer.add_float32("qwen3.attention.layer_norm_rms_epsilon", 1e-6)
        tokens = [*CONTROLS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
        writer.add_string("tokenizer.ggml.model", "gpt2")
        writer.add_string("tokenizer.ggml.pre", "qwen2")
        writer.add_array("tokenizer.ggml.tokens", tokens)
        writer.add_array("tokenizer.ggml.token_type", [3] * 3 + [1] * 256)
        writer.add_array("tokenizer.ggml.merges", ["h e"])
        writer.add_uint32("tokenizer.ggml.eos_token_id", 2)
        for key, (value, value_type, element) in (fields or {}).items():
            writer.add_key_value(key, value, value_type, element)
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 1)
        config = model_config("qwen3", num_layers=1)
        quantize = gguf.GGMLQuantizationType[kind]
        for canonical, value in random_weights(config).items():
            stored = names.get_name(canonical, try_suffixes=(".weight", ".bias"))
            assert stored is not None
            value = (tensors or {}).get(stored, value)
            if value.ndim == 2:
                packed = gguf.quants.quantize(value, quantize)
                writer.add_tensor(stored, packed, raw_dtype=quantize)
            else:
                writer.add_tensor(stored, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return tmp_path / name

    return write

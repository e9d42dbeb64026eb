"""Tiny checkpoints, written with the reference packages and read back by ours."""

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
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from phloem.srt.checkpoint import ModelConfig, RopeConfig, expected_tensors

Weights = dict[str, NDArray[np.float32]]

CONTROLS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def config() -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=len(CONTROLS) + 256 + 2,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        rms_norm_eps=1e-5,
        rope=RopeConfig(theta=10000.0),
        context_length=128,
        tie_embeddings=True,
        eos_ids=(2, 0),
        bos_id=1,
    )


@pytest.fixture
def weights(config: ModelConfig) -> Weights:
    rng = np.random.default_rng(0)
    return {
        name: rng.standard_normal(shape).astype(np.float32)
        for name, shape in expected_tensors(config).items()
    }


GgufWriter = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path, config: ModelConfig, weights: Weights) -> GgufWriter:
    """Write the tiny model; keyword arguments add or replace metadata (None leaves it out),
    `tensors` adds or replaces tensors by GGUF name (None leaves it out)."""

    def write(
        name: str = "tiny.gguf",
        *,
        arch: str = "llama",
        quantize: gguf.GGMLQuantizationType | None = None,
        tensors: dict[str, NDArray[Any] | None] | None = None,
        **metadata: Any,
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, arch)
        values = _metadata(config, arch) | {
            key.replace("__", "."): value for key, value in metadata.items()
        }
        for key, value in values.items():
            _add(writer, key, value)
        stored: dict[str, NDArray[Any] | None] = {
            _gguf_name(name): _permuted(config, name, value) if arch == "llama" else value
            for name, value in weights.items()
        }
        for key, array in (stored | (tensors or {})).items():
            if array is None:
                continue
            if quantize is not None and array.ndim == 2:
                packed = gguf.quants.quantize(array, quantize)
                writer.add_tensor(key, packed, raw_dtype=quantize)
            else:
                writer.add_tensor(key, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _metadata(config: ModelConfig, arch: str) -> dict[str, Any]:
    tokens = [*CONTROLS, *byte_alphabet(), "ab", "abc"]
    return {
        f"{arch}.block_count": config.num_layers,
        f"{arch}.context_length": config.context_length,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_heads,
        f"{arch}.attention.head_count_kv": config.num_kv_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * len(CONTROLS) + [1] * (len(tokens) - len(CONTROLS)),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    match value:
        case None:
            return
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def _gguf_name(name: str) -> str:
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 2)
    found = table.get_name(name, try_suffixes=(".weight", ".bias"))
    assert isinstance(found, str)
    return found


def _permuted(config: ModelConfig, name: str, value: NDArray[Any]) -> NDArray[Any]:
    """The converter's interleaving of q and k rows, from its description: the two halves of each
    head alternate."""
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    kind = name.split(".")[-2]
    if kind not in heads:
        return value
    halves = value.reshape(heads[kind], 2, config.head_dim // 2, *value.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)


FolderWriter = Callable[..., Path]


@pytest.fixture
def write_folder(tmp_path: Path, config: ModelConfig, weights: Weights) -> FolderWriter:
    """Write the tiny model as a Hugging Face folder; keyword arguments change config.json."""

    def write(
        *,
        tensors: Weights | None = None,
        generation: dict[str, Any] | None = None,
        tokenizer_config: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Path:
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        settings = {
            "model_type": "llama",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": config.rope.theta,
            "max_position_embeddings": config.context_length,
            "tie_word_embeddings": True,
            "eos_token_id": 0,
        } | changes
        kept = {key: value for key, value in settings.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        (folder / "generation_config.json").write_text(json.dumps(generation or {}))
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"eos_token": "<|im_end|>"} | (tokenizer_config or {}))
        )
        byte_level_tokenizer().save(str(folder / "tokenizer.json"))
        safetensors.numpy.save_file(
            weights if tensors is None else tensors, folder / "model.safetensors"
        )
        return folder

    return write


def byte_level_tokenizer() -> Tokenizer:
    tokens = [*CONTROLS, *byte_alphabet(), "ab", "abc"]
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(tokens)}, [("a", "b"), ("ab", "c")])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(CONTROLS)
    return tokenizer

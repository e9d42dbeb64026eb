"""Hugging Face folders: config.json, safetensors, tokenizer.json."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from phloem.srt.checkpoint import (
    CheckpointError,
    ModelConfig,
    RopeScaling,
    expected_tensors,
    open_checkpoint,
)

Write = Callable[..., Path]
Weights = dict[str, Any]


def test_configuration_and_tensors(
    write_folder: Write, config: ModelConfig, weights: Weights
) -> None:
    checkpoint = open_checkpoint(write_folder())
    assert checkpoint.format == "safetensors float32"
    assert checkpoint.config.eos_ids == (0, 2)
    assert checkpoint.config.head_dim == 8
    assert checkpoint.config.rope == config.rope
    assert not checkpoint.config.add_bos
    read = {tensor.name: tensor.numpy_float32() for tensor in checkpoint.tensors()}
    assert read.keys() == expected_tensors(config).keys()
    for name, values in read.items():
        np.testing.assert_array_equal(values, weights[name])
    vocabulary = checkpoint.vocabulary()
    assert vocabulary.tokens[-1] == b"abc"
    assert vocabulary.special_ids == {0, 1, 2}
    assert vocabulary.stop_ids == (0, 2)


def test_end_tokens_are_the_union_of_all_files(write_folder: Write) -> None:
    folder = write_folder(
        eos_token_id=0,
        generation={"eos_token_id": [0, 2]},
        tokenizer_config={"eos_token": "abc"},
    )
    ids = open_checkpoint(folder).config.eos_ids
    assert ids == (0, 2, 260)


def test_bfloat16_and_shards(write_folder: Write, tmp_path: Path, weights: Weights) -> None:
    """Rounded towards zero here, so that bits can be cut off; written by hand, since numpy has no
    such type."""
    folder = write_folder()
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    weight_map = {}
    for shard, part in enumerate((names[:5], names[5:])):
        file = f"model-{shard}.safetensors"
        header, data = {}, b""
        for name in part:
            raw = (weights[name].view(np.uint32) >> 16).astype("<u2").tobytes()
            offsets = [len(data), len(data) + len(raw)]
            header[name] = {
                "dtype": "BF16",
                "shape": list(weights[name].shape),
                "data_offsets": offsets,
            }
            data += raw
            weight_map[name] = file
        text = json.dumps(header).encode()
        (folder / file).write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "unrelated.safetensors").write_bytes(b"not in the index, so not read")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "safetensors bfloat16"
    for tensor in checkpoint.tensors():
        assert tensor.kind == "BF16"
        bits = weights[tensor.name].view(np.uint32) & 0xFFFF0000
        np.testing.assert_array_equal(tensor.numpy_float32().view(np.uint32), bits)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: No such file"):
        open_checkpoint(folder)


def test_float16(write_folder: Write, weights: Weights) -> None:
    halves = {name: value.astype(np.float16) for name, value in weights.items()}
    checkpoint = open_checkpoint(write_folder(tensors=halves))
    assert checkpoint.format == "safetensors float16"
    for tensor in checkpoint.tensors():
        np.testing.assert_array_equal(tensor.numpy_float32(), halves[tensor.name])


def test_qwen3_head_dim_sets_the_projections(
    write_folder: Write, config: ModelConfig, weights: Weights
) -> None:
    wide = ModelConfig(
        **{
            **{name: getattr(config, name) for name in config.__dataclass_fields__},
            "architecture": "qwen3",
            "head_dim": 16,
            "qk_norm": True,
        }
    )
    shapes = expected_tensors(wide)
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (64, 32)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (32, 32)
    assert shapes["model.layers.0.self_attn.o_proj.weight"] == (32, 64)
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    folder = write_folder(model_type="qwen3", head_dim=16, tensors=tensors)
    read = open_checkpoint(folder).config
    assert (read.head_dim, read.q_size, read.qk_norm, read.attention_bias) == (16, 64, True, False)


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"model_type": "mistral", "sliding_window": 64}, 64),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"model_type": "mistral", "sliding_window": 4096}, None),  # beyond the context
        ({"model_type": "llama", "sliding_window": 64}, None),
    ],
)
def test_sliding_window(write_folder: Write, changes: dict[str, Any], window: int | None) -> None:
    assert open_checkpoint(write_folder(**changes)).config.sliding_window == window


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"sliding_window": 64, "use_sliding_window": False}, None),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 2}, None),
        ({"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 0}, 64),
    ],
)
def test_qwen_window_counts_only_when_switched_on(
    write_folder: Write, weights: Weights, changes: dict[str, Any], window: int | None
) -> None:
    biased = dict(weights)
    for layer in range(2):
        for part, size in (("q", 32), ("k", 16), ("v", 16)):
            biased[f"model.layers.{layer}.self_attn.{part}_proj.bias"] = np.ones(size, np.float32)
    folder = write_folder(model_type="qwen2", tensors=biased, **changes)
    assert open_checkpoint(folder).config.sliding_window == window


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        {"rope_scaling": {"type": "llama3", **LLAMA3}, "rope_theta": 5e5},
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3},
            "rope_theta": None,
        },
    ],
)
def test_rope_scaling_under_each_of_its_keys(write_folder: Write, changes: dict[str, Any]) -> None:
    rope = open_checkpoint(write_folder(**changes)).config.rope
    assert rope.scaling is RopeScaling.LLAMA3
    assert (rope.theta, rope.factor, rope.original_context) == (5e5, 8.0, 64)


def test_yarn_stretches_the_context(write_folder: Write) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    config = open_checkpoint(write_folder(rope_scaling=scaling)).config
    assert config.context_length == 512
    assert config.rope.scaling is RopeScaling.YARN
    assert (config.rope.beta_fast, config.rope.beta_slow, config.rope.truncate) == (32.0, 1.0, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "model_type 'gemma2' is not supported .*llama, mistral, qwen2"),
        ({"model_type": None}, "model_type is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is not of type int"),
        ({"num_hidden_layers": 3}, r"layers\.2\..* is missing"),
        ({"num_hidden_layers": 1}, r"layers\.1\..* has no place"),
        ({"vocab_size": 200}, "261 tokens, but config.json says vocab_size 200"),
        ({"vocab_size": 999}, r"embed_tokens.weight' has shape \[261, 32\]"),
        ({"num_key_value_heads": 3}, "3 does not divide 4"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"tie_word_embeddings": False}, r"lm_head\.weight' is missing"),
        ({"attention_bias": True}, r"q_proj\.bias' is missing"),
        ({"eos_token_id": 261}, "261 is not one of the 261 tokens"),
        ({"eos_token_id": "x"}, "not a token id"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, r"factor is 0"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_theta": -1}, "rope_theta is -1"),
        ({"tokenizer_config": {"eos_token": "nope"}}, "eos_token 'nope' is not in the vocabulary"),
    ],
)
def test_refused(write_folder: Write, changes: dict[str, Any], message: str) -> None:
    folder = write_folder(**changes)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("file", "data", "message"),
    [
        ("config.json", b"{", "not valid JSON"),
        ("config.json", b"[" * 100_000, "not valid JSON"),
        ("config.json", b"[]", "not a JSON object"),
        ("tokenizer.json", b"{}", "damaged or not supported"),
        ("tokenizer.json", b'{"model": {"type": "WordPiece", "vocab": {}}}', "'WordPiece'"),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 1000000000}}}', "far apart"),
        ("model.safetensors", b"", "empty"),
        ("model.safetensors", b"abc", "header of"),
        ("model.safetensors", struct.pack("<Q", 2**62) + b"{}", "header of"),
        ("model.safetensors", struct.pack("<Q", 2) + b"[]", "damaged header"),
        ("model.safetensors", struct.pack("<Q", 2) + b"{}", "is missing"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "../x"}}',
            "not the name of a file",
        ),
    ],
)
def test_damaged_files(write_folder: Write, file: str, data: bytes, message: str) -> None:
    folder = write_folder()
    (folder / file).write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}, "unsupported type F8_E4M3"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 8]}, "misplaced"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}, "misplaced"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [16, 32]}, "truncated"),
        ({"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}, "damaged header"),
    ],
)
def test_damaged_tensor_entries(write_folder: Write, entry: dict[str, Any], message: str) -> None:
    folder = write_folder()
    text = json.dumps({"model.norm.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(folder)


def test_folder_without_weights(write_folder: Write) -> None:
    folder = write_folder()
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(CheckpointError, match="pickles are not read"):
        open_checkpoint(folder)


def test_stored_copies_of_tied_weights_are_passed_over(
    write_folder: Write, weights: Weights
) -> None:
    copies = weights | {
        "lm_head.weight": weights["model.embed_tokens.weight"],
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32),
    }
    names = {tensor.name for tensor in open_checkpoint(write_folder(tensors=copies)).tensors()}
    assert names == weights.keys()


def test_chat_templates_from_each_place(write_folder: Write) -> None:
    folder = write_folder(tokenizer_config={"chat_template": "in the config"})
    assert open_checkpoint(folder).tokenizer_data().chat_templates == {"default": "in the config"}
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = write_folder(tokenizer_config={"chat_template": named})
    templates = open_checkpoint(folder).tokenizer_data().chat_templates
    assert templates == {"default": "a", "tool_use": "b"}
    (folder / "chat_template.jinja").write_text("in its file")
    assert open_checkpoint(folder).tokenizer_data().chat_templates["default"] == "in its file"


def test_bos_from_the_post_processor_or_the_llama_flag(write_folder: Write) -> None:
    folder = write_folder(tokenizer_config={"bos_token": "<|im_start|>", "add_bos_token": True})
    assert not open_checkpoint(folder).config.add_bos  # the flag is the Llama classes' only
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
            ),
        ]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = open_checkpoint(folder).config
    assert (config.add_bos, config.bos_id) == (True, 1)
    flag = {"bos_token": "<|im_start|>", "tokenizer_class": "LlamaTokenizerFast"}
    folder = write_folder(tokenizer_config={**flag, "add_bos_token": True})
    assert open_checkpoint(folder).config.add_bos


def test_sentencepiece_pieces_and_gaps(write_folder: Write) -> None:
    folder = write_folder(eos_token_id=1)
    vocab = {"<unk>": 0, "</s>": 1, "<0x0A>": 2, "\u2581a": 3, "b\u2581": 4}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"unk_token": {"content": "<unk>"}}')
    data = open_checkpoint(folder).tokenizer_data()
    assert data.pieces == [b"<unk>", b"</s>", b"\n", b" a", b"b ", b"<think>"]
    assert data.control_ids == {0, 1}
    assert data.added_ids == {5}
    assert data.unk_id == 0
    assert data.strip_leading_space

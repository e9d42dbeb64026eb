"""GGUF checkpoints: configuration, tensors, token table, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from phloem.srt.checkpoint import (
    CheckpointError,
    ModelConfig,
    RopeScaling,
    expected_tensors,
    open_checkpoint,
)
from phloem.srt.checkpoint.quant_types import BLOCK_TYPES, TYPE_NAMES

Write = Callable[..., Path]
Weights = dict[str, Any]


def test_configuration_and_format(write_gguf: Write, config: ModelConfig) -> None:
    checkpoint = open_checkpoint(write_gguf())
    assert checkpoint.format == "gguf F32"
    assert checkpoint.config.rms_norm_eps == pytest.approx(1e-5)
    assert checkpoint.config == ModelConfig(
        **{
            **{name: getattr(config, name) for name in config.__dataclass_fields__},
            "rms_norm_eps": checkpoint.config.rms_norm_eps,
        }
    )


def test_tensors_come_back_under_canonical_names(
    write_gguf: Write, config: ModelConfig, weights: Weights
) -> None:
    """q and k rows too: the file holds them interleaved."""
    checkpoint = open_checkpoint(write_gguf())
    read = {tensor.name: tensor for tensor in checkpoint.tensors()}
    assert read.keys() == expected_tensors(config).keys()
    for name, tensor in read.items():
        values = tensor.numpy_float32()
        np.testing.assert_array_equal(values, weights[name])
        assert values.flags.writeable
    q = read["model.layers.1.self_attn.q_proj.weight"]
    assert q.row_order is not None
    stored = q.data.view("<f4")
    np.testing.assert_array_equal(stored[q.row_order], weights[q.name])
    assert not np.array_equal(stored, weights[q.name])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_quantised_rows(write_gguf: Write, weights: Weights, kind: str) -> None:
    quantize = gguf.GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(write_gguf(quantize=quantize))
    assert checkpoint.format == f"gguf {kind}"
    for tensor in checkpoint.tensors():
        expected = weights[tensor.name]
        if len(tensor.shape) == 2:
            assert tensor.kind == kind
            packed = gguf.quants.quantize(expected, quantize)
            order = slice(None) if tensor.row_order is None else tensor.row_order
            np.testing.assert_array_equal(
                tensor.data[order].reshape(-1), packed.view(np.uint8).reshape(-1)
            )
            expected = gguf.quants.dequantize(packed, quantize)
        np.testing.assert_array_equal(tensor.numpy_float32(), expected)


def test_block_sizes_agree_with_the_reference_package() -> None:
    for number, block in BLOCK_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert block.name == kind.name
        assert gguf.GGML_QUANT_SIZES[kind] == (block.elements, block.nbytes)
    for number, name in TYPE_NAMES.items():
        assert gguf.GGMLQuantizationType(number).name == name


def test_token_table_and_vocabulary(write_gguf: Write, config: ModelConfig) -> None:
    vocabulary = open_checkpoint(write_gguf()).vocabulary()
    assert vocabulary.size == config.vocab_size
    assert vocabulary.special_ids == {0, 1, 2}
    assert vocabulary.stop_ids == (2, 0)
    assert [vocabulary.tokens[i] for i in (0, 1, 2)] == [b"", b"", b""]
    assert sorted(vocabulary.tokens[3:259]) == [bytes([byte]) for byte in range(256)]
    assert vocabulary.tokens[-2:] == [b"ab", b"abc"]


def test_byte_level_pieces_are_exact_and_added_tokens_literal(write_gguf: Write) -> None:
    tokens = ["<s>", "Ġé", "Ã©", "è blank", "<mark é>", "[unused]"]
    path = write_gguf(
        tokenizer__ggml__tokens=tokens + [f"t{i}" for i in range(255)],
        tokenizer__ggml__token_type=[3, 1, 1, 1, 4, 5] + [1] * 255,
        tokenizer__ggml__eos_token_id=0,
        tokenizer__ggml__bos_token_id=None,
    )
    data = open_checkpoint(path).tokenizer_data()
    assert data.pieces[1] == b" \xe9"  # the alphabet's é is the byte E9
    assert data.pieces[2] == "é".encode()
    assert data.pieces[3] == "è blank".encode()  # a blank is not in the alphabet: taken literally
    assert data.pieces[4] == "<mark é>".encode()
    assert data.pieces[5] == b""
    assert [*data.control_ids, *data.added_ids, *data.unused_ids] == [0, 4, 5]


def test_end_tokens_are_the_named_ones_and_the_well_known(write_gguf: Write) -> None:
    path = write_gguf(tokenizer__ggml__eot_token_id=5)
    assert open_checkpoint(path).config.eos_ids == (2, 5, 0)
    with pytest.raises(CheckpointError, match="no end token"):
        open_checkpoint(
            write_gguf(tokenizer__ggml__eos_token_id=None, tokenizer__ggml__token_type=[1] * 261)
        )


def test_bos_by_flag_or_by_the_kind_of_tokenizer(write_gguf: Write) -> None:
    assert open_checkpoint(write_gguf(tokenizer__ggml__add_bos_token=True)).config.add_bos
    assert not open_checkpoint(write_gguf(tokenizer__ggml__add_bos_token=None)).config.add_bos
    llama3 = write_gguf(tokenizer__ggml__add_bos_token=None, tokenizer__ggml__pre="llama-bpe")
    assert open_checkpoint(llama3).config.add_bos
    with pytest.raises(CheckpointError, match="names none"):
        open_checkpoint(
            write_gguf(tokenizer__ggml__add_bos_token=True, tokenizer__ggml__bos_token_id=None)
        )


def test_qwen_files_keep_their_row_order_and_have_their_extras(
    write_gguf: Write, config: ModelConfig, weights: Weights
) -> None:
    biases = {
        f"blk.{layer}.attn_{part}.bias": np.arange(size, dtype=np.float32)
        for layer in range(2)
        for part, size in (("q", config.q_size), ("k", config.kv_size), ("v", config.kv_size))
    }
    qwen2 = open_checkpoint(write_gguf(arch="qwen2", tensors=dict(biases)))
    assert qwen2.config.attention_bias
    assert not qwen2.config.qk_norm
    read = {tensor.name: tensor for tensor in qwen2.tensors()}
    name = "model.layers.0.self_attn.q_proj"
    assert read[f"{name}.weight"].row_order is None
    np.testing.assert_array_equal(read[f"{name}.weight"].numpy_float32(), weights[f"{name}.weight"])
    np.testing.assert_array_equal(read[f"{name}.bias"].numpy_float32(), np.arange(32))

    norms = {
        f"blk.{layer}.attn_{part}_norm.weight": np.ones(config.head_dim, dtype=np.float32)
        for layer in range(2)
        for part in "qk"
    }
    assert open_checkpoint(write_gguf(arch="qwen3", tensors=dict(norms))).config.qk_norm
    with pytest.raises(CheckpointError, match=r"q_norm.weight' is missing"):
        open_checkpoint(write_gguf(arch="qwen3"))


def test_head_dim_need_not_divide_the_hidden_size(write_gguf: Write) -> None:
    """Qwen3's way: the projections follow head_dim, so these weights no longer fit."""
    with pytest.raises(CheckpointError, match=r"q_proj.weight' has shape \[32, 32\].*\[64, 32\]"):
        open_checkpoint(
            write_gguf(llama__attention__key_length=16, llama__attention__value_length=16)
        )


def test_rope_scaling(write_gguf: Write) -> None:
    linear = write_gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)
    assert open_checkpoint(linear).config.rope.scaling is RopeScaling.LINEAR
    yarn = open_checkpoint(
        write_gguf(
            llama__rope__scaling__type="yarn",
            llama__rope__scaling__factor=4.0,
            llama__rope__scaling__original_context_length=32,
            llama__rope__freq_base=500000.0,
        )
    ).config.rope
    assert (yarn.scaling, yarn.factor, yarn.original_context) == (RopeScaling.YARN, 4.0, 32)
    assert yarn.theta == 500000.0
    assert yarn.attention_factor == pytest.approx(1.138629436111989)
    divisors = np.array([1, 2, 4, 8], dtype=np.float32)
    factors = open_checkpoint(write_gguf(tensors={"rope_freqs.weight": divisors}))
    assert factors.config.rope.factors == (1.0, 2.0, 4.0, 8.0)
    assert "rope_freqs.weight" not in {tensor.name for tensor in factors.tensors()}


def test_untied_embeddings(write_gguf: Write, weights: Weights) -> None:
    output = weights["model.embed_tokens.weight"] + 1
    checkpoint = open_checkpoint(write_gguf(tensors={"output.weight": output}))
    assert not checkpoint.config.tie_embeddings
    assert "lm_head.weight" in {tensor.name for tensor in checkpoint.tensors()}


def test_chat_templates(write_gguf: Write) -> None:
    path = write_gguf(
        tokenizer__chat_template="main", **{"tokenizer__chat_template__tool_use": "tools"}
    )
    templates = open_checkpoint(path).tokenizer_data().chat_templates
    assert templates == {"default": "main", "tool_use": "tools"}
    assert not open_checkpoint(write_gguf()).tokenizer_data().chat_templates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma3"}, r"architecture 'gemma3' is not supported .*llama, qwen2, qwen3"),
        ({"llama__block_count": None}, r"'llama\.block_count' is missing"),
        ({"llama__block_count": 3}, r"layers\.2\..* is missing \(9 missing"),
        ({"llama__block_count": 1}, "has no place"),
        ({"llama__block_count": 2**31}, "cannot be in"),
        ({"llama__block_count": "two"}, "is not of type int"),
        ({"llama__embedding_length": 0}, "is 0"),
        ({"llama__attention__head_count": 3}, "cannot share 2|head of"),
        ({"llama__attention__head_count_kv": [2, 2]}, "not of type int"),
        ({"llama__attention__layer_norm_rms_epsilon": float("nan")}, "is nan"),
        ({"llama__expert_count": 8}, "mixture-of-experts"),
        ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ({"llama__rope__freq_base": 0.0}, "freq_base is 0.0"),
        ({"llama__rope__dimension_count": 4}, "dimension_count"),
        ({"split__count": 4}, "split over several"),
        ({"tokenizer__ggml__eos_token_id": 999}, "eos_token_id is 999"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "2 token types for 261 tokens"),
        ({"tokenizer__ggml__tokens": None}, r"'tokenizer\.ggml\.tokens' is missing"),
        ({"tensors": {"output_norm.weight": None}}, r"'model\.norm\.weight' is missing"),
        ({"tensors": {"blk.0.ffn_gate_inp.weight": np.ones((2, 2), np.float32)}}, "has no place"),
        ({"tensors": {"blk.7.attn_norm.weight": np.ones(32, np.float32)}}, "has no place"),
        ({"tensors": {"token_embd.weight": None}}, "token_embd.weight' is missing"),
        ({"tensors": {"output_norm.weight": np.ones(31, np.float32)}}, r"shape \[31\]"),
        ({"tensors": {"output_norm.weight": np.ones(32, np.int32)}}, "unsupported type I32"),
    ],
)
def test_refused(write_gguf: Write, changes: dict[str, Any], message: str) -> None:
    path = write_gguf(**changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer__ggml__model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokenizer__ggml__pre": None}, "would have to be guessed"),
        ({"tokenizer__ggml__merges": None}, r"merges' is missing"),
        ({"tokenizer__ggml__model": "llama"}, r"scores' is missing"),
        (
            {"tokenizer__ggml__model": "llama", "tokenizer__ggml__scores": [0.5]},
            "1 scores for 261 tokens",
        ),
    ],
)
def test_refused_tokenizers(write_gguf: Write, changes: dict[str, Any], message: str) -> None:
    checkpoint = open_checkpoint(write_gguf(**changes))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tokenizer_data()


def test_paths_that_are_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such file"):
        open_checkpoint(tmp_path / "absent.gguf")
    with pytest.raises(CheckpointError, match=r"config\.json: No such file"):
        open_checkpoint(tmp_path)


@pytest.mark.model
def test_default_model(default_model: Path) -> None:
    checkpoint = open_checkpoint(default_model)
    config = checkpoint.config
    assert checkpoint.format == "gguf Q4_1"
    assert (config.architecture, config.num_layers, config.num_heads) == ("llama", 30, 9)
    assert (config.num_kv_heads, config.head_dim, config.vocab_size) == (3, 64, 49152)
    assert config.eos_ids == (2, 0)
    assert not config.add_bos
    assert config.tie_embeddings
    vocabulary = checkpoint.vocabulary()
    assert len(vocabulary.special_ids) == 17
    assert set(vocabulary.tokens) >= {bytes([byte]) for byte in range(0x20, 0x7F)}

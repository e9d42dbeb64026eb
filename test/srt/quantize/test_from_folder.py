"""Hugging Face folder → GGUF: the same model for our loader, for `gguf` and for transformers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer, normalizers, pre_tokenizers

from phloem.srt.checkpoint import Checkpoint, open_checkpoint
from phloem.srt.checkpoint.rope import rope_frequencies
from phloem.srt.quantize import QuantizeError, convert, sample_text
from phloem.srt.quantize.encode import TYPES, encode
from phloem.srt.tokenizer import load_tokenizer
from phloem.srt.tokenizer.splitting import SPLIT_RULES

Write = Callable[..., Path]
Make = Callable[..., Tokenizer]

LLAMA2_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def written(folder: Path, kind: str = "F32") -> tuple[Checkpoint, Checkpoint]:
    """The folder, and the file made of it."""
    source = open_checkpoint(folder)
    target = folder.parent / f"{folder.name}-{kind}.gguf"
    convert(source, target, kind)
    return source, open_checkpoint(target)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_model_comes_back_as_it_was(write_folder: Write, architecture: str, tied: bool) -> None:
    source, target = written(write_folder(architecture, tie_word_embeddings=tied))
    stored = "llama" if architecture == "mistral" else architecture
    expected = dataclasses.replace(source.config, architecture=stored)
    # The tokenizer's unused end-of-text token ends a text for every reader of GGUF.
    same = dataclasses.replace(
        target.config, eos_ids=expected.eos_ids, rms_norm_eps=expected.rms_norm_eps
    )
    assert same == expected
    assert target.config.rms_norm_eps == pytest.approx(expected.rms_norm_eps)
    assert set(expected.eos_ids) <= set(target.config.eos_ids)
    ours = {t.name: t.numpy_float32() for t in target.tensors()}
    theirs = {t.name: t.numpy_float32() for t in source.tensors()}
    assert ours.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_array_equal(ours[name], values)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", TYPES)
def test_each_type_holds_the_weights(write_folder: Write, architecture: str, kind: str) -> None:
    """Quantising works row by row, so the interleaving of q and k commutes with it."""
    source, target = written(write_folder(architecture), kind)
    theirs = {t.name: t.numpy_float32() for t in source.tensors()}
    for tensor in target.tensors():
        expected = theirs[tensor.name]
        if expected.ndim == 2:
            assert tensor.kind == kind
            packed = encode(expected, TYPES[kind])
            expected = gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[kind])
        np.testing.assert_array_equal(tensor.numpy_float32(), expected.reshape(tensor.shape))


def test_names_and_dimensions_are_those_of_the_reference(write_folder: Write) -> None:
    source, target = written(write_folder("llama"))
    reader = gguf.GGUFReader(target.path)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, source.config.num_layers)
    expected = {
        names.get_name(t.name, try_suffixes=(".weight", ".bias")): [*reversed(t.shape)]
        for t in source.tensors()
    }
    assert {t.name: t.shape.tolist() for t in reader.tensors} == expected
    assert reader.fields["general.name"].contents() == "llama"
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == source.config.vocab_size  # llama.cpp wants one for each row
    assert len(set(tokens)) == len(tokens)


def test_attention_biases_are_permuted_with_their_rows(write_folder: Write) -> None:
    source, target = written(write_folder("llama", attention_bias=True))
    ours = {t.name: t.numpy_float32() for t in target.tensors()}
    for tensor in source.tensors():
        np.testing.assert_array_equal(ours[tensor.name], tensor.numpy_float32())
    stored = {t.name: t.data for t in gguf.GGUFReader(target.path).tensors}
    canonical = ours["model.layers.0.self_attn.q_proj.bias"]
    assert not np.array_equal(stored["blk.0.attn_q.bias"], canonical)
    np.testing.assert_array_equal(np.sort(stored["blk.0.attn_q.bias"]), np.sort(canonical))


@pytest.mark.parametrize(
    ("architecture", "scaling"),
    [
        ("llama", {"rope_type": "linear", "factor": 4.0}),
        (
            "llama",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            "qwen2",
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        (
            "qwen3",
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
            },
        ),
        (
            "mistral",
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "mscale": 0.7,
                "mscale_all_dim": 0.5,
            },
        ),
    ],
)
def test_rotary_scaling_gives_the_same_frequencies(
    write_folder: Write, architecture: str, scaling: dict[str, Any]
) -> None:
    folder = write_folder(architecture, rope_scaling=scaling, rope_theta=5e5)
    source, target = written(folder, "Q8_0")
    theirs, their_factor = rope_frequencies(source.config)
    ours, our_factor = rope_frequencies(target.config)
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    assert our_factor == pytest.approx(their_factor, rel=1e-6)
    assert target.config.context_length == source.config.context_length


def test_rotary_scaling_without_a_field_is_refused(write_folder: Write) -> None:
    scaling = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
    }
    with pytest.raises(QuantizeError, match="truncate"):
        written(write_folder("qwen3", rope_scaling=scaling))


def test_sliding_window_is_kept(write_folder: Write) -> None:
    _, target = written(write_folder("mistral", sliding_window=64))
    assert target.config.sliding_window == 64


def same_texts(source: Checkpoint, target: Checkpoint) -> None:
    """Both encode the same, recognise the same tokens, and render the same."""
    theirs, ours = load_tokenizer(source), load_tokenizer(target)
    probe = f"{sample_text()} 12 the<|im_end|>the <tool>12</s> <s>he 日本 \n\n  é"
    for special in (True, False):
        assert ours.encode(probe, special) == theirs.encode(probe, special)
    before, after = source.tokenizer_data(), target.tokenizer_data()
    rows = len(before.texts)
    assert after.pieces[:rows] == before.pieces
    assert set(after.pieces[rows:]) <= {b""}
    assert after.unused_ids == before.unused_ids | set(range(rows, len(after.texts)))
    for name in (
        "control_ids",
        "added_ids",
        "bos_id",
        "eos_id",
        "unk_id",
        "pad_id",
        "add_bos",
        "strip_leading_space",
        "chat_templates",
    ):
        assert getattr(after, name) == getattr(before, name), name


@pytest.mark.parametrize("pre", SPLIT_RULES)
def test_every_known_way_of_splitting_is_found(
    write_folder: Write, make_byte_level: Make, pre: str
) -> None:
    names = {
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "chat_template": [
            {"name": "default", "template": "{{ messages }}"},
            {"name": "tool_use", "template": "{{ tools }}"},
        ],
    }
    source, target = written(
        write_folder("qwen2", tokenizer=make_byte_level(pre), tokenizer_config=names)
    )
    same_texts(source, target)
    found = gguf.GGUFReader(target.path).fields["tokenizer.ggml.pre"].contents()
    assert SPLIT_RULES[found] == SPLIT_RULES[pre]


def test_sentencepiece_ranks_become_scores(write_folder: Write, make_sentencepiece: Make) -> None:
    folder = write_folder(
        "llama",
        tokenizer=make_sentencepiece(),
        tokenizer_config=LLAMA2_NAMES
        | {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True},
    )
    source, target = written(folder)
    assert target.config.add_bos
    same_texts(source, target)
    kinds = gguf.GGUFReader(target.path).fields["tokenizer.ggml.token_type"].contents()
    assert kinds[:4] == [2, 3, 3, 6]  # unknown, control, control, byte


def spaced(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def lowered(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize("change", [spaced, lowered])
def test_splitting_without_a_name_is_refused(
    write_folder: Write, make_byte_level: Make, change: Callable[[Tokenizer], Tokenizer]
) -> None:
    folder = write_folder(tokenizer=change(make_byte_level()))
    with pytest.raises(QuantizeError, match="no name for"):
        written(folder)
    assert not list(folder.parent.glob("*.gguf"))


def test_whole_words_are_part_of_the_rule(write_folder: Write, make_byte_level: Make) -> None:
    """Llama 3 takes a word that is a token without merging; its GGUF name says so."""
    tokenizer = make_byte_level("qwen2", whole_words=True)
    with pytest.raises(QuantizeError, match="no name for"):
        written(write_folder(tokenizer=tokenizer))


@pytest.mark.parametrize(
    ("merges", "said"),
    [
        (
            [("h", "e"), ("▁", "t"), ("t", "he"), ("▁t", "he"), ("▁", "the"), ("o", "n")],
            None,
        ),
        ([("▁t", "he"), ("h", "e"), ("▁", "the"), ("▁", "t"), ("t", "he")], "ranks merges"),
        ([("▁", "t"), ("h", "e"), ("▁t", "he")], None),
        ([("▁", "t"), ("h", "e"), ("▁t", "he"), ("t", "he")], "lacks merges"),
    ],
)
def test_merges_that_scores_cannot_rank_are_refused(
    write_folder: Write,
    make_sentencepiece: Make,
    merges: list[tuple[str, str]],
    said: str | None,
) -> None:
    folder = write_folder(tokenizer=make_sentencepiece(merges), tokenizer_config=LLAMA2_NAMES)
    if said is None:
        same_texts(*written(folder))
        return
    with pytest.raises(QuantizeError, match=said):
        written(folder)


def test_end_tokens_beyond_what_gguf_names_are_refused(write_folder: Write) -> None:
    source, target = written(write_folder(eos_token_id=[2, 0, 40, 41]))
    assert set(target.config.eos_ids) == set(source.config.eos_ids)
    (target.path).unlink()
    folder = write_folder(eos_token_id=[2, 40, 41, 42])
    with pytest.raises(QuantizeError, match="4 end tokens, more than GGUF can name: 42"):
        written(folder)
    assert not list(folder.parent.glob("*.gguf"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_transformers_reads_the_same_weights(write_folder: Write, architecture: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = write_folder(architecture)
    _, target = written(folder, "F16")
    original = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    read = transformers.AutoModelForCausalLM.from_pretrained(
        str(folder.parent), gguf_file=target.path.name, dtype=torch.float32
    )
    expected = original.state_dict()
    assert read.state_dict().keys() == expected.keys()
    for name, value in read.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-6)
    for key in ("num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "vocab_size"):
        assert getattr(read.config, key) == pytest.approx(getattr(original.config, key))

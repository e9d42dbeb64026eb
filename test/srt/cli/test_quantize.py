"""`phloem quantize`: what it prints, and when it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers import pre_tokenizers

from phloem.srt import quantize as phloem_quantize
from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.errors import Unavailable
from phloem.srt.quantize import QuantizeError, sample_text


@pytest.fixture
def source(clean_room: Path) -> Path:
    """A Qwen2 of one layer, its rows 64 and 256 long, in F32."""
    path = clean_room / "source.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    for key, count in {
        "block_count": 1,
        "context_length": 64,
        "embedding_length": 64,
        "feed_forward_length": 256,
        "attention.head_count": 2,
    }.items():
        writer.add_uint32(f"qwen2.{key}", count)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", "qwen2")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    writer.add_array("tokenizer.ggml.tokens", ["<|im_end|>", *alphabet])
    writer.add_array("tokenizer.ggml.token_type", [3] + [1] * 256)
    writer.add_array("tokenizer.ggml.merges", ["h e"])
    writer.add_uint32("tokenizer.ggml.eos_token_id", 0)
    rng = np.random.default_rng(0)
    block: dict[str, tuple[int, ...]] = {
        f"attn_{name}.weight": (64, 64) for name in ("q", "k", "v", "output")
    }
    block |= {f"ffn_{name}.weight": (256, 64) for name in ("gate", "up")}
    block |= {"ffn_down.weight": (64, 256), "attn_norm.weight": (64,), "ffn_norm.weight": (64,)}
    shapes = {f"blk.0.{name}": shape for name, shape in block.items()}
    shapes |= {"token_embd.weight": (257, 64), "output_norm.weight": (64,)}
    for name, shape in shapes.items():
        writer.add_tensor(name, rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


Judged = list[tuple[str, str]]


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    """(file, text) of each perplexity asked for; it is 10 for the source and 10.25 otherwise."""
    asked: Judged = []

    async def perplexity(model: Path, text: str, progress: object) -> float:
        asked.append((model.name, text))
        return 10.0 if model.name == "source.gguf" else 10.25

    monkeypatch.setattr(phloem_quantize, "perplexity", perplexity)
    return asked


Phloem = Callable[..., Any]


def test_types_sizes_and_perplexity_are_told(phloem: Phloem, source: Path, judged: Judged) -> None:
    result = phloem("quantize", "./source.gguf", "out.gguf", "--type", "Q8_0")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == [
        "TYPE  TENSORS  SIZE",
        "Q8_0  8        0.1 MB",
        "F32   3        0.0 MB",
        "size 0.3 MB → 0.1 MB (-73.3 %), 8.55 bits a weight",
        "perplexity 10.00 → 10.25 (+2.5 %)",
    ]
    assert judged == [("source.gguf", sample_text()), ("out.gguf", sample_text())]
    assert open_checkpoint("out.gguf").format == "gguf Q8_0"


def test_types_that_rows_do_not_allow_are_told(phloem: Phloem, source: Path) -> None:
    result = phloem("quantize", "source.gguf", "out.gguf", "--type", "Q4_K", "--no-perplexity")
    assert result.code == 0
    assert result.err == (
        "phloem: 7 tensors in Q4_1 instead of Q4_K, whose blocks of 256 do not divide rows of 64\n"
    )
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader("out.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == "Q4_K"
    assert kinds["blk.0.ffn_up.weight"] == kinds["token_embd.weight"] == "Q4_1"
    assert "perplexity" not in result.out


@pytest.mark.parametrize(("kind", "taken"), [("Q5_K", "Q8_0"), ("Q6_K", "Q8_0")])
def test_other_fallbacks(phloem: Phloem, source: Path, kind: str, taken: str) -> None:
    arguments = ["--type", kind, "--embedding-type", "Q4_0", "--no-perplexity"]
    result = phloem("quantize", "source.gguf", "out.gguf", *arguments)
    assert f"6 tensors in {taken} instead of {kind}" in result.err
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader("out.gguf").tensors}
    assert (kinds["blk.0.ffn_up.weight"], kinds["token_embd.weight"]) == (taken, "Q4_0")


def test_perplexity_of_a_file(phloem: Phloem, source: Path, judged: Judged) -> None:
    Path("own.txt").write_text("my own text")
    result = phloem(
        "quantize", "source.gguf", "out.gguf", "--type", "F16", "--perplexity", "own.txt"
    )
    assert result.code == 0
    assert judged == [("source.gguf", "my own text"), ("out.gguf", "my own text")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["out.gguf", "--type", "Q3_K"], 2, "Q4_0"),
        (["out.gguf"], 2, "--type"),
        (["out.gguf", "--type", "Q8_0", "--perplexity", "absent"], 2, "cannot read absent"),
        (["out.gguf", "--type", "Q8_0", "--perplexity", "source.gguf"], 2, "it is not UTF-8"),
        (
            ["out.gguf", "--type", "Q8_0", "--perplexity", "x", "--no-perplexity"],
            2,
            "exclude each other",
        ),
        (["out.bin", "--type", "Q8_0"], 1, "must end in .gguf"),
        (["source.gguf", "--type", "Q8_0", "--force"], 1, "is the source itself"),
        (["there.gguf", "--type", "Q8_0"], 1, "--force replaces it"),
    ],
)
def test_refusals_come_before_anything_is_written(
    phloem: Phloem, source: Path, arguments: list[str], code: int, said: str
) -> None:
    Path("there.gguf").write_bytes(b"precious")
    before = source.read_bytes()
    result = phloem("quantize", "source.gguf", *arguments)
    assert (result.code, result.out) == (code, "")
    assert said in result.err
    assert Path("there.gguf").read_bytes() == b"precious"
    assert source.read_bytes() == before
    assert {path.name for path in source.parent.iterdir()} == {"source.gguf", "there.gguf"}


def test_unknown_and_damaged_sources_are_one_line(phloem: Phloem, clean_room: Path) -> None:
    (clean_room / "bad.gguf").write_bytes(b"GGUF")
    for name in ("ghost", "bad.gguf", "./absent.gguf"):
        result = phloem("quantize", name, "out.gguf", "--type", "Q8_0")
        assert result.code == 1
        assert result.err.startswith("phloem: ")
        assert result.err.count("\n") == 1


@pytest.mark.parametrize("error", [QuantizeError("too short"), Unavailable("the worker died")])
def test_file_stays_when_perplexity_fails(
    phloem: Phloem, source: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def fails(*_: object) -> float:
        raise error

    monkeypatch.setattr(phloem_quantize, "perplexity", fails)
    result = phloem("quantize", "source.gguf", "out.gguf", "--type", "Q8_0")
    assert result.code == 1
    assert str(error) in result.err
    assert open_checkpoint("out.gguf").format == "gguf Q8_0"

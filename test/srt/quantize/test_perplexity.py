"""Perplexity: how a text is cut, and the number against transformers'."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.checkpoint import open_checkpoint
from phloem.srt.quantize import QuantizeError, perplexity, sample_text
from phloem.srt.quantize.perplexity import windows
from phloem.srt.tokenizer import load_tokenizer

Write = Callable[..., Path]

LLAMA2 = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True}


@pytest.mark.parametrize(
    ("count", "opening", "lengths"),
    [
        (10, [], [4, 4, 2]),
        (9, [], [4, 4]),  # the ninth would stand alone
        (9, [7], [4, 4, 4]),
        (10, [7], [4, 4, 4, 2]),
        (1, [], []),
        (1, [7], [2]),
        (0, [7], []),
    ],
)
def test_windows(count: int, opening: list[int], lengths: list[int]) -> None:
    cut = list(windows(list(range(100, 100 + count)), 4, opening))
    assert [len(window) for window in cut] == lengths
    assert all(window[: len(opening)] == opening for window in cut)
    ids = [i for window in cut for i in window[len(opening) :]]
    assert ids == list(range(100, 100 + len(ids)))


def theirs(folder: Path, cut: list[list[int]]) -> float:
    """exp of the mean cross-entropy, by transformers."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    lost, count = 0.0, 0
    for window in cut:
        ids = torch.tensor([window])
        with torch.no_grad():
            logits = model(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum")
        lost, count = lost + float(loss), count + len(window) - 1
    return math.exp(lost / count)


@pytest.mark.e2e
def test_agrees_with_transformers(write_folder: Write, make_sentencepiece: Any) -> None:
    """Over several windows, each opened by BOS; markup in the text is ordinary text."""
    names = {"bos_token": "<s>", "eos_token": "</s>"} | LLAMA2
    folder = write_folder(tokenizer=make_sentencepiece(), tokenizer_config=names)
    text = "on the <s> hearth </s> of the other " * 25
    tokenizer = load_tokenizer(open_checkpoint(folder))
    ids = tokenizer.encode(text, special=False)
    assert 1 not in ids
    cut = list(windows(ids, 256, [1]))
    assert len(cut) > 2
    ours = asyncio.run(perplexity(folder, text, dtype="float32"))
    assert ours == pytest.approx(theirs(folder, cut), rel=1e-4)


@pytest.mark.e2e
def test_text_without_anything_to_predict(write_folder: Write) -> None:
    with pytest.raises(QuantizeError, match="fewer than two tokens"):
        asyncio.run(perplexity(write_folder(), "a"))


@pytest.mark.model
def test_sample_is_about_two_thousand_tokens(default_model: Path) -> None:
    ids = load_tokenizer(open_checkpoint(default_model)).encode(sample_text(), special=False)
    assert 1800 < len(ids) < 2600

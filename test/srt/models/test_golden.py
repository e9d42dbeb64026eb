"""The default model against transformers reading the same GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from phloem.srt.checkpoint.opening import open_checkpoint
from phloem.srt.messages import RowPlan, RowStart, SamplingParams, StepPlan, pack
from phloem.srt.models.layers import can_pack
from phloem.srt.models.torch_model import TorchModel
from phloem.srt.tokenizer.tokenizer import load_tokenizer
from phloem.srt.worker.runner import ModelRunner

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]  # reading GGUF takes transformers long
transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.5}
"""Largest absolute error of a logit. Logits of this model reach about 30."""
TIE = {torch.float32: 4e-3, torch.bfloat16: 1.0}
"""Two logits closer than this may come in either order."""

NEW_TOKENS = 64
TURN = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = [
    TURN.format("What is the capital of France?"),
    TURN.format("Write a haiku about the sea."),
    TURN.format("Give me a JSON object that describes a cat."),
    TURN.format("Explain photosynthesis to a child, in three sentences."),
    TURN.format("List five prime numbers."),
    TURN.format("Traduis en français : the weather is nice today."),
    "<|im_start|>system\nYou answer in one word.<|im_end|>\n" + TURN.format("Is water wet?"),
    "The quick brown fox",
    "def fibonacci(n):\n    ",
    "In 1969,",
    "Once upon a time, in a small village by the river,",
    '{"name": "Ada", "born": 1815, "fields": [',
    "SELECT name, count(*) FROM orders",
    "1 + 1 = 2\n2 + 2 = 4\n3 + 3 =",
    "<html>\n<head>\n<title>",
    "Die Sonne scheint und",
    "Q: Who wrote Hamlet?\nA:",
    "- apples\n- pears\n-",
    "🙂 means happy, 😢 means",
    "The theory of relativity rests on two postulates. " * 12 + "The first",
]


@pytest.fixture(scope="module")
def prompts(default_model: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(open_checkpoint(default_model))
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def theirs(default_model: Path) -> Any:
    """transformers' model, float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        str(default_model.parent),
        gguf_file=default_model.name,
        quantization_config=transformers.GgufConfig(dequantize=True),
        dtype=torch.float32,
    ).eval()


def generate(
    runner: ModelRunner, prompts: list[list[int]], count: int
) -> tuple[list[list[int]], list[list[NDArray[np.float32]]]]:
    """Greedy tokens of all prompts, batched, and the logits they were chosen from."""
    tokens: list[list[int]] = [[] for _ in prompts]
    logits: list[list[NDArray[np.float32]]] = [[] for _ in prompts]
    slot = 1
    for step in range(count):
        rows = []
        for i, prompt in enumerate(prompts):
            size = 1 if step else len(prompt)
            start = RowStart(len(prompt), b"", SamplingParams(), seed=0, stop_ids=[])
            rows.append(
                RowPlan(
                    row=i,
                    epoch=i,
                    tokens=b"" if step else pack(prompt),
                    slots=pack(range(slot, slot + size)),
                    sample=True,
                    start=None if step else start,
                )
            )
            slot += size
        for i, values in enumerate(runner.logits(runner.forward(StepPlan(step, rows)), {})):
            logits[i].append(values)
            tokens[i].append(int(values.argmax()))
            runner.commit(i, tokens[i][-1])
    return tokens, logits


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        pytest.param(
            torch.bfloat16,
            marks=pytest.mark.skipif(
                not can_pack(torch.bfloat16), reason="this CPU does not multiply bfloat16"
            ),
        ),
    ],
    ids=str,
)
def test_greedy_generation(
    dtype: torch.dtype, default_model: Path, theirs: Any, prompts: list[list[int]]
) -> None:
    """Forced along our tokens, transformers has the same logits, and would choose each of them."""
    model = TorchModel.load(open_checkpoint(default_model), kv_slots=4096, dtype=dtype)
    runner = ModelRunner(model, kv_slots=4096, max_rows=len(prompts))
    tokens, logits = generate(runner, prompts, NEW_TOKENS)
    for prompt, ours, values in zip(prompts, tokens, logits, strict=True):
        with torch.no_grad():
            sequence = torch.tensor([prompt + ours[:-1]])
            expected = theirs(sequence, logits_to_keep=NEW_TOKENS).logits[0]
        error = (torch.from_numpy(np.stack(values)) - expected).abs().max()
        assert error < TOLERANCE[dtype]
        best, at = expected.max(-1)
        for step in (at != torch.tensor(ours)).nonzero().flatten().tolist():
            gap = best[step] - expected[step, ours[step]]
            assert gap < TIE[dtype], f"{prompt} at {step}: {ours[step]} instead of {int(at[step])}"

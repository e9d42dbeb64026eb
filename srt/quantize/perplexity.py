"""How well a model predicts a text, computed as it is served."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from phloem.srt.config import CacheOptions, ModelOptions, ServeConfig
from phloem.srt.engine import Engine
from phloem.srt.generation import GenerateRequest, collect
from phloem.srt.hub import SILENT, Progress
from phloem.srt.messages import SamplingParams
from phloem.srt.quantize.errors import QuantizeError

WINDOW = 512
"""Most tokens that are predicted from each other; longer texts are cut into windows."""


async def perplexity(
    model: Path,
    text: str,
    progress: Progress = SILENT,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
) -> float:
    """exp of the mean negative log-likelihood of `text`'s tokens under the model, computed in
    `dtype`; by default in the one that it would be served in.

    Each window stands alone: its first token is given, the others are predicted. Models that open
    a prompt with BOS get it before each window, and then the first token counts, too.

    Raises:
        QuantizeError: the text has no token to predict.
        PhloemError, CheckpointError, StartupError: as `Engine.start`.
    """
    config = ServeConfig(
        model=ModelOptions(model=str(model), dtype=dtype),
        cache=CacheOptions(kv_tokens=2 * WINDOW),
    )
    async with Engine(config, progress=progress) as engine:
        ids = await engine.tokenize(text, special=False)
        opening = (await engine.tokenize(""))[:1]
        size = min(WINDOW, engine.card.context_length)
        lost, count = 0.0, 0
        for window in windows(ids, size, opening):
            request = GenerateRequest(
                prompt=window, sampling=SamplingParams(max_tokens=0), prompt_logprobs_from=0
            )
            for entry in (await collect(engine.generate(request))).prompt_logprobs or []:
                if entry is not None:
                    lost -= entry.logprob
                    count += 1
    if not count:
        raise QuantizeError("the text has fewer than two tokens: there is nothing to predict")
    return math.exp(lost / count) if lost / count < 700 else math.inf


def windows(ids: list[int], size: int, opening: list[int]) -> Iterator[list[int]]:
    """Cut `ids` into prompts of at most `size` tokens, each after the tokens of `opening`; one
    with nothing to predict is left out."""
    step = size - len(opening)
    for start in range(0, len(ids), step):
        window = [*opening, *ids[start : start + step]]
        if len(window) > 1:
            yield window

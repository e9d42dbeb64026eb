"""Invariant 4: a greedy answer is the same, token for token, whatever happened around it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from phloem.srt.config import CacheOptions, ModelOptions, SchedulerOptions, ServeConfig
from phloem.srt.engine import Engine
from phloem.srt.generation import Completion, GenerateRequest, collect
from phloem.srt.messages import SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at one hundred degrees because",
    "To bake bread you need flour, water, salt and",
    "The three laws of motion say that",
    "My favourite season is autumn, since",
    "1 2 3 4 5 6",
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def config(model: Path, *, kv_tokens: int, step_tokens: int = 512) -> ServeConfig:
    return ServeConfig(
        model=ModelOptions(model=str(model)),
        cache=CacheOptions(kv_tokens=kv_tokens),
        scheduler=SchedulerOptions(max_step_tokens=step_tokens, max_running=8),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(default_model: Path) -> AsyncIterator[Engine]:
    async with Engine(config(default_model, kv_tokens=4096)) as running:
        yield running


async def answer(engine: Engine, prompt: str, sampling: SamplingParams = GREEDY) -> Completion:
    return await collect(engine.generate(GenerateRequest(prompt=prompt, sampling=sampling)))


async def cold(engine: Engine, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    """Each prompt alone, with an empty cache."""
    answers = []
    for prompt in PROMPTS:
        await engine.flush()
        answers.append((await answer(engine, prompt, sampling)).token_ids)
    return answers


@pytest.mark.asyncio(loop_scope="module")
async def test_cached_batched_and_alone_are_equal(engine: Engine) -> None:
    expected = await cold(engine)
    for prompt in PROMPTS:
        await answer(engine, prompt)
    again = [await answer(engine, prompt) for prompt in PROMPTS]
    assert all(a.cached_tokens == a.prompt_tokens - 1 for a in again)
    assert [a.token_ids for a in again] == expected
    await engine.flush()
    batched = await asyncio.gather(*(answer(engine, prompt) for prompt in PROMPTS))
    assert [b.token_ids for b in batched] == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_seeded_sampling_does_not_depend_on_the_batch(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=24)
    expected = await cold(engine, sampling)
    await engine.flush()
    batched = await asyncio.gather(*(answer(engine, p, sampling) for p in PROMPTS))
    assert [b.token_ids for b in batched] == expected


@pytest.mark.asyncio(loop_scope="module")
async def test_chunked_and_preempted_are_equal(engine: Engine, default_model: Path) -> None:
    long = msgspec.structs.replace(GREEDY, max_tokens=64)
    expected = await cold(engine, long)
    # 8 rows of up to 80 tokens in 192 slots, 24 tokens a step: chunks and preemption for sure
    async with Engine(config(default_model, kv_tokens=192, step_tokens=24)) as small:
        answers = await asyncio.gather(*(answer(small, p, long) for p in PROMPTS))
        await asyncio.sleep(1.2)  # for the last snapshot
        assert small.stats.preemptions_total > 0
    assert [a.token_ids for a in answers] == expected

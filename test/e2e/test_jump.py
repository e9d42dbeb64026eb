"""Jump-forward, closing, and a grammar process that dies: with the model and real processes."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import jsonschema_rs
import pytest
import pytest_asyncio

from phloem.constrained.spec import Choice, Constraint, JsonSchema, Regex, Whitespace
from phloem.srt.config import CacheOptions, ModelOptions, SchedulerOptions, ServeConfig
from phloem.srt.engine import Engine
from phloem.srt.errors import InvalidRequest
from phloem.srt.generation import Completion, GenerateRequest, collect
from phloem.srt.messages import FinishReason, JumpForward, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "home_town": {"enum": ["Paris", "London", "Lisbon"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 2},
    },
    "required": ["name", "home_town", "age", "tags"],
    "additionalProperties": False,
}
COMPACT = JsonSchema(schema=json.dumps(PERSON), whitespace=Whitespace.COMPACT)
CONSTRAINTS: list[Constraint] = [
    COMPACT,
    JsonSchema(schema=json.dumps(PERSON)),
    Choice(choices=("certainly", "certainly not", "perhaps")),
    Regex(pattern=r"The year [0-9]{4} was (good|bad)\."),
]
VALIDATOR = jsonschema_rs.validator_for(PERSON)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(default_model: Path) -> AsyncIterator[Engine]:
    config = ServeConfig(
        model=ModelOptions(model=str(default_model)),
        cache=CacheOptions(kv_tokens=8192),
        scheduler=SchedulerOptions(max_running=32),
    )
    async with Engine(config) as running:
        yield running


async def answer(
    engine: Engine,
    constraint: Constraint,
    jump: JumpForward,
    *,
    seed: int = 1,
    temperature: float = 0.0,
    max_tokens: int = 160,
) -> Completion:
    request = GenerateRequest(
        prompt=f"Somebody, number {seed}: ",
        sampling=SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens),
        constraint=constraint,
        jump=jump,
    )
    return await collect(engine.generate(request))


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("constraint", CONSTRAINTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_exact_jumps_change_no_token(
    engine: Engine, constraint: Constraint, temperature: float
) -> None:
    for seed in range(3):
        off, exact = [
            await answer(engine, constraint, jump, seed=seed, temperature=temperature)
            for jump in (JumpForward.OFF, JumpForward.EXACT)
        ]
        assert off.token_ids == exact.token_ids
        assert (off.text, off.finish) == (exact.text, exact.finish)
        assert off.forced_tokens == 0


@pytest.mark.asyncio(loop_scope="module")
async def test_canonical_jumps_are_valid_and_repeat(engine: Engine) -> None:
    together = await asyncio.gather(
        *(
            answer(engine, COMPACT, JumpForward.CANONICAL, seed=seed, temperature=1.2)
            for seed in range(16)
        )
    )
    for seed, found in enumerate(together):
        assert VALIDATOR.is_valid(json.loads(found.text))
        assert found.finish.reason is FinishReason.STOP
        assert found.forced_tokens >= 10
        if seed % 5 == 0:
            alone = await answer(engine, COMPACT, JumpForward.CANONICAL, seed=seed, temperature=1.2)
            assert alone.token_ids == found.token_ids


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("jump", list(JumpForward))
async def test_every_budget_is_enough_or_refused(engine: Engine, jump: JumpForward) -> None:
    with pytest.raises(InvalidRequest, match="the constraint wants") as caught:
        await answer(engine, COMPACT, jump, max_tokens=3)
    assert caught.value.code == "max_tokens_too_small"
    least = int(str(caught.value).split()[-1])
    for budget in range(least, least + 24, 3):
        found = await answer(engine, COMPACT, jump, max_tokens=budget, temperature=1.5, seed=budget)
        assert VALIDATOR.is_valid(json.loads(found.text)), budget
        assert found.completion_tokens <= budget


async def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError("it did not happen within a minute")


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grammar_process_that_is_killed_costs_no_token(engine: Engine) -> None:
    def requests() -> list[asyncio.Task[Completion]]:
        return [
            asyncio.create_task(
                answer(
                    engine,
                    CONSTRAINTS[seed % len(CONSTRAINTS)],
                    JumpForward.CANONICAL if seed % 3 else JumpForward.EXACT,
                    seed=seed,
                    temperature=0.9,
                )
            )
            for seed in range(64)
        ]

    quiet = await asyncio.gather(*requests())
    assert engine._backend is not None
    running = requests()
    for deaths in range(1, 3):
        await asyncio.sleep(0.7)
        os.kill(engine._backend.generation.pids["grammar"], signal.SIGKILL)
        await wait_for(functools.partial(lambda least: engine.restarts >= least, deaths))
    killed = await asyncio.gather(*running)
    assert [a.token_ids for a in killed] == [a.token_ids for a in quiet]

"""Drafts with the model and real processes: the same tokens, in fewer steps."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import pytest_asyncio

from phloem.constrained.spec import Choice, Constraint, JsonSchema, Regex, Whitespace
from phloem.srt.config import (
    CacheOptions,
    ConstraintOptions,
    ModelOptions,
    SchedulerOptions,
    ServeConfig,
)
from phloem.srt.engine import Engine
from phloem.srt.generation import Completion, GenerateRequest, collect
from phloem.srt.messages import FinishReason, JumpForward, SamplingParams

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(300)]

CALL = {
    "type": "object",
    "properties": {
        "tool": {"enum": ["get_weather", "get_time", "convert"]},
        "city": {"type": "string", "maxLength": 10},
        "unit": {"enum": ["celsius", "fahrenheit", "kelvin"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "tags": {"type": "array", "items": {"enum": ["a", "ab", "b"]}, "maxItems": 3},
    },
    "required": ["tool", "city", "unit", "days", "tags"],
    "additionalProperties": False,
}
COMPACT = JsonSchema(schema=json.dumps(CALL), whitespace=Whitespace.COMPACT)
CONSTRAINTS: list[Constraint] = [
    COMPACT,
    JsonSchema(schema=json.dumps(CALL)),
    Choice(choices=("certainly", "certainly not", "perhaps")),
    Regex(pattern=r"((red|green|blue), ){1,4}and that is (all|it)\."),
]
VALIDATOR = jsonschema_rs.validator_for(CALL)


def config(model: Path, drafts: int, **scheduler: Any) -> ServeConfig:
    return ServeConfig(
        model=ModelOptions(model=str(model)),
        cache=CacheOptions(kv_tokens=8192),
        scheduler=SchedulerOptions(**scheduler),
        constraints=ConstraintOptions(draft_tokens=drafts, draft_batch=8),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain(default_model: Path) -> AsyncIterator[Engine]:
    async with Engine(config(default_model, 0)) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def drafting(default_model: Path) -> AsyncIterator[Engine]:
    async with Engine(config(default_model, 12)) as running:
        yield running


def request(index: int, constraint: Constraint, jump: JumpForward, **more: Any) -> GenerateRequest:
    sampling: dict[str, Any] = {"temperature": 0.0, "seed": index % 5, "max_tokens": 120}
    return GenerateRequest(
        prompt=f"Question {index % 7}: ",
        sampling=SamplingParams(**(sampling | more)),
        constraint=constraint,
        jump=jump,
    )


async def answers(engine: Engine, requests: list[GenerateRequest], at_once: int) -> list[Any]:
    """Each answer's tokens, text and end; `at_once` run beside each other."""
    gate = asyncio.Semaphore(at_once)

    async def answer(one: GenerateRequest) -> Completion:
        async with gate:
            return await collect(engine.generate(one))

    return await asyncio.gather(*(answer(one) for one in requests))


def same(drafted: list[Completion], alone: list[Completion]) -> int:
    """How many guesses were accepted; the answers are the same."""
    for one, other in zip(drafted, alone, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.text, one.finish) == (other.text, other.finish)
        assert one.forced_tokens == other.forced_tokens
        assert other.accepted_guesses == other.rejected_guesses == 0
    return sum(one.accepted_guesses for one in drafted)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("jump", [JumpForward.EXACT, JumpForward.CANONICAL])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
async def test_drafts_change_no_token(
    plain: Engine, drafting: Engine, jump: JumpForward, temperature: float
) -> None:
    requests = [
        request(index, constraint, jump, temperature=temperature)
        for index in range(10)
        for constraint in CONSTRAINTS
    ]
    alone = await answers(plain, requests, 5)
    for at_once, asked in ((1, 16), (5, len(requests))):
        drafted = await answers(drafting, requests[:asked], at_once)
        assert same(drafted, alone[:asked]) > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_repeated_keys_and_values_are_guessed(drafting: Engine) -> None:
    """At temperature 0 most of what is drawn is what was drawn before."""
    requests = [request(index, COMPACT, JumpForward.CANONICAL) for index in range(20)]
    found = (await answers(drafting, requests, 1))[10:]
    drawn = sum(one.completion_tokens - one.forced_tokens for one in found)
    assert sum(one.accepted_guesses for one in found) > drawn // 2
    assert all(VALIDATOR.is_valid(json.loads(one.text)) for one in found)


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "more",
    [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"min_tokens": 30},
        {"top_k": 5, "top_p": 0.9, "min_p": 0.01},
        {"logprobs": 3},
        {"logit_bias": {260: -3.0, 28: 2.0}},
    ],
    ids=lambda more: next(iter(more)),
)
async def test_drafts_go_with_every_way_to_sample(
    plain: Engine, drafting: Engine, more: dict[str, Any]
) -> None:
    requests = [
        request(index, constraint, JumpForward.CANONICAL, temperature=0.9, **more)
        for index in range(8)
        for constraint in (COMPACT, CONSTRAINTS[3])
    ]
    alone = await answers(plain, requests, 4)
    drafted = await answers(drafting, requests, 4)
    accepted = same(drafted, alone)
    if "logprobs" in more:  # does not jump, so there is no draft
        assert accepted == 0
        assert [one.logprobs for one in drafted] == [one.logprobs for one in alone]
    else:
        assert accepted > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_drafts_keep_within_every_budget(plain: Engine, drafting: Engine) -> None:
    """Masks are narrowed near the end, along a draft as without it."""
    requests = [
        request(index, COMPACT, JumpForward.CANONICAL, temperature=temperature, max_tokens=budget)
        for temperature in (0.0, 1.5)
        for index, budget in enumerate([*range(36, 60), *range(36, 60)])
    ]
    alone = await answers(plain, requests, 4)
    drafted = await answers(drafting, requests, 4)
    assert same(drafted, alone) > 0
    assert all(VALIDATOR.is_valid(json.loads(one.text)) for one in drafted)
    assert {FinishReason.STOP} <= {one.finish.reason for one in drafted}


@pytest.mark.asyncio(loop_scope="module")
async def test_stop_strings_and_stop_tokens_end_a_drafted_answer(
    plain: Engine, drafting: Engine
) -> None:
    base = request(1, COMPACT, JumpForward.CANONICAL)
    [whole] = await answers(plain, [base] * 1, 1)
    stops = [whole.token_ids[len(whole.token_ids) * i // 6] for i in range(1, 6)]
    by_id = [request(1, COMPACT, JumpForward.CANONICAL, stop_token_ids=(id_,)) for id_ in stops]
    by_text = [
        GenerateRequest(
            prompt=base.prompt,
            sampling=base.sampling,
            constraint=COMPACT,
            jump=JumpForward.CANONICAL,
            stop=(text,),
        )
        for text in ('"unit"', "days", "]")
    ]
    for wanted in (by_id, by_text):
        for _ in range(2):
            alone = await answers(plain, wanted, 1)
            drafted = await answers(drafting, wanted, 1)
            assert [one.text for one in drafted] == [one.text for one in alone]
            assert [one.finish for one in drafted] == [one.finish for one in alone]


@pytest.mark.asyncio(loop_scope="module")
async def test_drafts_preemption_and_pages(default_model: Path, plain: Engine) -> None:
    """In a pool that is too small for all, rows give their slots back, and come again."""
    requests = [
        request(index, COMPACT, JumpForward.CANONICAL, temperature=0.7) for index in range(24)
    ]
    alone = await answers(plain, requests, 1)
    preemptions = 0
    for page in (1, 16):
        cache = CacheOptions(kv_tokens=160, page_size=page)
        small = replace(config(default_model, 12, max_running=8), cache=cache)
        async with Engine(small) as tight:
            drafted = await answers(tight, requests, 8)
            assert same(drafted, alone) > 0
            await asyncio.sleep(1.2)  # counts are told once a second
            preemptions += tight.stats.preemptions_total
    assert preemptions > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_grammar_process_that_is_killed_costs_no_token(
    plain: Engine, default_model: Path
) -> None:
    requests = [
        request(index, CONSTRAINTS[index % 4], JumpForward.CANONICAL, temperature=0.5)
        for index in range(40)
    ]
    alone = await answers(plain, requests, 4)
    async with Engine(config(default_model, 12)) as engine:
        assert engine._backend is not None
        running = asyncio.create_task(answers(engine, requests, 4))
        await asyncio.sleep(0.7)
        os.kill(engine._backend.generation.pids["grammar"], signal.SIGKILL)
        assert same(await running, alone) > 0


def test_guesses_are_in_usage_and_metrics(start_server: Callable[..., Any]) -> None:
    server = start_server("--kv-tokens", "4096")
    body = {
        "model": "tiny",
        "prompt": "A call: ",
        "temperature": 0,
        "max_tokens": 100,
        "response_format": {"type": "json_schema", "json_schema": {"schema": CALL}},
    }
    texts, details = [], []
    for _ in range(3):
        status, reply = server.post("/v1/completions", body)
        assert status == 200, reply
        texts.append(reply["choices"][0]["text"])
        details.append(reply["usage"]["completion_tokens_details"])
    assert len(set(texts)) == 1
    assert details[0]["accepted_prediction_tokens"] < details[2]["accepted_prediction_tokens"]
    for name in ("accepted", "rejected"):
        total = sum(one[f"{name}_prediction_tokens"] for one in details)
        server.until(
            lambda name=name, total=total: (
                server.metric(f"phloem_{name}_prediction_tokens_total") == total
            )
        )
    status, reply = server.post(
        "/generate",
        {
            "text": "A call: ",
            "sampling_params": {
                "json_schema": json.dumps(CALL),
                "temperature": 0,
                "max_new_tokens": 100,
            },
        },
    )
    assert status == 200 and reply["meta_info"]["accepted_prediction_tokens"] > 0

"""Quotas of tenants: what is counted, what a client is told, and who waits for how long."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phloem.srt.errors import RateLimited
from phloem.srt.http.errors import ErrorShape
from phloem.srt.http.rate_limits import Bucket, Quota, Quotas
from phloem.srt.tenants import Tenant
from phloem.srt.testing import ManualClock


def tenant(**limits: int) -> Tenant:
    return Tenant(name="acme", **limits)  # type: ignore[arg-type]


def refusal(quota: Quota, prompt_tokens: int = 1) -> RateLimited:
    with pytest.raises(RateLimited) as caught, quota.admitted(prompt_tokens):
        pass
    return caught.value


# ----------------------------------------------------------------------- the bucket


def test_a_bucket_is_refilled_evenly_and_never_above_its_brim() -> None:
    clock = ManualClock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert (bucket.remaining, bucket.seconds_until(1), bucket.seconds_until(60)) == (0, 1.0, 60.0)
    clock.advance(10)
    assert bucket.remaining == 10
    bucket.take(30)  # overdrawn
    assert (bucket.remaining, bucket.seconds_until(1)) == (0, 21.0)
    clock.advance(1000)
    assert bucket.level == 60
    bucket.take(-5)
    assert bucket.level == 60


@given(
    capacity=st.integers(1, 10_000),
    steps=st.lists(st.tuples(st.floats(0, 100), st.integers(0, 5_000)), max_size=50),
)
def test_no_more_is_served_than_the_quota_and_one_request(
    capacity: int, steps: list[tuple[float, int]]
) -> None:
    """Whoever takes only while there is something gets what was refilled, one minute's worth that
    was there, and the last request's overdraft."""
    clock = ManualClock()
    bucket = Bucket(capacity, clock)
    taken = largest = 0
    for pause, amount in steps:
        clock.advance(pause)
        if bucket.seconds_until(1) == 0:
            bucket.take(amount)
            taken, largest = taken + amount, max(largest, amount)
        assert taken <= capacity + clock.now * capacity / 60 + largest + 1e-6
        assert bucket.level <= capacity


# ----------------------------------------------------------------------- one tenant's quotas


def test_requests_are_counted_until_the_bucket_is_empty() -> None:
    clock = ManualClock()
    quota = Quota(tenant(requests_per_minute=2), clock)
    for _ in range(2):
        with quota.admitted(5) as bill:
            bill.accepted(5)
    error = refusal(quota)
    assert (error.code, error.retry_after) == ("rate_limit_exceeded", 30.0)
    clock.advance(30)
    with quota.admitted(5) as bill:
        bill.accepted(5)
    assert refusal(quota).retry_after == 30.0


def test_tokens_are_those_of_the_prompt_and_those_that_were_generated() -> None:
    clock = ManualClock()
    quota = Quota(tenant(tokens_per_minute=600), clock)
    assert quota.tokens is not None
    with quota.admitted(100) as bill:
        assert quota.tokens.remaining == 500
        bill.accepted(110)  # it was a little longer than was known
        assert quota.tokens.remaining == 490
        for _ in range(700):
            bill.output(1)
    assert quota.tokens.level == -210
    error = refusal(quota, 30)
    assert error.retry_after == pytest.approx(24.0)
    assert "600 tokens a minute" in error.message
    clock.advance(24)
    with quota.admitted(30):
        pass


def test_a_prompt_beyond_the_quota_waits_for_a_full_bucket_not_for_ever() -> None:
    clock = ManualClock()
    quota = Quota(tenant(tokens_per_minute=60), clock)
    with quota.admitted(600) as bill:
        bill.accepted(600)
    assert refusal(quota).retry_after == pytest.approx(541.0)
    assert refusal(quota, 600).retry_after == pytest.approx(600.0)
    clock.advance(600)
    with quota.admitted(600):
        pass


def test_what_the_engine_refuses_costs_nothing() -> None:
    quota = Quota(tenant(requests_per_minute=1, tokens_per_minute=100), ManualClock())
    for _ in range(3):
        with pytest.raises(ValueError, match="no"), quota.admitted(80):
            raise ValueError("no")

    def fail_late() -> None:
        with quota.admitted(80) as bill:
            bill.accepted(80)
            raise ValueError("late")

    with pytest.raises(ValueError, match="late"):
        fail_late()
    assert refusal(quota).code == "rate_limit_exceeded"


def test_requests_at_once() -> None:
    quota = Quota(tenant(max_concurrent=2), ManualClock())
    with quota.admitted(1), quota.admitted(1):
        error = refusal(quota)
        assert (error.code, error.retry_after) == ("concurrency_limit_exceeded", 1.0)
    with quota.admitted(1):
        pass
    assert quota.headers(ErrorShape.OPENAI) == {}


def test_prompts_that_choices_share_count_once() -> None:
    clock = ManualClock()
    quotas = Quotas({"acme": tenant(tokens_per_minute=100), "free": Tenant(name="free")}, clock)
    quota = quotas.of("acme")
    assert quota is not None and quota.tokens is not None
    shared = [1] * 10
    with quotas.admitted("acme", [shared, shared, [1] * 7, "a text"]):
        assert quota.tokens.remaining == 83
    assert quota.tokens.remaining == 100
    assert quotas.of("free") is None
    with quotas.admitted("free", [shared]) as bill:
        bill.accepted(10)
        bill.output(10)


def test_headers_in_either_spelling() -> None:
    clock = ManualClock()
    quota = Quota(tenant(requests_per_minute=60, tokens_per_minute=6000), clock)
    with quota.admitted(90) as bill:
        bill.accepted(90)
        bill.output(6010)
    assert quota.headers(ErrorShape.OPENAI) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1s",
        "x-ratelimit-limit-tokens": "6000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "1m1s",
    }
    clock.advance(0.9)
    assert quota.headers(ErrorShape.OPENAI)["x-ratelimit-reset-requests"] == "100ms"
    told = quota.headers(ErrorShape.ANTHROPIC)
    assert told["anthropic-ratelimit-requests-limit"] == "60"
    assert told["anthropic-ratelimit-tokens-remaining"] == "0"
    reset = datetime.fromisoformat(told["anthropic-ratelimit-tokens-reset"])
    assert 50 < (reset - datetime.now(UTC)).total_seconds() < 63
    assert len(told) == 6


# ----------------------------------------------------------------------- over HTTP


@pytest.fixture
def limited(serve: Any, tmp_path: Path) -> Callable[..., Any]:
    """Serve tenants `acme`, with quotas, and `free`, without; a key is the tenant's name."""

    async def start(**limits: int) -> Any:
        lines = [f"{name} = {value}" for name, value in limits.items()]
        path = tmp_path / "tenants.toml"
        path.write_text(_file(lines))
        return await serve(tenants=str(path))

    return start


def _file(lines: list[str]) -> str:
    keys = {name: hashlib.sha256(name.encode()).hexdigest() for name in ("acme", "free")}
    tables = [f'[tenants.{name}]\nkey_sha256 = "{key}"\n' for name, key in keys.items()]
    return tables[1] + tables[0] + "\n".join(lines)


ACME = {"Authorization": "Bearer acme"}
FREE = {"Authorization": "Bearer free"}
CHAT = {"messages": [{"role": "user", "content": "Hi"}]}


def told(reply: Any) -> dict[str, str]:
    return {
        name.lower().removeprefix("x-ratelimit-"): value
        for name, value in reply.headers.items()
        if "ratelimit" in name.lower()
    }


async def test_every_reply_says_what_is_left(limited: Any, engine: Any) -> None:
    api = await limited(requests_per_minute=2, tokens_per_minute=1000)
    models = await api.call("GET", "/v1/models", headers=ACME)
    assert told(models)["remaining-requests"] == "2"
    whole = await api.call("POST", "/v1/chat/completions", CHAT, headers=ACME)
    used = whole.json["usage"]["total_tokens"]
    assert told(whole)["remaining-requests"] == "1"
    assert told(whole)["remaining-tokens"] == str(1000 - used)
    stream = await api.call("POST", "/v1/chat/completions", {**CHAT, "stream": True}, headers=ACME)
    assert stream.status == 200
    prompt = whole.json["usage"]["prompt_tokens"]
    assert told(stream)["remaining-tokens"] == str(1000 - used - prompt)
    assert told(stream)["remaining-requests"] == "0"
    refused = await api.call("POST", "/v1/completions", {"prompt": "Hi"}, headers=ACME)
    assert refused.status == 429
    assert refused.json["error"]["type"] == "rate_limit_error"
    assert refused.json["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["Retry-After"]) <= 30
    assert told(refused)["limit-requests"] == "2"
    assert len(engine.requests) == 2
    other = await api.call("POST", "/v1/chat/completions", CHAT, headers=FREE)
    assert (other.status, told(other)) == (200, {})
    unknown = await api.call("POST", "/v1/chat/completions", CHAT)
    assert (unknown.status, told(unknown)) == (401, {})


async def test_choices_are_one_request_and_one_prompt(limited: Any) -> None:
    api = await limited(requests_per_minute=10, tokens_per_minute=1000)
    for path, body in (
        ("/v1/chat/completions", {**CHAT, "n": 3}),
        ("/v1/completions", {"prompt": ["Hi", "Ho"], "n": 2}),
    ):
        before = told(await api.call("GET", "/v1/models", headers=ACME))
        reply = await api.call("POST", path, body, headers=ACME)
        spent = int(before["remaining-tokens"]) - int(told(reply)["remaining-tokens"])
        assert spent in (used := reply.json["usage"]["total_tokens"], used - 1)  # time goes on
        assert int(before["remaining-requests"]) - int(told(reply)["remaining-requests"]) <= 1


async def test_bodies_that_are_refused_cost_nothing(limited: Any, engine: Any, script: Any) -> None:
    api = await limited(requests_per_minute=1, tokens_per_minute=1000)
    engine.script = lambda request: script(refusal=RateLimited("full", code="queue_full"))
    for body, status in (({}, 400), (CHAT, 429), (CHAT, 429)):
        reply = await api.call("POST", "/v1/chat/completions", body, headers=ACME)
        assert (reply.status, told(reply)["remaining-requests"]) == (status, "1")
        assert reply.json["error"]["code"] != "rate_limit_exceeded"
    engine.script = lambda request: script()
    assert (await api.call("POST", "/v1/chat/completions", CHAT, headers=ACME)).status == 200


async def test_a_client_that_leaves_frees_its_place(
    limited: Any, engine: Any, script: Any, eventually: Callable[..., Any]
) -> None:
    api = await limited(max_concurrent=1)
    hold = asyncio.Event()
    engine.script = lambda request: script(hold=hold)
    first = asyncio.create_task(api.call("POST", "/generate", {"text": "Hi"}, headers=ACME))
    await eventually(lambda: engine.running)
    second = await api.call("POST", "/generate", {"text": "Hi"}, headers=ACME)
    assert (second.status, second.json["error"]["code"]) == (429, "concurrency_limit_exceeded")
    first.cancel()
    await eventually(lambda: not engine.running)
    hold.set()
    assert (await api.call("POST", "/generate", {"text": "Hi"}, headers=ACME)).status == 200


@pytest.mark.parametrize("shape", ["x-ratelimit-", "anthropic-ratelimit-"])
async def test_the_protocol_of_the_route_names_the_headers(limited: Any, shape: str) -> None:
    api = await limited(requests_per_minute=5)
    path = "/v1/messages" if shape.startswith("anthropic") else "/api/chat"
    reply = await api.call("POST", path, {}, headers={"X-Api-Key": "acme"})
    assert reply.status < 500
    names = {name.lower() for name in reply.headers if "ratelimit" in name.lower()}
    assert len(names) == 3
    assert all(re.match(shape, name) for name in names)

"""Many clients at once: nothing lost, nothing invalid, nothing left behind."""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import aiohttp
import jsonschema
import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]


def schema(index: int) -> dict[str, Any]:
    """Ten different small closed schemas."""
    return {
        "type": "object",
        "properties": {
            "id": {"const": index},
            "size": {"enum": ["s", "m", "l"]},
            "count": {"type": "integer", "minimum": 0, "maximum": 99},
            f"flag{index}": {"type": "boolean"},
        },
        "required": ["id", "size", "count", f"flag{index}"],
        "additionalProperties": False,
    }


def body(index: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Order number {index} as JSON."}],
        "max_tokens": 80,
        "temperature": 1.0,
        "seed": index,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "order", "strict": True, "schema": schema(index % 10)},
        },
    } | more


async def test_two_hundred_constrained_requests_are_all_valid(server: Any) -> None:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=280)
    ) as http:

        async def ask(index: int) -> None:
            url = f"{server.url}/v1/chat/completions"
            async with http.post(url, json=body(index)) as reply:
                assert reply.status == 200, await reply.text()
                answer = await reply.json()
            (choice,) = answer["choices"]
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), schema(index % 10))

        await asyncio.gather(*(ask(index) for index in range(200)))


async def test_killed_clients_leave_nothing_behind(server: Any) -> None:
    rng = random.Random(5)
    server.post("/flush_cache", {})

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask_and_leave(index: int) -> None:
            asked = body(index, max_tokens=400, stream=index % 2 == 0)
            if index % 3:
                del asked["response_format"]
                asked["ignore_eos"] = True
            try:
                async with asyncio.timeout(rng.random() * 2):
                    url = f"{server.url}/v1/chat/completions"
                    async with http.post(url, json=asked) as reply:
                        await reply.read()
            except (TimeoutError, aiohttp.ClientError):
                return  # the client is gone, as intended

        await asyncio.gather(*(ask_and_leave(index) for index in range(60)))

    server.until(lambda: server.metric("phloem_num_requests_running") == 0, seconds=10)
    server.until(lambda: server.metric("phloem_num_requests_waiting") == 0, seconds=10)
    held = server.metric("phloem_radix_locked_tokens") + server.metric("phloem_kv_private_slots")
    free = server.metric("phloem_kv_free_slots") + server.metric("phloem_radix_evictable_tokens")
    assert held == 0
    assert free == server.metric("phloem_kv_slots")


def test_an_idle_server_uses_no_cpu(server: Any) -> None:
    server.until(lambda: server.metric("phloem_num_requests_running") == 0)
    family = [psutil.Process(server.process.pid), *server.children().values()]

    def used() -> float:
        return sum(sum(p.cpu_times()[:2]) for p in family)

    before, began = used(), time.monotonic()
    time.sleep(3.0)
    share = (used() - before) / (time.monotonic() - began)
    assert share < 0.03, f"{share:.1%} of a core while idle"


async def test_a_shared_prefix_is_computed_once(server: Any) -> None:
    """Computed prefill tokens = unique tokens of the workload, ± the last token of each prompt."""
    server.post("/flush_cache", {})
    system = "You are a careful clerk. " + "Follow the rules of the office. " * 40
    prompts = []
    for index in range(24):
        text = f"{system}\nQuestion {index}: how many?"
        status, reply = server.post("/tokenize", {"text": text})
        assert status == 200
        prompts.append(reply["tokens"])
    unique = {tuple(p[: i + 1]) for p in prompts for i in range(len(p))}
    before = server.metric("phloem_computed_prefill_tokens_total")
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:

        async def ask(prompt: list[int]) -> int:
            asked = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
            async with http.post(f"{server.url}/v1/completions", json=asked) as reply:
                assert reply.status == 200
                usage = (await reply.json())["usage"]
            return int(usage["prompt_tokens_details"]["cached_tokens"])

        cached = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    server.until(lambda: server.metric("phloem_num_requests_running") == 0)
    computed = server.metric("phloem_computed_prefill_tokens_total") - before
    assert len(unique) <= computed <= len(unique) + len(prompts)
    assert sum(len(p) for p in prompts) - sum(cached) == computed

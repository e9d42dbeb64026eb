"""The hostile side of `fuzz.py`: clients that send one bad constraint after the other, and judge.

They run in a process of their own, and give way: what they do to build, send and judge must not
show in the latencies that their neighbours see.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import orjson
from fuzz_bombs import Case, bomb
from fuzz_judge import Reply, faults_of
from fuzz_random import random_case

PATIENCE_S = 60.0
"""A request that has not ended after so long hangs."""
BOMB_SHARE, LEAVE_SHARE, STREAM_SHARE = 0.35, 0.04, 0.25
KEPT_FAULTS, KEPT_SLOWEST, SHOWN_CHARS = 60, 12, 300
NICE = 10


@dataclass(frozen=True, kw_only=True)
class Target:
    """The server, how many clients go at it with which seed, and for how many seconds."""

    url: str
    model: str
    clients: int
    seed: int
    seconds: float


@dataclass
class Attack:
    """What was asked and what came of it. `ends` counts statuses with codes, `answers` how far
    answers came; a fault has the request that shows it."""

    asked: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    slowest: list[dict[str, Any]] = field(default_factory=list)
    faults: list[dict[str, Any]] = field(default_factory=list)
    fault_count: int = 0

    def fault(self, what: str, body: bytes) -> None:
        self.fault_count += 1
        if len(self.faults) < KEPT_FAULTS:
            request = body.decode(errors="replace")
            self.faults.append({"fault": what[:2_000], "request": request})

    def took(self, seconds: float, case: Case, end: str) -> None:
        shown = case.text[:SHOWN_CHARS]
        self.slowest.append({"seconds": seconds, "case": case.name, "end": end, "text": shown})
        self.slowest.sort(key=lambda one: -float(one["seconds"]))
        del self.slowest[KEPT_SLOWEST:]


def attack(target: Target) -> Attack:
    """To be run in a process of its own."""
    os.nice(NICE)
    return asyncio.run(_attack(target))


async def _attack(target: Target) -> Attack:
    found = Attack()
    end = time.perf_counter() + target.seconds
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        await asyncio.gather(*(
            Hostile(http, target, found, f"{target.seed}-{i}").send_until(end)
            for i in range(target.clients)
        ))  # fmt: skip
    return found


class Hostile:
    """Sends one hostile constraint after the other: the same ones for the same seed."""

    def __init__(
        self, http: aiohttp.ClientSession, target: Target, found: Attack, seed: str
    ) -> None:
        self._http = http
        self._target = target
        self._found = found
        self._random = random.Random(seed)

    async def send_until(self, end: float) -> None:
        while time.perf_counter() < end:
            draw = self._random.random()
            case = bomb(self._random) if draw < BOMB_SHARE else random_case(self._random)
            await self._send(case)

    async def _send(self, case: Case) -> None:
        rng, found = self._random, self._found
        body, stream = self._body(case)
        patience = rng.random() if rng.random() < LEAVE_SHARE else PATIENCE_S
        found.asked += 1
        began = time.perf_counter()
        try:
            async with asyncio.timeout(patience):
                reply = await self._post(body, stream)
        except TimeoutError:
            if patience < PATIENCE_S:
                found.ends["left"] += 1
                return
            found.ends["no end"] += 1
            found.fault(f"{case.name}: no end after {PATIENCE_S:g} s", body)
            return
        except (aiohttp.ClientError, ConnectionError, ValueError) as error:
            found.ends[type(error).__name__] += 1
            found.fault(f"{case.name}: {type(error).__name__}: {error}", body)
            await asyncio.sleep(0.5)
            return
        seconds = time.perf_counter() - began
        end = f"{reply.status} {reply.code}"
        found.ends[end] += 1
        found.took(seconds, case, end)
        if reply.report is not None:
            complete = "complete" if reply.report["complete"] else "cut"
            found.answers[f"{case.kind}, {reply.report['enforcement']}, {complete}"] += 1
        for fault in faults_of(case, reply, len(body)):
            found.fault(f"{case.name}: {fault}", body)

    def _body(self, case: Case) -> tuple[bytes, bool]:
        """A completion's body, and whether it asks for a stream. The constraint stands in it as
        raw text, in one of its spellings."""
        rng = self._random
        stream = rng.random() < STREAM_SHARE
        fields = {
            "model": self._target.model,
            "prompt": rng.choice(["Answer:", "JSON:", "Once upon a time"]),
            "max_tokens": rng.choice([1, 8, 32, 64]),
            "temperature": rng.choice([0, 1, 1.5]),
            "seed": rng.randrange(1_000),
            "stream": stream,
        }
        if rng.random() < 0.3:
            fields["constraint_whitespace"] = rng.choice(["compact", "spaced", "indented", "any"])
        if rng.random() < 0.3:
            fields["jump_forward"] = rng.choice(["off", "exact"])
        constraint = _spelling(case, rng).encode("utf-8", "surrogatepass")
        return orjson.dumps(fields)[:-1] + b"," + constraint + b"}", stream

    async def _post(self, body: bytes, stream: bool) -> Reply:
        url = f"{self._target.url}/v1/completions"
        headers = {"Content-Type": "application/json"}
        async with self._http.post(url, data=body, headers=headers) as answer:
            content = await answer.read()
            if stream and answer.status == 200:
                return _streamed(content)
            data = orjson.loads(content)
            if answer.status != 200:
                return Reply(status=answer.status, error=data["error"])
            (choice,) = data["choices"]
            return Reply(
                status=200,
                text=choice["text"],
                finish_reason=choice["finish_reason"],
                report=data.get("constraint"),
            )


def _spelling(case: Case, rng: random.Random) -> str:
    """A member of the body that asks for the constraint."""
    if case.kind == "choice":
        return f'"guided_choice":{case.text}'
    if case.kind == "regex":
        name = rng.choice(["regex", "guided_regex"])
        return f'"{name}":{json.dumps(case.text)}'
    if case.kind == "ebnf":
        name = rng.choice(["ebnf", "guided_grammar", "grammar"])
        return f'"{name}":{json.dumps(case.text)}'
    form = '"response_format":{"type":"json_schema","json_schema":{"name":"f",%s"schema":%s}}'
    return rng.choice([
        f'"json_schema":{case.text}',
        f'"json_schema":{json.dumps(case.text)}',
        f'"guided_json":{case.text}',
        f'"structured_outputs":{{"json":{case.text}}}',
        form % ("", case.text),
        form % ('"strict":false,', case.text),
    ])  # fmt: skip


def _streamed(content: bytes) -> Reply:
    """The answer in a whole stream. Raises `ValueError` when it has not exactly one end."""
    data = [line[5:].strip() for line in content.splitlines() if line.startswith(b"data:")]
    if not data or data[-1] != b"[DONE]" or data.count(b"[DONE]") != 1:
        raise ValueError(f"a stream that ends in {data[-1:]}")
    events = [orjson.loads(one) for one in data[:-1]]
    choices = [choice for event in events for choice in event.get("choices") or ()]
    reasons = [c["finish_reason"] for c in choices if c.get("finish_reason") is not None]
    errors = [event["error"] for event in events if "error" in event]
    if len(reasons) + len(errors) != 1:
        raise ValueError(f"a stream with ends {reasons} and errors {errors}")
    reports = [event["constraint"] for event in events if event.get("constraint") is not None]
    return Reply(
        status=200,
        text="".join(choice.get("text") or "" for choice in choices),
        finish_reason=reasons[0] if reasons else None,
        report=reports[-1] if reports else None,
        error=errors[0] if errors else None,
    )

"""docs/http-api.md: every route stands in it, and its examples are answered."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import msgspec
import pytest

from phloem.constrained.spec import Continued, JsonSchema, StructuralTag
from phloem.radix import Cleared
from phloem.srt.config import ServerOptions
from phloem.srt.errors import Unavailable
from phloem.srt.http.app import create_app
from phloem.srt.kv_events import KvEvents
from phloem.srt.messages import Answer, Flush, Flushed, Question
from phloem.srt.questions import (
    AskExplain,
    AskPolicy,
    AskStats,
    AskTree,
    CacheExplanation,
    CacheStats,
    CacheTree,
    MissReason,
    Pin,
    Pinned,
    Policy,
    Unpin,
    Unpinned,
)
from phloem.srt.tenants import load_tenants
from phloem.srt.wire import pack

DOCUMENT = (Path(__file__).parents[3] / "docs" / "http-api.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```bash\n(.*?)```", DOCUMENT, re.DOTALL)
    for line in block.splitlines()
]


_PIECES: dict[type, tuple[str, ...]] = {
    JsonSchema: ('"H', 'i"'),
    Continued: ("05-", "01"),
    StructuralTag: ("</think>", "no"),
}


def answer(question: Question) -> Answer:
    match question:
        case AskExplain():
            prompt = question.prompt or pack([1, 2])
            return CacheExplanation(0, prompt, "", 0, MissReason.NEVER_SEEN)
        case AskStats():
            numbers = [*[0] * 11, "lru", "fair", *[0] * 7]
            return msgspec.convert(["cache_stats", *numbers, [], [], 0, [], []], CacheStats)
        case AskTree():
            return CacheTree(0, [], truncated=False)
        case Pin():
            return Pinned(0, 1, 1, 10)
        case Unpin():
            return Unpinned(0, 1)
        case AskPolicy(_, policy):
            return Policy(0, policy or "fair", ["fair"])
        case Flush():
            return Flushed(0, 1)


@pytest.mark.parametrize("command", COMMANDS)
async def test_examples_are_answered(api: Any, engine: Any, script: Any, command: str) -> None:
    engine.answers = answer
    engine.script = lambda request: script(_PIECES.get(type(request.constraint), ("Hi",)))
    engine.kv_events.put_nowait(KvEvents(1, [Cleared()]))
    engine.kv_events.put_nowait(Unavailable("over"))
    name, *words = shlex.split(command)
    assert name == "curl"
    method, body, url = "GET", None, ""
    while words:
        match words.pop(0):
            case "--json":
                method, body = "POST", words.pop(0).encode()
            case "-X":
                method = words.pop(0)
            case "-N":
                continue
            case word:
                url = word
    path = url.removeprefix("localhost:30000")
    assert path.startswith("/")
    reply = await api.call(method, path, raw=body)
    assert reply.status == 200, reply.raw


def test_there_are_examples() -> None:
    assert len(COMMANDS) > 8


def test_every_route_is_in_the_table(engine: Any) -> None:
    named = set(re.findall(r"(?<=[` ])(/[^`?, ]*)`", DOCUMENT))
    for route in create_app(engine, ServerOptions()).router.routes():
        assert route.resource is not None
        canonical = route.resource.canonical.replace("/v1/models/{model}", "/v1/models/{id}")
        assert canonical in named, canonical


def test_the_file_of_tenants_loads(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", DOCUMENT, re.DOTALL)
    path = tmp_path / "tenants.toml"
    path.write_text(example)
    tenant = load_tenants(path)["acme"]
    assert (tenant.weight, tenant.kv_quota, tenant.share) == (2.0, 50_000, False)

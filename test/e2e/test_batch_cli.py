"""`phloem batch` with a real model in its own process, killed on the way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

import phloem

pytestmark = [pytest.mark.e2e, pytest.mark.model]


def requests(count: int) -> list[dict[str, Any]]:
    chat = [
        {
            "custom_id": f"r{i}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"Say {i}."}],
                "max_tokens": 8,
                "ignore_eos": True,
                "temperature": 0,
            },
        }
        for i in range(count)
    ]
    return [
        *chat,
        {"prompt": "Once", "max_tokens": 2},
        {"custom_id": "vector", "url": "/v1/embeddings", "body": {"input": "Once"}},
        {"custom_id": "bad", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": -1}},
    ]


def test_killed_and_gone_on_with(default_model: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = requests(200)
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    command = [sys.executable, "-m", "phloem.srt.cli", "batch", str(source), "-o", str(output)]
    command += ["--model", str(default_model), "--kv-tokens", "16384"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=tmp_path) as first:
        while first.poll() is None and (
            not output.exists() or output.read_bytes().count(b"\n") < 40
        ):
            time.sleep(0.02)
        children = psutil.Process(first.pid).children(recursive=True)
        first.send_signal(signal.SIGKILL)
    psutil.wait_procs(children, timeout=30)
    assert not any(child.is_running() for child in children)
    before = output.read_bytes().count(b"\n")
    assert 40 <= before < len(lines)
    second = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert second.returncode == 1, second.stderr
    assert f"203 requests ({before} of them before): 202 answered, 1 failed" in second.stderr
    assert "bad: max_tokens" in second.stderr
    found = [json.loads(one) for one in output.read_text().splitlines()]
    asked = Counter([*(one["custom_id"] for one in lines if "custom_id" in one), "line-201"])
    assert Counter(one["custom_id"] for one in found) == asked
    bodies = {one["custom_id"]: one["response"]["body"] for one in found}
    assert bodies["r7"]["usage"]["completion_tokens"] == 8
    assert len(bodies["vector"]["data"][0]["embedding"]) > 100


@phloem.function
def story(s: phloem.State, topic: str) -> None:
    s += phloem.user(f"A word on {topic}, please, and then another one, which is about the same.")
    s += phloem.assistant(phloem.gen("first", max_tokens=8, temperature=0.0))
    s += phloem.user("As JSON.")
    schema = {
        "type": "object",
        "properties": {"a_long_name_of_a_property": {"type": "boolean"}},
        "required": ["a_long_name_of_a_property"],
        "additionalProperties": False,
    }
    s += phloem.assistant(phloem.gen("second", json_schema=schema, temperature=0.0))


def test_a_trace_has_what_the_server_knows(server: Any) -> None:
    server.post("/flush_cache", {})
    trace = story.run(topic="tea", backend=server.url).trace
    first, second = trace.spans
    for span in (first, second):
        assert span.queue_s is not None
        assert span.sent < span.first <= span.ended  # type: ignore[operator]
        assert span.constraint == (None if span is first else "json_schema")
    assert first.completion_tokens == 8
    assert second.cached_tokens >= first.prompt_tokens // 2
    assert 0 < second.forced_tokens < second.completion_tokens
    assert trace.totals().cached_tokens == first.cached_tokens + second.cached_tokens
    said = story.run(topic="tea", backend=server.url).explain()
    assert "were forced by constraints and not sampled" in said

"""Starting, dying, coming back, stopping: with real processes and real signals."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model]

Start = Callable[..., Any]


def ask(server: Any, **more: Any) -> tuple[int, Any]:
    body = {"prompt": "The sky is", "max_tokens": 4, "temperature": 0} | more
    answer: tuple[int, Any] = server.post("/v1/completions", body)
    return answer


def stream_in_background(server: Any) -> tuple[threading.Thread, list[str]]:
    """A long stream; its lines, and the thread that reads them."""
    lines: list[str] = []
    body = {"prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )

    def read() -> None:
        with urllib.request.urlopen(request, timeout=60) as reply:
            lines.extend(raw.decode().strip() for raw in reply)

    thread = threading.Thread(target=read)
    thread.start()
    server.until(lambda: server.metric("phloem_num_requests_running") > 0)
    return thread, lines


@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_killed_process_is_replaced(start_server: Start, role: str) -> None:
    server = start_server("--kv-tokens", "4096")
    before = ask(server)
    assert before[0] == 200
    thread, lines = stream_in_background(server)
    old = server.children()
    old[role].send_signal(signal.SIGKILL)
    thread.join(30)
    assert not thread.is_alive(), "the stream hangs"
    events = [line for line in lines if line]
    assert '"error"' in events[-2], "the stream says that it broke"
    assert events[-1] == "data: [DONE]"
    server.until(lambda: server.get("/ready")[0] == 200)
    assert server.get("/health")[0] == 200
    status, reply = ask(server)
    assert status == 200
    assert reply["choices"][0]["text"] == before[1]["choices"][0]["text"]
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in old.values())
    assert server.stop() == 0


def test_health_says_that_the_backend_is_down(start_server: Start) -> None:
    server = start_server("--kv-tokens", "4096")
    server.children()["worker"].send_signal(signal.SIGKILL)
    server.until(lambda: server.get("/health")[0] == 503, seconds=5)
    status, body = ask(server)
    assert status in (200, 503)
    if status == 503:
        assert "worker" in body["error"]["message"]
    server.until(lambda: server.get("/health")[0] == 200)
    assert ask(server)[0] == 200


def test_a_killed_grammar_process_costs_no_request(start_server: Start) -> None:
    server = start_server("--kv-tokens", "4096")
    # long enough to be seen running: what the server tells of itself is up to a second old
    body = {"prompt": "x", "regex": "[a-z ]{1200}", "max_tokens": 1300, "temperature": 0}
    status, first = server.post("/v1/completions", body)
    assert status == 200
    results: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: results.append(server.post("/v1/completions", body)))
    thread.start()
    server.until(lambda: server.metric("phloem_num_requests_running") > 0)
    time.sleep(0.2)
    server.children()["grammar"].send_signal(signal.SIGKILL)
    thread.join(60)
    assert [status for status, _ in results] == [200]
    assert results[0][1]["choices"][0]["text"] == first["choices"][0]["text"]


def test_the_next_start_compiles_what_was_asked_for_before(
    start_server: Start, tmp_path: Path
) -> None:
    flags = ("--kv-tokens", "2048", "--data-dir", str(tmp_path / "data"))
    compiles, hits = "phloem_grammar_compiles_total", "phloem_grammar_cache_hits_total"
    first = start_server(*flags)
    for pattern in ("[ab]{4}", "[cd]{4}"):
        assert ask(first, regex=pattern)[0] == 200
    first.stop()
    second = start_server(*flags)
    second.until(lambda: second.metric(compiles) == 2)  # before anybody asks
    assert ask(second, regex="[ab]{4}")[0] == 200
    second.until(lambda: second.metric(hits) == 1)
    assert second.metric(compiles) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_everything(start_server: Start, number: int) -> None:
    server = start_server("--kv-tokens", "4096")
    children = list(server.children().values())
    assert len(children) == 3
    assert server.stop(number) == 0
    assert not any(child.is_running() for child in children)


def test_sigterm_lets_running_requests_finish(start_server: Start) -> None:
    server = start_server("--kv-tokens", "4096", "--drain-seconds", "100")
    results: list[tuple[int, Any]] = []
    thread = threading.Thread(
        target=lambda: results.append(ask(server, max_tokens=1000, ignore_eos=True))
    )
    thread.start()
    server.until(lambda: server.metric("phloem_num_requests_running") > 0)
    for child in server.children().values():  # systemd, for one, signals all of the group
        child.send_signal(signal.SIGTERM)
    assert server.stop(signal.SIGTERM, 110) == 0
    thread.join(10)
    assert results
    assert results[0][0] == 200
    assert results[0][1]["usage"]["completion_tokens"] == 1000


def test_no_orphans_after_the_frontend_is_killed(start_server: Start) -> None:
    server = start_server("--kv-tokens", "4096")
    children = list(server.children().values())
    server.process.kill()
    server.process.wait()
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert not alive, f"orphans: {alive}"
    assert len(gone) == 3


def test_two_servers_do_not_meet(start_server: Start) -> None:
    one = start_server("--kv-tokens", "4096")
    two = start_server("--kv-tokens", "4096", "--served-model-name", "second")
    assert json.loads(one.get("/v1/models")[1])["data"][0]["id"] == "tiny"
    assert json.loads(two.get("/v1/models")[1])["data"][0]["id"] == "second"
    assert one.stop() == 0
    assert ask(two)[0] == 200


def run_cli(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "phloem.srt.cli", *args],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def test_a_taken_port_is_told_at_once(default_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run_cli("serve", str(default_model), "--port", port)
    assert done.returncode != 0
    assert port in done.stderr
    assert "in use" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_missing_model_is_named() -> None:
    done = run_cli("serve", "/nowhere/model.gguf", "--port", "0")
    assert done.returncode != 0
    assert "/nowhere/model.gguf" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_model_is_named(default_model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(default_model.read_bytes()[: 1 << 22])
    done = run_cli("serve", str(damaged), "--port", "0")
    assert done.returncode != 0
    assert "damaged.gguf" in done.stderr
    assert "Traceback" not in done.stderr

"""Real servers: the CLI in a process of its own, on a free port, ended by its own pid."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

STARTUP_LIMIT_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A running `phloem serve` and what a test wants of it."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = folder / f"server-{self.port}.log"
        command = [sys.executable, "-m", "phloem.srt.cli", "serve", str(model)]
        command += ["--port", str(self.port), "--served-model-name", "tiny", *flags]
        if "--data-dir" not in flags:
            command += ["--data-dir", str(folder / "data")]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + STARTUP_LIMIT_S
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended:\n{self.log.read_text()}")
            try:
                if self.get("/ready")[0] == 200:
                    return
            except OSError:
                time.sleep(0.05)
        raise AssertionError(f"not ready within {STARTUP_LIMIT_S} s:\n{self.log.read_text()}")

    def get(self, path: str) -> tuple[int, str]:
        return self._ask(urllib.request.Request(self.url + path))

    def post(self, path: str, body: object) -> tuple[int, Any]:
        """Status and parsed JSON. `body` may be bytes, sent as they are."""
        status, text = self._ask(self._posting(path, body))
        return status, json.loads(text)

    def events(self, path: str, body: object) -> list[Any]:
        """The parsed events of a stream, behind which `[DONE]` has to come."""
        with urllib.request.urlopen(self._posting(path, body), timeout=60) as reply:
            lines = reply.read().decode().splitlines()
        data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        assert data[-1] == "[DONE]"
        return [json.loads(one) for one in data[:-1]]

    def _posting(self, path: str, body: object) -> urllib.request.Request:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})

    @staticmethod
    def _ask(request: urllib.request.Request) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """The value of a metric without labels."""
        for line in self.get("/metrics")[1].splitlines():
            key, _, value = line.rpartition(" ")
            if key.split("{")[0] == name:
                return float(value)
        raise AssertionError(f"no metric {name}")

    def until(self, holds: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > deadline:
                raise AssertionError("it never came true")
            time.sleep(0.05)

    def children(self) -> dict[str, psutil.Process]:
        """The backend's processes by role."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            command = child.cmdline()
            if "phloem.srt.process" in command:
                found[command[-1]] = child
        return found

    def stop(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Signal the server and wait for its end; the exit code."""
        if self.process.poll() is None:
            os.kill(self.process.pid, number)
        return self.process.wait(seconds)


@pytest.fixture(scope="session")
def start_server(
    default_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Server]]:
    """Starts servers with the default model; flags as on the command line."""
    servers: list[Server] = []

    def start(*flags: str, model: Path = default_model, ready: bool = True) -> Server:
        server = Server(model, tmp_path_factory.mktemp("server"), *flags)
        servers.append(server)
        if ready:
            server.wait_ready()
        return server

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


@pytest.fixture(scope="session")
def server(start_server: Callable[..., Server]) -> Server:
    """One server for all tests that only ask it something."""
    return start_server("--kv-tokens", "16384")

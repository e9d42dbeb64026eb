"""The servers that are compared: how each is started, when it is ready, how it ends.

Every server runs in a session of its own: Linux shares the CPU out by session, so one that lived
in the terminal's would compete with whatever else runs there, and another would not.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent


class PeerFailed(Exception):
    """A server ended, or was not ready in time; the message has the end of its output."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all servers get: the model as a GGUF file, the same as a Hugging Face folder (for
    servers that want one), threads, the compute type of those that do not compute in the file's
    own format, and the tokens of context."""

    model: Path
    model_folder: Path | None
    threads: int
    dtype: str
    context: int = 2048
    slots: int = 16


@dataclass(frozen=True, kw_only=True)
class Command:
    """How to start a server. `model` is the name that its requests give."""

    arguments: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str = "model"
    health: str = "/health"
    ready_seconds: float = 120.0


class NotInstalled(Exception):
    """The peer cannot be run here; the message says what is missing."""


def _program(name: str, variable: str) -> str:
    """Path of program `name`, or what environment variable `variable` says."""
    found = os.environ.get(variable) or shutil.which(name)
    if found is None or not os.access(found, os.X_OK):
        raise NotInstalled(f"no {name} on PATH (or in {variable})")
    return found


def _phloem(setting: Setting, port: int) -> Command:
    beside = Path(sys.executable).with_name("phloem")
    program = str(beside) if beside.exists() else _program("phloem", "PHLOEM")
    return Command(
        arguments=[
            *(program, "serve", str(setting.model), "--port", str(port)),
            *("--threads", str(setting.threads), "--served-model-name", "model"),
        ],
        health="/ready",
    )


def _llama_server(setting: Setting, port: int) -> Command:
    threads = str(setting.threads)
    return Command(
        arguments=[
            *(_program("llama-server", "LLAMA_SERVER"), "-m", str(setting.model)),
            *("-t", threads, "-tb", threads, "-np", str(setting.slots)),
            *("-c", str(setting.context * setting.slots), "--no-kv-unified", "--cache-prompt"),
            # by default it answers as few connections as there are threads, and drops the rest
            *("--threads-http", str(2 * setting.slots)),
            *("--jinja", "--no-warmup", "--port", str(port)),
        ]
    )


def _vllm(setting: Setting, port: int) -> Command:
    if setting.model_folder is None:
        raise NotInstalled("vLLM wants the model as a Hugging Face folder (--model-folder)")
    return Command(
        arguments=[
            *(_program("vllm", "VLLM"), "serve", str(setting.model_folder), "--port", str(port)),
            *("--dtype", setting.dtype, "--max-model-len", str(setting.context)),
            *("--max-num-seqs", "32", "--enable-prefix-caching", "--block-size", "32"),
            *("--enable-prompt-tokens-details", "--served-model-name", "model"),
        ],
        environment={
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setting.threads - 1}",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        },
        ready_seconds=600.0,  # it compiles
    )


def _transformers(setting: Setting, port: int) -> Command:
    return Command(
        arguments=[
            *(sys.executable, str(HERE / "naive_server.py"), str(setting.model)),
            *("--port", str(port), "--threads", str(setting.threads), "--dtype", setting.dtype),
        ],
        environment={"HF_HUB_OFFLINE": "1"},
        ready_seconds=300.0,
    )


PEERS: dict[str, Callable[[Setting, int], Command]] = {
    "phloem": _phloem,
    "llama-server": _llama_server,
    "vllm": _vllm,
    "transformers": _transformers,
}


@dataclass(frozen=True, kw_only=True)
class Running:
    """A server that answers."""

    url: str
    pid: int
    model: str
    start_seconds: float


@contextmanager
def running(name: str, setting: Setting, log: Path, flags: Sequence[str] = ()) -> Iterator[Running]:
    """Start peer `name`, with `flags` after its own, wait until it is ready, and end it
    afterwards; its output goes to `log`.

    Raises `NotInstalled` or `PeerFailed`.
    """
    port = free_port()
    command = PEERS[name](setting, port)
    url = f"http://127.0.0.1:{port}"
    environment = os.environ | {"OMP_NUM_THREADS": str(setting.threads)} | dict(command.environment)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command.arguments, *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            _await_ready(name, process, url + command.health, command.ready_seconds, log)
            yield Running(
                url=url,
                pid=process.pid,
                model=command.model,
                start_seconds=time.monotonic() - began,
            )
        finally:
            _end(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _await_ready(
    name: str, process: subprocess.Popen[bytes], url: str, seconds: float, log: Path
) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise PeerFailed(f"{name} ended with code {process.returncode}:\n{_tail(log)}")
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise PeerFailed(f"{name} was not ready within {seconds:g} s:\n{_tail(log)}")


def _tail(log: Path, lines: int = 12) -> str:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    return "\n".join(line[:200] for line in text)


def _end(process: subprocess.Popen[bytes], grace_seconds: float = 20.0) -> None:
    """SIGTERM to the server's whole group, then SIGKILL to what is left of it."""
    for sign, patience in ((signal.SIGTERM, grace_seconds), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue

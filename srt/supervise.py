"""Child processes: spawned, told their options in one JSON line, watched, stopped in order.

A `Generation` is one life of the backend: scheduler, worker and grammar process around one run
directory. When the scheduler or the worker dies the generation is over (its KV is gone) and a new
one is started with fresh sockets, so nothing of the old one can be mistaken for the new one's.
The grammar process alone may be replaced within a generation: its state is derived.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import msgspec
from msgspec.structs import replace

from phloem.srt.process import ROLES, error_file

log = logging.getLogger(__name__)

STDERR = 2

# Compute threads must sleep, not spin, between operations: with two cores a spinning pool starves
# the scheduler. OpenMP reads this once, before torch is imported.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}

# While weights are loaded, large arrays come and go: keeping freed memory instead of giving it back
# to the system each time saves a quarter of the load in page faults.
_WORKER_ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(256 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(512 << 20),
}


class ChildDied(Exception):
    """A child ended by itself. `reason` is its own last word, or how it ended; `code` its exit
    code, negative for a signal."""

    def __init__(self, role: str, reason: str, code: int) -> None:
        super().__init__(f"the {role} process {reason}")
        self.role = role
        self.reason = reason
        self.code = code


class Generation:
    """The backend's processes. They are spawned first and configured when the options are known:
    meanwhile they import what they need, which is most of their start-up."""

    def __init__(self) -> None:
        self.run_dir: Path | None = None
        self._options: dict[str, msgspec.Struct] = {}
        self._children: dict[str, asyncio.subprocess.Process] = {}
        self._waiters: dict[asyncio.Task[int], str] = {}

    async def spawn(self) -> None:
        """Start a process for each of `ROLES`."""
        for role in ROLES:
            await self._spawn(role)

    async def _spawn(self, role: str) -> None:
        environment = os.environ | _ENVIRONMENT
        if role == "worker":
            environment |= _WORKER_ENVIRONMENT
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "phloem.srt.process",
            role,
            stdin=asyncio.subprocess.PIPE,
            stdout=STDERR,  # standard output belongs to the command's answer
            env=environment,
        )
        self._children[role] = child
        self._waiters[asyncio.create_task(child.wait(), name=f"wait for {role}")] = role

    def configure(self, run_dir: Path, options: dict[str, msgspec.Struct]) -> None:
        """Tell each role its options. `run_dir` is an existing, private directory; this
        generation removes it when it is stopped."""
        self.run_dir = run_dir
        self._options = options
        for role in self._children:
            self._tell(role)

    def _tell(self, role: str) -> None:
        stdin = self._children[role].stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(self._options[role]) + b"\n")

    @property
    def pids(self) -> dict[str, int]:
        return {role: child.pid for role, child in self._children.items()}

    async def wait_for_death(self) -> ChildDied:
        """The next child that ends, and why."""
        done, _ = await asyncio.wait(self._waiters, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        role = self._waiters.pop(task)
        return ChildDied(role, self._last_word(role, task.result()), task.result())

    def _last_word(self, role: str, code: int) -> str:
        word = error_file(self.run_dir, role) if self.run_dir is not None else None
        if word is not None and word.exists():
            return f"failed: {word.read_text().strip()}"
        if code < 0:
            return f"was killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    async def restart(self, role: str, **changed: object) -> None:
        """Put a new process in the place of one that ended, with some of its options changed."""
        assert self.run_dir is not None
        error_file(self.run_dir, role).unlink(missing_ok=True)
        self._options[role] = replace(self._options[role], **changed)
        await self._spawn(role)
        self._tell(role)

    async def stop(self, grace_seconds: float = 2.0) -> None:
        """End all children: politely by closing their standard input, then by SIGKILL."""
        for child in self._children.values():
            if child.stdin is not None:
                child.stdin.close()
        deadline = time.monotonic() + grace_seconds
        if self._waiters:
            await asyncio.wait(self._waiters, timeout=max(0.0, deadline - time.monotonic()))
        for child in self._children.values():
            if child.returncode is None:
                child.kill()
        if self._waiters:
            await asyncio.wait(self._waiters)
        self._waiters.clear()
        self._children.clear()
        if self.run_dir is not None:
            await asyncio.to_thread(shutil.rmtree, self.run_dir, ignore_errors=True)

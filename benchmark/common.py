"""What every measurement needs beside its figures: machine, commit, memory, and other load."""

from __future__ import annotations

import platform
import subprocess
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import orjson
import psutil

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_SECONDS = 0.5


def machine() -> dict[str, object]:
    """The machine, as far as it explains figures."""
    model = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {
        "cpu": model,
        "cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def commit() -> str:
    """The repository's commit, with `-dirty` if files differ from it."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def write_json(path: Path, **content: object) -> None:
    """Write `content` with commit, machine and time of day."""
    about = {
        "commit": commit(),
        "machine": machine(),
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    options = orjson.OPT_INDENT_2 | orjson.OPT_SERIALIZE_NUMPY
    path.write_bytes(orjson.dumps(about | content, option=options) + b"\n")


class Watch:
    """While open, follows the processes under `pid` (None: only the machine).

    Afterwards `peak_mib` is the most memory they had at once, as proportional set size, which
    counts a shared page once; `other_cores` is how many cores were busy on average with something
    that is neither one of them nor this process.
    """

    def __init__(self, pid: int | None) -> None:
        self._root = None if pid is None else psutil.Process(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self._own_seconds: dict[int, float] = {}
        self.peak_mib: float | None = None
        self.other_cores = 0.0

    def __enter__(self) -> Watch:
        self._began = time.monotonic()
        self._busy_before = _busy_seconds()
        self._own_before = self._sample()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()
        own = self._sample() - self._own_before
        busy = _busy_seconds() - self._busy_before
        self.other_cores = max(0.0, (busy - own) / (time.monotonic() - self._began))

    def _follow(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._sample()

    def _sample(self) -> float:
        """Note the memory; CPU seconds used so far by the processes watched and this one."""
        processes = [psutil.Process()]
        if self._root is not None:
            watched = _family(self._root)
            memory = sum(map(_pss_bytes, watched)) / 2**20
            self.peak_mib = max(self.peak_mib or 0.0, memory)
            processes += watched
        for process in processes:
            try:
                times = process.cpu_times()
            except psutil.Error:
                continue
            self._own_seconds[process.pid] = times.user + times.system
        return sum(self._own_seconds.values())


def _family(root: psutil.Process) -> list[psutil.Process]:
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _pss_bytes(process: psutil.Process) -> int:
    """Proportional set size, or resident size where the system does not tell it."""
    try:
        info: Any = process.memory_full_info()
    except psutil.Error:
        return 0
    return int(getattr(info, "pss", info.rss))


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # guest time is part of user time already
    return float(
        sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
    )

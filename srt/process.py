"""Entry point of a child process: `python -m phloem.srt.process ROLE`, options as one JSON line on
standard input. What the role needs is imported before the options are read, so the parent may
spawn first and make up its mind afterwards.

Standard input stays open as long as the parent lives. When it ends, whatever killed the parent,
the child leaves: there are no orphans. SIGINT and SIGTERM are the parent's business: a terminal
sends the one to the whole group, and systemd the other; the child is needed until the requests that
run have ended.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

log = logging.getLogger("phloem")

ROLES = ("worker", "grammar", "scheduler")
"""In order of start: the slowest to come up first."""


def error_file(run_dir: str | Path, role: str) -> Path:
    """Where a child that fails to start leaves its reason, in one line."""
    return Path(run_dir) / f"{role}.error"


def _read_line() -> bytes:
    """One line from file descriptor 0, unbuffered: the rest of the pipe is the parent's pulse."""
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = os.read(0, 1 << 16)
        if not piece:
            break
        data += piece
    return bytes(data)


def _leave_with_parent() -> None:
    while os.read(0, 1 << 10):
        continue
    os._exit(1)


def _load(role: str) -> Callable[[bytes, dict[str, float]], None]:
    """Import what the role needs; the function that runs it with its options as JSON and the
    seconds that start-up took so far."""
    match role:
        case "scheduler":
            from phloem.srt.scheduler.options import SchedulerProcessOptions
            from phloem.srt.scheduler.process import main as scheduler_main

            return lambda data, _startup: scheduler_main(
                msgspec.json.decode(data, type=SchedulerProcessOptions)
            )
        case "worker":
            import phloem.srt.models.cpu_model
            from phloem.srt.worker.options import WorkerProcessOptions
            from phloem.srt.worker.process import main as worker_main

            return lambda data, startup: worker_main(
                msgspec.json.decode(data, type=WorkerProcessOptions), startup
            )
        case "grammar":
            import phloem.constrained.backends.xgrammar  # noqa: F401  (loaded by name later)
            from phloem.srt.grammar.options import GrammarOptions
            from phloem.srt.grammar.process import main as grammar_main

            return lambda data, startup: grammar_main(
                msgspec.json.decode(data, type=GrammarOptions), startup
            )
    raise SystemExit(f"unknown role {role!r}; there are {', '.join(ROLES)}")


class _Common(msgspec.Struct):
    """The options that every role has."""

    run_dir: str
    log_level: str = "info"


def main() -> int:
    role = sys.argv[1]
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    began = time.perf_counter()
    run = _load(role)
    startup = {"import": time.perf_counter() - began}
    options = _read_line()
    if not options:
        return 1  # the parent is gone
    common = msgspec.json.decode(options, type=_Common)
    threading.Thread(target=_leave_with_parent, name="parent-watch", daemon=True).start()
    logging.basicConfig(level=common.log_level.upper(), format=f"%(levelname)s {role}: %(message)s")
    try:
        run(options, startup)
    except Exception as error:
        error_file(common.run_dir, role).write_text(f"{error or type(error).__name__}\n")
        log.exception("the %s process ends", role)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

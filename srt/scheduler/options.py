"""What the scheduler process is started with."""

from __future__ import annotations

import msgspec


class SchedulerProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`run_dir` holds the sockets. Times are seconds."""

    run_dir: str
    max_running: int
    max_waiting: int
    max_step_tokens: int
    request_timeout_s: float
    eviction_policy: str
    sharing: bool
    log_level: str = "info"

"""What the scheduler process is started with."""

from __future__ import annotations

import msgspec

from phloem.srt.scheduler.tenants import TenantLimits


class SchedulerProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`run_dir` holds the sockets. Times are seconds. `kv_events` is an address to publish changes
    of the tree at, `record` a file for what the scheduler is told; None for neither. `tier` says
    that the worker has a lower tier. The mask buffer has a row for each token of `draft_batch`
    drafts of `draft_tokens` behind those of the `max_running` rows."""

    run_dir: str
    max_running: int
    max_waiting: int
    max_step_tokens: int
    request_timeout_s: float
    eviction_policy: str
    sharing: bool
    schedule_policy: str
    page_size: int
    pin_share: float
    itl_target_s: float | None
    tenants: dict[str, TenantLimits]
    kv_events: str | None
    record: str | None
    tier: bool
    draft_tokens: int = 0
    draft_batch: int = 0
    log_level: str = "info"

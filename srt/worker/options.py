"""What the worker process is started with."""

from __future__ import annotations

import msgspec

from phloem.srt.models.options import ComputeOptions
from phloem.srt.tier.options import TierOptions


class WorkerProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`run_dir` holds the sockets and will hold the mask buffer; `checkpoint` is a file or folder
    on disk. `max_rows` is how many requests may be in a step, `mask_rows` how many rows the mask
    buffer has. `kv_slots` includes slot 0, which is padding. `tier` None keeps KV in memory only.
    """

    run_dir: str
    checkpoint: str
    compute: ComputeOptions
    max_rows: int
    mask_rows: int
    context_length: int
    kv_slots: int
    tier: TierOptions | None = None
    log_level: str = "info"

"""What the worker process is started with."""

from __future__ import annotations

import msgspec

from phloem.srt.models.options import ComputeOptions


class WorkerProcessOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`run_dir` holds the sockets and will hold the mask buffer; `checkpoint` is a file or folder
    on disk. `max_rows` is how many requests may be in a step. `kv_slots` includes slot 0, which is
    padding. None leaves `context_length` to the model and `kv_slots` to the free memory.
    """

    run_dir: str
    checkpoint: str
    compute: ComputeOptions
    max_rows: int
    context_length: int
    kv_slots: int
    log_level: str = "info"

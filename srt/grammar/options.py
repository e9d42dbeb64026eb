"""What the grammar process is started with."""

from __future__ import annotations

import msgspec


class GrammarOptions(msgspec.Struct, frozen=True, kw_only=True):
    """`run_dir` holds the sockets and the mask buffer; `checkpoint` gives the vocabulary.

    `memory_bytes` is how much address space compiles and matchers may take beyond what the idle
    process has; `cache_bytes` bounds the compiled grammars that are kept.
    """

    run_dir: str
    checkpoint: str
    max_rows: int
    vocab_size: int
    compile_timeout_s: float
    compile_threads: int
    memory_bytes: int
    cache_bytes: int
    log_level: str = "info"

"""What the grammar process is started with."""

from __future__ import annotations

import msgspec


class GrammarOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Sockets and the mask buffer are in `run_dir` (`grammar.sock`, `masks.sock`, `masks`).

    `mask_rows` and `vocab_size` shape the mask buffer. A compile may take `compile_timeout_s`
    seconds of processor time; `memory_bytes` is what the process, and the one that compiles for
    it, may add to its size after loading; `cache_bytes` bounds the compiled grammars it keeps.
    `predecessor` is the exit code of the process whose place this one takes, 0 for the first.
    What is compiled is remembered for the next start in the file `remembered`, if there is one.
    """

    run_dir: str
    checkpoint: str
    mask_rows: int
    vocab_size: int
    compile_timeout_s: float = 5.0
    compile_threads: int = 1
    memory_bytes: int = 2 << 30
    cache_bytes: int = 256 << 20
    predecessor: int = 0
    remembered: str | None = None
    log_level: str = "info"

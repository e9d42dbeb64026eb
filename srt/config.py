"""The one configuration: typed, documented, frozen. The CLI, the TOML file and the environment
are all derived from these classes; nothing else reads options.

`ServeConfig` is what the user asked for, with None for "you choose". `phloem.srt.resolve` turns
it, once, into `Resolved`: what was chosen, and why.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """The model and how it is held in memory."""

    model: str = DEFAULT_MODEL
    """A catalogue name, a GGUF file, a checkpoint folder, or a Hugging Face repository."""
    served_model_name: str | None = None
    """Name in `/v1/models` and in the `model` field of requests; by default the model's name."""
    backend: Literal["auto", "cpu", "torch"] = "auto"
    """What computes: `cpu`, Phloem's own kernels on floats or integers of 8 bits, as the file has
    them (4 bits as they are, beyond 2³⁰ weights), or `torch`, torch operations on weights turned
    into floats. `auto` takes `cpu` where the kernels were built, unless a `dtype` is asked for."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type of the torch backend. `auto` takes bfloat16 where the CPU multiplies it
    natively, else float32."""
    quantization: Literal["int8", "int4"] | None = None
    """Quantise float weights when they are loaded, with the cpu backend: `int8` with one scale a
    row, `int4` in groups of 32."""
    context_length: int | None = None
    """Tokens of prompt plus output; by default what the model was trained for."""
    chat_template: str | None = None
    """A Jinja file that replaces the model's own chat template."""
    tool_call_format: Literal["auto", "hermes", "llama3", "mistral", "mistral-args", "json"] = (
        "auto"
    )
    """How calls of tools are written. `auto` takes what the chat template shows, and `json` where
    it shows none that is known."""


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """The HTTP face."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """Port to listen on; 0 takes a free one."""
    api_key: str | None = None
    """If set, every route but `/health`, `/ready` and `/docs` wants `Authorization: Bearer KEY`."""
    tenants: str | None = None
    """TOML file of tenants: their keys, shares, quotas and scopes, as docs/http-api.md has it."""
    max_body_bytes: int = 4 << 20
    """A larger request body is refused with 413."""
    max_connections: int = 4096
    """Connections that may be open at once; on one more, requests get 503."""
    read_timeout: float = 30.0
    """Seconds within which the head of a request, and then its body, must arrive; else 408. Uploads
    may take longer if they do not pause for so long."""
    write_timeout: float = 60.0
    """Seconds that a reply may wait for its client to read; then the connection is cut."""
    keep_alive_timeout: float = 75.0
    """Seconds after which a connection without a request is closed."""
    cors_origin: tuple[str, ...] = ()
    """Origin (as `https://app.example.org`) whose pages may read replies, or `*` for all; by
    default none. It can be given several times."""
    tls_cert: str | None = None
    """PEM file of the certificate, with those that lead to its root, to serve HTTPS with."""
    tls_key: str | None = None
    """PEM file of the certificate's key; by default it is in the same file."""
    data_dir: str | None = None
    """Folder of what clients store (responses, files, batches), and of which constraints were
    compiled; by default `data` in the folder that models are kept in."""
    max_file_bytes: int = 512 << 20
    """A larger file is refused by `/v1/files` with 413."""
    batch_running: int | None = None
    """Sequences of `/v1/batches` that run at once; by default a quarter of `max_running`."""
    drain_seconds: float = 30.0
    """After SIGTERM, how long running requests may still take."""


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """The KV pool and the radix tree over it."""

    kv_tokens: int | None = None
    """KV slots; by default as many as a quarter of the free memory holds, at most 131,072."""
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "int8"] = "auto"
    """How keys and values are kept. `auto` takes float16 with the cpu backend (bfloat16 where AMX
    multiplies it) and the compute type with torch, which has no other."""
    eviction_policy: Literal["lru", "lfu", "fifo", "slru", "priority", "program", "size"] = "lru"
    """Which cached leaf goes first when slots are needed: see docs/cache.md."""
    page_size: Literal[1, 16, 64] = 1
    """Tokens a page of the tree holds. Above 1 only whole pages are shared."""
    pin_share: float = 0.25
    """Share of the slots that pins may hold."""
    kv_tiers: str | None = None
    """Tiers below the pool: `disk` or `disk:SIZE` (4GiB) keeps KV over restarts."""
    kv_tier_dir: str | None = None
    """Folder of the disk tier; by default `kv` in the folder that models are kept in."""
    kv_events: str | None = None
    """Address (as `tcp://127.0.0.1:5557`) to publish changes of the tree at, over ZeroMQ."""
    disable_radix_cache: bool = False
    """Share nothing between requests (for measurements)."""


@dataclass(frozen=True, kw_only=True)
class SchedulerOptions:
    """Admission, batching and bounds."""

    max_running: int = 32
    """Requests that may be in the batch at once."""
    max_waiting: int = 4096
    """Requests that may wait; beyond it the answer is 429."""
    max_step_tokens: int = 512
    """Tokens one step may compute, decode and prefill chunks together."""
    request_timeout_s: float = 3600.0
    """Deadline of a request that does not set its own."""
    schedule_policy: Literal["fair", "fcfs", "lpm", "dfs-weight", "random"] = "fair"
    """Order of waiting requests: see docs/scheduling.md. It can be changed while serving."""
    itl_target_ms: float | None = None
    """Longest step, in milliseconds, that running streams should wait for while a prompt comes in.
    By default twice what a step without the prompt takes, but at least 50; up to five times that
    where more requests wait for their first token than for their next."""
    record: str | None = None
    """File to write every input of the scheduler to, for `phloem replay`. Prompts and answers are
    written as keyed hashes, not as tokens."""


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """The process that computes."""

    threads: int | None = None
    """Compute threads; by default the number of cores."""


@dataclass(frozen=True, kw_only=True)
class ConstraintOptions:
    """Grammars."""

    compile_timeout_s: float = 5.0
    """CPU seconds one compile may take; then the request is refused."""
    compile_threads: int = 1
    """Grammars compiled at the same time."""
    memory_bytes: int = 2 << 30
    """Address space the grammar process may add to its own; beyond it the compile fails."""
    cache_bytes: int = 256 << 20
    """Compiled grammars kept."""
    draft_tokens: int = 8
    """Tokens of a draft: what probably follows in a constrained answer, from others under the same
    constraint, is computed along with the last token and kept if it is what is drawn. 0: none."""
    draft_batch: int = 8
    """Requests that may run at once for there to be drafts."""


@dataclass(frozen=True, kw_only=True)
class LogOptions:
    """What is said on stderr."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is printed."""


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Everything `phloem serve` and `phloem.Engine` can be told."""

    model: ModelOptions = field(default_factory=ModelOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    worker: WorkerOptions = field(default_factory=WorkerOptions)
    constraints: ConstraintOptions = field(default_factory=ConstraintOptions)
    log: LogOptions = field(default_factory=LogOptions)

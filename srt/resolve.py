"""What was asked and what there is → what will be done, once, with the reason for each choice.

`detect_hardware` looks at the machine, `resolve` chooses; nothing later changes its mind. The
KV pool needs one thing more, the model's bytes per slot, so `choose_kv_tokens` is called when the
model's configuration has been read.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import psutil

from phloem.srt.config import CacheOptions, ServeConfig, ServerOptions
from phloem.srt.errors import InvalidRequest
from phloem.srt.kernels.cpu.library import (
    ISA_VARIABLE,
    NOT_BUILT,
    KernelsUnavailable,
    runnable_isas,
)

Dtype = Literal["float32", "bfloat16"]
KvDtype = Literal["float32", "float16", "bfloat16", "int8"]

MAX_DEFAULT_KV_TOKENS = 131_072
MIN_KV_TOKENS = 16

DEFAULT_TIER_BYTES = 8 << 30
MIN_TIER_BLOCKS = 8
"""Fewer blocks on disk keep nothing worth having."""

_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,3})?) ?([KMGT])(i?)B", re.IGNORECASE)

# Widest first: the first set that the CPU has in full names its ISA (flags as in /proc/cpuinfo).
_ISA_FLAGS: tuple[tuple[str, frozenset[str]], ...] = (
    ("amx-bf16", frozenset({"amx_bf16", "amx_tile"})),
    ("avx512-bf16", frozenset({"avx512f", "avx512_bf16"})),
    ("avx512-vnni", frozenset({"avx512f", "avx512_vnni"})),
    ("avx512", frozenset({"avx512f", "avx512bw", "avx512vl"})),
    ("avx2", frozenset({"avx2", "fma"})),
    ("sve-bf16", frozenset({"sve", "bf16"})),
    ("neon-bf16", frozenset({"asimd", "bf16"})),
    ("neon", frozenset({"asimd"})),
)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine as this process may use it. Memory is in bytes; `flags` as in /proc/cpuinfo.

    `affinity` counts the logical CPUs the process may run on; `quota` is its control group's share
    of CPU time in CPUs, None for no limit. `kernels` are the instruction sets that Phloem's CPU
    kernels can use here, best first; none if they were not built.
    """

    cpu: str
    flags: frozenset[str]
    logical_cpus: int
    affinity: int
    quota: float | None
    memory_total: int
    memory_free: int
    kernels: tuple[str, ...] = ()

    @property
    def isa(self) -> str:
        """The widest vector instructions there are, by a name of ours; `generic` for none."""
        return next((name for name, needed in _ISA_FLAGS if needed <= self.flags), "generic")

    @property
    def native_bfloat16(self) -> bool:
        """Whether the CPU multiplies bfloat16 itself."""
        return self.isa.endswith("bf16")

    @property
    def usable_cores(self) -> int:
        """CPUs that this process can keep busy."""
        return self.affinity if self.quota is None else max(1, min(self.affinity, int(self.quota)))


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The choices. `reasons` says of each, by field name, why; it may be added to."""

    config: ServeConfig
    hardware: Hardware
    threads: int
    backend: Literal["cpu", "torch"]
    dtype: Dtype
    kv_dtype: KvDtype
    isa: str
    reasons: dict[str, str]


def resolve(asked: ServeConfig, hardware: Hardware) -> Resolved:
    """Choose what `asked` leaves open. Raises `InvalidRequest` naming an option that is out of
    its range."""
    check_ranges(asked)
    reasons: dict[str, str] = {}
    threads, reasons["threads"] = _choose_threads(asked.worker.threads, hardware)
    backend, reasons["backend"] = _choose_backend(asked, hardware)
    if backend == "cpu":
        # Scales and sums are float32, whatever the weights are kept in.
        dtype: Dtype = "float32"
        isa, reasons["isa"] = _choose_isa(hardware)
    else:
        dtype, reasons["dtype"] = _choose_dtype(asked.model.dtype, hardware)
        isa, reasons["isa"] = hardware.isa, f"the widest that {hardware.cpu} has"
    kv_dtype, reasons["kv_dtype"] = _choose_kv_dtype(
        asked.cache.kv_cache_dtype, backend, dtype, isa
    )
    return Resolved(
        config=asked,
        hardware=hardware,
        threads=threads,
        backend=backend,
        dtype=dtype,
        kv_dtype=kv_dtype,
        isa=isa,
        reasons=reasons,
    )


def choose_kv_tokens(
    asked: int | None, *, bytes_per_slot: int, hardware: Hardware
) -> tuple[int, str]:
    """KV slots and why: as asked, else what a quarter of the free memory holds, up to a bound.

    `bytes_per_slot` is what one token's K and V take over all layers. Raises `InvalidRequest` when
    memory has no room for what was asked, or for any useful pool.
    """
    fit = hardware.memory_free // bytes_per_slot
    each = f"{bytes_per_slot:,} bytes each"
    free = f"{hardware.memory_free / 2**30:.1f} GiB free"
    if asked is not None:
        if asked > fit:
            raise InvalidRequest(
                f"kv_tokens {asked:,} at {each} do not fit: {free}, room for {fit:,}",
                param="cache.kv_tokens",
            )
        return asked, f"asked for; {each}"
    quarter = fit // 4
    if quarter < MIN_KV_TOKENS:
        raise InvalidRequest(
            f"no room for a KV cache: {free}, {each}; ask for kv_tokens explicitly",
            param="cache.kv_tokens",
        )
    if quarter >= MAX_DEFAULT_KV_TOKENS:
        return MAX_DEFAULT_KV_TOKENS, f"the default's upper bound; {each}, {free}"
    return quarter, f"a quarter of the memory ({free}) at {each}"


@dataclass(frozen=True, kw_only=True)
class DiskTier:
    """KV on disk: `folder` may take `limit_bytes`."""

    folder: Path
    limit_bytes: int


def choose_disk_tier(
    cache: CacheOptions, *, folder: Path, block_bytes: int
) -> tuple[DiskTier | None, str]:
    """The tier below the pool, and why so large. `folder` is where KV goes unless `cache` names
    another, `block_bytes` what is written at once.

    Raises `InvalidRequest` for tiers that there are not, and for a size that the disk has no room
    for.
    """
    tiers = parse_tiers(cache.kv_tiers)
    if "disk" not in tiers:
        return None, "not asked for"
    asked = tiers["disk"]
    if cache.kv_tier_dir is not None:
        folder = Path(cache.kv_tier_dir).expanduser().absolute()
    room = _room_on_disk(folder)
    limit, why = asked, "asked for"
    if limit is None:
        limit, why = DEFAULT_TIER_BYTES, "the default"
        if limit > room // 2:
            limit, why = room // 2, f"half of what {folder} has room for"
    elif limit > room:
        raise InvalidRequest(
            f"kv_tiers asks for {_gib(limit)} on disk; {folder} has room for {_gib(room)}",
            param="cache.kv_tiers",
        )
    least = MIN_TIER_BLOCKS * block_bytes
    if limit < least:
        raise InvalidRequest(
            f"a disk tier of {_gib(limit)} is too small for this model's KV: {MIN_TIER_BLOCKS} "
            f"blocks take {_gib(least)}",
            param="cache.kv_tiers",
        )
    return DiskTier(folder=folder, limit_bytes=limit), f"{why}; in {folder}"


def parse_tiers(text: str | None) -> dict[str, int | None]:
    """`disk` or `disk:4GiB` → bytes by tier, None for a size that was not given. Raises
    `InvalidRequest`."""
    tiers: dict[str, int | None] = {}
    for part in () if text is None else text.split(","):
        name, colon, size = (word.strip() for word in part.partition(":"))
        if name == "host":
            raise InvalidRequest(
                "kv_tiers names host: on a CPU the pool itself is the host's memory; give it more "
                "with kv_tokens",
                param="cache.kv_tiers",
            )
        if name != "disk":
            raise InvalidRequest(
                f"kv_tiers names {name!r}; there is: disk, or disk:SIZE as in disk:4GiB",
                param="cache.kv_tiers",
            )
        if name in tiers:
            raise InvalidRequest(f"kv_tiers names {name} twice", param="cache.kv_tiers")
        tiers[name] = _parse_size(size) if colon else None
    return tiers


def _parse_size(text: str) -> int:
    """`4GiB`, `500MB`, `1.5 tib` → bytes. Raises `InvalidRequest`."""
    match = _SIZE.fullmatch(text)
    if match is None:
        raise InvalidRequest(
            f"kv_tiers has size {text!r}; it must be like 4GiB or 500MB", param="cache.kv_tiers"
        )
    number, prefix, binary = match.groups()
    unit = (1024 if binary else 1000) ** ("KMGT".index(prefix.upper()) + 1)
    return int(float(number) * unit)


def _gib(count: int) -> str:
    return f"{count / 2**30:,.2f} GiB"


def _room_on_disk(folder: Path) -> int:
    """Bytes that may be in `folder` in all. Raises `InvalidRequest` if it can be neither made nor
    written to."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        problem = "may not be written to" if existing.is_dir() else "is not a folder"
        raise InvalidRequest(
            f"KV cannot be kept in {folder}: {existing} {problem}", param="cache.kv_tier_dir"
        )
    held = 0
    for path in folder.glob("*/*"):
        try:
            held += path.stat().st_size
        except OSError:
            continue
    return shutil.disk_usage(existing).free + held


def _choose_threads(asked: int | None, hardware: Hardware) -> tuple[int, str]:
    """Compute threads and why: as asked, else one for each CPU that may be used."""
    if asked is not None:
        return asked, "asked for"
    cores = hardware.usable_cores
    if cores < hardware.affinity:
        return cores, f"CPU quota of {hardware.quota:g}"
    if cores < hardware.logical_cpus:
        return cores, f"allowed on {cores} of {hardware.logical_cpus} CPUs"
    return cores, f"one for each of {cores} CPUs"


def _choose_backend(asked: ServeConfig, hardware: Hardware) -> tuple[Literal["cpu", "torch"], str]:
    """What computes and why. Raises `InvalidRequest` for options that exclude each other."""
    model, built = asked.model, bool(hardware.kernels)
    if model.backend == "cpu":
        if not built:
            raise InvalidRequest(
                f"{NOT_BUILT}; use --backend torch",
                param="model.backend",
            )
        if model.dtype != "auto":
            raise InvalidRequest(
                f"dtype {model.dtype} is for the torch backend; the cpu backend keeps weights as "
                "the file has them, or as --quantization says",
                param="model.dtype",
            )
        return "cpu", "asked for"
    if model.quantization is not None and (model.backend == "torch" or not built):
        raise InvalidRequest(
            "quantization needs the cpu backend"
            + ("" if built else ", whose kernels are not built here"),
            param="model.quantization",
        )
    if model.backend == "torch":
        return "torch", "asked for"
    if model.dtype != "auto":
        if model.quantization is not None:
            raise InvalidRequest(
                f"dtype {model.dtype} is for the torch backend, quantization for the cpu backend",
                param="model.dtype",
            )
        return "torch", f"for the dtype asked for, {model.dtype}"
    if not built:
        return "torch", NOT_BUILT
    return "cpu", "Phloem's own kernels are built"


def _choose_isa(hardware: Hardware) -> tuple[str, str]:
    """The kernels' instruction set and why. Raises `InvalidRequest` for one this CPU lacks."""
    forced = os.environ.get(ISA_VARIABLE)
    if not forced:
        return hardware.kernels[0], f"the best that {hardware.cpu} runs"
    if forced not in hardware.kernels:
        raise InvalidRequest(
            f"{ISA_VARIABLE} is {forced!r}; this CPU runs {', '.join(hardware.kernels)}",
            param=ISA_VARIABLE,
        )
    return forced, f"{ISA_VARIABLE} says so"


def _choose_kv_dtype(
    asked: Literal["auto"] | KvDtype, backend: Literal["cpu", "torch"], dtype: Dtype, isa: str
) -> tuple[KvDtype, str]:
    """How KV is kept and why. Raises `InvalidRequest` for what the backend does not have."""
    if backend == "torch":
        if asked not in ("auto", dtype):
            raise InvalidRequest(
                f"kv_cache_dtype {asked} needs the cpu backend; torch keeps KV in its compute "
                f"type, {dtype}",
                param="cache.kv_cache_dtype",
            )
        return dtype, "the compute type"
    if asked != "auto":
        return asked, "asked for"
    if isa == "amx":
        return "bfloat16", "what AMX tiles multiply"
    return "float16", "half of float32's bytes, with three digits"


def _choose_dtype(asked: Literal["auto"] | Dtype, hardware: Hardware) -> tuple[Dtype, str]:
    """Compute type and why: as asked, else bfloat16 only where the CPU multiplies it natively."""
    if asked != "auto":
        return asked, "asked for"
    if hardware.native_bfloat16:
        return "bfloat16", f"the CPU multiplies it natively ({hardware.isa})"
    return "float32", f"no native bfloat16 on this CPU ({hardware.isa})"


def check_ranges(asked: ServeConfig) -> None:
    """Raise `InvalidRequest` naming the first option whose value makes no sense on any machine."""
    at_least: tuple[tuple[str, float | None, float], ...] = (
        ("model.context_length", asked.model.context_length, 1),
        ("server.port", asked.server.port, 0),
        ("server.max_body_bytes", asked.server.max_body_bytes, 1),
        ("server.max_file_bytes", asked.server.max_file_bytes, 1),
        ("server.batch_running", asked.server.batch_running, 1),
        ("server.max_connections", asked.server.max_connections, 1),
        ("server.read_timeout", asked.server.read_timeout, 1),
        ("server.write_timeout", asked.server.write_timeout, 1),
        ("server.keep_alive_timeout", asked.server.keep_alive_timeout, 1),
        ("server.drain_seconds", asked.server.drain_seconds, 0),
        ("cache.kv_tokens", asked.cache.kv_tokens, MIN_KV_TOKENS),
        ("scheduler.max_running", asked.scheduler.max_running, 1),
        ("scheduler.max_waiting", asked.scheduler.max_waiting, 0),
        ("scheduler.max_step_tokens", asked.scheduler.max_step_tokens, 1),
        ("scheduler.request_timeout_s", asked.scheduler.request_timeout_s, 0),
        ("scheduler.itl_target_ms", asked.scheduler.itl_target_ms, 1),
        ("worker.threads", asked.worker.threads, 1),
        ("constraints.compile_timeout_s", asked.constraints.compile_timeout_s, 0),
        ("constraints.compile_threads", asked.constraints.compile_threads, 1),
        ("constraints.memory_bytes", asked.constraints.memory_bytes, 1),
        ("constraints.cache_bytes", asked.constraints.cache_bytes, 0),
        ("constraints.draft_tokens", asked.constraints.draft_tokens, 0),
        ("constraints.draft_batch", asked.constraints.draft_batch, 0),
    )
    for option, value, least in at_least:
        if value is not None and not value >= least:  # so that NaN is refused too
            raise InvalidRequest(f"{option} is {value}; it must be at least {least}", param=option)
    cache, limits = asked.cache, asked.scheduler
    if not 0 <= cache.pin_share <= 1:
        raise InvalidRequest(
            f"cache.pin_share is {cache.pin_share}; it is a share, from 0 to 1",
            param="cache.pin_share",
        )
    least = limits.max_running + cache.page_size
    if cache.page_size > 1 and limits.max_step_tokens < least:
        raise InvalidRequest(
            f"scheduler.max_step_tokens is {limits.max_step_tokens}; with pages of "
            f"{cache.page_size} it must be at least {least}: one token for each running request "
            "and a page",
            param="scheduler.max_step_tokens",
        )
    if "disk" not in parse_tiers(asked.cache.kv_tiers) and asked.cache.kv_tier_dir is not None:
        raise InvalidRequest(
            "kv_tier_dir is for a disk tier: ask for one with kv_tiers", param="cache.kv_tier_dir"
        )
    if asked.cache.kv_tiers is not None and asked.cache.disable_radix_cache:
        raise InvalidRequest(
            "kv_tiers keeps what requests share; disable_radix_cache lets them share nothing",
            param="cache.kv_tiers",
        )
    _check_server(asked.server)


def _check_server(server: ServerOptions) -> None:
    if server.port > 65_535:
        raise InvalidRequest(
            f"server.port is {server.port}; the largest is 65535", param="server.port"
        )
    for origin in server.cors_origin:
        if origin != "*" and not _is_origin(origin):
            raise InvalidRequest(
                f"{origin!r} is no origin; one looks like https://app.example.org:8443",
                param="server.cors_origin",
            )


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        _ = parts.port
    except ValueError:
        return False
    return bool(parts.scheme and parts.hostname) and text == f"{parts.scheme}://{parts.netloc}"


def detect_hardware(root: Path = Path("/")) -> Hardware:
    """Look at this machine. `root` is where `proc` and `sys` are (tests give another)."""
    cpu, flags = _read_cpuinfo(root / "proc" / "cpuinfo")
    memory = psutil.virtual_memory()
    logical = os.cpu_count() or 1
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else logical
    groups = _control_groups(root)
    limit, used = _memory_limit(groups)
    total = memory.total if limit is None else min(memory.total, limit)
    free = memory.available if limit is None else min(memory.available, max(0, limit - used))
    return Hardware(
        cpu=cpu,
        flags=flags,
        logical_cpus=logical,
        affinity=affinity,
        quota=_cpu_quota(groups),
        memory_total=total,
        memory_free=free,
        kernels=_kernels(),
    )


def _kernels() -> tuple[str, ...]:
    try:
        return tuple(runnable_isas())
    except KernelsUnavailable:
        return ()


def _read_cpuinfo(path: Path) -> tuple[str, frozenset[str]]:
    name, flags = platform.processor() or platform.machine(), frozenset[str]()
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return name, flags
    for line in lines:
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "model name":
            name = value
        elif key in ("flags", "Features"):
            flags = frozenset(value.split())
            break
    return name, flags


def _control_groups(root: Path) -> list[Path]:
    """Folders of this process's control groups and their ancestors, both hierarchy versions."""
    try:
        lines = (root / "proc" / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return []
    mount = root / "sys" / "fs" / "cgroup"
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        base = mount / controllers.removeprefix("name=") if controllers else mount
        folder = base / group.lstrip("/")
        found += [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]
    return found


def _cpu_quota(groups: list[Path]) -> float | None:
    """The tightest CPU quota of the groups, in CPUs."""
    quotas = []
    for group in groups:
        both = _numbers(group / "cpu.max")
        if not both:
            both = _numbers(group / "cpu.cfs_quota_us") + _numbers(group / "cpu.cfs_period_us")
        if len(both) == 2 and both[0] > 0 and both[1] > 0:
            quotas.append(both[0] / both[1])
    return min(quotas, default=None)


def _memory_limit(groups: list[Path]) -> tuple[int | None, int]:
    """The tightest memory limit of the groups, and what is used of it, in bytes."""
    found = []
    for group in groups:
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limits = _numbers(group / limit)
            # the first version writes "no limit" as a number near 2**63
            if limits and limits[0] < 1 << 60:
                found.append((limits[0], sum(_numbers(group / used)[:1])))
    return min(found, key=lambda pair: pair[0] - pair[1], default=(None, 0))


def _numbers(path: Path) -> list[int]:
    """The whole numbers in a control file; empty when it is absent or says `max`."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []

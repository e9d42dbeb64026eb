"""What is chosen for which machine, and why."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from phloem.srt.config import (
    CacheOptions,
    ConstraintOptions,
    ModelOptions,
    SchedulerOptions,
    ServeConfig,
    ServerOptions,
    WorkerOptions,
)
from phloem.srt.errors import InvalidRequest
from phloem.srt.resolve import Hardware, choose_kv_tokens, detect_hardware, resolve

GIB = 1 << 30
PLAIN = Hardware(
    cpu="A CPU",
    flags=frozenset({"avx2", "fma", "sse2"}),
    logical_cpus=8,
    affinity=8,
    quota=None,
    memory_total=16 * GIB,
    memory_free=8 * GIB,
)


@pytest.mark.parametrize(
    ("flags", "isa", "dtype"),
    [
        ({"avx2", "fma"}, "avx2", "float32"),
        ({"avx2", "fma", "avx512f", "avx512bw", "avx512vl"}, "avx512", "float32"),
        ({"avx512f", "avx512_vnni"}, "avx512-vnni", "float32"),
        ({"avx512f", "avx512_vnni", "avx512_bf16"}, "avx512-bf16", "bfloat16"),
        ({"avx512f", "amx_tile", "amx_bf16"}, "amx-bf16", "bfloat16"),
        ({"asimd"}, "neon", "float32"),
        ({"asimd", "bf16"}, "neon-bf16", "bfloat16"),
        ({"sse2"}, "generic", "float32"),
    ],
)
def test_bfloat16_only_where_the_cpu_multiplies_it(flags: set[str], isa: str, dtype: str) -> None:
    hardware = replace(PLAIN, flags=frozenset(flags))
    resolved = resolve(ServeConfig(), hardware)
    assert (resolved.isa, resolved.dtype) == (isa, dtype)
    assert isa in resolved.reasons["dtype"]


@pytest.mark.parametrize(
    ("affinity", "quota", "threads", "why"),
    [
        (8, None, 8, "each of 8 CPUs"),
        (3, None, 3, "3 of 8 CPUs"),
        (8, 2.5, 2, "quota of 2.5"),
        (2, 6.0, 2, "2 of 8 CPUs"),
        (8, 0.4, 1, "quota of 0.4"),
    ],
)
def test_threads_follow_affinity_and_quota(
    affinity: int, quota: float | None, threads: int, why: str
) -> None:
    resolved = resolve(ServeConfig(), replace(PLAIN, affinity=affinity, quota=quota))
    assert resolved.threads == threads
    assert why in resolved.reasons["threads"]


def test_what_was_asked_for_is_taken() -> None:
    asked = ServeConfig(model=ModelOptions(dtype="bfloat16"), worker=WorkerOptions(threads=3))
    resolved = resolve(asked, PLAIN)
    assert (resolved.threads, resolved.dtype) == (3, "bfloat16")
    assert resolved.reasons["threads"] == resolved.reasons["dtype"] == "asked for"
    assert resolved.config is asked


def test_kv_tokens_are_a_quarter_of_free_memory_up_to_a_bound() -> None:
    tokens, why = choose_kv_tokens(None, bytes_per_slot=1 << 20, hardware=PLAIN)
    assert tokens == 2048
    assert "a quarter of the memory (8.0 GiB free)" in why
    tokens, why = choose_kv_tokens(None, bytes_per_slot=64, hardware=PLAIN)
    assert tokens == 131_072
    assert "upper bound" in why
    assert choose_kv_tokens(100, bytes_per_slot=1 << 20, hardware=PLAIN)[0] == 100


def test_kv_tokens_that_do_not_fit_are_refused_with_the_numbers() -> None:
    with pytest.raises(InvalidRequest, match=r"9,000.*room for 8,192") as caught:
        choose_kv_tokens(9000, bytes_per_slot=1 << 20, hardware=PLAIN)
    assert caught.value.param == "cache.kv_tokens"
    with pytest.raises(InvalidRequest, match="no room for a KV cache"):
        choose_kv_tokens(None, bytes_per_slot=1 << 30, hardware=PLAIN)


@pytest.mark.parametrize(
    ("config", "option"),
    [
        (ServeConfig(server=ServerOptions(port=-1)), "server.port"),
        (ServeConfig(server=ServerOptions(port=65_536)), "server.port"),
        (ServeConfig(model=ModelOptions(context_length=0)), "model.context_length"),
        (ServeConfig(cache=CacheOptions(kv_tokens=1)), "cache.kv_tokens"),
        (ServeConfig(scheduler=SchedulerOptions(max_running=0)), "scheduler.max_running"),
        (
            ServeConfig(scheduler=SchedulerOptions(request_timeout_s=float("nan"))),
            "scheduler.request_timeout_s",
        ),
        (ServeConfig(worker=WorkerOptions(threads=0)), "worker.threads"),
        (
            ServeConfig(constraints=ConstraintOptions(compile_threads=0)),
            "constraints.compile_threads",
        ),
    ],
)
def test_option_out_of_range_is_named(config: ServeConfig, option: str) -> None:
    with pytest.raises(InvalidRequest, match=option.replace(".", r"\.")) as caught:
        resolve(config, PLAIN)
    assert caught.value.param == option


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_detection_reads_cpuinfo_and_the_second_version_of_control_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/cpuinfo": "processor\t: 0\nmodel name\t: Big CPU\nflags\t\t: avx2 fma\n",
            "proc/self/cgroup": "0::/outer/inner\n",
            "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
            "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/outer/inner/memory.max": "max\n",
            "sys/fs/cgroup/outer/memory.max": "1000000\n",
            "sys/fs/cgroup/outer/memory.current": "400000\n",
        },
    )
    found = detect_hardware(tmp_path)
    assert (found.cpu, found.isa, found.quota) == ("Big CPU", "avx2", 1.5)
    assert (found.memory_total, found.memory_free) == (1_000_000, 600_000)
    assert found.usable_cores == 1


def test_detection_reads_the_first_version_of_control_groups(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/box\n1:cpu,cpuacct:/box\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu,cpuacct/box/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/box/memory.limit_in_bytes": "5000\n",
            "sys/fs/cgroup/memory/box/memory.usage_in_bytes": "6000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    found = detect_hardware(tmp_path)
    assert found.quota == 2.0
    assert (found.memory_total, found.memory_free) == (5000, 0)


def test_detection_without_any_of_these_files(tmp_path: Path) -> None:
    found = detect_hardware(tmp_path)
    assert found.quota is None
    assert found.isa == "generic"
    assert 1 <= found.usable_cores <= (os.cpu_count() or 1)
    assert found.memory_free <= found.memory_total


def test_this_machine_resolves() -> None:
    hardware = detect_hardware()
    resolved = resolve(ServeConfig(), hardware)
    assert 1 <= resolved.threads <= hardware.logical_cpus
    assert resolved.backend == ("cpu" if hardware.kernels else "torch")
    assert {"threads", "backend", "isa", "kv_dtype"} <= resolved.reasons.keys()


BUILT = replace(PLAIN, kernels=("avx2", "generic"))


def test_kernels_compute_where_they_are_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHLOEM_ISA", raising=False)
    resolved = resolve(ServeConfig(), BUILT)
    assert (resolved.backend, resolved.isa, resolved.kv_dtype) == ("cpu", "avx2", "float16")
    resolved = resolve(ServeConfig(), PLAIN)
    assert (resolved.backend, resolved.kv_dtype) == ("torch", "float32")
    assert "no C++17 compiler" in resolved.reasons["backend"]
    asked = ServeConfig(model=ModelOptions(dtype="float32"))
    assert resolve(asked, BUILT).backend == "torch"
    asked = ServeConfig(cache=CacheOptions(kv_cache_dtype="int8"))
    assert resolve(asked, BUILT).kv_dtype == "int8"
    tiles = replace(PLAIN, kernels=("amx", "avx512vnni", "generic"))
    assert resolve(ServeConfig(), tiles).kv_dtype == "bfloat16"
    asked = ServeConfig(cache=CacheOptions(kv_cache_dtype="float16"))
    assert resolve(asked, tiles).kv_dtype == "float16"


def test_the_environment_may_force_an_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHLOEM_ISA", "generic")
    assert resolve(ServeConfig(), BUILT).isa == "generic"
    monkeypatch.setenv("PHLOEM_ISA", "avx512")
    with pytest.raises(InvalidRequest, match="this CPU runs avx2, generic"):
        resolve(ServeConfig(), BUILT)


@pytest.mark.parametrize(
    ("model", "kv", "hardware", "param"),
    [
        (ModelOptions(backend="cpu"), "auto", PLAIN, "model.backend"),
        (ModelOptions(backend="cpu", dtype="float32"), "auto", BUILT, "model.dtype"),
        (ModelOptions(quantization="int8"), "auto", PLAIN, "model.quantization"),
        (ModelOptions(backend="torch", quantization="int4"), "auto", BUILT, "model.quantization"),
        (ModelOptions(dtype="float32", quantization="int4"), "auto", BUILT, "model.dtype"),
        (ModelOptions(backend="torch"), "int8", BUILT, "cache.kv_cache_dtype"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    model: ModelOptions, kv: Literal["auto", "int8"], hardware: Hardware, param: str
) -> None:
    asked = ServeConfig(model=model, cache=CacheOptions(kv_cache_dtype=kv))
    with pytest.raises(InvalidRequest) as refused:
        resolve(asked, hardware)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "origin",
    [
        "app.example.org",
        "https://a.b/",
        "https://a.b/c",
        "https://",
        "null",
        "https://a:b",
        "*.org",
    ],
)
def test_what_is_no_origin_is_refused(origin: str) -> None:
    origins = ("http://localhost:5173", "https://[::1]:8443", "*", origin)
    with pytest.raises(InvalidRequest, match="is no origin") as caught:
        resolve(ServeConfig(server=ServerOptions(cors_origin=origins)), PLAIN)
    assert caught.value.param == "server.cors_origin"
    assert repr(origin) in caught.value.message
    resolve(ServeConfig(server=ServerOptions(cors_origin=origins[:-1])), PLAIN)

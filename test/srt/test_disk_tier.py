"""What may be asked of the disk tier, and how much it gets."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from phloem.srt import resolve
from phloem.srt.config import CacheOptions, ServeConfig
from phloem.srt.errors import InvalidRequest
from phloem.srt.resolve import (
    DEFAULT_TIER_BYTES,
    DiskTier,
    check_ranges,
    choose_disk_tier,
    parse_tiers,
)

GIB = 1 << 30
BLOCK = 1 << 20

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its last number is what the disk has free."""
    amounts = [1000 * GIB]
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, amounts[-1]))
    return amounts


def choose(folder: Path, tiers: str, folder_asked: str | None = None) -> tuple[DiskTier, str]:
    cache = CacheOptions(kv_tiers=tiers, kv_tier_dir=folder_asked)
    tier, reason = choose_disk_tier(cache, folder=folder, block_bytes=BLOCK)
    assert tier is not None
    return tier, reason


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("disk", None),
        (" disk ", None),
        ("disk:4GiB", 4 * GIB),
        ("disk: 500MB", 500_000_000),
        ("disk:1.5tib", 3 << 39),
        ("disk:64 kB", 64_000),
    ],
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_tiers(text) == {"disk": size}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "names ''; there is: disk"),
        ("ssd:4GiB", "names 'ssd'; there is: disk, or disk:SIZE as in disk:4GiB"),
        ("disk,", "names ''"),
        ("disk,disk:1GiB", "names disk twice"),
        ("host:8GiB,disk", "on a CPU the pool itself is the host's memory; .*kv_tokens"),
        ("disk:", "has size ''; it must be like 4GiB or 500MB"),
        ("disk:4", "has size '4'"),
        ("disk:-4GiB", "has size '-4GiB'"),
        ("disk:1e9GB", "has size '1e9GB'"),
        ("disk:nanGiB", "has size 'nanGiB'"),
        ("disk:4GiB:2", "has size '4GiB:2'"),
    ],
)
def test_what_is_refused(text: str, match: str) -> None:
    """Before anything is started."""
    with pytest.raises(InvalidRequest, match=match) as caught:
        check_ranges(ServeConfig(cache=CacheOptions(kv_tiers=text)))
    assert caught.value.param == "cache.kv_tiers"


def test_options_that_exclude_each_other() -> None:
    with pytest.raises(InvalidRequest, match="ask for one with kv_tiers") as caught:
        check_ranges(ServeConfig(cache=CacheOptions(kv_tier_dir="/tmp")))
    assert caught.value.param == "cache.kv_tier_dir"
    with pytest.raises(InvalidRequest, match="share nothing"):
        check_ranges(ServeConfig(cache=CacheOptions(kv_tiers="disk", disable_radix_cache=True)))
    check_ranges(ServeConfig(cache=CacheOptions(kv_tiers="disk", kv_tier_dir="/tmp")))
    check_ranges(ServeConfig())


def test_no_tier_unless_it_is_asked_for(tmp_path: Path) -> None:
    tier, _ = choose_disk_tier(CacheOptions(), folder=tmp_path, block_bytes=BLOCK)
    assert tier is None


def test_the_default_is_no_more_than_half_of_the_disk(tmp_path: Path, free: list[int]) -> None:
    folder = tmp_path / "home" / "kv"
    tier, reason = choose(folder, "disk")
    assert tier == DiskTier(folder=folder, limit_bytes=DEFAULT_TIER_BYTES)
    assert reason == f"the default; in {folder}"
    free.append(5 * GIB)
    tier, reason = choose(folder, "disk")
    assert tier.limit_bytes == 5 * GIB // 2
    assert "half of what" in reason
    assert not folder.exists()


def test_what_is_asked_for_has_to_fit(tmp_path: Path, free: list[int]) -> None:
    free.append(5 * GIB)
    tier, reason = choose(tmp_path, "disk:5GiB")
    assert tier.limit_bytes == 5 * GIB
    assert reason == f"asked for; in {tmp_path}"
    free.append(5 * GIB - 1000)
    with pytest.raises(InvalidRequest, match=r"5\.00 GiB on disk; .* has room for 5\.00 GiB"):
        choose(tmp_path, "disk:5GiB")
    kept = tmp_path / ("0" * 32) / "segment-00000001.kv"  # which counts in the limit
    kept.parent.mkdir()
    kept.write_bytes(bytes(1000))
    assert choose(tmp_path, "disk:5GiB")[0].limit_bytes == 5 * GIB


def test_a_size_that_holds_nothing(tmp_path: Path, free: list[int]) -> None:
    least = resolve.MIN_TIER_BLOCKS
    assert choose(tmp_path, f"disk:{least * 1024}KiB")[0].limit_bytes == least * BLOCK
    with pytest.raises(InvalidRequest, match="too small for this model's KV"):
        choose(tmp_path, f"disk:{least * 1024 - 1}KiB")


def test_another_folder(tmp_path: Path, free: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    tier, _ = choose(tmp_path / "unused", "disk", "~/fast disk/kv")
    assert tier.folder == tmp_path / "fast disk" / "kv"


def test_a_folder_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/kv"):
        with pytest.raises(InvalidRequest, match="file is not a folder") as caught:
            choose(tmp_path, "disk", str(tmp_path / folder))
        assert caught.value.param == "cache.kv_tier_dir"
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path)
    with pytest.raises(InvalidRequest, match="may not be written to"):
        choose(tmp_path / "kv", "disk")

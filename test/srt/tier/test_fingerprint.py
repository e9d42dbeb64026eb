"""What KV depends on, and that a file is read in full only once."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from phloem.srt.tier import fingerprint as module
from phloem.srt.tier.errors import TierError
from phloem.srt.tier.fingerprint import content_hashes, fingerprint, look_at

FACTS: dict[str, str | int] = {"kv_dtype": "float16", "layers": 30}


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose content was read."""
    names: list[str] = []
    plain = module._hash

    def counting(path: Path) -> str:
        names.append(path.name)
        return plain(path)

    monkeypatch.setattr(module, "_hash", counting)
    return names


def test_anything_that_differs_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "model.gguf"
    seen = set()

    def one(content: bytes, facts: dict[str, str | int]) -> bytes:
        model.write_bytes(content)
        made = fingerprint(look_at(model), facts, tmp_path / "kv")
        assert len(made) == 16
        assert made == fingerprint(look_at(model), dict(reversed(facts.items())), tmp_path / "kv")
        return made

    seen.add(one(b"weights", FACTS))
    seen.add(one(b"weightz", FACTS))
    seen.add(one(b"weights", {**FACTS, "layers": 31}))
    seen.add(one(b"weights", {**FACTS, "layers": "30"}))
    seen.add(one(b"weights", {"kv_dtype": "float16"}))
    assert len(seen) == 5
    assert one(b"weights", FACTS) in seen  # the content counts, not when it was written
    monkeypatch.setattr(module, "LAYOUT_VERSION", 1000)
    assert one(b"weights", FACTS) not in seen


def test_a_file_is_read_once(tmp_path: Path, hashed: list[str]) -> None:
    model, link = tmp_path / "model.gguf", tmp_path / "link.gguf"
    model.write_bytes(bytes(100))
    link.symlink_to(model)
    root = tmp_path / "kv"
    expected = content_hashes(look_at(model), root)
    assert content_hashes(look_at(model), root) == content_hashes(look_at(link), root) == expected
    assert hashed == ["model.gguf"]
    before = model.stat()
    model.write_bytes(bytes(99) + b"1")
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if nothing had happened
    assert content_hashes(look_at(model), root) != expected
    assert hashed == ["model.gguf"] * 2


def test_a_folders_weights_and_configuration_count(tmp_path: Path, hashed: list[str]) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "b.safetensors", "a.safetensors", "tokenizer.json", "README.md"):
        (folder / name).write_text(name)
    (folder / "model.safetensors.index.json").write_text("{}")
    first = fingerprint(look_at(folder), FACTS, tmp_path / "kv")
    assert hashed == [
        "config.json",
        "a.safetensors",
        "b.safetensors",
        "model.safetensors.index.json",
    ]
    (folder / "tokenizer.json").write_text("other")
    assert fingerprint(look_at(folder), FACTS, tmp_path / "kv") == first
    (folder / "b.safetensors").write_text("other")
    assert fingerprint(look_at(folder), FACTS, tmp_path / "kv") != first
    assert hashed[4:] == ["b.safetensors"]


def test_a_file_that_changed_since_it_was_loaded(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"1")
    loaded = look_at(model)
    model.write_bytes(b"22")
    with pytest.raises(TierError, match=r"model\.gguf changed while it was being loaded"):
        fingerprint(loaded, FACTS, tmp_path / "kv")
    model.unlink()
    with pytest.raises(FileNotFoundError):
        fingerprint(loaded, FACTS, tmp_path / "kv")


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"[[1, 2]]", b'{"a": 1}'])
def test_a_damaged_list_of_hashes_is_not_used(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    model, root = tmp_path / "model.gguf", tmp_path / "kv"
    model.write_bytes(b"1")
    expected = content_hashes(look_at(model), root)
    (root / "hashes.json").write_bytes(content)
    assert content_hashes(look_at(model), root) == expected
    assert "hashes.json is not used" in caplog.text
    caplog.clear()
    assert content_hashes(look_at(model), root) == expected
    assert not caplog.records
    assert [path.name for path in root.iterdir()] == ["hashes.json"]


def test_the_list_does_not_grow_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hashed: list[str]
) -> None:
    monkeypatch.setattr(module, "_MOST_HASHES", 3)
    models = [tmp_path / str(i) for i in range(6)]
    for model in models:
        model.write_text("x")
        content_hashes(look_at(model), tmp_path / "kv")
    assert hashed == ["0", "1", "2", "3", "4", "5"]
    for model in models[3:]:
        content_hashes(look_at(model), tmp_path / "kv")
    assert len(hashed) == 6
    content_hashes(look_at(models[0]), tmp_path / "kv")
    assert hashed[6:] == ["0"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_hashing_yields_to_the_threads_that_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def niceness() -> int:
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    monkeypatch.setattr(module, "_hash", lambda _: str(niceness()))
    before = niceness()
    model = tmp_path / "model.gguf"
    model.write_bytes(b"1")
    (seen,) = content_hashes(look_at(model), tmp_path / "kv")
    assert int(seen) > before
    assert niceness() == before

"""Pulling from a hub, against one on the loopback interface."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.errors import InvalidRequest, NotFound, Unavailable
from phloem.srt.hub import list_models, pull, resolve_model, show

CHECKPOINT = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "model.safetensors": b"weights" * 1000,
}


def test_checkpoint_is_a_folder_of_what_serving_needs(hub: Any) -> None:
    hub.files = {
        **CHECKPOINT,
        "README.md": b"# hello",
        "pytorch_model.bin": b"pickles",
        "onnx/model.onnx": b"other",
        "consolidated.safetensors": b"the same again",
    }
    model = resolve_model("org/name")
    assert {f.name: f.read_bytes() for f in model.path.iterdir()} == CHECKPOINT
    assert model.license == "mit"
    assert "org/name@c0ffee" in model.source
    assert show("org/name").problems == ()


def test_sharded_checkpoint_brings_its_index(hub: Any) -> None:
    hub.files = {
        "config.json": b"{}",
        "model-00001-of-00002.safetensors": b"1",
        "model-00002-of-00002.safetensors": b"2",
        "model.safetensors.index.json": b'{"weight_map": {}}',
    }
    assert {f.name for f in resolve_model("org/name").path.iterdir()} == set(hub.files)


def test_one_gguf_is_taken_and_several_are_asked_about(hub: Any) -> None:
    hub.files = {"m.Q4_K_M.gguf": b"GGUF4"}
    assert resolve_model("org/name").path.read_bytes() == b"GGUF4"
    hub.files["m.Q8_0.gguf"] = b"GGUF88"
    assert resolve_model("org/name:m.Q8_0.gguf").path.read_bytes() == b"GGUF88"
    assert {model.name for model in list_models()} == {"org/name", "org/name:m.Q8_0.gguf"}


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("org/name", InvalidRequest, "several GGUF files.*org/name:FILE.*a.gguf, b.gguf"),
        ("org/name:c.gguf", NotFound, "no file 'c.gguf'.*a.gguf, b.gguf"),
        ("org/other", NotFound, "org/other"),
    ],
)
def test_refusals_name_what_there_is(
    hub: Any, name: str, error: type[Exception], said: str
) -> None:
    hub.files = {"a.gguf": b"GGUFa", "b.gguf": b"GGUFb"}
    with pytest.raises(error, match=said):
        pull(name)


def test_repository_without_weights_is_refused(hub: Any) -> None:
    hub.files = {"pytorch_model.bin": b"pickles", "config.json": b"{}"}
    with pytest.raises(InvalidRequest, match="neither safetensors nor GGUF"):
        pull("org/name")


def test_stored_repository_is_served_without_the_hub(
    hub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.files = dict(CHECKPOINT)
    pull("org/name")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert (resolve_model("org/name").path / "config.json").exists()
    with pytest.raises(Unavailable, match="could not be reached for org/unseen"):
        resolve_model("org/unseen")


def test_file_damaged_on_the_way_is_refused(hub: Any) -> None:
    hub.files = {"m.gguf": b"GGUF-good"}
    hub.served = {"m.gguf": b"GGUF-evil"}
    with pytest.raises(InvalidRequest, match=r"m\.gguf came with SHA-256"):
        pull("org/name")
    assert list_models() == []
    hub.served = {}
    assert pull("org/name").path.read_bytes() == b"GGUF-good"


def test_token_goes_to_the_hub_and_not_to_its_storage(
    hub: Any, storage_host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    hub.files = {"m.gguf": b"GGUF" * 100}
    storage_host.files = dict(hub.files)
    hub.storage = storage_host.url
    assert pull("org/name").path.read_bytes() == hub.files["m.gguf"]
    assert ("/api/models/org/name/revision/main", "Bearer hf_secret") in hub.tokens
    assert storage_host.tokens
    assert all(token is None for _, token in storage_host.tokens)


def test_pull_resumes_after_a_kill(hub: Any, home: Path, progress: Any) -> None:
    hub.files = {"m.gguf": b"GGUF" + os.urandom(24 << 20)}
    hub.stall_after = 12 << 20
    code = "from phloem.srt.hub import pull; pull('org/name')"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        size = 0
        while size < 10 << 20:  # what huggingface_hub reads at a time
            assert child.poll() is None
            time.sleep(0.02)
            size = sum(f.stat().st_size for f in home.glob("partial/*/*.part"))
        child.kill()
    assert list_models() == []
    hub.stall_after = None
    assert pull("org/name", progress).path.read_bytes() == hub.files["m.gguf"]
    first, second = hub.ranges
    assert first is None
    assert int(second.removeprefix("bytes=").rstrip("-")) >= size
    assert progress.bars["m.gguf"][0] >= size


def test_part_of_an_older_revision_is_not_mixed_in(hub: Any, home: Path) -> None:
    hub.files = {"m.gguf": b"GGUF" + b"new" * 1000}
    folder = home / "partial" / "org%2Fname"
    folder.mkdir(parents=True)
    (folder / "m.gguf.0123456789abcdef.part").write_bytes(b"old" * 500)
    assert pull("org/name").path.read_bytes() == hub.files["m.gguf"]
    assert hub.ranges == [None]

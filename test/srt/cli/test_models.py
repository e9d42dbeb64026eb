"""`phloem pull`, `list`, `show`, `rm` over the store."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest

from phloem.srt.hub import CATALOGUE
from phloem.srt.hub.store import Manifest, Store, StoredFile

DATA = b"GGUF of nothing"


@pytest.fixture
def stocked(clean_room: Any) -> Manifest:
    """A store that has one (broken, but whole) model, `tiny`."""
    store = Store.default()
    staged = store.staging("tiny")
    (staged / "tiny.gguf").write_bytes(DATA)
    file = StoredFile(name="tiny.gguf", size=len(DATA), sha256=hashlib.sha256(DATA).hexdigest())
    manifest = Manifest(
        name="tiny", source="a test", license="MIT", files=(file,), open_as="tiny.gguf"
    )
    store.commit(manifest, staged)
    return manifest


@pytest.mark.usefixtures("stocked")
def test_list_shows_what_is_here_and_what_can_be_pulled(phloem: Any) -> None:
    rows = [line.split("  ") for line in phloem("list").out.splitlines()]
    assert [row[0] for row in rows] == ["NAME", "tiny", *CATALOGUE]
    gemma = next(row for row in rows if row[0] == "gemma3-270m")
    assert "not pulled; the Gemma architecture is not supported yet" in gemma[-1]


def test_show_tells_files_hashes_and_why_it_cannot_be_served(
    phloem: Any, stocked: Manifest
) -> None:
    result = phloem("show", "tiny")
    assert result.code == 0
    assert stocked.sha256 in result.out
    assert "a test" in result.out
    assert "servable  no: " in result.out


def test_show_of_a_damaged_model_ends_with_1_and_names_the_file(
    phloem: Any, stocked: Manifest
) -> None:
    Store.default().path(stocked).resolve().write_bytes(b"X" + DATA[1:])
    result = phloem("show", "tiny")
    assert result.code == 1
    assert "damaged: " in result.err
    assert "tiny.gguf" in result.err
    assert "phloem pull tiny" in result.err


def test_show_of_gemma_says_that_it_cannot_be_served(phloem: Any) -> None:
    result = phloem("show", "gemma3-270m")
    assert result.code == 1
    assert "Gemma architecture is not supported yet" in result.err
    assert "Gemma Terms of Use" in result.err


@pytest.mark.parametrize("command", ["serve", "run"])
def test_serving_gemma_is_refused_before_anything_is_fetched(phloem: Any, command: str) -> None:
    arguments = ["--port", "0"] if command == "serve" else ["prompt"]
    result = phloem(command, *arguments, "--model", "gemma3-270m")
    assert result.code == 1
    assert result.err == (
        "phloem: gemma3-270m cannot be served: the Gemma architecture is not supported yet; "
        "the file can be pulled, not served\n"
    )


@pytest.mark.usefixtures("stocked")
def test_rm_frees_and_forgets(phloem: Any) -> None:
    assert phloem("rm", "tiny").out.startswith("tiny is removed")
    assert phloem("rm", "tiny").code == 1


def test_pull_of_what_is_here_checks_it_and_tells_of_a_block(
    phloem: Any, stocked: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = replace(CATALOGUE["gemma3-270m"], name="tiny", blocked="nobody can serve it")
    monkeypatch.setitem(CATALOGUE, "tiny", entry)
    result = phloem("pull", "tiny")
    assert (result.code, result.err) == (0, "phloem: tiny: nobody can serve it\n")
    assert stocked.source in result.out


def test_pull_of_an_unknown_name_helps(phloem: Any) -> None:
    result = phloem("pull", "smollm2-135m-instrukt")
    assert result.code == 1
    assert "Did you mean smollm2-135m-instruct?" in result.err

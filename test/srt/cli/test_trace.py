"""`phloem trace`: one run drawn, several listed, a page, and what is no trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from phloem.lang.recording.files import save
from phloem.lang.recording.spans import Branch, Span, Trace


def run(program: str, error: str | None = None) -> Trace:
    spans = [
        Span(id=0, name="plan", called=0, sent=0, first=0.5, ended=1, prompt_tokens=1234, read=True)
    ]
    return Trace(
        program=program,
        started_at=0.0,
        ended=2.0,
        spans=spans,
        branches=[Branch()],
        error=error,
    )


@pytest.fixture
def one(tmp_path: Path) -> Path:
    path = tmp_path / "one.json"
    save(run("agent"), path)
    return path


@pytest.fixture
def several(tmp_path: Path) -> Path:
    import msgspec

    path = tmp_path / "all.jsonl"
    lines = [msgspec.json.encode(run(f"agent{i}", "E: it" if i == 1 else None)) for i in range(3)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_one_run_is_drawn_and_explained(phloem: Any, one: Path) -> None:
    result = phloem("trace", str(one))
    assert result.code == 0
    first, *rest = result.out.splitlines()
    assert first.rstrip() == "agent: 2 s, 1 calls, 1,234 in (0 cached), 0 out (0 forced)"
    assert "█" in rest[0] and rest[0].startswith("plan ")
    assert "agent took 2 s: 1 call." in rest


def test_a_page_instead(phloem: Any, one: Path, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    result = phloem("trace", str(one), "--html", str(page))
    assert (result.code, result.out) == (0, "")
    assert "<title>agent: 2 s" in page.read_text(encoding="utf-8")


def test_several_runs_are_listed_and_one_is_chosen(
    phloem: Any, several: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = phloem("trace", str(several)).out.splitlines()
    assert [row.split()[:2] for row in rows[1:]] == [[f"{i + 1}", f"agent{i}"] for i in range(3)]
    assert rows[2].endswith("E: it")
    assert phloem("trace", str(several), "--run", "2").out.startswith("agent1: ")
    monkeypatch.setattr("phloem.srt.cli.trace.LISTED", 2)
    assert phloem("trace", str(several)).out.splitlines()[-1].startswith("… and more")


def test_faults(phloem: Any, several: Path, tmp_path: Path) -> None:
    page = str(tmp_path / "x.html")
    cases: list[tuple[int, str, tuple[str, ...]]] = [
        (1, "No such file", (str(tmp_path / "none"),)),
        (2, "fewer than 4 runs", (str(several), "--run", "4")),
        (2, "choose one with --run", (str(several), "--html", page)),
        (2, "--run", (str(several), "--run", "0")),
        (1, "is no trace", (__file__,)),
    ]
    for code, said, arguments in cases:
        result = phloem("trace", *arguments)
        assert (result.code, said in result.err) == (code, True), result

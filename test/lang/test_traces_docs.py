"""Every Python snippet of docs/traces.md runs, and its table names every field of a span."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import phloem
from phloem.lang.recording.spans import Span

PAGE = (Path(__file__).parents[2] / "docs" / "traces.md").read_text(encoding="utf-8")


@pytest.mark.timeout(60)
def test_snippets_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"phloem": phloem}
    phloem.set_default_backend(phloem.MockBackend({"idea": "Ride tram 28.", "best": "The first."}))
    try:
        for code in re.findall(r"```python(?: setup)?\n(.*?)```", PAGE, re.DOTALL):
            exec(compile(code, "docs/traces.md", "exec"), scope)
    finally:
        phloem.set_default_backend(None)
    printed = capsys.readouterr().out
    assert "├─ [0] idea" in printed
    assert "plan took " in printed
    assert "Oslo The first." in printed
    assert {path.name for path in tmp_path.iterdir()} == {"run.html", "run.json", "plans.jsonl"}


def test_every_field_is_documented() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE))
    assert set(Span.__struct_fields__) <= named | {"id"}

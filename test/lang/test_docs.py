"""Every Python snippet of the pages about the DSL runs, in order, on the scripted model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import phloem
from phloem.lang.backend.mock import Script

DOCS = Path(__file__).parents[2] / "docs"


def printed_by(page: Path, script: Script, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the snippets of a page print, one after another."""
    blocks = re.findall(r"```(python(?: setup)?)\n(.*?)```", page.read_text(), re.DOTALL)
    assert len(blocks) >= 5
    scope: dict[str, object] = {"phloem": phloem}
    setup = next(code for kind, code in blocks if kind == "python setup")
    exec(setup, scope)
    phloem.set_default_backend(phloem.MockBackend(script))
    try:
        for kind, code in blocks:
            if kind == "python":
                exec(compile(code, str(page), "exec"), scope)
    finally:
        phloem.set_default_backend(None)
    return capsys.readouterr().out.splitlines()


@pytest.mark.timeout(60)
def test_dsl(capsys: pytest.CaptureFixture[str]) -> None:
    script = {
        "idea": "Ride tram 28.",
        "best": '{"idea": "Ride tram 28."}',
        "stars": "5",
        "person": '{"name": "Ada", "age": 36}',
        "points": "90",
    }
    printed = printed_by(DOCS / "dsl.md", script, capsys)
    expected = ["{'idea': 'Ride tram 28.'}", "5", "Ada", "36", "/name Ada", "/age 36"]
    assert printed[:6] == expected
    assert '{"idea": "Ride tram 28."}extract(text)' in printed
    assert "├ gen person: json_schema" in printed


@pytest.mark.timeout(60)
def test_migration(capsys: pytest.CaptureFixture[str]) -> None:
    script = {
        "answer": "Tea.",
        "age": "36",
        "person": '{"name":"Ada","age":36}',
        "verdict": "Fine.",
        "good": "true",
    }
    printed = printed_by(DOCS / "migration.md", script, capsys)
    assert printed == ["Tea.Tea. ['yes', 'yes'] [None, None]", "Ada"]

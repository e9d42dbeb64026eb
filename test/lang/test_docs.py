"""Every Python snippet of docs/dsl.md runs, in order, on the scripted model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import phloem

PAGE = Path(__file__).parents[2] / "docs" / "dsl.md"


@pytest.mark.timeout(60)
def test_snippets_run(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(python(?: setup)?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 6
    backend = phloem.MockBackend(
        {
            "idea": "Ride tram 28.",
            "best": '{"idea": "Ride tram 28."}',
            "stars": "5",
            "person": '{"name": "Ada", "age": 36}',
            "points": "90",
        }
    )
    scope: dict[str, object] = {"phloem": phloem}
    setup = next(code for kind, code in blocks if kind == "python setup")
    exec(setup, scope)
    phloem.set_default_backend(backend)
    try:
        for kind, code in blocks:
            if kind == "python":
                exec(compile(code, str(PAGE), "exec"), scope)
    finally:
        phloem.set_default_backend(None)
    printed = capsys.readouterr().out.splitlines()
    assert printed[:5] == ["{'idea': 'Ride tram 28.'}", "5", "Ada", "/name Ada", "/age 36"]
    assert '{"idea": "Ride tram 28."}' in printed[-1]

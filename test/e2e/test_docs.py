"""The README's programs do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import phloem

pytestmark = [pytest.mark.e2e, pytest.mark.model]

README = Path(__file__).parents[2] / "README.md"
PROGRAMS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.usefixtures("default_model")
@pytest.mark.parametrize("index", range(len(PROGRAMS)))
def test_program(server: Any, capsys: pytest.CaptureFixture[str], index: int) -> None:
    program = PROGRAMS[index].replace("http://127.0.0.1:30000", server.url)
    program = program.replace("smollm2-135m-instruct", "tiny")
    try:
        exec(compile(program, f"README program {index + 1}", "exec"), {"__name__": "readme"})
    finally:
        phloem.set_default_backend(None)
    assert capsys.readouterr().out.strip()

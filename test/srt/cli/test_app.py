"""The command line as a whole: help, version, exit codes."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from phloem.srt.cli import models
from phloem.srt.cli.docs import render

REFERENCE = Path(__file__).parents[3] / "docs" / "cli.md"


def test_reference_is_fresh() -> None:
    """`make docs` writes it anew."""
    assert REFERENCE.read_text(encoding="utf-8") == render()


def test_version(phloem: Any) -> None:
    result = phloem("--version")
    assert (result.code, result.out.strip()) == (0, version("phloem"))


def test_help_names_every_command(phloem: Any) -> None:
    shown = phloem("--help").out
    for command in [
        "serve",
        "run",
        "chat",
        "pull",
        "list",
        "show",
        "rm",
        "bench",
        "batch",
        "trace",
        "doctor",
        "quantize",
    ]:
        assert f"│ {command} " in shown


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["srve"], "srve"),
        (["serve", "--prot", "1"], "--prot"),
        (["serve", "--port", "one"], "--port"),
        (["serve", "--dtype", "int4"], "float32"),
        (["pull"], "MODEL"),
        (["run", "a", "b"], "b"),
    ],
)
def test_usage_errors_end_with_2_and_name_the_fault(
    phloem: Any, arguments: list[str], said: str
) -> None:
    result = phloem(*arguments)
    assert result.code == 2
    assert said in result.err
    assert not result.out


def test_flag_given_again_overrides_the_first(phloem: Any) -> None:
    result = phloem("doctor", "--threads", "3", "--threads", "4")
    assert result.code == 0
    assert re.search(r"threads +4: asked for", result.out)


def test_error_of_a_command_is_one_line_and_1(phloem: Any) -> None:
    result = phloem("rm", "ghost")
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert result.err.startswith("phloem: no model 'ghost'")


def test_ctrl_c_ends_with_130(phloem: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> list[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "list_models", interrupted)
    assert phloem("list").code == 130


def test_reader_that_left_is_no_traceback() -> None:
    code = "import sys; from phloem.srt.cli import main; sys.exit(main(['list']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.close()
        assert child.stderr.read() == b""
        assert child.wait() == 1

"""Pyright, in strict mode, sees of the DSL what mypy does: the types that test_dsl_types.py
expects, and its mistakes. (mypy reads that file in `make check`.)"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = Path(__file__).with_name("test_dsl_types.py").read_text(encoding="utf-8")
READ = ["example.py", "revealed.py"]
CONFIG = {
    "include": READ,
    "typeCheckingMode": "strict",
    "enableTypeIgnoreComments": False,
}
RULES = {
    "call-overload": {"reportArgumentType", "reportCallIssue"},
    "arg-type": {"reportArgumentType", "reportOperatorIssue"},
    "attr-defined": {"reportAttributeAccessIssue"},
}
"""mypy's code for a mistake → pyright's."""

Diagnostics = dict[str, list[dict[str, Any]]]  # by file


@pytest.fixture(scope="module")
def diagnostics(tmp_path_factory: pytest.TempPathFactory) -> Diagnostics:
    """Of the example, and of a copy that has the types of its expressions shown."""
    folder = tmp_path_factory.mktemp("pyright")
    lay_out(folder)
    (folder / "example.py").write_text(EXAMPLE, encoding="utf-8")
    (folder / "revealed.py").write_text(revealing(EXAMPLE), encoding="utf-8")
    (folder / "pyrightconfig.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1, done.stderr  # there are the mistakes
    report = json.loads(done.stdout)
    assert report["summary"]["filesAnalyzed"] == len(READ)
    found: Diagnostics = defaultdict(list)
    for one in report["generalDiagnostics"]:
        found[Path(one["file"]).name].append(one)
    return found


def lay_out(folder: Path) -> None:
    """The packages under the names that they are imported by, which pyright cannot see through an
    editable install."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    left_out = shutil.ignore_patterns("_phloem", "__pycache__", "*.so", "*.cpp", "*.h")
    for package, source in project["tool"]["setuptools"]["package-dir"].items():
        target = folder.joinpath(*package.split("."))
        shutil.copytree(ROOT / source, target, ignore=left_out, dirs_exist_ok=True)


def expectations(code: str) -> list[ast.Call]:
    """The calls of `assert_type`, in order."""
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    found = [call for call in calls if ast.unparse(call.func) == "assert_type"]
    return sorted(found, key=lambda call: call.lineno)


def revealing(code: str) -> str:
    """The code with `reveal_type(x)` for each `assert_type(x, T)`."""
    lines = code.splitlines()
    for call in expectations(code):
        first, last = call.lineno - 1, (call.end_lineno or 0) - 1
        shown = f"reveal_type({ast.unparse(call.args[0])})"
        line = lines[first][: call.col_offset] + shown + lines[last][call.end_col_offset :]
        lines[first : last + 1] = [line, *[""] * (last - first)]
    return "\n".join(lines)


def test_types_are_as_expected(diagnostics: Diagnostics) -> None:
    """Each one is shown, too: pyright says nothing of code that it takes to be unreachable."""
    shown = {
        one["range"]["start"]["line"] + 1: one["message"].rpartition(' is "')[2].rstrip('"')
        for one in diagnostics["revealed.py"]
        if one["severity"] == "information"
    }
    wanted = {
        call.lineno: re.sub(r"\b[a-z]\w*\.", "", ast.unparse(call.args[1]))
        for call in expectations(EXAMPLE)
    }
    assert len(wanted) > 20
    assert shown == wanted


def test_mistakes_are_reported_and_nothing_else_is(diagnostics: Diagnostics) -> None:
    mistakes = {
        number: match[1]
        for number, line in enumerate(EXAMPLE.splitlines(), 1)
        if (match := re.search(r"# type: ignore\[([\w-]+)\]$", line))
    }
    assert len(mistakes) > 10
    found = defaultdict(set)
    for one in diagnostics["example.py"]:
        found[one["range"]["start"]["line"] + 1].add(one["rule"])
    assert found.keys() == mistakes.keys(), diagnostics["example.py"]
    for number, code in mistakes.items():
        assert found[number] & RULES[code], (number, found[number])

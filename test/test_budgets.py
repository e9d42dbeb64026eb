"""Sizes that keep the code readable. A limit is raised only with a reason beside it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("srt", "lang", "constrained", "radix", "benchmark", "test")

LIMITS = {"lines of a file": 600, "lines of a function": 60}

FILE_LIMITS: dict[str, int] = {}
"""Files that may be longer, each with a comment that says why."""

FUNCTION_LIMITS: dict[str, int] = {}
"""Functions ("path::name") that may be longer, each with a comment that says why."""


def sources() -> list[str]:
    return sorted(
        str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
    )


def functions(path: str) -> Iterator[tuple[str, int]]:
    """Each function of a file and its length in lines, decorators and docstring not counted."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node, clean=False) is not None
            docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - docstring


def test_there_is_something_to_measure() -> None:
    assert "srt/config.py" in sources()


@pytest.mark.parametrize("path", sources())
def test_file_and_its_functions_stay_within_their_limits(path: str) -> None:
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_LIMITS.get(path, LIMITS["lines of a file"])
    for name, length in functions(path):
        limit = FUNCTION_LIMITS.get(f"{path}::{name}", LIMITS["lines of a function"])
        assert length <= limit, f"{path}::{name} has {length} lines"


def test_exceptions_are_still_needed() -> None:
    for path, limit in FILE_LIMITS.items():
        lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
        assert LIMITS["lines of a file"] < lines <= limit
    for entry, limit in FUNCTION_LIMITS.items():
        path, _, name = entry.partition("::")
        lengths = [length for found, length in functions(path) if found == name]
        assert any(LIMITS["lines of a function"] < length <= limit for length in lengths)

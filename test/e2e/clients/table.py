"""docs/clients.md, out of the marks of the tests: `python test/e2e/clients/table.py`.

The tests that are marked have to pass, so what the table says was seen; the versions are those
that constraints.txt pins.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PAGE = ROOT / "docs" / "clients.md"

HEAD = """\
# Clients

Each of these packages, unmodified and in the version named, runs against one server in
`test/e2e/clients`; a release on which one of them fails is not made. This page is generated from
those tests.

| package | version | what is exercised |
|---|---|---|
"""

TAIL = """
Point a client at `http://localhost:30000/v1` where it wants OpenAI's routes, and at
`http://localhost:30000` where it wants Anthropic's, Ollama's or SGLang's. Without `--api-key`, any
key will do.
"""


def marks(source: str) -> list[tuple[str, str]]:
    """The (package, what) of every `@pytest.mark.client(package, what)` in a file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.client":
            package, what = (ast.literal_eval(argument) for argument in node.args)
            found.append((package, what))
    return found


def versions(constraints: str) -> dict[str, str]:
    pins = (line.partition("==") for line in constraints.splitlines())
    return {name.strip().lower(): version.strip() for name, _, version in pins if version}


def page() -> str:
    """The whole page. Raises `KeyError` for a package whose version is not pinned."""
    exercised: dict[str, list[str]] = {}
    for path in sorted(HERE.glob("test_*.py")):
        for package, what in marks(path.read_text()):
            if what not in exercised.setdefault(package, []):
                exercised[package].append(what)
    pinned = versions((ROOT / "constraints.txt").read_text())
    pinned["sglang"] = " and ".join(
        re.findall(r"sglang==([\d.]+)", (ROOT / "Makefile").read_text())
    )
    rows = [
        f"| `{package}` | {pinned[package]} | {'; '.join(exercised[package])} |"
        for package in sorted(exercised)
    ]
    return HEAD + "\n".join(rows) + "\n" + TAIL


if __name__ == "__main__":
    PAGE.write_text(page())

"""What is packaged, and what an import costs."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
ROOTS = {"constrained": "phloem.constrained", "radix": "phloem.radix", "srt": "phloem.srt"}


@pytest.fixture(scope="module")
def setuptools_table() -> dict[str, Any]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    table: dict[str, Any] = project["tool"]["setuptools"]
    return table


def packages_on_disk() -> set[str]:
    """Every folder with an `__init__.py`, by the name it is imported under."""
    found = {"phloem"}
    for folder in ("constrained", "lang", "radix", "srt"):
        for init in (ROOT / folder).rglob("__init__.py"):
            parts = init.parent.relative_to(ROOT).parts
            if parts[:2] != ("lang", "_phloem"):
                found.add(".".join(("phloem", *parts)))
    return found


def test_every_package_is_listed(setuptools_table: dict[str, Any]) -> None:
    assert packages_on_disk() == set(setuptools_table["packages"])


def test_every_source_file_lies_in_a_package() -> None:
    for folder in ("constrained", "lang", "radix", "srt"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").exists(), path


def modules_after(code: str) -> set[str]:
    """Names of the modules that a fresh interpreter has loaded after `code`."""
    script = f"import sys\n{code}\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd="/"
    )
    return set(done.stdout.split("\n")[-2].split())


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import phloem", {"torch", "aiohttp", "numpy", "msgspec", "phloem.lang", "phloem.srt"}),
        ("import phloem; phloem.__version__", {"torch", "phloem.srt"}),
        ("import phloem.lang", {"torch", "aiohttp", "transformers", "phloem.srt"}),
        ("import phloem; phloem.gen", {"torch", "aiohttp", "transformers", "phloem.srt"}),
        ("import phloem.radix", {"torch", "phloem.srt", "phloem.lang"}),
        ("import phloem.srt.cli", {"torch", "aiohttp", "zmq", "huggingface_hub", "tokenizers"}),
        (
            "from phloem.srt.cli import main\nmain(['--help'])",
            {"torch", "aiohttp", "zmq", "huggingface_hub", "tokenizers"},
        ),
        ("import phloem.srt.scheduler.core", {"torch", "transformers", "tokenizers"}),
    ],
)
def test_import_loads_no_more_than_it_should(code: str, forbidden: set[str]) -> None:
    assert not modules_after(code) & forbidden


def test_wheel_holds_the_packages_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE", *ROOTS, "lang"):
        _copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--quiet", "--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert {"phloem/__init__.py", "phloem/py.typed", "phloem/srt/cli/app.py"} <= names
    assert all(name.startswith("phloem/") for name in names)
    packaged = {name.rpartition("/")[0].replace("/", ".") for name in names}
    assert packaged == packages_on_disk()


def _copy(source: Path, target: Path) -> None:
    if source.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(source.read_bytes())
        return
    for path in source.iterdir():
        if path.name != "__pycache__":
            _copy(path, target / path.name)

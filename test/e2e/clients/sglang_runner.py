"""Runs what a package `sglang` brings, in a process of its own: two versions cannot be imported
in one.

    python sglang_runner.py programs FOLDER URL NAME…      functions of its test_programs.py
    python sglang_runner.py kits FOLDER URL MODEL KIT…     mixins of its test/kits;
                                                           KIT.MIXIN is one of them

FOLDER is where the package was installed without its dependencies. One line of JSON tells, by
name, "ok" or what was raised.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import unittest
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def programs(folder: Path, url: str, names: list[str]) -> dict[str, str]:
    import sglang  # type: ignore[import-not-found]

    sglang.set_default_backend(sglang.RuntimeEndpoint(url))
    # Only the older package has them; both have the functions that they call.
    module = load(folder.parent / "0.5.2" / "sglang" / "test" / "test_programs.py")
    found = {}
    for name in names:
        function = getattr(module, f"test_{name}")
        takes = inspect.signature(function).parameters
        try:
            function(**({"check_answer": False} if "check_answer" in takes else {}))
            found[name] = "ok"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


class _Alive:
    """The server's process, as far as the kits ask for it."""

    def poll(self) -> None:
        return None


def kits(folder: Path, url: str, model: str, names: list[str]) -> dict[str, str]:
    cases: list[unittest.TestCase] = []
    for kit in names:
        name, _, only = kit.partition(".")
        module = load(folder / "sglang" / "test" / "kits" / f"{name}.py")
        for mixin in list(vars(module).values()):
            if not isinstance(mixin, type) or mixin.__module__ != name:
                continue
            if only in ("", mixin.__name__):
                about: dict[str, Any] = {"base_url": url, "model": model, "process": _Alive()}
                about["disable_overlap"] = False
                case = type(mixin.__name__, (mixin, unittest.TestCase), about)
                cases += map(case, unittest.defaultTestLoader.getTestCaseNames(case))
    found = {one.id().split(".")[-1]: "ok" for one in cases}
    result = unittest.TestResult()
    unittest.TestSuite(cases).run(result)
    for test, trace in [*result.errors, *result.failures]:
        found[test.id().split(".")[-1]] = trace.strip().splitlines()[-1]
    return found


def main() -> None:
    kind, folder, url, *rest = sys.argv[1:]
    sys.path.insert(0, folder)
    with redirect_stdout(sys.stderr):
        if kind == "programs":
            found = programs(Path(folder), url, rest)
        else:
            found = kits(Path(folder), url, rest[0], rest[1:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()

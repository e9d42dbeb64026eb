"""The programs of benchmark/programs against a real server: whatever the model says, they hold."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model]

BENCHMARK = Path(__file__).parents[2] / "benchmark"
NAMES = sorted(path.stem for path in (BENCHMARK / "programs").glob("*.py") if path.stem != "demo")


@pytest.mark.parametrize("name", NAMES)
def test_a_program_holds(name: str, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARK / "programs")
    workload: Any = importlib.import_module(name)
    program, (item,) = workload.programs(1, 1)
    workload.check(program.run(**item, backend=server.url))


def test_a_file_runs_by_itself(server: Any) -> None:
    command = [sys.executable, str(BENCHMARK / "programs" / "few_shot.py"), "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-2].startswith("=> ")


def test_the_benchmark_compares_both_clients(server: Any, default_model: Path) -> None:
    command = [sys.executable, str(BENCHMARK / "programs.py"), "--url", server.url, "-n", "1"]
    command += ["--workloads", "few_shot", "--model", str(default_model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    assert "the programs of phloem-plain" in done.stdout

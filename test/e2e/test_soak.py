"""The soak's short form: everything at once against a real server, for about twenty seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(300)]

SOAK = Path(__file__).resolve().parents[2] / "benchmark" / "soak.py"


def test_mixed_traffic_leaves_the_books_in_order(default_model: Path, tmp_path: Path) -> None:
    """Memory needs longer to show a trend: `benchmark/soak.py --minutes 30` looks at that."""
    books, log = tmp_path / "soak.json", tmp_path / "server.log"
    command = [sys.executable, str(SOAK), "--model", str(default_model), "--seconds", "12"]
    command += ["--kill-grammar-every", "3", "--kill-worker-every", "7"]
    command += ["--clients", "6", "--kv-tokens", "4096"]
    command += ["--json", str(books), "--log", str(log)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, check=False, stdin=subprocess.DEVNULL
    )
    assert books.exists(), done.stderr[-3000:]
    verdict = json.loads(books.read_text())["verdict"]
    assert verdict["faults"] == [], log.read_text()[-3000:]
    assert verdict["accounting_exact"] and verdict["looks"] > 10
    assert verdict["every_request_ended_once"] and verdict["requests"] >= 20
    assert verdict["kills"]["grammar"] >= 2 and verdict["kills"]["worker"] == 1
    assert verdict["files_grown"] < 50

"""The measurement of connections runs, and counts what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmark" / "connections.py"


def test_every_piece_is_timed() -> None:
    sizes = ("--idle", "5", "--streams", "6", "--rows", "2", "--interval", "0.05")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *sizes, "--seconds", "0.5"],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)["found"]
    assert found["pieces"] == 6 * 10
    assert 0 < found["added_p50_ms"] <= found["added_p99_ms"] <= found["added_max_ms"]
    assert found["rss_peak_mib"] >= found["rss_start_mib"] > 0

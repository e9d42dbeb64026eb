"""The benchmarks are scripts beside the packages: their folder is where they import from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

"""The proxy with faults is a script of the benchmarks, too: their folder is where it is imported
from."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmark"))

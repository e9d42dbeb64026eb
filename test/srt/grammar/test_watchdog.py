"""A process that one matcher holds up ends, and its successor knows whose matcher it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from phloem.srt.grammar.watchdog import Watchdog

SCRIPT = """
import re, sys
from pathlib import Path
from phloem.srt.grammar.watchdog import Watchdog
dog = Watchdog(Path(sys.argv[1]), 0.3)
dog.begin(41)
dog.end()
dog.begin(42)
re.match("(a+)+b", "a" * 60)  # native code that keeps the interpreter's lock
"""


def test_whose_matcher_it_was(tmp_path: Path) -> None:
    path = tmp_path / "matcher"
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(path)], timeout=60, check=False)
    assert done.returncode == -signal.SIGALRM
    assert Watchdog(path, 60).left_by(done.returncode) == 42


def test_another_death_is_nobodys_fault(tmp_path: Path) -> None:
    dog = Watchdog(tmp_path / "matcher", 60)
    assert dog.left_by(-signal.SIGALRM) is None
    dog.begin(7)
    dog.end()
    assert dog.left_by(-signal.SIGKILL) is None
    assert dog.left_by(0) is None
    assert dog.left_by(-signal.SIGALRM) == 7

"""Ends this process when one matcher does not come back, and says whose it was.

A matcher is native code that cannot be interrupted, and may hold the interpreter's lock. So the
watchdog is the kernel's: an interval timer whose signal ends the process (`setitimer(2)`, SIGALRM).
Whose matcher was at work stands in a file that the process's successor reads.
"""

from __future__ import annotations

import mmap
import signal
import struct
from pathlib import Path

_UID = struct.Struct("<q")


class Watchdog:
    """`path` is the file of the matcher at work; a matcher may take `seconds` at a time."""

    def __init__(self, path: Path, seconds: float) -> None:
        path.touch(mode=0o600)
        with path.open("r+b") as file:
            file.truncate(_UID.size)
            self._at_work = mmap.mmap(file.fileno(), _UID.size)
        self._seconds = seconds

    def begin(self, uid: int) -> None:
        """The matcher of request `uid` goes to work."""
        _UID.pack_into(self._at_work, 0, uid)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def end(self) -> None:
        """It came back."""
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    def left_by(self, exit_code: int) -> int | None:
        """Whose matcher ended the predecessor, which ended with `exit_code`; None when it was
        something else. Exit codes are as `subprocess` gives them."""
        uid: int = _UID.unpack_from(self._at_work, 0)[0]
        return uid if exit_code == -signal.SIGALRM and uid else None

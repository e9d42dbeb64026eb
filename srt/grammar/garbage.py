"""When the interpreter may look for cyclic garbage in all that the grammar process keeps.

It looks by itself whenever enough was made, and then at everything: half a second among a hundred
grammars, in which every stream waits for its mask. Grammars have no cycles, so nothing is lost by
looking only when nobody waits. What is alive then is set aside, and is not looked at again.
"""

from __future__ import annotations

import gc
from typing import Final

IDLE_SECONDS: Final = 1.0
"""So long must nobody have asked for anything."""

_YOUNG: Final = (700, 10, 1 << 30)
"""Collections of what is young go on as they do by default; the last number is "never"."""


class Garbage:
    """`begin` is for the process that owns its interpreter; `made` says that something new is
    alive, `collect` is for a quiet moment."""

    def __init__(self) -> None:
        self._pending = False

    @staticmethod
    def begin() -> None:
        """From here on only young objects are looked at by themselves."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(*_YOUNG)

    def made(self) -> None:
        self._pending = True

    @property
    def waits(self) -> float | None:
        """Seconds of quiet after which `collect` has something to do; None if it has not."""
        return IDLE_SECONDS if self._pending else None

    def collect(self) -> None:
        """Look at all that is new since the last time."""
        if self._pending:
            gc.collect()
            gc.freeze()
            self._pending = False

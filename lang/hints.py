"""What a run tells a Phloem server of its calls: the program that they are of, and which of them
are siblings. It changes when they are served, never what is answered (docs/programs.md).
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Hint:
    """Of one call. `group` is the fork whose first calls, `width` of them, it is one of."""

    program: str
    group: str = ""
    width: int = 0


hint_here: ContextVar[Hint | None] = ContextVar("phloem_hint", default=None)
"""That of the call which runs in this context; None outside of programs."""


def hint_fields() -> dict[str, Any]:
    """The fields of a request that say so; none outside of programs."""
    hint = hint_here.get()
    if hint is None:
        return {}
    if not hint.group:
        return {"program": hint.program}
    return {"program": hint.program, "plan": {"group": hint.group, "width": hint.width}}

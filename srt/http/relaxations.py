"""What is known of schemas that could not be enforced in full, so that it is not found out anew."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

REMEMBERED: Final = 64


@dataclass(frozen=True)
class Relaxation:
    """A schema that was cut: what is enforced of it, what answers are put to, and the report (JSON
    pointers into the schema; see `phloem.srt.generation.ConstraintOutcome`)."""

    enforced_schema: str
    checked_schema: str
    enforced: list[str]
    validated: list[str]
    unsupported: list[str]


class Relaxations:
    """The `REMEMBERED` schemas cut last, by their whole text."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, Relaxation] = OrderedDict()

    def get(self, schema: str) -> Relaxation | None:
        """What is known of a schema."""
        if schema in self._known:
            self._known.move_to_end(schema)
        return self._known.get(schema)

    def put(self, schema: str, relaxation: Relaxation) -> None:
        """Remember it, and forget the one that was longest not asked for."""
        self._known[schema] = relaxation
        self._known.move_to_end(schema)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

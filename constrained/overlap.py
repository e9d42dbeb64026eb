"""How much of a text others end with, read item by item (Knuth, Morris and Pratt, 1977)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Overlap(Generic[_Item]):
    """Looks for one text, of characters or of bytes; not empty."""

    def __init__(self, text: Sequence[_Item]) -> None:
        self._text = text
        # For each prefix, the length of its longest proper prefix that is also its suffix.
        self._borders = [0]
        for item in text[1:]:
            self._borders.append(self.after(self._borders[-1], item))

    def after(self, length: int, item: _Item) -> int:
        """What ended with the first `length` items of the text, but not all, goes on with `item`:
        how many it ends with then."""
        while length and self._text[length] != item:
            length = self._borders[length - 1]
        return length + (self._text[length] == item)

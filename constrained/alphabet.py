"""Character sets as bit masks over the classes that a group of sets tells apart.

Automata are worked out on masks, since intersections of integers cost next to nothing, and carry
character sets at their ends.
"""

from __future__ import annotations

from collections.abc import Iterable

from phloem.constrained.charset import CharSet, Range, char_set


class Alphabet:
    """The coarsest partition of all characters that splits none of `sets`; characters that are in
    no set belong to no class."""

    def __init__(self, sets: Iterable[CharSet]) -> None:
        distinct = list(dict.fromkeys(sets))
        flips: dict[int, int] = {}
        for i, chars in enumerate(distinct):
            for low, high in chars:
                flips[low] = flips.get(low, 0) ^ (1 << i)
                flips[high + 1] = flips.get(high + 1, 0) ^ (1 << i)
        classes: dict[int, list[Range]] = {}
        signature, start = 0, 0
        for edge in sorted(flips):
            if signature and edge > start:
                classes.setdefault(signature, []).append((start, edge - 1))
            signature ^= flips[edge]
            start = edge
        self._classes = list(classes.values())
        self._masks = {
            chars: sum(1 << c for c, members in enumerate(classes) if members >> i & 1)
            for i, chars in enumerate(distinct)
        }
        self._sets: dict[int, CharSet] = {mask: chars for chars, mask in self._masks.items()}
        self.full = (1 << len(classes)) - 1
        """The mask of all classes."""

    def mask(self, chars: CharSet) -> int:
        """The classes of one of the sets that the alphabet was made of."""
        return self._masks[chars]

    def chars(self, mask: int) -> CharSet:
        """The characters of these classes."""
        found = self._sets.get(mask)
        if found is None:
            members = (r for i, rs in enumerate(self._classes) if mask >> i & 1 for r in rs)
            found = self._sets[mask] = char_set(members)
        return found


def split(masks: Iterable[int], full: int) -> list[int]:
    """The coarsest partition of `full` that splits none of `masks`."""
    parts = [full]
    for mask in dict.fromkeys(masks):
        parts = [p for part in parts for p in (part & mask, part & ~mask) if p]
    return parts

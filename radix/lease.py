"""A lease: one request's hold on a path of the tree, and the only handle on it."""

from __future__ import annotations

from array import array

from phloem.radix.errors import LeaseError
from phloem.radix.node import Node
from phloem.radix.program import Program


class Lease:
    """The path from a namespace's root to the `length`-th token, which stays in the tree until
    `RadixTree.release`. Made by `RadixTree.acquire`, moved forward by `RadixTree.extend`.

    `priority` and `owner`, the program it is used for, are passed on to what it adds.
    """

    __slots__ = ("_length", "_namespace", "_node", "owner", "priority")

    def __init__(
        self,
        node: Node,
        length: int,
        namespace: str,
        priority: int = 0,
        owner: Program | None = None,
    ) -> None:
        self._node: Node | None = node
        self._length = length
        self._namespace = namespace
        self.priority = priority
        self.owner = owner

    @property
    def length(self) -> int:
        """Tokens on the path (after the release: as it was)."""
        return self._length

    @property
    def namespace(self) -> str:
        return self._namespace

    @property
    def program(self) -> str:
        """The program it was acquired for, "" for none."""
        return "" if self.owner is None else self.owner.name

    @property
    def released(self) -> bool:
        return self._node is None

    @property
    def node(self) -> Node:
        """Where the path ends; for the tree only. Raises `LeaseError` after the release."""
        if self._node is None:
            raise LeaseError(f"{self!r} was used after its release")
        return self._node

    def slots(self, start: int = 0, stop: int | None = None) -> list[int]:
        """KV slots of the path's tokens [start, stop), in token order; by default of all.

        Costs the nodes and tokens from `start` on, not the whole path. Raises `LeaseError` after
        the release and `ValueError` for a range outside the path.
        """
        return self._gather("slots", start, stop).tolist()

    def tokens(self, start: int = 0, stop: int | None = None) -> array[int]:
        """The path's token ids [start, stop), as `slots`."""
        return self._gather("tokens", start, stop)

    def _gather(self, field: str, start: int, stop: int | None) -> array[int]:
        node: Node | None = self.node
        end = self._length
        stop = end if stop is None else stop
        if not 0 <= start <= stop <= end:
            raise ValueError(f"range [{start}, {stop}) is outside the path of {end} tokens")
        parts: list[array[int]] = []
        while node is not None and end > start:
            begin = end - len(node.tokens)
            if begin < stop:
                values: array[int] = getattr(node, field)
                parts.append(values[max(start - begin, 0) : stop - begin])
            end = begin
            node = node.parent
        path = array("i")
        for part in reversed(parts):
            path.extend(part)
        return path

    def moved(self, node: Node, length: int) -> None:
        """The path now ends at `node`; for the tree only."""
        self._node = node
        self._length = length

    def ended(self) -> None:
        """The hold is over; for the tree only."""
        self._node = None

    def __repr__(self) -> str:
        state = "released" if self._node is None else "held"
        return f"<Lease of {self._length} tokens in namespace {self._namespace!r}, {state}>"

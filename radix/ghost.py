"""What left the tree: token runs that hang where they were cut off.

    node ── forks ──▶ at token 40: {7: ghost of 12 tokens} ── forks ──▶ at token 52: {…}

Positions count tokens from the root, so they stay what they are when an edge is split, grows or
goes. A fork hangs somewhere along the edge of a node (or of a ghost), its end included; none of its
branches begins as the edge or a live child continues there.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

from phloem.radix.node import FirstPage


class Cause(NamedTuple):
    """When (the tree's clock) tokens went, and `by` whom, or because somebody `flushed`."""

    at: float
    by: str
    flushed: bool


class Ghost:
    """`tokens` that were cached once.

    Pieces of one path that went one after the other may be one ghost, with the cause of the last,
    which is the first on the path.
    """

    __slots__ = ("cause", "fork", "forks", "tokens")

    def __init__(self, tokens: array[int], forks: Forks | None, cause: Cause) -> None:
        self.tokens = tokens
        self.forks = forks
        self.cause = cause
        self.fork: Fork | None = None


class Fork:
    """Ghosts that begin at the same place, by their first page."""

    __slots__ = ("branches", "owner", "position")

    def __init__(self, owner: Forks, position: int) -> None:
        self.owner = owner
        self.position = position
        self.branches: dict[FirstPage, Ghost] = {}


class Forks:
    """All forks of one edge, by position; `namespace` is set while they are an idle root's."""

    __slots__ = ("at", "namespace")

    def __init__(self) -> None:
        self.at: dict[int, Fork] = {}
        self.namespace: str | None = None

    def find(self, position: int, first: FirstPage) -> Ghost | None:
        """The ghost that begins at `position` with the page `first`."""
        fork = self.at.get(position)
        return None if fork is None else fork.branches.get(first)

    def hang(self, position: int, first: FirstPage, ghost: Ghost) -> None:
        """`ghost`, which hangs nowhere, begins at `position` with the page `first`."""
        fork = self.at.get(position)
        if fork is None:
            fork = self.at[position] = Fork(self, position)
        fork.branches[first] = ghost
        ghost.fork = fork

    def cut(self, position: int) -> Forks | None:
        """Split off the forks up to `position`, that included. Costs O(forks of this edge)."""
        upper: Forks | None = None
        for place in [place for place in self.at if place <= position]:
            if upper is None:
                upper = Forks()
            upper.take(self.at.pop(place))
        return upper

    def take(self, fork: Fork) -> None:
        """`fork`, from another edge, hangs from this one now; there is none at its position."""
        fork.owner = self
        self.at[fork.position] = fork

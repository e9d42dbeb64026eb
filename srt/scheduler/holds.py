"""Holds: leases on what calls of a program were announced to go on from.

Within a budget and for a time, and the first thing to yield: before a row is preempted, before a
waiting request is kept out, and before a newer hold. They are hints; pins are orders.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from phloem.radix import Lease, RadixTree, common_prefix

HOLD_SECONDS = 120.0
"""So long the next call that goes on from there is waited for: as long as a tool may take."""

MAX_HOLDS = 256
MAX_PROGRAM_HOLDS = 32
"""Of these, for one program."""


@dataclass(slots=True)
class _Hold:
    """`awaited` calls are still to go on from the path: they begin with the `least` first of its
    `tokens`, at least."""

    lease: Lease
    tokens: array[int]
    least: int
    awaited: int
    expires: float


class Holds:
    """Holds by program and name, the oldest first. `budget` tokens may be held, shared ones counted
    for each."""

    def __init__(self, tree: RadixTree, budget: int, clock: Callable[[], float]) -> None:
        self.budget = budget
        self.tokens = 0
        self._tree = tree
        self._clock = clock
        self._holds: OrderedDict[tuple[str, str], _Hold] = OrderedDict()
        self._names: dict[str, list[str]] = {}
        """By program, in the same order."""

    def __len__(self) -> int:
        return len(self._holds)

    def keep(
        self, program: str, name: str, tokens: array[int], namespace: str, least: int, awaited: int
    ) -> None:
        """Hold what the tree has of `tokens`, until `awaited` calls of `program` went on from its
        `least` first; in place of what `name` held."""
        self._drop(program, name)
        if awaited < 1:
            return
        whole = tokens + array("i", [-1])  # of tokens alone, the last would be left out
        cached = self._tree.match(whole, namespace)
        if not 0 < cached <= self.budget:
            return
        names = self._names.get(program, [])
        if len(names) == MAX_PROGRAM_HOLDS:
            self._drop(program, names[0])
        while self.tokens + cached > self.budget or len(self._holds) == MAX_HOLDS:
            self._drop_oldest()
        lease = self._tree.acquire(whole, namespace, program=program)
        expires = self._clock() + HOLD_SECONDS
        self._holds[program, name] = _Hold(lease, whole[: lease.length], least, awaited, expires)
        self._names.setdefault(program, []).append(name)
        self.tokens += lease.length

    def went_on(self, program: str, tokens: array[int], namespace: str) -> None:
        """A call of `program` with the prompt `tokens` begins; whatever waited for it last ends."""
        for name in list(self._names.get(program, ())):
            hold = self._holds[program, name]
            least = min(hold.least, len(hold.tokens))
            if hold.lease.namespace != namespace:
                continue
            if common_prefix(hold.tokens, tokens, least) < least:
                continue
            hold.awaited -= 1
            if hold.awaited < 1:
                self._drop(program, name)

    def end(self, program: str) -> None:
        """Nothing is held for `program` any more."""
        for name in list(self._names.get(program, ())):
            self._drop(program, name)

    def expire(self) -> None:
        """End the holds that were waited for too long."""
        now = self._clock()
        while self._holds and next(iter(self._holds.values())).expires <= now:
            self._drop_oldest()

    def drop_all(self, namespace: str | None = None) -> None:
        """End all holds, of one namespace or of all."""
        for key, hold in list(self._holds.items()):
            if namespace is None or hold.lease.namespace == namespace:
                self._drop(*key)

    def leases(self) -> list[Lease]:
        return [hold.lease for hold in self._holds.values()]

    def free(self, tokens: int) -> None:
        """End holds, oldest first, until so many more tokens are evictable, or none is left."""
        wanted = self._tree.evictable + tokens
        while self._holds and self._tree.evictable < wanted:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._drop(*next(iter(self._holds)))

    def _drop(self, program: str, name: str) -> None:
        hold = self._holds.pop((program, name), None)
        if hold is None:
            return
        names = self._names[program]
        names.remove(name)
        if not names:
            del self._names[program]
        self.tokens -= hold.lease.length
        self._tree.release(hold.lease)

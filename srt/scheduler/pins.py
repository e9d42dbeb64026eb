"""Pins: leases that an operator or a program holds on prompts, so that these stay cached.

They have a budget and a time to live, and they are the last thing to go: when the first of the
running requests finds no slot although all others were preempted, all pins are dropped.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from phloem.radix import Lease, RadixTree
from phloem.srt.errors import Conflict, InvalidRequest, NotFound
from phloem.srt.questions import PinUse

log = logging.getLogger(__name__)

MAX_PINS = 1024


@dataclass
class _Pin:
    lease: Lease
    expires: float | None


class Pins:
    """Pins by name. `budget` tokens may be held by them, shared ones counted for each pin."""

    def __init__(self, tree: RadixTree, budget: int, clock: Callable[[], float]) -> None:
        self.budget = budget
        self._tree = tree
        self._clock = clock
        self._pins: dict[str, _Pin] = {}

    @property
    def tokens(self) -> int:
        """Tokens held by all pins together, shared ones counted for each."""
        return sum(pin.lease.length for pin in self._pins.values())

    def __len__(self) -> int:
        return len(self._pins)

    def pin(self, name: str, prompt: array[int], namespace: str, ttl_s: float | None) -> int:
        """Hold what the tree has of `prompt`, in place of what `name` held; the tokens held.

        Raises `NotFound` when nothing of it is cached, `Conflict` when the budget has no room.
        """
        if ttl_s is not None and ttl_s <= 0:
            raise InvalidRequest(f"ttl_s must be positive, not {ttl_s:g}", param="ttl_s")
        self.expire()
        whole = prompt + array("i", [-1])  # of a prompt alone, the last token would be left out
        cached = self._tree.match(whole, namespace)
        if not cached:
            raise NotFound("nothing of this prompt is cached", param="prompt", code="not_cached")
        old = self._pins.get(name)
        held = self.tokens - (old.lease.length if old is not None else 0)
        if held + cached > self.budget or (old is None and len(self._pins) == MAX_PINS):
            raise Conflict(
                f"{cached} tokens would be pinned beside {held}; the budget is {self.budget} "
                f"tokens in at most {MAX_PINS} pins",
                param="prompt",
                code="pin_budget_exceeded",
            )
        lease = self._tree.acquire(whole, namespace)
        if old is not None:
            self._drop(name)
        expires = None if ttl_s is None else self._clock() + ttl_s
        self._pins[name] = _Pin(lease, expires)
        return lease.length

    def unpin(self, name: str) -> int:
        """End a pin; the tokens it held. Raises `NotFound`."""
        if name not in self._pins:
            raise NotFound(f"there is no pin called {name!r}", param="name", code="pin_not_found")
        return self._drop(name)

    def _drop(self, name: str) -> int:
        pin = self._pins.pop(name)
        self._tree.release(pin.lease)
        return pin.lease.length

    def expire(self) -> None:
        """End the pins whose time is over."""
        now = self._clock()
        for name in [
            n for n, p in self._pins.items() if p.expires is not None and p.expires <= now
        ]:
            self._drop(name)

    def drop_all(self, namespace: str | None = None) -> None:
        """End all pins, of one namespace or of all."""
        for name, pin in list(self._pins.items()):
            if namespace is None or pin.lease.namespace == namespace:
                self._drop(name)

    def leases(self) -> list[Lease]:
        return [pin.lease for pin in self._pins.values()]

    def uses(self) -> list[PinUse]:
        now = self._clock()
        return [
            PinUse(
                name,
                pin.lease.namespace,
                pin.lease.length,
                None if pin.expires is None else pin.expires - now,
            )
            for name, pin in self._pins.items()
        ]

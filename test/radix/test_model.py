"""Random histories of the tree against a naive model that keeps one entry a token.

After every operation: the tree's content (slots, lock counts, hits), each lease's path, every
counter and the pool's owners are what the model says, and `check` finds nothing. The model also
predicts exactly which tokens LRU and LFU evict; for other policies it verifies that only unlocked
tokens went, and no more than asked for.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from phloem.radix import (
    POLICIES,
    EvictionPolicy,
    Lease,
    LeaseError,
    OutOfSlots,
    RadixTree,
    SlotError,
    SlotPool,
)

Place = tuple[str, tuple[int, ...]]  # namespace, all tokens up to and including this one


@dataclass
class Entry:
    """One cached token."""

    slot: int
    used: int
    hits: int = 0
    locks: int = 0


@dataclass
class Running:
    """A request: its lease, the path the model expects, and slots it kept for itself."""

    lease: Lease
    namespace: str
    path: tuple[int, ...]
    private: list[int] = field(default_factory=list)


ORDERS: dict[str, Callable[[Entry], tuple[int, ...]]] = {
    "lru": lambda entry: (entry.used,),
    "lfu": lambda entry: (entry.hits, entry.used),
}


class Pair:
    """A tree and its model, driven together."""

    def __init__(self, policy: EvictionPolicy, size: int) -> None:
        self.now = 0
        self.policy = policy
        self.pool = SlotPool(size)
        self.tree = RadixTree(self.pool, policy=policy, clock=lambda: self.now)
        self.cached: dict[Place, Entry] = {}
        self.running: list[Running] = []
        self.splits_seen = 0
        self.duplicates = 0

    # ------------------------------------------------------------------------------- operations

    def start(self, tokens: list[int], namespace: str, limit: int | None) -> None:
        self.now += 1
        most = max(len(tokens) - 1, 0)
        longest = self._longest(namespace, (), tokens[:most])
        assert self.tree.match(tokens, namespace) == longest
        length = longest if limit is None else min(longest, limit)
        nodes = self.tree.nodes
        lease = self.tree.acquire(array("i", tokens), namespace, limit)
        self.splits_seen += self.tree.nodes - nodes
        path = tuple(tokens[:length])
        for end in range(1, length + 1):
            entry = self.cached[namespace, path[:end]]
            entry.locks += 1
            entry.hits += 1
            entry.used = self.now
        self.running.append(Running(lease, namespace, path))

    def grow(self, index: int, tokens: list[int], *, keep: bool) -> None:
        """Extend request `index`; it keeps the slots of duplicates or gives them back."""
        self.now += 1
        request = self.running[index]
        if len(tokens) > self.pool.free:
            self.evict(len(tokens) - self.pool.free)
        if len(tokens) > self.pool.free:
            with pytest.raises(OutOfSlots):
                self.pool.allocate(len(tokens))
            return
        slots = self.pool.allocate(len(tokens))
        duplicate = self.tree.extend(request.lease, tokens, slots)
        present = self._longest(request.namespace, request.path, tokens)
        assert duplicate == present
        self.duplicates += duplicate
        for token, slot in zip(tokens, slots, strict=True):
            request.path += (token,)
            entry = self.cached.setdefault((request.namespace, request.path), Entry(slot, 0))
            entry.locks += 1
            entry.used = self.now
        if keep:
            request.private += slots[:duplicate]
        else:
            self.pool.release(slots[:duplicate])

    def finish(self, index: int) -> None:
        self.now += 1
        request = self.running.pop(index)
        self.pool.release(request.private)
        self.tree.release(request.lease)
        for end in range(1, len(request.path) + 1):
            entry = self.cached[request.namespace, request.path[:end]]
            entry.locks -= 1
            entry.used = self.now
        with pytest.raises(LeaseError):
            self.tree.release(request.lease)

    def evict(self, n: int) -> None:
        self.now += 1
        unlocked = {place for place, entry in self.cached.items() if not entry.locks}
        want = min(max(n, 0), len(unlocked))
        order = ORDERS.get(self.policy.name)
        if order is not None:
            for _ in range(want):
                inner = {(name, path[:-1]) for name, path in self.cached}
                leaves = [place for place in unlocked if place not in inner]
                victim = min(leaves, key=lambda place: order(self.cached[place]))
                unlocked.remove(victim)
                del self.cached[victim]
            assert self.tree.evict(n) == want
        else:
            assert self.tree.evict(n) == want
            left = set(self._content())
            evicted = set(self.cached) - left
            assert evicted <= unlocked
            assert len(evicted) == want
            for place in evicted:
                del self.cached[place]

    def flush(self, namespace: str | None) -> None:
        self.now += 1
        victims = [
            place
            for place, entry in self.cached.items()
            if not entry.locks and namespace in (None, place[0])
        ]
        assert self.tree.flush(namespace) == len(victims)
        for place in victims:
            del self.cached[place]

    def misuse(self, pick: int) -> None:
        """Mistakes that must be refused and change nothing."""
        places = list(self.cached)
        if places:
            slot = self.cached[places[pick % len(places)]].slot
            with pytest.raises(SlotError):
                self.pool.release([slot])
            for request in self.running[:1]:
                with pytest.raises(SlotError):
                    self.tree.extend(request.lease, [99], [slot])
        private = [slot for request in self.running for slot in request.private]
        if private:
            slot = private[pick % len(private)]
            with pytest.raises(SlotError, match="listed twice"):
                self.pool.release([slot, slot])

    # ----------------------------------------------------------------------------------- verdict

    def verify(self) -> None:
        self.tree.check()
        content = self._content()
        assert content == {
            place: (entry.slot, entry.locks, entry.hits) for place, entry in self.cached.items()
        }
        for (namespace, path), entry in self.cached.items():
            if len(path) > 1:
                assert self.cached[namespace, path[:-1]].locks >= entry.locks
        locked = sum(1 for entry in self.cached.values() if entry.locks)
        private = [slot for request in self.running for slot in request.private]
        assert (self.tree.locked, self.tree.evictable) == (locked, len(self.cached) - locked)
        assert (self.pool.private, self.pool.in_tree) == (len(private), len(self.cached))
        assert self.pool.free + len(private) + len(self.cached) == self.pool.capacity
        owners = Counter([*private, *(entry.slot for entry in self.cached.values())])
        assert not owners or max(owners.values()) == 1
        for request in self.running:
            assert request.lease.length == len(request.path)
            assert request.lease.tokens().tolist() == list(request.path)
            assert request.lease.slots() == [
                self.cached[request.namespace, request.path[: end + 1]].slot
                for end in range(len(request.path))
            ]

    def _content(self) -> dict[Place, tuple[int, int, int]]:
        found: dict[Place, tuple[int, int, int]] = {}
        above: list[tuple[int, ...]] = []
        for view in self.tree.dump():
            del above[view.depth :]
            prefix = above[-1] if above else ()
            assert len(prefix) == view.start
            for token, slot in zip(view.tokens, view.slots, strict=True):
                prefix += (token,)
                found[view.namespace, prefix] = (slot, view.lock_ref, view.hits)
            above.append(prefix)
            if (view.namespace, prefix) in self.cached:
                assert view.last_access == self.cached[view.namespace, prefix].used
        return found

    def _longest(self, namespace: str, path: tuple[int, ...], tokens: list[int]) -> int:
        length = 0
        for token in tokens:
            path += (token,)
            if (namespace, path) not in self.cached:
                break
            length += 1
        return length


NAMESPACES = ["", "a", "b"]


@pytest.mark.parametrize(("size", "operations"), [(24, 5000), (96, 2500)])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_long_random_history(policy: EvictionPolicy, size: int, operations: int) -> None:
    rng = random.Random(f"{policy.name}-{size}")
    pair = Pair(policy, size)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randrange(most + 1))]

    for _ in range(operations):
        index = rng.randrange(len(pair.running)) if pair.running else None
        match rng.choices(range(6), (30, 40, 18, 6, 1, 3))[0]:
            case 0 if len(pair.running) < 6:
                limit = rng.choice([None, None, None, rng.randrange(6)])
                pair.start(tokens(9), rng.choice(NAMESPACES), limit)
            case 1 if index is not None and len(pair.running[index].path) < 14:
                pair.grow(index, tokens(rng.choice([1, 5])), keep=rng.random() < 0.5)
            case 2 if index is not None:
                pair.finish(index)
            case 3:
                pair.evict(rng.randrange(12))
            case 4:
                pair.flush(rng.choice([None, *NAMESPACES]))
            case 5:
                pair.misuse(rng.randrange(1000))
        pair.verify()
    while pair.running:
        pair.finish(0)
    pair.flush(None)
    pair.verify()
    assert pair.pool.free == pair.pool.capacity
    assert pair.tree.nodes == pair.tree.stats().namespaces == 0
    assert pair.splits_seen > 50
    assert pair.duplicates > 50


class TreeMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    pair: Pair

    @initialize(policy=st.sampled_from(list(POLICIES.values())), size=st.integers(1, 40))
    def begin(self, policy: EvictionPolicy, size: int) -> None:
        self.pair = Pair(policy, size)

    @rule(
        tokens=st.lists(st.integers(0, 2), max_size=8),
        namespace=st.sampled_from(NAMESPACES),
        limit=st.none() | st.integers(0, 8),
    )
    def start(self, tokens: list[int], namespace: str, limit: int | None) -> None:
        self.pair.start(tokens, namespace, limit)

    @precondition(lambda self: self.pair.running)
    @rule(
        data=st.data(),
        tokens=st.lists(st.integers(0, 2), max_size=6),
        keep=st.booleans(),
    )
    def grow(self, data: st.DataObject, tokens: list[int], keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.pair.running) - 1))
        self.pair.grow(index, tokens, keep=keep)

    @precondition(lambda self: self.pair.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.pair.finish(data.draw(st.integers(0, len(self.pair.running) - 1)))

    @rule(n=st.integers(-1, 20))
    def evict(self, n: int) -> None:
        self.pair.evict(n)

    @rule(namespace=st.none() | st.sampled_from(NAMESPACES))
    def flush(self, namespace: str | None) -> None:
        self.pair.flush(namespace)

    @rule(pick=st.integers(0, 100))
    def misuse(self, pick: int) -> None:
        self.pair.misuse(pick)

    @invariant()
    def agree(self) -> None:
        self.pair.verify()


TreeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTreeMachine = TreeMachine.TestCase

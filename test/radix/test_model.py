"""Random histories of the tree against a naive model that keeps one entry a page.

After every operation: the tree's content (slots, lock counts, hits), each lease's path, every
counter, the pool's owners and what a mirror knows from the events are what the model says, and
`check` finds nothing. The model also predicts exactly which pages LRU, LFU, priority and program
evict; for other policies it verifies that only unlocked pages went, and no more than asked for. It
remembers for ever what went, and when, and so knows what `explain` must say.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter, OrderedDict
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
    MissReason,
    OutOfSlots,
    RadixTree,
    SlotError,
    SlotPool,
    TreeMirror,
    history,
)

Place = tuple[str, tuple[int, ...]]  # namespace, all tokens up to the end of this page


@dataclass
class Entry:
    """One cached page. `program` is the number of the live program that used it last."""

    slot: int
    used: int
    hits: int = 0
    locks: int = 0
    priority: int = -100
    program: int | None = None


@dataclass
class Gone:
    """A page that was cached once."""

    at: int
    by: str
    flushed: bool


@dataclass
class Running:
    """A request: its lease, the path the model expects, and slots it kept for itself."""

    lease: Lease
    namespace: str
    path: tuple[int, ...]
    priority: int
    program: int | None
    private: list[int] = field(default_factory=list)


ORDERS: dict[str, Callable[[Entry], tuple[int, ...]]] = {
    "lru": lambda entry: (entry.used,),
    "lfu": lambda entry: (entry.hits, entry.used),
    "priority": lambda entry: (entry.priority, entry.used),
    "program": lambda entry: (entry.program is not None, entry.used),
}
PROGRAM_LIMIT = 2


class Pair:
    """A tree and its model, driven together. `size` is in pages."""

    def __init__(
        self, policy: EvictionPolicy, size: int, page: int, history_tokens: int = 1 << 30
    ) -> None:
        self.now = 0
        self.policy = policy
        self.page = page
        self.pool = SlotPool(size * page, page)
        self.tree = RadixTree(
            self.pool,
            policy=policy,
            clock=lambda: self.now,
            history_tokens=history_tokens,
            program_limit=PROGRAM_LIMIT,
        )
        self.mirror = TreeMirror(page)
        self.history_tokens = history_tokens
        self.cached: dict[Place, Entry] = {}
        self.gone: dict[Place, Gone] = {}
        self.running: list[Running] = []
        self.live: OrderedDict[str, int] = OrderedDict()  # programs, least recently used first
        self.program_count = 0
        self.seen: Counter[str] = Counter()  # what happened, to know that the history was rich

    # ------------------------------------------------------------------------------- operations

    def start(
        self,
        tokens: list[int],
        namespace: str,
        limit: int | None,
        priority: int = 0,
        program: str = "",
    ) -> None:
        self.now += 1
        most = max(len(tokens) - 1, 0)
        longest = self._longest(namespace, (), tokens[:most])
        assert self.tree.match(tokens, namespace) == longest
        assert self.mirror.match(tokens, namespace) == longest
        self.explain(tokens, namespace, limit)
        length = longest if limit is None else min(longest, limit - limit % self.page)
        nodes = self.tree.nodes
        number = self._use_program(program) if program else None
        lease = self.tree.acquire(
            array("i", tokens), namespace, limit, priority=priority, program=program
        )
        self.seen["splits"] += self.tree.nodes - nodes
        path = tuple(tokens[:length])
        for end in range(self.page, length + 1, self.page):
            entry = self.cached[namespace, path[:end]]
            entry.locks += 1
            entry.hits += 1
            self._used(entry, priority, number)
        self.running.append(Running(lease, namespace, path, priority, number))

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
        self.seen["duplicates"] += duplicate
        live = request.program if request.program in self.live.values() else None
        for start in range(0, len(tokens), self.page):
            request.path += tuple(tokens[start : start + self.page])
            place = request.namespace, request.path
            entry = self.cached.setdefault(place, Entry(slots[start], 0))
            entry.locks += 1
            self._used(entry, request.priority, live)
            self.seen["came again"] += self.gone.pop(place, None) is not None
        if keep:
            request.private += slots[:duplicate]
        else:
            self.pool.release(slots[:duplicate])

    def finish(self, index: int) -> None:
        self.now += 1
        request = self.running.pop(index)
        self.pool.release(request.private)
        self.tree.release(request.lease)
        for end in range(self.page, len(request.path) + 1, self.page):
            entry = self.cached[request.namespace, request.path[:end]]
            entry.locks -= 1
            entry.used = self.now
        with pytest.raises(LeaseError):
            self.tree.release(request.lease)

    def evict(self, n: int) -> None:
        self.now += 1
        by = f"request {self.now}"
        unlocked = {place for place, entry in self.cached.items() if not entry.locks}
        want = min(-(-max(n, 0) // self.page), len(unlocked))
        order = ORDERS.get(self.policy.name)
        evicted: set[Place] = set()
        if order is not None:
            for _ in range(want):
                inner = {(name, path[: -self.page]) for name, path in self.cached}
                leaves = [place for place in unlocked if place not in inner]
                victim = min(leaves, key=lambda place: order(self.cached[place]))
                unlocked.remove(victim)
                del self.cached[victim]
                evicted.add(victim)
            assert self.tree.evict(n, by) == want * self.page
        else:
            assert self.tree.evict(n, by) == want * self.page
            evicted = set(self.cached) - set(self._content())
            assert evicted <= unlocked
            assert len(evicted) == want
            for place in evicted:
                del self.cached[place]
        self.gone |= dict.fromkeys(evicted, Gone(self.now, by, False))

    def flush(self, namespace: str | None) -> None:
        self.now += 1
        victims = [
            place
            for place, entry in self.cached.items()
            if not entry.locks and namespace in (None, place[0])
        ]
        assert self.tree.flush(namespace) == len(victims) * self.page
        for place in victims:
            del self.cached[place]
        self.gone |= dict.fromkeys(victims, Gone(self.now, "", True))

    def end_program(self, name: str) -> None:
        self.tree.end_program(name)
        number = self.live.pop(name, None)
        if number is not None:
            self._bury(number)

    def misuse(self, pick: int) -> None:
        """Mistakes that must be refused and change nothing."""
        places = list(self.cached)
        if places:
            slot = self.cached[places[pick % len(places)]].slot
            slots = list(range(slot, slot + self.page))
            with pytest.raises(SlotError):
                self.pool.release(slots)
            for request in self.running[:1]:
                with pytest.raises(SlotError):
                    self.tree.extend(request.lease, [99] * self.page, slots)
                if self.page > 1:
                    with pytest.raises(ValueError, match="whole pages"):
                        self.tree.extend(request.lease, [99], [slot])
        private = [slot for request in self.running for slot in request.private]
        if private:
            start = pick % len(private) // self.page * self.page
            slots = private[start : start + self.page]
            with pytest.raises(SlotError, match="listed twice"):
                self.pool.release(slots + slots)
            if self.page > 1:
                with pytest.raises(SlotError, match="whole pages"):
                    self.pool.release(slots[1:] + slots[:1])

    # ----------------------------------------------------------------------------------- verdict

    def explain(self, tokens: list[int], namespace: str, limit: int | None) -> None:
        """Ask the tree why `tokens` hit as they do, and compare with what the model knows."""
        most = max(len(tokens) - 1, 0)
        longest = self._longest(namespace, (), tokens[:most])
        told = self.tree.explain(tokens, namespace, limit)
        allowed = longest if limit is None else min(longest, limit - limit % self.page)
        path = tuple(tokens[:allowed])
        follow = {
            place[1][allowed : allowed + self.page]
            for place in self.cached
            if place[0] == namespace and len(place[1]) > allowed and place[1][:allowed] == path
        }
        first = self.gone.get((namespace, tuple(tokens[: allowed + self.page])))
        gone = allowed
        while gone + self.page <= most and (namespace, tuple(tokens[: gone + self.page])) in (
            self.gone
        ):
            gone += self.page
        assert told.matched == allowed
        assert told.branches == len(follow)
        assert len(told.cached) == min(len(follow), 3)
        for shown in told.cached:
            assert 0 < len(shown) <= 32
            width = min(len(shown), self.page)
            assert tuple(shown[:width]) in {page[:width] for page in follow}
        self.seen[told.reason] += 1
        if allowed < longest:
            assert told.reason is MissReason.LIMITED
        elif most - longest < self.page:
            assert told.reason is MissReason.WHOLE
        elif first is not None and (
            self.history_tokens > 1 << 20 or told.reason in (MissReason.EVICTED, MissReason.FLUSHED)
        ):
            assert told.reason is (MissReason.FLUSHED if first.flushed else MissReason.EVICTED)
            assert told.evicted_tokens <= gone - allowed
            if self.history_tokens > 1 << 20:
                assert told.evicted_tokens == gone - allowed
            # A piece that others were put in front of has the cause of the last of them.
            assert told.evicted_at is not None
            if history.MERGED:
                assert first.at <= told.evicted_at <= self.now
            else:
                assert (told.evicted_at, told.evicted_by) == (first.at, first.by)
            return
        elif follow:
            assert told.reason is MissReason.OTHER_TOKEN
        else:
            assert told.reason is MissReason.NEVER_SEEN
        assert (told.evicted_tokens, told.evicted_at, told.evicted_by) == (0, None, "")

    def verify(self) -> None:
        self.tree.check()
        content = self._content()
        assert content == {
            place: (entry.slot, entry.locks, entry.hits) for place, entry in self.cached.items()
        }
        for (namespace, path), entry in self.cached.items():
            if len(path) > self.page:
                assert self.cached[namespace, path[: -self.page]].locks >= entry.locks
        locked = sum(1 for entry in self.cached.values() if entry.locks) * self.page
        cached = len(self.cached) * self.page
        private = [slot for request in self.running for slot in request.private]
        assert (self.tree.locked, self.tree.evictable) == (locked, cached - locked)
        assert (self.pool.private, self.pool.in_tree) == (len(private), cached)
        assert self.pool.free + len(private) + cached == self.pool.capacity
        kept = private[:: self.page]
        owners = Counter([*kept, *(entry.slot for entry in self.cached.values())])
        assert not owners or max(owners.values()) == 1
        assert all(slot % self.page == 0 < slot for slot in owners)
        for request in self.running:
            assert request.lease.length == len(request.path)
            assert request.lease.tokens().tolist() == list(request.path)
            slots: list[int] = []
            for end in range(self.page, len(request.path) + 1, self.page):
                slot = self.cached[request.namespace, request.path[:end]].slot
                slots.extend(range(slot, slot + self.page))
            assert request.lease.slots() == slots
        stats = self.tree.stats()
        assert stats.programs == len(self.live)
        assert stats.history_tokens <= self.history_tokens
        self._verify_mirror()
        for summary in self.tree.namespaces(9):
            assert summary.tokens == self.page * sum(
                1 for name, _ in self.cached if name == summary.namespace
            )

    def _verify_mirror(self) -> None:
        if not self.tree.events and not self.mirror.nodes:
            self.tree.watch(True)
        self.mirror.apply(self.tree.events)
        self.tree.events.clear()
        assert self.mirror.nodes == self.tree.nodes
        assert set(self.mirror.namespaces) == {name for name, _ in self.cached}
        if self.now % 8 == 0:
            for namespace, path in self.cached:
                assert self.mirror.match([*path, -1], namespace) == len(path)

    def _content(self) -> dict[Place, tuple[int, int, int]]:
        found: dict[Place, tuple[int, int, int]] = {}
        above: list[tuple[int, ...]] = []
        for view in self.tree.dump():
            del above[view.depth :]
            prefix = above[-1] if above else ()
            assert len(prefix) == view.start
            for start in range(0, len(view.tokens), self.page):
                prefix += view.tokens[start : start + self.page]
                found[view.namespace, prefix] = (view.slots[start], view.lock_ref, view.hits)
            above.append(prefix)
            if (view.namespace, prefix) in self.cached:
                assert view.last_access == self.cached[view.namespace, prefix].used
        return found

    def _longest(self, namespace: str, path: tuple[int, ...], tokens: list[int]) -> int:
        """How many of `tokens`, in whole pages, are cached after `path`."""
        length = 0
        while length + self.page <= len(tokens):
            path += tuple(tokens[length : length + self.page])
            if (namespace, path) not in self.cached:
                break
            length += self.page
        return length

    def _used(self, entry: Entry, priority: int, program: int | None) -> None:
        entry.used = self.now
        entry.priority = max(entry.priority, priority)
        if program is not None:
            entry.program = program

    def _use_program(self, name: str) -> int:
        if name not in self.live:
            self.program_count += 1
            self.live[name] = self.program_count
        self.live.move_to_end(name)
        if len(self.live) > PROGRAM_LIMIT:
            self._bury(self.live.popitem(last=False)[1])
        return self.live[name]

    def _bury(self, number: int) -> None:
        for entry in self.cached.values():
            if entry.program == number:
                entry.program = None
                self.seen["died"] += 1


# ------------------------------------------------------------------------------------- histories

NAMESPACES = ["", "a", "b"]
PROGRAM_NAMES = ["", "", "p", "q", "r"]


def pages(picks: list[int], page: int) -> list[int]:
    """Pages that differ early, in the middle and at the very end, so that branches part inside."""
    if page == 1:
        return picks
    kinds = [[0] * page, [0] * (page - 1) + [1], [0] * (page // 2) + [1] + [0] * (page // 2 - 1)]
    return [token for pick in picks for token in kinds[pick % 3]]


def run(pair: Pair, rng: random.Random, operations: int) -> None:
    def tokens(most: int) -> list[int]:
        kinds = 2 if pair.page == 1 else 3
        return pages([rng.randrange(kinds) for _ in range(rng.randrange(most + 1))], pair.page)

    for _ in range(operations):
        index = rng.randrange(len(pair.running)) if pair.running else None
        match rng.choices(range(7), (30, 40, 18, 6, 4, 3, 3))[0]:
            case 0 if len(pair.running) < 6:
                limit = rng.choice([None, None, None, rng.randrange(6 * pair.page)])
                prompt = tokens(9) + [0] * rng.choice([0, 1, pair.page - 1])
                priority, program = rng.choice([0, 0, 0, -1, 2]), rng.choice(PROGRAM_NAMES)
                pair.start(prompt, rng.choice(NAMESPACES), limit, priority, program)
            case 1 if index is not None and len(pair.running[index].path) < 14 * pair.page:
                pair.grow(index, tokens(rng.choice([1, 5])), keep=rng.random() < 0.5)
            case 2 if index is not None:
                pair.finish(index)
            case 3:
                pair.evict(rng.randrange(12 * pair.page))
            case 4:
                pair.flush(rng.choice([None, *NAMESPACES]))
            case 5:
                pair.misuse(rng.randrange(1000))
            case 6:
                pair.end_program(rng.choice(PROGRAM_NAMES))
        pair.verify()


def wind_up(pair: Pair) -> None:
    """All requests finish and all is flushed: nothing is left."""
    while pair.running:
        pair.finish(0)
    pair.flush(None)
    pair.verify()
    assert pair.pool.free == pair.pool.capacity
    assert pair.tree.nodes == pair.tree.stats().namespaces == 0


@pytest.mark.parametrize(
    ("page", "size", "operations"), [(1, 24, 2000), (1, 96, 1000), (16, 24, 800), (64, 24, 600)]
)
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_long_random_history(policy: EvictionPolicy, page: int, size: int, operations: int) -> None:
    pair = Pair(policy, size, page)
    run(pair, random.Random(f"{policy.name}-{page}-{size}"), operations)
    wind_up(pair)
    for event in ("splits", "duplicates", "came again", "died", *MissReason):
        assert pair.seen[event] > 0, event


@pytest.mark.parametrize("page", [1, 16])
def test_causes_are_exact_where_pieces_are_not_merged(
    page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "MERGED", 0)
    pair = Pair(POLICIES["lru"], 24, page)
    run(pair, random.Random(page), 1500)
    assert pair.seen[MissReason.EVICTED] > 20 and pair.seen[MissReason.FLUSHED] > 5
    wind_up(pair)


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("tokens", [0, 40, 200])
def test_a_short_history_is_never_wrong(tokens: int, page: int) -> None:
    pair = Pair(POLICIES["lru"], 24, page, history_tokens=tokens)
    run(pair, random.Random(page + tokens), 1500)
    assert (pair.seen[MissReason.EVICTED] > 0) == (tokens > 0)
    wind_up(pair)


class TreeMachine(RuleBasedStateMachine):
    """The same operations, chosen and shrunk by hypothesis."""

    pair: Pair

    @initialize(
        policy=st.sampled_from(list(POLICIES.values())),
        size=st.integers(1, 40),
        page=st.sampled_from([1, 2, 16]),
    )
    def begin(self, policy: EvictionPolicy, size: int, page: int) -> None:
        self.pair = Pair(policy, size, page)

    @rule(
        picks=st.lists(st.integers(0, 2), max_size=8),
        namespace=st.sampled_from(NAMESPACES),
        limit=st.none() | st.integers(0, 20),
        priority=st.integers(-1, 1),
        program=st.sampled_from(PROGRAM_NAMES),
    )
    def start(
        self, picks: list[int], namespace: str, limit: int | None, priority: int, program: str
    ) -> None:
        self.pair.start(pages(picks, self.pair.page), namespace, limit, priority, program)

    @precondition(lambda self: self.pair.running)
    @rule(
        data=st.data(),
        picks=st.lists(st.integers(0, 2), max_size=6),
        keep=st.booleans(),
    )
    def grow(self, data: st.DataObject, picks: list[int], keep: bool) -> None:
        index = data.draw(st.integers(0, len(self.pair.running) - 1))
        self.pair.grow(index, pages(picks, self.pair.page), keep=keep)

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

    @rule(name=st.sampled_from(PROGRAM_NAMES))
    def end_program(self, name: str) -> None:
        self.pair.end_program(name)

    @rule(pick=st.integers(0, 100))
    def misuse(self, pick: int) -> None:
        self.pair.misuse(pick)

    @invariant()
    def agree(self) -> None:
        self.pair.verify()


TreeMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTreeMachine = TreeMachine.TestCase

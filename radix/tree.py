"""The radix tree that owns all cached KV, of finished and of running requests.

Token ids are accepted as any sequence of ints; `array('i')` is the fast path, since it is compared
with edges as it is (keep a request's tokens in one). The tree is for one thread. No operation
costs more for more cached tokens: `match`, `acquire`, `extend` and `explain` depend on the nodes
and tokens of their own path, `release` on the nodes of its path, `evict` on what it frees,
`end_program` on the nodes the program used last.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import nlargest
from itertools import count

from phloem.radix.divergence import Divergence, diverge
from phloem.radix.errors import LeaseError
from phloem.radix.events import Cleared, KvEvent, NodeRemoved, NodeSplit, NodeStored, pack
from phloem.radix.evict import LRU, EvictionPolicy, EvictionQueue
from phloem.radix.ghost import Cause
from phloem.radix.history import History
from phloem.radix.integrity import all_nodes, check_tree
from phloem.radix.lease import Lease
from phloem.radix.node import Node, Root, as_tokens, descend_for, first_page
from phloem.radix.program import Program, Programs
from phloem.radix.slots import SlotPool
from phloem.radix.stats import NodeView, RadixStats
from phloem.radix.survey import NamespaceSummary, NodeSummary, below, survey, views

HISTORY_POOLS, HISTORY_TOKENS = 4, 65_536
"""Tokens that are remembered by default: so many pools' worth, at most so many."""


class RadixTree:
    """Prefixes in namespaces → KV slots of `pool`, which this tree shares with the requests.

    A request holds its prefix by a `Lease`; what no lease holds may be evicted, leaves first, in
    the order of `policy`. The tree holds whole pages of the pool's page size. `clock` gives the
    times of use and must not go backwards; by default it counts operations. Namespaces appear on
    first use and go with their last token and lease. What left the tree is remembered for
    `explain`, the last `history_tokens` tokens of it: by default four times the pool's capacity,
    at most 65,536 (a piece counts as 16 at least; 0: nothing is remembered). Programs live from
    their first use until `end_program`, or until `program_limit` others were used after them.
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        policy: EvictionPolicy = LRU,
        clock: Callable[[], float] | None = None,
        history_tokens: int | None = None,
        program_limit: int = 4096,
    ) -> None:
        self._pool = pool
        self._page = pool.page_size
        self._descend = descend_for(pool.page_size)
        self._clock = clock if clock is not None else count(1).__next__
        self._next_id = count(1).__next__
        self._queue = EvictionQueue(policy)
        if history_tokens is None:
            history_tokens = min(HISTORY_POOLS * pool.capacity, HISTORY_TOKENS)
        self._history = History(history_tokens, pool.page_size)
        self._programs = Programs(program_limit)
        self._roots: dict[str, Root] = {}
        self._leases: set[Lease] = set()
        self._lowest_priority = 0
        self._watching = False
        self.events: list[KvEvent] = []
        """Changes since the caller last cleared this list, while `watch` is on."""
        self._nodes = 0
        self._tokens = 0
        self._locked = 0
        self._lookups = 0
        self._lookup_tokens = 0
        self._hit_tokens = 0
        self._inserted = 0
        self._duplicates = 0
        self._evicted = 0

    # ------------------------------------------------------------------------------------ reading

    @property
    def page_size(self) -> int:
        """Tokens of a page; the tree holds whole ones."""
        return self._page

    @property
    def nodes(self) -> int:
        """Nodes in all namespaces, roots not counted."""
        return self._nodes

    @property
    def locked(self) -> int:
        """Cached tokens that at least one lease holds."""
        return self._locked

    @property
    def evictable(self) -> int:
        """Cached tokens that no lease holds: exactly what `evict` can free."""
        return self._tokens - self._locked

    def match(self, tokens: Sequence[int], namespace: str = "") -> int:
        """Length of the longest cached prefix of `tokens`, whole pages, at most `len(tokens) - 1`:
        the last token is always computed, since its logits are wanted. Changes nothing, not even
        recency.
        """
        root = self._roots.get(namespace)
        if root is None:
            return 0
        query = as_tokens(tokens)
        return self._descend(root, query, 0, len(query) - 1)[2]

    def probe(self, tokens: Sequence[int], namespace: str, limit: int) -> tuple[int, int]:
        """(length of the cached prefix, at most `limit`; how many of these tokens no lease holds).

        What a lease on this prefix would take from `evictable`. Changes nothing.
        """
        root = self._roots.get(namespace)
        if root is None:
            return 0, 0
        query = as_tokens(tokens)
        end, offset, length = self._descend(root, query, 0, min(limit, len(query)))
        unlocked = 0
        node: Node | None = end
        while node is not None and not node.lock_ref:
            unlocked += offset if node is end else len(node.tokens)
            node = node.parent
        return length, unlocked

    def sole(self, lease: Lease) -> int:
        """Tokens that would become evictable with the release of `lease` alone."""
        node: Node | None = self._held(lease)
        tokens = 0
        while node is not None and node.lock_ref == 1:
            tokens += len(node.tokens)
            node = node.parent
        return tokens

    def sole_of(self, leases: Iterable[Lease]) -> int:
        """Tokens that would become evictable with the release of all these leases, each listed
        once. Costs the nodes of their paths."""
        held: Counter[Node] = Counter()
        for lease in leases:
            node: Node | None = self._held(lease)
            while node is not None:
                held[node] += 1
                node = node.parent
        return sum(len(node.tokens) for node, holds in held.items() if holds == node.lock_ref)

    def explain(
        self, tokens: Sequence[int], namespace: str = "", limit: int | None = None
    ) -> Divergence:
        """What `acquire` would find and why it is not more. Changes nothing.

        Raises `ValueError` for a negative limit.
        """
        if limit is not None and limit < 0:
            raise ValueError(f"limit must not be negative, not {limit}")
        root: Node | None = self._roots.get(namespace)
        if root is None:
            root = Root(namespace, 0)
            root.forks = self._history.of_idle(namespace)
        return diverge(root, as_tokens(tokens), limit, self._page, self._descend)

    def survey(
        self,
        namespace: str | None = None,
        prefix: Sequence[int] = (),
        min_tokens: int = 0,
        limit: int = 100,
        preview: int = 0,
    ) -> tuple[list[NodeSummary], bool]:
        """Up to `limit` nodes of `namespace` (None: of all), parents before children and larger
        branches before smaller ones; True if there are more.

        Only nodes whose path begins with `prefix` and that have at least `min_tokens` tokens in
        their edge and below together; `preview` token ids of each edge are shown. The work is
        bounded: in a tree so large that not all was counted, totals are too low, which is True
        too.
        """
        names = list(self._roots) if namespace is None else [namespace]
        start = as_tokens(prefix)
        tops = (
            (name, node)
            for name in names
            if name in self._roots
            for node in below(self._roots[name], start, self._page, self._descend)
        )
        return survey(tops, min_tokens, limit, preview)

    def namespaces(self, limit: int) -> list[NamespaceSummary]:
        """The `limit` namespaces with the most cached tokens, the largest first."""
        largest = nlargest(limit, self._roots.values(), key=lambda root: root.usage.tokens)
        return [
            NamespaceSummary(
                namespace=root.namespace, tokens=root.usage.tokens, nodes=root.usage.nodes
            )
            for root in largest
        ]

    def stats(self) -> RadixStats:
        return RadixStats(
            nodes=self._nodes,
            namespaces=len(self._roots),
            leases=len(self._leases),
            evictable=self.evictable,
            locked=self._locked,
            programs=len(self._programs),
            history_tokens=self._history.tokens,
            lookups_total=self._lookups,
            lookup_tokens_total=self._lookup_tokens,
            hit_tokens_total=self._hit_tokens,
            inserted_total=self._inserted,
            duplicate_total=self._duplicates,
            evicted_total=self._evicted,
        )

    def dump(self, limit: int | None = None) -> Iterator[NodeView]:
        """Up to `limit` nodes, parents before children, for debugging. The tree must not change
        while this runs."""
        return views(self._roots.values(), limit)

    def check(self) -> None:
        """Verify every invariant, in O(cached tokens). Raises `IntegrityError`."""
        self._pool.check()
        check_tree(
            self._roots,
            self._leases,
            self._queue,
            self._pool,
            self._programs,
            nodes=self._nodes,
            tokens=self._tokens,
            locked=self._locked,
        )
        self._history.check(all_nodes(self._roots), self._roots)

    # ----------------------------------------------------------------------------------- leasing

    def acquire(
        self,
        tokens: Sequence[int],
        namespace: str = "",
        limit: int | None = None,
        *,
        priority: int = 0,
        program: str = "",
    ) -> Lease:
        """Lease the longest cached prefix of `tokens`, whole pages, at most `limit` and
        `len(tokens) - 1` tokens.

        A node that matches only in part is split. The whole path is locked and counts as used, by a
        request of this `priority` and `program` ("": of none). The lease may have length 0. Raises
        `ValueError` for a negative limit.
        """
        if limit is not None and limit < 0:
            raise ValueError(f"limit must not be negative, not {limit}")
        query = as_tokens(tokens)
        stop = len(query) - 1 if limit is None else min(limit, len(query) - 1)
        now = self._clock()
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace, now)
            self._history.wake(root)
        node, offset, length = self._descend(root, query, 0, stop)
        if offset != len(node.tokens):
            node = self._cut(node, offset)
        owner = self._use_program(program) if program else None
        lease = Lease(node, length, namespace, priority, owner)
        self._leases.add(lease)
        self._lookups += 1
        self._lookup_tokens += len(query)
        self._hit_tokens += length
        above: Node | None = node
        while above is not None:
            if not above.lock_ref:
                self._locked += len(above.tokens)
            above.lock_ref += 1
            above.hits += 1
            above.last_access = now
            above = above.parent
        if owner is not None or priority != self._lowest_priority:
            self._lowest_priority = min(priority, self._lowest_priority)
            self._mark(node, None, priority, owner)
        return lease

    def extend(self, lease: Lease, tokens: Sequence[int], slots: Sequence[int]) -> int:
        """Append `tokens`, which follow the lease's path and whose KV is in `slots`; the lease
        then ends, still locked, after the last of them.

        Returns `duplicate`: how many leading tokens another request had put there meanwhile. The
        tree keeps the slots it has for these (`lease.slots` tells them) and the first `duplicate`
        of `slots` remain the caller's to release; all others are the tree's now. Raises
        `LeaseError`, `ValueError` for unequal lengths or a part of a page and `SlotError` for
        slots that are not a request's; the tree is then unchanged.
        """
        end = at = self._held(lease)
        new, new_slots = as_tokens(tokens), as_tokens(slots)
        if len(new) != len(new_slots):
            raise ValueError(f"{len(new)} tokens but {len(new_slots)} slots")
        if len(new) % self._page:
            raise ValueError(f"{len(new)} tokens are not whole pages of {self._page}")
        offset = duplicate = 0
        if at.children:
            end, offset, duplicate = self._descend(at, new, 0, len(new))
        taken = new_slots[duplicate:]
        self._pool.adopt(taken)
        now = self._clock()
        owner = lease.owner
        if owner is not None and not owner.live:
            owner = None
        if duplicate:
            if offset != len(end.tokens):
                end = self._cut(end, offset)
            self._lock_between(end, at, now)
            self._mark(end, at, lease.priority, owner)
            new = new[duplicate:]
        if taken:
            end = self._append(end, new, taken, now, lease, owner)
        lease.moved(end, lease.length + duplicate + len(taken))
        self._inserted += len(taken)
        self._duplicates += duplicate
        return duplicate

    def release(self, lease: Lease) -> None:
        """End the hold: the path's tokens stay cached, and those that no other lease holds become
        evictable. Raises `LeaseError` if the lease is released already or another tree's.
        """
        node: Node | None = self._held(lease)
        now = self._clock()
        self._leases.remove(lease)
        lease.ended()
        while node is not None:
            node.lock_ref -= 1
            node.last_access = now
            if not node.lock_ref:
                self._locked -= len(node.tokens)
                if not node.children:
                    self._now_idle(node)
            node = node.parent

    def end_program(self, program: str) -> None:
        """`program` makes no more requests: its paths are worth no more than others'. Does nothing
        if it does not live."""
        ended = self._programs.end(program)
        if ended is not None:
            self._bury(ended)

    # ---------------------------------------------------------------------------------- eviction

    def evict(self, n: int, by: str = "") -> int:
        """Free the slots of `n` unlocked tokens, or of all when there are fewer; returns how many.

        Leaves go in the policy's order, each from its tail; the last one is only shortened, so
        never more is freed than asked for, up to a whole page. `by` says for whom, to the history.
        """
        n += -n % self._page
        freed = 0
        cause: Cause | None = None
        while freed < n and (node := self._queue.best()) is not None:
            if cause is None:
                cause = Cause(self._clock(), by, False)
            excess = len(node.tokens) - (n - freed)
            if excess > 0:
                self._shorten(node, excess, cause)
                freed = n
                break
            self._queue.drop_best()
            freed += len(node.tokens)
            parent = self._remove(node, cause)
            if not parent.children and not parent.lock_ref:
                self._now_idle(parent)
        self._tokens -= freed
        self._evicted += freed
        return freed

    def flush(self, namespace: str | None = None) -> int:
        """Drop all unlocked tokens, of one namespace or of all; returns how many.

        Costs O(nodes). What leases hold stays.
        """
        cause = Cause(self._clock(), "", True)
        names = list(self._roots) if namespace is None else [namespace]
        stack: list[Node] = [self._roots[name] for name in names if name in self._roots]
        freed = 0
        while stack:
            node = stack.pop()
            for child in list(node.children.values()):
                if child.lock_ref:
                    stack.append(child)
                else:
                    freed += self._drop_subtree(child, cause)
            if not node.children and not node.lock_ref:
                self._now_idle(node)
        self._queue.purge()
        self._tokens -= freed
        self._evicted += freed
        return freed

    # ---------------------------------------------------------------------------------- watching

    def watch(self, on: bool) -> None:
        """From now on append every change to `events`, or stop and forget them.

        `events` then begins with `Cleared` and the whole tree, also when it was watched already. It
        grows until the caller takes and clears it.
        """
        self._watching = on
        self.events = [Cleared()] if on else []
        if on:
            for root in self._roots.values():
                stack = list(root.children.values())
                while stack:
                    node = stack.pop()
                    self._tell_stored(node, node.tokens, root.namespace)
                    stack.extend(node.children.values())

    # ---------------------------------------------------------------------------------- internals

    def _held(self, lease: Lease) -> Node:
        """Where `lease` ends. Raises `LeaseError` if it is not a live lease of this tree."""
        node = lease.node
        if lease not in self._leases:
            raise LeaseError(f"{lease!r} belongs to another tree")
        return node

    def _cut(self, node: Node, offset: int) -> Node:
        """The new node that ends after `offset` tokens of `node`'s edge."""
        self._nodes += 1
        node.usage.nodes += 1
        upper = node.split(offset, self._page, self._next_id())
        if self._watching:
            self.events.append(NodeSplit(node.id, upper.id, offset))
        return upper

    def _lock_between(self, node: Node, above: Node, now: float) -> None:
        """Lock the path from `node` up to `above`, which is locked already."""
        while node is not above:
            if not node.lock_ref:
                self._locked += len(node.tokens)
            node.lock_ref += 1
            node.last_access = now
            assert node.parent is not None, "the lease's node is an ancestor"
            node = node.parent

    def _append(
        self,
        node: Node,
        tokens: array[int],
        slots: array[int],
        now: float,
        lease: Lease,
        owner: Program | None,
    ) -> Node:
        """Put `tokens` below `node`, where `lease` ends; returns the new end.

        A leaf that no one else holds, no one has hit yet and that had no other users grows in
        place: so a request that adds a token a step makes one node. A node that was hit gets a
        child, as its usage is not that of the new tokens; so does a root, which the lease itself
        has hit.
        """
        self._tokens += len(tokens)
        self._locked += len(tokens)
        node.usage.tokens += len(tokens)
        if (
            node.lock_ref == 1
            and not node.hits
            and not node.children
            and node.priority == lease.priority
            and node.program is owner
        ):
            if node.forks is not None:
                end = node.start + len(node.tokens)
                self._history.cached(node, node, end, tokens)
            node.tokens.extend(tokens)
            node.slots.extend(slots)
            node.inserted = node.last_access = now
            if node.queued:  # from before it was locked; a longer edge may be worth less
                self._queue.forget(node)
            grown = node
        else:
            grown = Node(node, tokens[:], slots, now, self._next_id())
            grown.lock_ref = 1
            grown.priority = lease.priority
            if owner is not None:
                owner.mark(grown)
            if node.forks is not None:
                self._history.cached(node, grown, grown.start, tokens)
            node.children[first_page(tokens, self._page)] = grown
            self._nodes += 1
            node.usage.nodes += 1
        if self._watching:
            self._tell_stored(grown, tokens, lease.namespace)
        return grown

    def _tell_stored(self, node: Node, tokens: array[int], namespace: str) -> None:
        parent = 0 if node.parent is None else node.parent.id
        self.events.append(NodeStored(node.id, parent, namespace, pack(tokens)))

    def _shorten(self, node: Node, keep: int, cause: Cause) -> None:
        """Evict all but the first `keep` tokens of a leaf; the counts are the caller's."""
        tail = node.tokens[keep:]
        self._pool.reclaim(node.slots[keep:])
        del node.tokens[keep:]
        del node.slots[keep:]
        node.usage.tokens -= len(tail)
        if self._watching:
            self.events.append(NodeRemoved(node.id, keep))
        self._history.shortened(node, tail, cause)

    def _remove(self, node: Node, cause: Cause) -> Node:
        """Take a node without children out of the tree and free its slots; returns its parent. The
        count of tokens is the caller's."""
        parent = node.parent
        assert parent is not None, "roots are never evicted"
        del parent.children[first_page(node.tokens, self._page)]
        node.parent = None
        self._nodes -= 1
        node.usage.nodes -= 1
        node.usage.tokens -= len(node.tokens)
        self._pool.reclaim(node.slots)
        if node.program is not None:
            del node.program.nodes[node]
        if self._watching:
            self.events.append(NodeRemoved(node.id, 0))
        self._history.removed(node, parent, cause)
        return parent

    def _now_idle(self, node: Node) -> None:
        """`node` has neither children nor lock any more: it may be evicted, a root goes at once."""
        if isinstance(node, Root):
            del self._roots[node.namespace]
            self._history.idle(node)
        else:
            self._queue.offer(node)

    def _drop_subtree(self, top: Node, cause: Cause) -> int:
        """Cut the unlocked subtree of `top` out and free its slots; returns the tokens freed."""
        nodes = [top]
        for node in nodes:  # grows meanwhile
            nodes.extend(node.children.values())
        freed = 0
        for node in reversed(nodes):
            self._queue.forget(node)
            freed += len(node.tokens)
            self._remove(node, cause)
        return freed

    def _use_program(self, name: str) -> Program:
        program, ended = self._programs.use(name)
        if ended is not None:
            self._bury(ended)
        return program

    def _bury(self, program: Program) -> None:
        """Unmark what `program`, which has ended, used last."""
        for node in program.nodes:
            node.program = None
            self._queue.renew(node)
        program.nodes.clear()

    def _mark(self, node: Node, above: Node | None, priority: int, owner: Program | None) -> None:
        """The path from `node` up to `above` (or the root) was used with this priority, by `owner`.

        Who used a node used its ancestors, so that no ancestor's priority is lower.
        """
        while node is not above and node.parent is not None:
            if node.priority < priority:
                node.priority = priority
            elif owner is None:
                return
            if owner is not None:
                owner.mark(node)
            node = node.parent

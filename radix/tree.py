"""The token-level radix tree that owns all cached KV, of finished and of running requests.

Token ids are accepted as any sequence of ints; `array('i')` is the fast path, since it is compared
with edges as it is (keep a request's tokens in one). The tree is for one thread. No operation
costs more for more cached tokens: `match`, `acquire` and `extend` depend on the nodes and tokens
of their own path, `release` on the nodes of its path, `evict` on what it frees.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from phloem.radix.errors import LeaseError
from phloem.radix.evict import LRU, EvictionPolicy, EvictionQueue
from phloem.radix.integrity import check_tree
from phloem.radix.lease import Lease
from phloem.radix.node import Node, Root, as_tokens, descend
from phloem.radix.slots import SlotPool
from phloem.radix.stats import NodeView, RadixStats


class RadixTree:
    """Prefixes in namespaces → KV slots of `pool`, which this tree shares with the requests.

    A request holds its prefix by a `Lease`; what no lease holds may be evicted, leaves first, in
    the order of `policy`. `clock` gives the times of use and must not go backwards; by default it
    counts operations. Namespaces appear on first use and go with their last token and lease.
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        policy: EvictionPolicy = LRU,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._pool = pool
        self._clock = clock if clock is not None else count(1).__next__
        self._queue = EvictionQueue(policy)
        self._roots: dict[str, Root] = {}
        self._leases: set[Lease] = set()
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
        """Length of the longest cached prefix of `tokens`, at most `len(tokens) - 1`: the last
        token is always computed, since its logits are wanted. Changes nothing, not even recency.
        """
        root = self._roots.get(namespace)
        if root is None:
            return 0
        query = as_tokens(tokens)
        return descend(root, query, 0, len(query) - 1)[2]

    def probe(self, tokens: Sequence[int], namespace: str, limit: int) -> tuple[int, int]:
        """(length of the cached prefix, at most `limit`; how many of these tokens no lease holds).

        What a lease on this prefix would take from `evictable`. Changes nothing.
        """
        root = self._roots.get(namespace)
        if root is None:
            return 0, 0
        query = as_tokens(tokens)
        end, offset, length = descend(root, query, 0, min(limit, len(query)))
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

    def stats(self) -> RadixStats:
        return RadixStats(
            nodes=self._nodes,
            namespaces=len(self._roots),
            leases=len(self._leases),
            evictable=self.evictable,
            locked=self._locked,
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
        stack: list[tuple[Node, str, int, int]] = [
            (child, root.namespace, 0, 0)
            for root in reversed(self._roots.values())
            for child in reversed(root.children.values())
        ]
        shown = 0
        while stack and (limit is None or shown < limit):
            node, namespace, depth, start = stack.pop()
            shown += 1
            yield NodeView(
                namespace=namespace,
                depth=depth,
                start=start,
                tokens=tuple(node.tokens),
                slots=tuple(node.slots),
                lock_ref=node.lock_ref,
                hits=node.hits,
                last_access=node.last_access,
            )
            end = start + len(node.tokens)
            stack.extend(
                (child, namespace, depth + 1, end) for child in reversed(node.children.values())
            )

    def check(self) -> None:
        """Verify every invariant, in O(cached tokens). Raises `IntegrityError`."""
        self._pool.check()
        check_tree(
            self._roots,
            self._leases,
            self._queue,
            self._pool,
            nodes=self._nodes,
            tokens=self._tokens,
            locked=self._locked,
        )

    # ----------------------------------------------------------------------------------- leasing

    def acquire(
        self, tokens: Sequence[int], namespace: str = "", limit: int | None = None
    ) -> Lease:
        """Lease the longest cached prefix of `tokens`, at most `limit` and `len(tokens) - 1`.

        A node that matches only in part is split. The whole path is locked and counts as used.
        The lease may have length 0. Raises `ValueError` for a negative limit.
        """
        if limit is not None and limit < 0:
            raise ValueError(f"limit must not be negative, not {limit}")
        query = as_tokens(tokens)
        stop = len(query) - 1 if limit is None else min(limit, len(query) - 1)
        now = self._clock()
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = Root(namespace, now)
        node, offset, length = descend(root, query, 0, stop)
        node = self._cut(node, offset)
        lease = Lease(node, length, namespace)
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
        return lease

    def extend(self, lease: Lease, tokens: Sequence[int], slots: Sequence[int]) -> int:
        """Append `tokens`, which follow the lease's path and whose KV is in `slots`; the lease
        then ends, still locked, after the last of them.

        Returns `duplicate`: how many leading tokens another request had put there meanwhile. The
        tree keeps the slots it has for these (`lease.slots` tells them) and the first `duplicate`
        of `slots` remain the caller's to release; all others are the tree's now. Raises
        `LeaseError`, `ValueError` for unequal lengths and `SlotError` for slots that are not a
        request's; the tree is then unchanged.
        """
        at = self._held(lease)
        new, new_slots = as_tokens(tokens), as_tokens(slots)
        if len(new) != len(new_slots):
            raise ValueError(f"{len(new)} tokens but {len(new_slots)} slots")
        end, offset, duplicate = descend(at, new, 0, len(new))
        taken = new_slots[duplicate:]
        self._pool.adopt(taken)
        now = self._clock()
        if duplicate:
            end = self._cut(end, offset)
            self._lock_between(end, at, now)
        if taken:
            end = self._append(end, new[duplicate:], taken, now)
        lease.moved(end, lease.length + len(new))
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

    # ---------------------------------------------------------------------------------- eviction

    def evict(self, n: int) -> int:
        """Free the slots of `n` unlocked tokens, or of all when there are fewer; returns how many.

        Leaves go in the policy's order, each from its tail; the last one is only shortened, so
        never more is freed than asked for.
        """
        freed = 0
        while freed < n and (node := self._queue.best()) is not None:
            excess = len(node.tokens) - (n - freed)
            if excess > 0:
                self._pool.reclaim(node.slots[excess:])
                del node.tokens[excess:]
                del node.slots[excess:]
                freed = n
                continue
            self._queue.drop_best()
            freed += len(node.tokens)
            self._pool.reclaim(node.slots)
            self._detach(node)
        self._tokens -= freed
        self._evicted += freed
        return freed

    def flush(self, namespace: str | None = None) -> int:
        """Drop all unlocked tokens, of one namespace or of all; returns how many.

        Costs O(nodes). What leases hold stays.
        """
        names = list(self._roots) if namespace is None else [namespace]
        stack: list[Node] = [self._roots[name] for name in names if name in self._roots]
        freed = 0
        while stack:
            node = stack.pop()
            for child in list(node.children.values()):
                if child.lock_ref:
                    stack.append(child)
                else:
                    freed += self._drop_subtree(child)
        self._queue.purge()
        self._tokens -= freed
        self._evicted += freed
        return freed

    # ---------------------------------------------------------------------------------- internals

    def _held(self, lease: Lease) -> Node:
        """Where `lease` ends. Raises `LeaseError` if it is not a live lease of this tree."""
        node = lease.node
        if lease not in self._leases:
            raise LeaseError(f"{lease!r} belongs to another tree")
        return node

    def _cut(self, node: Node, offset: int) -> Node:
        """The node that ends after `offset` tokens of `node`'s edge, by a split if need be."""
        if offset == len(node.tokens):
            return node
        self._nodes += 1
        return node.split(offset)

    def _lock_between(self, node: Node, above: Node, now: float) -> None:
        """Lock the path from `node` up to `above`, which is locked already."""
        while node is not above:
            if not node.lock_ref:
                self._locked += len(node.tokens)
            node.lock_ref += 1
            node.last_access = now
            assert node.parent is not None, "the lease's node is an ancestor"
            node = node.parent

    def _append(self, node: Node, tokens: array[int], slots: array[int], now: float) -> Node:
        """Put `tokens` below `node`, where the caller's lease ends; returns the new end.

        A leaf that no one else holds and no one has hit yet grows in place: so a request that adds
        a token a step makes one node. A node that was hit gets a child, as its usage is not that
        of the new tokens; so does a root, which the lease itself has hit.
        """
        self._tokens += len(tokens)
        self._locked += len(tokens)
        if node.lock_ref == 1 and not node.hits and not node.children:
            node.tokens.extend(tokens)
            node.slots.extend(slots)
            node.inserted = node.last_access = now
            return node
        child = Node(node, tokens, slots, now)
        child.lock_ref = 1
        node.children[tokens[0]] = child
        self._nodes += 1
        return child

    def _detach(self, node: Node) -> None:
        """Take a node without children out of the tree."""
        parent = node.parent
        assert parent is not None, "roots are never evicted"
        del parent.children[node.tokens[0]]
        node.parent = None
        self._nodes -= 1
        if not parent.children and not parent.lock_ref:
            self._now_idle(parent)

    def _now_idle(self, node: Node) -> None:
        """`node` has neither children nor lock any more: it may be evicted, a root goes at once."""
        if isinstance(node, Root):
            del self._roots[node.namespace]
        else:
            self._queue.offer(node)

    def _drop_subtree(self, top: Node) -> int:
        """Cut the unlocked subtree of `top` out and free its slots; returns the tokens freed."""
        below = list(top.children.values())
        top.children.clear()
        self._pool.reclaim(top.slots)
        freed = len(top.slots)
        self._detach(top)
        while below:
            node = below.pop()
            below.extend(node.children.values())
            node.children.clear()
            node.parent = None
            self._nodes -= 1
            self._pool.reclaim(node.slots)
            freed += len(node.slots)
        return freed

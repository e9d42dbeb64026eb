"""The invariants of the tree, verified from scratch (tests and debug mode)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from phloem.radix.errors import IntegrityError
from phloem.radix.evict import EvictionQueue
from phloem.radix.lease import Lease
from phloem.radix.node import Node, Root
from phloem.radix.slots import SlotPool


def check_tree(
    roots: Mapping[str, Root],
    leases: Iterable[Lease],
    queue: EvictionQueue,
    pool: SlotPool,
    *,
    nodes: int,
    tokens: int,
    locked: int,
) -> None:
    """Raise `IntegrityError` at the first contradiction; the numbers are the tree's own counts.

    Structure: a child is filed under its first token and knows its parent, edges are not empty,
    no root is idle. Locks: a node's lock count is that of its children plus the leases that end
    at it. Slots: each is the tree's, in one place. Queue: exactly one entry for each unlocked
    leaf, none for nodes outside the tree.
    """
    ends = _lease_ends(roots, leases)
    queued = queue.nodes()
    _require(len(set(queued)) == len(queued), "a node is in the eviction queue twice")
    stale = set(queued)
    seen_slots: set[int] = set()
    seen_nodes = seen_tokens = seen_locked = 0
    for node, where in _walk(roots):
        expected = ends.pop(node, 0) + sum(child.lock_ref for child in node.children.values())
        _require(
            node.lock_ref == expected,
            f"{where}: lock_ref {node.lock_ref}, but {expected} leases end here or below",
        )
        if isinstance(node, Root):
            _require(
                bool(node.children or node.lock_ref), f"{where}: an idle namespace was not removed"
            )
            continue
        _check_edge(node, where, pool, seen_slots)
        _require(
            node.queued == (node in stale), f"{where}: queued flag and eviction queue disagree"
        )
        _require(
            bool(node.queued or node.lock_ref or node.children),
            f"{where}: an unlocked leaf is missing from the eviction queue",
        )
        stale.discard(node)
        seen_nodes += 1
        seen_tokens += len(node.tokens)
        seen_locked += len(node.tokens) if node.lock_ref else 0
    _require(not ends, f"{len(ends)} leases end at nodes outside the tree")
    _require(not stale, f"{len(stale)} queued nodes are outside the tree")
    for name, counted, found in (
        ("nodes", nodes, seen_nodes),
        ("tokens", tokens, seen_tokens),
        ("locked tokens", locked, seen_locked),
        ("slots", pool.in_tree, seen_tokens),
    ):
        _require(counted == found, f"{counted} {name} are counted but {found} found")


def _walk(roots: Mapping[str, Root]) -> Iterator[tuple[Node, str]]:
    """All nodes with a description of their place; checks links on the way."""
    for name, root in roots.items():
        _require(root.namespace == name, f"root {root.namespace!r} is filed under {name!r}")
        _require(root.parent is None and not root.tokens, f"root {name!r} is not a root")
        stack: list[tuple[Node, int]] = [(root, 0)]
        while stack:
            node, start = stack.pop()
            yield node, f"node at token {start} of namespace {name!r}"
            end = start + len(node.tokens)
            for first, child in node.children.items():
                where = f"node at token {end} of namespace {name!r}"
                _require(child.parent is node, f"{where}: its parent is another node")
                _require(len(child.tokens) > 0, f"{where}: its edge is empty")
                _require(child.tokens[0] == first, f"{where}: filed under token {first}")
                stack.append((child, end))


def _check_edge(node: Node, where: str, pool: SlotPool, seen: set[int]) -> None:
    _require(
        len(node.tokens) == len(node.slots),
        f"{where}: {len(node.tokens)} tokens but {len(node.slots)} slots",
    )
    for slot in node.slots:
        _require(slot not in seen, f"{where}: slot {slot} is in the tree twice")
        _require(pool.owned_by_tree(slot), f"{where}: slot {slot} is not the tree's")
        seen.add(slot)


def _lease_ends(roots: Mapping[str, Root], leases: Iterable[Lease]) -> Counter[Node]:
    """Leases per node they end at; checks each one's length and namespace."""
    ends: Counter[Node] = Counter()
    for lease in leases:
        ends[lease.node] += 1
        length = 0
        node: Node = lease.node
        while node.parent is not None:
            length += len(node.tokens)
            node = node.parent
        _require(length == lease.length, f"{lease!r}: its path has {length} tokens")
        _require(roots.get(lease.namespace) is node, f"{lease!r}: its root is not in the tree")
    return ends


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)

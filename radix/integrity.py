"""The invariants of the tree, verified from scratch (tests and debug mode)."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from phloem.radix.errors import IntegrityError
from phloem.radix.evict import EvictionQueue
from phloem.radix.lease import Lease
from phloem.radix.node import Node, Root, Usage, first_page
from phloem.radix.program import Programs
from phloem.radix.slots import SlotPool


def check_tree(
    roots: Mapping[str, Root],
    leases: Iterable[Lease],
    queue: EvictionQueue,
    pool: SlotPool,
    programs: Programs,
    *,
    nodes: int,
    tokens: int,
    locked: int,
) -> None:
    """Raise `IntegrityError` at the first contradiction; the numbers are the tree's own counts.

    Structure: a child is filed under its first page and knows its parent and place, edges are not
    empty, ids differ, no root is idle. Locks: a node's lock count is that of its children plus the
    leases that end at it. Slots: each is the tree's, in one place, in whole pages. Queue: exactly
    one valid entry for each unlocked leaf, none for nodes outside the tree. Programs: live ones
    know exactly the nodes that they used last.
    """
    queue.check()
    ends = _lease_ends(roots, leases)
    stale = set(queue.nodes())
    marked = {node: program for program in programs.all() for node in program.nodes}
    seen_slots: set[int] = set()
    seen_ids: set[int] = set()
    usage = {name: Usage() for name in roots}
    seen_locked = 0
    for node, name, where in _walk(roots, pool.page_size):
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
        _require(node.id > 0 and node.id not in seen_ids, f"{where}: its id {node.id} is not its")
        _require(bool(node.queued) == (node in stale), f"{where}: queued but not in the queue")
        _require(
            bool(node.queued or node.lock_ref or node.children),
            f"{where}: an unlocked leaf is missing from the eviction queue",
        )
        _require(node.program is marked.pop(node, None), f"{where}: its program is another")
        stale.discard(node)
        seen_ids.add(node.id)
        usage[name].nodes += 1
        usage[name].tokens += len(node.tokens)
        seen_locked += len(node.tokens) if node.lock_ref else 0
    _require(not ends, f"{len(ends)} leases end at nodes outside the tree")
    _require(not stale, f"{len(stale)} queued nodes are outside the tree")
    _require(not marked, f"{len(marked)} nodes of live programs are outside the tree")
    _check_usage(roots, usage)
    seen_tokens = sum(use.tokens for use in usage.values())
    for what, counted, found in (
        ("nodes", nodes, sum(use.nodes for use in usage.values())),
        ("tokens", tokens, seen_tokens),
        ("locked tokens", locked, seen_locked),
        ("slots", pool.in_tree, seen_tokens),
    ):
        _require(counted == found, f"{counted} {what} are counted but {found} found")


def all_nodes(roots: Mapping[str, Root]) -> list[Node]:
    """The nodes of all namespaces, roots included."""
    stack: list[Node] = list(roots.values())
    for node in stack:  # grows meanwhile
        stack.extend(node.children.values())
    return stack


def _walk(roots: Mapping[str, Root], page: int) -> Iterator[tuple[Node, str, str]]:
    """All nodes with their namespace and a description of their place; checks links on the way."""
    for name, root in roots.items():
        _require(root.namespace == name, f"root {root.namespace!r} is filed under {name!r}")
        _require(root.parent is None and not root.tokens, f"root {name!r} is not a root")
        stack: list[tuple[Node, int]] = [(root, 0)]
        while stack:
            node, start = stack.pop()
            where = f"node at token {start} of namespace {name!r}"
            _require(node.start == start, f"{where}: it says it starts at {node.start}")
            yield node, name, where
            end = start + len(node.tokens)
            for first, child in node.children.items():
                where = f"node at token {end} of namespace {name!r}"
                _require(child.parent is node, f"{where}: its parent is another node")
                _require(child.usage is root.usage, f"{where}: its namespace is another")
                _require(len(child.tokens) > 0, f"{where}: its edge is empty")
                _require(
                    first_page(child.tokens, page) == first, f"{where}: filed under token {first!r}"
                )
                stack.append((child, end))


def _check_edge(node: Node, where: str, pool: SlotPool, seen: set[int]) -> None:
    _require(
        len(node.tokens) == len(node.slots),
        f"{where}: {len(node.tokens)} tokens but {len(node.slots)} slots",
    )
    page = pool.page_size
    _require(len(node.tokens) % page == 0, f"{where}: {len(node.tokens)} tokens in pages of {page}")
    for start in range(0, len(node.slots), page):
        slot = node.slots[start]
        if slot in seen:
            raise IntegrityError(f"{where}: slot {slot} is in the tree twice")
        if not pool.owned_by_tree(slot):
            raise IntegrityError(f"{where}: slot {slot} is not the tree's")
        if page > 1 and (
            slot % page or node.slots[start : start + page] != array("i", range(slot, slot + page))
        ):
            raise IntegrityError(f"{where}: the page of slot {slot} is torn apart")
        seen.add(slot)


def _check_usage(roots: Mapping[str, Root], found: Mapping[str, Usage]) -> None:
    for name, root in roots.items():
        counted, use = root.usage, found[name]
        _require(
            (counted.nodes, counted.tokens) == (use.nodes, use.tokens),
            f"namespace {name!r}: {counted.tokens} tokens in {counted.nodes} nodes are counted, "
            f"but {use.tokens} in {use.nodes} found",
        )


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

"""Looking at the tree: all of it, or its largest branches within bounded work."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from phloem.radix.node import Descend, Node, Root
from phloem.radix.stats import NodeView

VISITS = 20_000
"""Nodes a survey counts at most, which takes about 10 ms."""


@dataclass(frozen=True, kw_only=True)
class NodeSummary:
    """One node as `RadixTree.survey` shows it.

    `node` and `parent` are ids (0: the root of `namespace`), `depth` the nodes and `start` the
    tokens before this edge, `tokens` its length, `total` counts the edge and all below it. `leases`
    end here or below. `preview` are the edge's first token ids, as many as were asked for.
    """

    node: int
    parent: int
    namespace: str
    depth: int
    start: int
    tokens: int
    total: int
    leases: int
    hits: int
    last_access: float
    children: int
    preview: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NamespaceSummary:
    """A namespace's share of the tree: `tokens` (locked ones counted in) in `nodes`."""

    namespace: str
    tokens: int
    nodes: int


def views(roots: Collection[Root], limit: int | None) -> Iterator[NodeView]:
    """Up to `limit` nodes of these namespaces with all they hold, parents before children."""
    stack = [
        (child, root.namespace, 0)
        for root in reversed(list(roots))
        for child in reversed(root.children.values())
    ]
    shown = 0
    while stack and (limit is None or shown < limit):
        node, namespace, depth = stack.pop()
        shown += 1
        yield NodeView(
            namespace=namespace,
            depth=depth,
            start=node.start,
            tokens=tuple(node.tokens),
            slots=tuple(node.slots),
            lock_ref=node.lock_ref,
            hits=node.hits,
            last_access=node.last_access,
        )
        stack.extend((child, namespace, depth + 1) for child in reversed(node.children.values()))


def below(root: Node, prefix: array[int], page: int, descend: Descend) -> Iterator[Node]:
    """The topmost nodes whose path, to its end, begins with `prefix`."""
    node, offset, length = descend(root, prefix, 0, len(prefix))
    rest = prefix[length:]  # unless the walk met another token, less than a page
    if len(rest) >= page:
        return
    if offset == len(node.tokens) and (rest or not prefix):
        for child in node.children.values():
            if child.tokens[: len(rest)] == rest:
                yield child
    elif node.tokens[offset : offset + len(rest)] == rest:
        yield node


def survey(
    tops: Iterable[tuple[str, Node]], min_tokens: int, limit: int, preview: int
) -> tuple[list[NodeSummary], bool]:
    """Up to `limit` nodes at or below `tops`, of those with at least `min_tokens` in their edge and
    below; and whether there are more, or totals that are too low since only `VISITS` nodes were
    counted. Parents come before children, siblings by their totals."""
    first = list(islice(tops, VISITS + 1))
    totals, whole = _totals([node for _, node in first[:VISITS]])
    stack = [
        (name, node, _depth(node)) for name, node in first if totals.get(node, -1) >= min_tokens
    ]
    stack.sort(key=lambda top: (top[1].usage.tokens, top[0], totals[top[1]]))
    found: list[NodeSummary] = []
    while stack and len(found) < limit:
        name, node, depth = stack.pop()
        found.append(_summary(name, node, depth, totals[node], preview))
        children = [
            child for child in node.children.values() if totals.get(child, -1) >= min_tokens
        ]
        children.sort(key=totals.__getitem__)
        stack.extend((name, child, depth + 1) for child in children)
    return found, bool(stack) or len(first) > VISITS or not whole


def _totals(visited: list[Node]) -> tuple[dict[Node, int], bool]:
    """Tokens at and below these nodes and those below them, as far as `VISITS` nodes go, which
    `visited` is filled up to; and whether that was all."""
    whole = True
    for node in visited:  # grows meanwhile, level by level
        room = VISITS - len(visited)
        whole = whole and room >= len(node.children)
        visited.extend(islice(node.children.values(), room))
    totals = {node: len(node.tokens) for node in visited}
    for node in reversed(visited):
        if node.parent in totals:
            totals[node.parent] += totals[node]
    return totals, whole


def _depth(node: Node) -> int:
    """Nodes between the root and `node`."""
    depth = -1
    above = node.parent
    while above is not None:
        depth += 1
        above = above.parent
    return depth


def _summary(name: str, node: Node, depth: int, total: int, preview: int) -> NodeSummary:
    return NodeSummary(
        node=node.id,
        parent=0 if node.parent is None else node.parent.id,
        namespace=name,
        depth=depth,
        start=node.start,
        tokens=len(node.tokens),
        total=total,
        leases=node.lock_ref,
        hits=node.hits,
        last_access=node.last_access,
        children=len(node.children),
        preview=tuple(node.tokens[:preview]),
    )

"""Two questions about directed graphs: what reaches an end, and what refers to each other."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

N = TypeVar("N", bound=Hashable)


def reaching(edges: Iterable[tuple[N, N]], ends: Iterable[N]) -> set[N]:
    """The ends, and all nodes from which one of them is reached over `edges` (source, target)."""
    sources: dict[N, list[N]] = {}
    for source, target in edges:
        sources.setdefault(target, []).append(source)
    found = set(ends)
    pending = list(found)
    while pending:
        for source in sources.get(pending.pop(), ()):
            if source not in found:
                found.add(source)
                pending.append(source)
    return found


def components(starts: Iterable[N], targets: Callable[[N], Iterable[N]]) -> Iterator[list[N]]:
    """Strongly connected components of what is reached from `starts`, targets before sources, each
    beginning with the node of it that was met first (Tarjan's algorithm, without recursion)."""
    index: dict[N, int] = {}
    low: dict[N, int] = {}
    stack: list[N] = []
    held: set[N] = set()
    work: list[tuple[N, Iterator[N]]] = []

    def enter(node: N) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        held.add(node)
        work.append((node, iter(targets(node))))

    for start in starts:
        if start not in index:
            enter(start)
        while work:
            node, pending = work[-1]
            for target in pending:
                if target not in index:
                    enter(target)
                    break
                if target in held:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    at = _at(stack, node)
                    yield stack[at:]
                    held.difference_update(stack[at:])
                    del stack[at:]


def _at(stack: list[N], node: N) -> int:
    """Where the node lies, looked for from the top."""
    return next(at for at in range(len(stack) - 1, -1, -1) if stack[at] == node)

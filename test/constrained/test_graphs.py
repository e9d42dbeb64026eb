"""Reachability and components, against the plainest way to find them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from phloem.constrained.graphs import components, reaching

NODES = 7
EDGES = st.sets(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)))


def closure(edges: set[tuple[int, int]]) -> set[tuple[int, int]]:
    """Which node reaches which, itself included."""
    found = {(n, n) for n in range(NODES)} | edges
    for middle in range(NODES):
        found |= {(a, d) for a, b in found for c, d in found if b == c == middle}
    return found


@given(EDGES, st.sets(st.integers(0, NODES - 1)))
def test_what_reaches_an_end(edges: set[tuple[int, int]], ends: set[int]) -> None:
    assert reaching(edges, ends) == {a for a, b in closure(edges) if b in ends}


@given(EDGES, st.lists(st.integers(0, NODES - 1)))
def test_components(edges: set[tuple[int, int]], starts: list[int]) -> None:
    reach = closure(edges)
    found = list(components(starts, lambda node: [b for a, b in sorted(edges) if a == node]))
    nodes = [node for component in found for node in component]
    assert sorted(nodes) == sorted({b for a, b in reach if a in starts})
    for place, component in enumerate(found):
        for node in component:
            assert set(component) == {b for a, b in reach if a == node and (b, a) in reach}
            later = [other for after in found[place + 1 :] for other in after]
            assert not any((node, other) in reach for other in later)

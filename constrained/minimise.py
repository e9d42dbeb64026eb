"""Merging states of an automaton that accept the same strings (Hopcroft's algorithm on masks)."""

from __future__ import annotations

Row = list[tuple[int, int]]


def minimise(rows: list[Row], accepting: set[int]) -> tuple[list[Row], set[int]]:
    """The least automaton of the same language. `rows[s]` are disjoint masks with their targets;
    state 0 is the start, before and after; every other state is reached and can accept."""
    sources: list[list[tuple[int, int]]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for mask, target in row:
            sources[target].append((state, mask))
    blocks = [b for b in (set(accepting), set(range(len(rows))) - accepting) if b]
    block_of = [0] * len(rows)
    for number, block in enumerate(blocks):
        for state in block:
            block_of[state] = number
    work = set(range(len(blocks)))
    while work:
        reach: dict[int, int] = {}
        for target in blocks[work.pop()]:
            for state, mask in sources[target]:
                reach[state] = reach.get(state, 0) | mask
        groups: dict[int, dict[int, list[int]]] = {}
        for state, mask in reach.items():
            groups.setdefault(block_of[state], {}).setdefault(mask, []).append(state)
        for number, parts in groups.items():
            _split(number, list(parts.values()), blocks, block_of, work)
    return _merged(rows, accepting, block_of, len(blocks))


def _split(
    number: int,
    parts: list[list[int]],
    blocks: list[set[int]],
    block_of: list[int],
    work: set[int],
) -> None:
    """Split a block into `parts` and what is in none of them. All but the largest piece have to
    be looked at again."""
    block = blocks[number]
    if sum(map(len, parts)) == len(block):
        parts.sort(key=len)
        parts.pop()
    fresh = []
    for part in parts:
        block.difference_update(part)
        fresh.append(len(blocks))
        for state in part:
            block_of[state] = len(blocks)
        blocks.append(set(part))
    if number in work:
        work.update(fresh)
        return
    largest = max((number, *fresh), key=lambda n: len(blocks[n]))
    work.update(n for n in (number, *fresh) if n != largest)


def _merged(
    rows: list[Row], accepting: set[int], block_of: list[int], count: int
) -> tuple[list[Row], set[int]]:
    if count == len(rows):
        return rows, accepting
    number: dict[int, int] = {}
    members: list[int] = []
    for state, block in enumerate(block_of):
        if block not in number:
            number[block] = len(number)
            members.append(state)
    merged: list[Row] = []
    for state in members:
        row: dict[int, int] = {}
        for mask, target in rows[state]:
            to = number[block_of[target]]
            row[to] = row.get(to, 0) | mask
        merged.append([(mask, to) for to, mask in row.items()])
    return merged, {number[block_of[s]] for s in accepting}
